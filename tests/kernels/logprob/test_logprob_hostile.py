"""token_log_probs on inputs that broke other implementations: each has one defined result."""

import math

import pytest
import torch

from hybridengine.kernels import check_labels, token_log_probs
from hybridengine.kernels.logprob import op
from hybridengine.kernels.logprob.options import row_options
from hybridengine.kernels.logprob.rows import rows_backward, rows_forward
from tests import tolerances
from tests.kernels.logprob.cases import (
    BACKENDS,
    DEVICES,
    plain_pytorch,
    problem,
    value_and_gradient,
)

INF = math.inf


def run(logits, token_ids, device="cpu", gradients=(1.0, 0.0), **options):
    leaf = logits.to(device).clone().requires_grad_()
    log_probs, entropy = token_log_probs(leaf, token_ids.to(device), **options)
    grad = torch.autograd.grad(
        (log_probs, entropy),
        leaf,
        [torch.full_like(v, g) for v, g in zip((log_probs, entropy), gradients, strict=True)],
    )[0]
    return log_probs.detach().cpu(), entropy.detach().cpu(), grad.cpu()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_minus_infinity_removes_an_entry(device, backend):
    logits = torch.tensor([[0.0, -INF, 1.0, -INF]])
    log_probs, entropy, grad = run(
        logits, torch.tensor([2]), device, gradients=(1.0, 1.0), backend=backend
    )
    p = torch.tensor([0.0, 1.0], dtype=torch.float64).softmax(0)
    assert log_probs.item() == pytest.approx(p[1].log().item(), rel=1e-6)
    assert entropy.item() == pytest.approx(-(p * p.log()).sum().item(), rel=1e-6)
    assert grad[0, 1] == 0
    assert grad[0, 3] == 0
    assert grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_removed_token_has_log_prob_minus_infinity(device, backend):
    vocab_mask = torch.tensor([[True, False, True]], device=device)
    log_probs, entropy, grad = run(
        torch.zeros(1, 3), torch.tensor([1]), device, vocab_mask=vocab_mask, backend=backend
    )
    assert log_probs.item() == -INF
    assert entropy.item() == pytest.approx(math.log(2), rel=1e-6)
    assert grad[0, 1] == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_row_with_all_entries_removed_has_no_gradient(device, backend):
    logits, nothing = torch.tensor([[1.0, 2.0, 3.0]]), torch.zeros(1, 3, dtype=torch.bool)
    log_probs, entropy, grad = run(
        logits,
        torch.tensor([1]),
        device,
        (1.0, 1.0),
        vocab_mask=nothing.to(device),
        backend=backend,
    )
    assert log_probs.isnan().all() and entropy.isnan().all()
    assert torch.equal(grad, torch.zeros(1, 3))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gap", (10.0, 17.0, 40.0, 90.0))
def test_gradient_of_the_token_as_p_goes_to_one(gap, device, dtype):
    """1 - p must be the sum over the other entries, not a difference (Liger #1329)."""
    logits = torch.zeros(1, 50)
    logits[0, 7] = gap
    log_probs, _, grad = run(logits.to(dtype), torch.tensor([7]), device)
    others = 49 * math.exp(-gap)
    rounding = tolerances.GRAD_ROUNDING[str(dtype).removeprefix("torch.")]
    assert log_probs.item() == pytest.approx(-math.log1p(others), rel=1e-6)
    assert grad[0, 7].item() == pytest.approx(others / (1 + others), rel=2e-6 + rounding)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", (-1e4, -200.0, 1e4))
def test_rows_with_a_large_logit_offset_are_as_exact_as_others(level, device):
    base = torch.randint(-8, 8, (4, 300), generator=torch.Generator().manual_seed(0)).float()
    token_ids = torch.arange(4)
    near = run(base, token_ids, device, gradients=(1.0, 1.0))
    far = run(base + level, token_ids, device, gradients=(1.0, 1.0))
    for n, f in zip(near, far, strict=True):
        torch.testing.assert_close(f, n, **tolerances.LARGE_OFFSET)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("token_is_peak", (False, True))
