"""The gradient products over active rows: in Triton's interpreter, and on a GPU if there is one."""

import pytest
import torch
from hybridengine.kernels import linear_policy_loss

from tests.kernels.interpreter import run_interpreted
from tests.kernels.linear.cases import loss_inputs, problem

pytest.importorskip("triton")


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted("linear/interpreted_active_rows.py")


@pytest.mark.parametrize("capability", (90, 100))
def test_products_compile_without_spills(capability):
    from hybridengine.kernels._triton_builds import builds

    for name in ("hidden", "weight"):
        registers, shared, spilled = builds(capability)[f"active_rows_{name}_bf16"]()
        assert registers <= 255
        assert shared <= 227 * 1024
        assert spilled == 0


@pytest.mark.gpu
@pytest.mark.parametrize("old", ("given", "own"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_a_cuda_graph_counts_active_rows_at_every_replay(dtype, old):
    """Captured with one mask, replayed with others: only the device knows the number of rows."""
    tensors, token_ids, _ = problem(700, 64, 1003, dtype=dtype)
    hidden, weight = (t.cuda().requires_grad_() for t in tensors[:2])
    token_ids = token_ids.cuda()
    arguments = {k: v.cuda() for k, v in loss_inputs(700).items() if k != "cu_seqlens"}
    if old == "own":
        arguments |= {"old_log_probs": None, "rollout_log_probs": arguments["old_log_probs"]}

    def step():
        loss, *_ = linear_policy_loss(
            hidden, weight, token_ids, budget_bytes=130 * 1003 * 12, **arguments
        )
        return (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for share in (0.0, 0.3, 1.0):
        arguments["response_mask"].copy_(torch.rand(700, device="cuda") < share)
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):
            assert torch.equal(got, expected)
