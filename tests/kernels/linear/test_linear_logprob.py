"""linear_token_log_probs against a float64 two-step reference."""

import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridengine.kernels.gemm import WIDENED_BYTES
from hybridengine.kernels.linear.chunks import Chunks
from tests import tolerances
from tests.kernels.linear.cases import (
    DEVICES,
    assert_all_close,
    fused,
    gradients,
    problem,
    two_steps,
)
from tests.kernels.strategies import integers


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=25)
@given(**integers(rows=(0, 50), width=(1, 40), vocab=(1, 130), chunk_rows=(1, 60), seed=(0, 100)))
def test_against_float64(device, rows, width, vocab, chunk_rows, seed):
    tensors, token_ids, weights = problem(rows, width, vocab, seed)
    token_ids[::5] = -100
    options = {"temperature": 0.8, "softcap": 30.0}
    expected = gradients(two_steps, tensors, token_ids, weights, dtype=torch.float64, **options)
    got = gradients(
        fused, tensors, token_ids, weights, device, budget_bytes=chunk_rows * vocab * 4, **options
    )
    assert_all_close(got, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_error_is_at_most_twice_that_of_plain_pytorch(dtype, device):
    tensors, token_ids, weights = problem(64, 128, 1000, dtype=dtype)
    tensors[1] /= 128**0.5
    exact = gradients(two_steps, tensors, token_ids, weights, dtype=torch.float64)
    reference = lambda *a: two_steps(*a, backend="reference")  # noqa: E731
    plain = gradients(reference, tensors, token_ids, weights, device)
    ours = gradients(fused, tensors, token_ids, weights, device, budget_bytes=20 * 1000 * 6)
    for e, p, o in zip(exact, plain, ours, strict=True):
        error, plain_error = ((v.double() - e).square().mean().sqrt() for v in (o, p))
        assert error <= tolerances.ERROR_FACTOR * plain_error


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_logits_of_16_bit_inputs_are_not_rounded(dtype, device):
    """As exact as from inputs converted to float32; PyTorch's error is 1000 times larger."""
    tensors, token_ids, weights = problem(64, 128, 1000, dtype=dtype)
    exact = gradients(two_steps, tensors, token_ids, weights, dtype=torch.float64)[:2]
    ours = gradients(fused, tensors, token_ids, weights, device, budget_bytes=20 * 1000 * 6)[:2]
    assert_all_close(ours, exact)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("backward", (False, True))
def test_buffers_do_not_exceed_the_budget(dtype, backward):
    """Counts the sizes of buffers; the benchmark measures the peak memory."""
    for rows, width, vocab in ((512, 1024, 151_936), (4096, 1024, 49_152), (3, 8, 20), (0, 8, 20)):
        hidden, weight = (torch.empty(n, width, dtype=dtype, device="meta") for n in (rows, vocab))
        chunks = Chunks(hidden, weight, None, 2**28, False, rows if backward else 0)
        widths = rows and width * 8 * min(rows, chunks.rows)  # packed or widened, and a gradient
        widened = 0 if dtype == torch.float32 else WIDENED_BYTES
        buffers = {id(b): b.nbytes for b in (chunks.logits_buffer, chunks.grad_logits)}
        assert sum(buffers.values()) + widths + widened <= 2**28
        covered = [row for part in chunks.parts() for row in range(part.start, part.stop)]
        assert covered == list(range(rows))
        if rows == 512:
            assert len(list(chunks.parts())) == 2


@pytest.mark.parametrize(
    ("rows", "gib", "chunk_rows", "products"),
    [
        (8192, 4.0, 1408, 1),
        (8192, 2.0, 640, 2),  # a GPU with 40 GiB
        (32_768, 4.0, 1408, 3),
        (1000, 4.0, 1024, 1),
    ],
)
def test_chunks_of_a_gpu(rows, gib, chunk_rows, products):
    """From 80 GiB on, the weight gradient is read and written in less than a tenth of the time of
    its product: 7,330 rows at 4.3 TB/s and 788 TFLOP/s (docs/operators.md)."""
    budget_bytes, width, vocab = int(gib * 2**30), 4096, 128_256
    with FakeTensorMode():
        hidden, weight = (
            torch.empty(n, width, dtype=torch.bfloat16, device="cuda") for n in (rows, vocab)
        )
        chunks = Chunks(hidden, weight, None, budget_bytes, False, rows)
    assert chunks.rows == chunk_rows
    assert chunks.logits_buffer.nbytes + chunks.grad_logits.nbytes <= budget_bytes
    assert chunks.one_product is (products == 1)
    assert -(-rows // chunks.grad_logits.shape[0]) == products
    assert chunks.one_product or gib < 4 or chunks.grad_logits.shape[0] > 7330


@pytest.mark.parametrize("frozen", ((0,), (1,), (0, 1), (1, 2)))
def test_gradients_of_frozen_tensors_are_not_computed(frozen, monkeypatch):
    tensors, token_ids, weights = problem(30, 8, 50)
    expected = gradients(fused, tensors, token_ids, weights)[2:]
    if 0 in frozen:
        monkeypatch.setattr(Chunks, "hidden_grad", None)
    if 1 in frozen:
        monkeypatch.setattr(Chunks, "weight_grad", None)
    leaves = [t.requires_grad_(i not in frozen) for i, t in enumerate(tensors)]
    log_probs, entropy = fused(*leaves, token_ids)
    ((log_probs * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
    for i, leaf in enumerate(leaves):
        if i in frozen:
            assert leaf.grad is None
        else:
            assert torch.equal(leaf.grad, expected[i])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget_bytes", (500, 2**20))
def test_stats(budget_bytes, device):
    """Over the entries of the vocab mask, and without a gradient."""
    tensors, token_ids, _ = problem(30, 8, 50)
    hidden, weight, bias, token_ids = (t.to(device) for t in (*tensors, token_ids))
    mask = torch.rand(30, 50, device=device) < 0.5
    mask[torch.arange(30), token_ids] = True
    log_probs, entropy, stats = fused(
        hidden.requires_grad_(),
        weight,
        bias,
        token_ids,
        temperature=0.7,
        vocab_mask=mask,
        return_stats=True,
        budget_bytes=budget_bytes,
    )
    logits = (hidden.double() @ weight.double().t() + bias.double()) / 0.7
    p = logits.masked_fill(~mask, -torch.inf).softmax(-1)
    assert torch.equal(stats.argmax, p.argmax(-1))
    torch.testing.assert_close(
        stats.sum_p_squared.double(), p.square().sum(-1), **tolerances.LINEAR
    )
    assert log_probs.requires_grad and entropy.requires_grad
    assert not stats.argmax.requires_grad and not stats.sum_p_squared.requires_grad


def test_main_grad_is_added_to():
    (hidden, weight, bias), token_ids, weights = problem(30, 8, 50)
    expected = gradients(fused, (hidden, weight, bias), token_ids, weights)[3]
    weight.requires_grad_()
    main_grad = torch.ones(50, 8)
    log_probs, entropy = fused(hidden, weight, bias, token_ids, main_grad=main_grad)
    ((log_probs * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
    assert weight.grad is None
    torch.testing.assert_close(main_grad - 1, expected, **tolerances.LINEAR)


@pytest.mark.parametrize("device", DEVICES)
def test_deterministic_rows_do_not_depend_on_other_rows(device):
    tensors, token_ids, weights = problem(300, 64, 501, dtype=torch.float32)
    full = gradients(fused, tensors, token_ids, weights, device, deterministic=True)
    for begin, end in ((0, 1), (1, 130), (130, 300), (77, 205)):
        rows = slice(begin, end)
        part = gradients(
            fused,
            [tensors[0][rows], *tensors[1:]],
            token_ids[rows],
            weights[:, rows],
            device,
            deterministic=True,
            budget_bytes=10**6,
        )
        for w, p in zip(full[:3], part[:3], strict=True):
            assert torch.equal(w[rows], p)
    again = gradients(fused, tensors, token_ids, weights, device, deterministic=True)
    assert all(torch.equal(a, w) for a, w in zip(again, full, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("budget_bytes", (7 * 50 * 6, 2**20))
def test_nan_in_inactive_rows_does_not_spread(budget_bytes, dtype, device):
    """The gradient of their logits is 0, and 0 * NaN must not reach the weight gradient."""
    tensors, token_ids, weights = problem(30, 16, 50, dtype=dtype)
    tensors[0][[4, 9]] = torch.nan
    token_ids[4], weights[:, 9] = -100, 0.0
    log_probs, entropy, *grads = gradients(
        fused, tensors, token_ids, weights, device, budget_bytes=budget_bytes
    )
    assert log_probs[4] == entropy[4] == 0
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][[4, 9]].any()