@pytest.mark.parametrize("gap", (1.0, 5.0, 17.0, 30.0))  # from 36 on float64 is not exact either
def test_peaked_rows_have_at_most_twice_the_error_of_plain_pytorch(
    gap, token_is_peak, dtype, device
):
    """One entry is `gap` above all others. RMS error, for each gradient alone and for both."""
    logits, token_ids, _ = problem(32, 5003, torch.float32, seed=int(gap), scale=1.0)
    peak = token_ids if token_is_peak else token_ids.flip(0) - 1  # another entry than the token
    peak = peak.where(peak >= 0, 5002)
    logits.scatter_(1, peak[:, None], logits.amax(1, keepdim=True) + gap)
    logits, token_ids = logits.to(dtype).to(device), token_ids.to(device)
    for gradients in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        exact, plain, ours = (
            value_and_gradient(
                function, x, token_ids, torch.tensor(gradients, device=device)[:, None]
            )
            for function, x in (
                (plain_pytorch, logits.double()),
                (plain_pytorch, logits),
                (token_log_probs, logits),
            )
        )
        for name, e, p, o in zip(("log_probs", "entropy", "grad"), exact, plain, ours, strict=True):
            error, plain_error = ((v.double() - e).square().mean().sqrt() for v in (o, p))
            floor = tolerances.ROUNDING * e.square().mean().sqrt()
            assert error <= tolerances.ERROR_FACTOR * plain_error.clamp(min=floor), (
                name,
                gradients,
            )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    "late",
    [
        [8.0, 12.0],  # the maximum is late: previous sums are rescaled
        [1e4],
        [30.0, 28.5],  # a peaked row whose peak is neither the token nor in the first block
        [-INF, 20.0],
        [torch.finfo(torch.bfloat16).min, -1e9],
    ],
)
def test_the_position_of_large_and_removed_entries_does_not_matter(late, dtype, device):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 9001, generator=generator)
    logits[:, 8000 : 8000 + len(late)] = torch.tensor(late)
    logits, token_ids = logits.to(dtype), torch.randint(0, 8000, (6,), generator=generator)
    log_probs, entropy, grad = run(logits, token_ids, device, gradients=(1.0, 1.0))
    exact = run(logits.double(), token_ids, gradients=(1.0, 1.0), backend="reference")
    for got, want in zip((log_probs, entropy), exact, strict=False):
        torch.testing.assert_close(got.double(), want, **tolerances.LOG_PROB)
    rounding = tolerances.GRAD_ROUNDING[str(dtype).removeprefix("torch.")]
    torch.testing.assert_close(
        grad.double(), exact[2], rtol=tolerances.LOG_PROB_GRAD["rtol"] + rounding, atol=2e-6
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("label", (-1, 5, 2**40, -(2**40)))
def test_a_label_outside_the_vocabulary_is_refused(label, backend):
    with pytest.raises(IndexError, match=rf"token_ids\[1\] is {label}, outside .* 5; expected"):
        token_log_probs(torch.zeros(2, 5), torch.tensor([0, label]), backend=backend)


@pytest.mark.gpu
def test_on_a_gpu_a_bad_label_gives_nan_and_raises_a_flag():
    log_probs, _ = token_log_probs(
        torch.zeros(2, 5, device="cuda"), torch.tensor([0, 7], device="cuda")
    )
    assert log_probs.isnan().tolist() == [False, True]
    with pytest.raises(IndexError, match="outside the vocabulary"):
        check_labels(log_probs.device)
    check_labels(log_probs.device)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_nan_in_an_ignored_row_does_not_spread(device, backend):
    logits = torch.randn(3, 40)
    logits[1] = torch.nan
    token_ids = torch.tensor([3, -100, 5])
    log_probs, entropy, grad = run(logits, token_ids, device, gradients=(1.0, 1.0), backend=backend)
    assert log_probs[1] == 0
    assert entropy[1] == 0
    assert torch.equal(grad[1], torch.zeros(40))
    assert log_probs.isfinite().all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_row_with_no_incoming_gradient_gets_exact_zeros(device, backend):
    logits = torch.full((2, 9), torch.nan)
    logits[0] = 1.0
    leaf = logits.to(device).requires_grad_()
    log_probs, _ = token_log_probs(leaf, torch.tensor([0, 0], device=device), backend=backend)
    weights = torch.tensor([1.0, 0.0], device=device)
    grad = torch.autograd.grad(log_probs, leaf, weights)[0].cpu()
    assert torch.equal(grad[1], torch.zeros(9))
    assert grad[0].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row", ([math.nan, 0.0], [INF, 0.0], [-INF, -INF]))
def test_no_distribution_gives_nan(row, device, backend):
    log_probs, entropy, _ = run(torch.tensor([row]), torch.tensor([1]), device, backend=backend)
    assert log_probs.isnan().all()
    assert entropy.isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_and_all_ignored(device, backend):
    log_probs, entropy, grad = run(
        torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64), device, backend=backend
    )
    assert log_probs.shape == entropy.shape == (0,)
    assert grad.shape == (0, 7)
    log_probs, entropy, grad = run(
        torch.full((3, 7), torch.nan), torch.full((3,), -100), device, backend=backend
    )
    for value in (log_probs, entropy, grad):
        assert not value.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_non_contiguous_and_unaligned_rows(dtype, device):
    wide = torch.randn(7, 2 * 333 + 3).to(dtype).to(device)
    token_ids = torch.randint(0, 333, (7,))
    for view in (wide[:, 1:334], wide[:, 3:][:, ::2][:, :333], wide.t()[:333, :7].t()[:, :333]):
        ours = run(view, token_ids, device, gradients=(1.0, 1.0))
        plain = run(view.contiguous(), token_ids, device, gradients=(1.0, 1.0))
        for o, p in zip(ours, plain, strict=True):
            torch.testing.assert_close(o.float(), p.float(), rtol=1e-6, atol=1e-6)


