"""What stands in for a GPU while the kernels of baselines are compiled."""

from __future__ import annotations

import torch

from tools.gpu_peers import LEFT_OUT
from tools.gpu_peers_compile import both_passes, cases, item


def test_slices_without_the_indexing_of_torch() -> None:
    x = torch.arange(60).view(3, 4, 5)
    for key in (slice(1, 3), slice(-2, None), (slice(None), slice(0, 2)), (slice(2),)):
        torch.testing.assert_close(item(x, key), x[key])


def test_both_passes_of_a_function_run_without_the_engine() -> None:
    passes = []

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.save_for_backward(x)
            ctx.set_materialize_grads(False)
            ctx.factor = factor
            passes.append("forward")
            return x * factor, None

        @staticmethod
        def backward(ctx, grad, none):
            (x,) = ctx.saved_tensors
            assert x.shape == grad.shape and none is None and ctx.factor == 3
            passes.append("backward")
            return grad, None

    x = torch.ones(2, requires_grad=True)
    out, _ = both_passes(Scale, x, 3)
    assert out.tolist() == [3, 3] and not out.requires_grad
    both_passes(Scale, x.detach(), 3)
    assert passes == ["forward", "backward", "forward"]


def test_every_baseline_is_compiled_once_per_shape() -> None:
    names = [name for name, _ in cases()]
    assert {name.split()[0].rstrip(",") for name in names} == {"quack", "flash-attn-4", "Liger"}
    assert len(names) > 15


def test_what_is_left_out_of_the_wheels() -> None:
    names = ("x/lib/static.a", "nvidia_cutlass_dsl/cu13/lib/stubs/arm/libcute_dsl_runtime.so")
    assert all(LEFT_OUT.search(name) for name in names)
    for name in ("nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so", "tvm_ffi/core.so"):
        assert not LEFT_OUT.search(name)
