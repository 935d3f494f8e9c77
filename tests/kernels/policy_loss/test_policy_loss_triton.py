"""The Triton policy loss: in Triton's interpreter on the CPU, and on a GPU where there is one."""

import pytest

from hybridengine.kernels import LOSS_AGG_MODES, LOSS_MODES
from tests.kernels.batches import aggregated, assert_same, run
from tests.kernels.interpreter import run_interpreted

pytest.importorskip("triton")


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted("policy_loss/interpreted_policy_loss.py")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_on_the_gpu(backend, loss_mode, loss_agg_mode):
    inputs, options, exact = aggregated(loss_mode, loss_agg_mode)
    on_gpu = {name: value.cuda() for name, value in inputs.items()}
    loss, metrics, *gradients = run(on_gpu, backend=backend, **options)
    host = {name: value.cpu() for name, value in metrics.items()}
    assert_same((loss.cpu(), host, *(gradient.cpu() for gradient in gradients)), exact)