def test_offsets_beyond_two_to_the_31_elements():
    """With a stride of 2^29 elements row 4 begins at element 2^31; the memory is sparse."""
    rows, stride = 5, 2**29
    try:
        storage = torch.empty(stride * 4 + 16, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.fail("cannot reserve 4 GiB of address space; only a few pages would be used")
    logits = storage.as_strided((rows, 16), (stride, 1))
    logits.copy_(torch.randn(rows, 16))
    token_ids = torch.arange(rows)
    for got, want in zip(
        run_views(logits, token_ids), run_views(logits.contiguous(), token_ids), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    options = row_options("test", token_ids, 16)
    backend, ones = op.backend_for(logits, None), torch.ones(rows)
    row_results = list(rows_forward(logits, token_ids, options, False, backend))
    expected = torch.empty(rows, 16, dtype=torch.bfloat16)
    for out in (expected, logits):  # also in place
        rows_backward(logits, out, token_ids, options, row_results, ones, None, backend)
    assert torch.equal(logits, expected)


def run_views(logits, token_ids):
    with torch.no_grad():
        return token_log_probs(logits, token_ids)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masked", (False, True))
def test_a_soft_cap_makes_infinite_logits_finite(masked, device, backend):
    """y = c tanh(x / c) is c at inf and -c at -inf, without gradient; masked entries stay -inf."""
    logits = torch.randn(3, 4103, generator=torch.Generator().manual_seed(0))
    logits[:, ::7] = -INF
    logits[1, 4100:] = INF
    logits[2] = -INF
    token_ids = torch.tensor([7, 4102, 5])
    vocab_mask = torch.ones(3, 4103, dtype=torch.bool)
    if masked:
        vocab_mask[:, 14::21] = False
    options = {"softcap": 3.0, "temperature": 0.7, "logit_scale": 1.5}
    results = run(
        logits,
        token_ids,
        device,
        gradients=(0.5, 2.0),
        backend=backend,
        **options,
        vocab_mask=vocab_mask.to(device) if masked else None,
    )
    exact = logits.double().requires_grad_()
    y = (3 * torch.tanh(1.5 * exact / 3)).masked_fill(~vocab_mask, -INF) / 0.7
    log_p = y.log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p.masked_fill(~vocab_mask, 0)).sum(-1)
    log_probs = log_p.gather(1, token_ids[:, None]).squeeze(1)
    (0.5 * log_probs + 2 * entropy).sum().backward()
    expected = (log_probs, entropy, exact.grad.nan_to_num())
    for got, want in zip(results, expected, strict=True):
        torch.testing.assert_close(got.double(), want.detach(), **tolerances.LOG_PROB_GRAD)
    assert not results[2][~logits.isfinite()].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("value", (math.nan, INF))
def test_nan_and_infinity_show_in_any_column(value, dtype, device):
    columns = [0, 1, 9, 255, 1023, 1024, 4095, 4096, 4999]
    logits, token_ids, _ = problem(len(columns), 5000, dtype, seed=3)
    logits[:, ::7] = -INF
    logits[torch.arange(len(columns)), columns] = value
    log_probs, entropy, _ = run(logits, token_ids, device)
    assert log_probs.isnan().all()
    assert entropy.isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_nan_among_removed_entries_gives_nan(device):
    """Its block and all before it have no other finite entry, so there is no maximum yet."""
    logits = torch.full((1, 5000), -INF)
    logits[0, 2100] = math.nan
    logits[0, 4500] = 0.0
    log_probs, entropy, _ = run(logits, torch.tensor([4500]), device)
    assert log_probs.isnan().all()
    assert entropy.isnan().all()
