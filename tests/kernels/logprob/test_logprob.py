"""token_log_probs against float64, forward and gradient, with every option and backend."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import token_log_probs
from hybridengine.kernels.logprob import op
from hybridengine.kernels.logprob.options import RowOptions, row_options
from hybridengine.kernels.logprob.reference import reference_token_log_probs
from hybridengine.kernels.logprob.rows import rows_backward, rows_forward
from tests import tolerances
from tests.kernels.logprob.cases import (
    DEVICES,
    DTYPES,
    OPTIONS,
    assert_matches_float64,
    move,
    options_with_labels,
    plain_pytorch,
    problem,
    value_and_gradient,
)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 9),
    vocab=st.one_of(st.integers(1, 70), st.integers(2000, 4200)),
    dtype=st.sampled_from(DTYPES),
    option=st.sampled_from(OPTIONS),
    seed=st.integers(0, 1000),
)
def test_against_float64(device, rows, vocab, dtype, option, seed):
    assert_matches_float64(device, rows, vocab, dtype, option, seed)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_twice_that_of_plain_pytorch(dtype, option, device):
    """Root mean square over rows, of log-prob, entropy and gradient."""
    logits, token_ids, gradients = problem(64, 5003, dtype, seed=3)
    options = options_with_labels(option, token_ids, 5003, seed=3)
    exact = value_and_gradient(plain_pytorch, logits.double(), token_ids, gradients, **options)
    on_device = (logits.to(device), token_ids.to(device), gradients.to(device))
    plain = value_and_gradient(plain_pytorch, *on_device, **move(options, device))
    ours = value_and_gradient(token_log_probs, *on_device, **move(options, device))
    for name, e, p, o in zip(("log_probs", "entropy", "grad"), exact, plain, ours, strict=True):
        error, plain_error = ((v.cpu().double() - e).square().mean().sqrt() for v in (o, p))
        assert error <= tolerances.ERROR_FACTOR * plain_error, (name, error, plain_error)


@pytest.mark.parametrize("option", OPTIONS)
def test_reference_passes_gradcheck(option):
    logits, token_ids, _ = problem(3, 7, torch.float64, seed=1, scale=2.0)
    options = options_with_labels(option, token_ids, 7, seed=1)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: token_log_probs(x, token_ids, **options), logits)


def test_reference_gradient_equals_autograd_of_the_specification():
    logits, token_ids, gradients = problem(4, 9, torch.float64, seed=5)
    options = RowOptions(1.0, torch.rand(4) + 0.5, 0.5, 6.0, -100, None, None, False, "")
    leaf = logits.clone().requires_grad_()
    log_probs, entropy = reference_token_log_probs(leaf, token_ids, options)[:2]
    expected = torch.autograd.grad((log_probs * gradients[0] + entropy * gradients[1]).sum(), leaf)[
        0
    ]
    ours = value_and_gradient(
        token_log_probs,
        logits,
        token_ids,
        gradients,
        temperature=options.temperatures,
        logit_scale=0.5,
        softcap=6.0,
    )
    torch.testing.assert_close(ours[2], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("device", DEVICES)
def test_only_the_requested_gradients(device):
    logits, token_ids, gradients = problem(4, 50, torch.float32, seed=2)
    exact = logits.double().requires_grad_()
    leaf = logits.to(device).clone().requires_grad_()
    expected = plain_pytorch(exact, token_ids)
    got = token_log_probs(leaf, token_ids.to(device))
    for chosen in ([0], [1], [0, 1]):
        e = sum((expected[i] * gradients[i].double()).sum() for i in chosen)
        g = sum((got[i] * gradients[i].to(device)).sum() for i in chosen)
        e = torch.autograd.grad(e, exact, retain_graph=True)[0]
        g = torch.autograd.grad(g, leaf, retain_graph=True)[0]
        torch.testing.assert_close(g.cpu().double(), e, **tolerances.LOG_PROB_GRAD)
    assert not token_log_probs(logits.to(device), token_ids.to(device))[0].requires_grad


@pytest.mark.parametrize("device", DEVICES)
def test_in_place_gradient_is_written_over_the_logits(device):
    logits, token_ids, gradients = problem(5, 301, torch.bfloat16, seed=4)
    logits, token_ids, gradients = (t.to(device) for t in (logits, token_ids, gradients))
    expected = value_and_gradient(token_log_probs, logits, token_ids, gradients)[2]
    leaf = logits.requires_grad_()
    hidden = leaf * 1
    log_probs, entropy = token_log_probs(hidden, token_ids, inplace_backward=True)
    address = hidden.data_ptr()
    kept = []
    hidden.register_hook(lambda grad: kept.append(grad.data_ptr()))
    ((log_probs * gradients[0]).sum() + (entropy * gradients[1]).sum()).backward()
    assert kept == [address]
    assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("offset", (0, 3))
def test_a_large_gradient_on_huge_pages(offset):
    """From 32 MiB on the CPU kernel requests huge pages; the result is the same."""
    logits = torch.randn(33, 2**18 + offset, generator=torch.Generator().manual_seed(0))
    token_ids = torch.arange(33)
    ones = torch.ones(2, 33)
    full = value_and_gradient(token_log_probs, logits, token_ids, ones)[2]
    part = value_and_gradient(token_log_probs, logits[30:], token_ids[30:], ones[:, 30:])[2]
    assert full.nbytes > 2**25 > part.nbytes
    assert torch.equal(full[30:], part)


@pytest.mark.parametrize("device", DEVICES)
def test_stats(device):
    logits, token_ids, _ = problem(5, 301, torch.float32, seed=4)
    _, _, stats = token_log_probs(
        logits.to(device), token_ids.to(device), 0.5, logit_scale=2.0, return_stats=True
    )
    z = logits.double() * 4.0
    expected = (z.logsumexp(-1), logits.double().amax(-1) * 2.0, z.softmax(-1).square().sum(-1))
    for e, g in zip(expected, stats, strict=True):
        torch.testing.assert_close(g.cpu().double(), e, **tolerances.LOG_PROB)


@pytest.mark.parametrize("device", DEVICES)
def test_leading_dimensions(device):
    logits, token_ids, _ = problem(6, 40, torch.float32, seed=6)
    flat = token_log_probs(logits.to(device), token_ids.to(device))
    shaped = token_log_probs(logits.view(2, 3, 40).to(device), token_ids.view(2, 3).to(device))
    for f, s in zip(flat, shaped, strict=True):
        assert s.shape == (2, 3)
        assert torch.equal(s.flatten(), f)


def test_an_in_place_gradient_compiles_as_one_graph():
    logits, token_ids, gradients = problem(4, 100, torch.float32, seed=7)

    def loss(x):
        log_probs, entropy = token_log_probs(x * 2.0, token_ids, inplace_backward=True)
        return (log_probs * gradients[0] + entropy * gradients[1]).sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaf = logits.clone().requires_grad_()
        value = function(leaf)
        value.backward()
        results.append((value.detach(), leaf.grad))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_depend_on_other_rows_or_the_thread_count(device):
    logits, token_ids, gradients = problem(33, 4099, torch.bfloat16, seed=8)
    full = value_and_gradient(
        token_log_probs, logits.to(device), token_ids.to(device), gradients.to(device)
    )
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for begin, end in ((0, 1), (1, 20), (20, 33)):
            part = value_and_gradient(
                token_log_probs,
                logits[begin:end].to(device),
                token_ids[begin:end].to(device),
                gradients[:, begin:end].to(device),
            )
            for w, p in zip(full, part, strict=True):
                assert torch.equal(w[begin:end], p)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_splitting_rows_over_blocks_changes_nothing(dtype):
    """Few rows are split to fill the GPU, many are not; an odd vocabulary leaves most unaligned."""
    rows, vocab = 33_000, 9001
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator, device="cuda", dtype=dtype) * 4
    token_ids = torch.randint(0, vocab, (rows,), generator=generator, device="cuda")
    gradients = torch.randn(2, rows, generator=generator, device="cuda")
    full = value_and_gradient(token_log_probs, logits, token_ids, gradients)
    for begin, end in ((0, 1), (5, 12), (32_900, 33_000)):
        part = value_and_gradient(
            token_log_probs, logits[begin:end], token_ids[begin:end], gradients[:, begin:end]
        )
        for whole, alone in zip(full, part, strict=True):
            assert torch.equal(whole[begin:end], alone)
    exact = plain_pytorch(logits[:8].double(), token_ids[:8])
    for whole, want in zip(full, exact, strict=False):
        torch.testing.assert_close(whole[:8].double(), want, **tolerances.LOG_PROB)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_token_in_any_column(dtype, device):
    """The first and last columns of what a lane, a warp and a block of the kernels hold."""
    columns = [0, 3, 7, 8, 127, 128, 255, 256, 511, 512, 1023, 1024, 4095, 4096, 8191, 8192, 8400]
    logits, _, gradients = problem(len(columns), 8401, dtype, seed=2)
    token_ids = torch.tensor(columns)
    logits.scatter_(1, token_ids[:, None], 20.0)  # added to the others, it would be most of the sum
    exact = value_and_gradient(plain_pytorch, logits.double(), token_ids, gradients)
    got = value_and_gradient(
        token_log_probs, logits.to(device), token_ids.to(device), gradients.to(device)
    )
    for e, g in zip(exact[:2], got[:2], strict=True):
        torch.testing.assert_close(g.cpu().double(), e, **tolerances.LOG_PROB)
    rounding = tolerances.GRAD_ROUNDING[str(dtype).removeprefix("torch.")]
    torch.testing.assert_close(
        got[2].cpu().double(), exact[2], rtol=tolerances.LOG_PROB_GRAD["rtol"] + rounding, atol=2e-6
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_written_to_the_rows_of_row_index(dtype, device):
    """As linear_policy_loss compacts active rows: in another order, and without some."""
    logits, token_ids, gradients = (t.to(device) for t in problem(5, 301, dtype, seed=9))
    expected = value_and_gradient(token_log_probs, logits, token_ids, gradients)[2]
    options = row_options("test", token_ids, 301)
    backend = op.backend_for(logits, None)
    row_results = list(rows_forward(logits, token_ids, options, False, backend))
    row_index = torch.tensor([3, -1, 0, 6, -1], dtype=torch.int32, device=device)
    out = torch.full((8, 304), 7.0, dtype=dtype, device=device)[:, :301]
    rows_backward(logits, out, token_ids, options, row_results, *gradients, backend, row_index)
    for out_row in range(8):
        row = row_index.tolist().index(out_row) if out_row in (0, 3, 6) else None
        assert torch.equal(
            out[out_row], torch.full_like(out[0], 7.0) if row is None else expected[row]
        )
