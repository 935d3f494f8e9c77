"""causal_conv1d and linear_recurrence in Triton: interpreted, and on a GPU if there is one."""

import pytest
import torch

from hybridengine.kernels import causal_conv1d, linear_recurrence
from tests.kernels import linear_attention_cases as cases
from tests.kernels.cuda_graph import capture
from tests.kernels.interpreter import run_interpreted

pytest.importorskip("triton")


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted("interpreted_linear_attention.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    (
        "causal_conv1d_forward_every_option_bf16",
        "linear_recurrence_states_gated_delta_128_bf16",
        "linear_recurrence_score_grads_gated_delta_128_bf16",
    ),
)
def test_compiles_for_hopper_without_spills(kernel):
    from tools.triton_builds import builds

    _, shared, spilled = builds(90)[kernel]()
    assert shared <= 227 * 1024
    assert spilled == 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.CONVOLUTIONS, ids=str)
def test_convolution_on_the_gpu(case):
    cases.check_convolution("cuda", case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.RECURRENCES, ids=str)
def test_recurrence_on_the_gpu(case):
    cases.check_recurrence("cuda", case)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ("convolution", "recurrence"))
def test_nan_on_the_gpu(op):
    cases.check_nan("cuda", op)


@pytest.mark.gpu
def test_a_captured_graph_takes_other_segments():
    ends = torch.tensor([0, 40, 90, 130], dtype=torch.int32, device="cuda")
    x = torch.randn(130, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(64, 4, device="cuda", requires_grad=True)

    def step():
        mixed = causal_conv1d(x, weight, cu_seqlens=ends, activation="silu").view(130, 2, 32)
        g, beta = -mixed.float().square().mean(-1), mixed.float().mean(-1).sigmoid()
        out, _ = linear_recurrence(mixed, mixed, mixed, g, beta, cu_seqlens=ends, l2_norm=True)
        return out, *torch.autograd.grad(out.float().square().sum(), (x, weight))

    graph, captured = capture(step)
    ends.copy_(torch.tensor([0, 1, 65, 130]))
    graph.replay()
    for got, expected in zip(captured, step(), strict=True):
        assert torch.equal(got, expected)
