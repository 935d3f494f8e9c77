"""Log-probs and their gradient up to a factor per row, in one read of the logits."""

from types import SimpleNamespace

import pytest
import torch

from hybridengine.kernels.logprob.options import row_options
from hybridengine.kernels.logprob.rows import has_unscaled_gradient, rows_unscaled_gradient
from tests import tolerances
from tests.kernels.interpreter import run_interpreted
from tests.kernels.logprob.cases import OPTIONS, move, options_for, plain_pytorch, problem

pytest.importorskip("triton")


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted("logprob/interpreted_unscaled.py")


def test_where_it_runs():
    for device, dtype, group, runs in (
        ("cuda", torch.bfloat16, "", True),
        ("cuda", torch.bfloat16, "tp", False),  # ranks hold slices of the vocabulary
        ("cuda", torch.float16, "", False),  # 5 bits of exponent
        ("cuda", torch.float32, "", False),
        ("cpu", torch.bfloat16, "", False),
    ):
        hidden = SimpleNamespace(is_cuda=device == "cuda", dtype=dtype)
        assert has_unscaled_gradient(hidden, group) == runs


@pytest.mark.gpu
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("vocab", (4103, 20_480))
def test_on_the_gpu(vocab, option):
    logits, token_ids, _ = problem(9, vocab, torch.float32, seed=0)
    logits[4, vocab - 2] = 150.0  # far above the first columns: this row is read again
    options = options_for(option, 9, vocab, seed=0)
    leaf = logits.double().requires_grad_()
    log_probs, entropy = plain_pytorch(leaf, token_ids, **options)
    kept = log_probs.isfinite()
    (exact,) = torch.autograd.grad(log_probs[kept].sum(), leaf)
    rows = row_options("test", token_ids.cuda(), vocab, **move(options, "cuda"))
    out = torch.empty(9, vocab, dtype=torch.bfloat16, device="cuda")
    *got, row_scale = rows_unscaled_gradient(logits.cuda(), out, token_ids.cuda(), rows)
    for g, e in zip(got, (log_probs, entropy), strict=True):
        torch.testing.assert_close(g.cpu().double(), e.detach(), **tolerances.LOG_PROB)
    gradient = (row_scale.double()[:, None] * out.double()).cpu()
    rounding = tolerances.GRAD_ROUNDING["bfloat16"] + tolerances.LOG_PROB_GRAD["rtol"]
    torch.testing.assert_close(gradient[kept], exact[kept], rtol=rounding, atol=2e-6)
