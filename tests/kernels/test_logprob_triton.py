"""The Triton log-prob kernels: in Triton's interpreter here, and on a GPU where there is one."""

import pytest
import torch
from hybridengine.kernels import token_log_probs

from tests import tolerances
from tests.kernels.interpreter import run_interpreted
from tests.kernels.test_logprob import (
    OPTIONS,
    move,
    options_for,
    plain_pytorch,
    problem,
    value_and_gradient,
)

pytest.importorskip("triton")


def test_in_the_interpreter():
    run_interpreted("logprob")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("cuda", "triton"))
@pytest.mark.parametrize("option", OPTIONS)
def test_on_the_gpu(option, backend):
    logits, token_ids, gradients = problem(9, 4103, torch.float32, seed=0)
    options = options_for(option, 9, 4103, seed=0)
    exact = value_and_gradient(plain_pytorch, logits.double(), token_ids, gradients, **options)
    on_gpu = (logits.cuda(), token_ids.cuda(), gradients.cuda())
    got = value_and_gradient(token_log_probs, *on_gpu, backend=backend, **move(options, "cuda"))
    for e, g in zip(exact, got, strict=True):
        torch.testing.assert_close(g.cpu().double(), e, **tolerances.LOG_PROB, equal_nan=True)
