"""Run by test_exact_gpu.py in Triton's interpreter: vLLM's CPU engine with the GPU's operators."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.exact_bits import SMALL, compare, save_model
from tests.kernels.interpreter import round_to_nearest, widen_dot
from tests.ranks import run_ranks

EXPECTED = {
    *(
        "linear_kernel",
        "join_kernel",
        "norm_kernel",
        "gated_kernel",
        "write_kernel",
        "paged_kernel",
    ),
    *("path_kernel", "forward_kernel"),
}


def interpreted(*arguments: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patches:
        launched = _use_triton(patches)
        return compare(*arguments) | {"launched": launched}


def _use_triton(patches: pytest.MonkeyPatch) -> set[str]:
    """Let CPU tensors have the Triton kernels of all exact operators; return those that ran."""
    import hybridengine.model  # noqa: F401
    from hybridengine.kernels import decode_linear_triton, layer_triton, paged_attention_triton
    from hybridengine.kernels._launch import launch
    from hybridengine.kernels.attention import triton_paths
    from hybridengine.kernels.logprob import triton as logprob_triton

    kernels = "hybridengine.kernels"
    widen_dot(patches)
    round_to_nearest(patches)

    def choose(op: str, device: Any, requested: Any = None, dtype: Any = None) -> str:
        return "triton"

    for name in ("decode_linear", "layer", "paged_attention", "attention.op", "logprob.rows"):
        patches.setattr(sys.modules[f"{kernels}.{name}"], "choose_backend", choose)
    for name in ("layer", "rotary"):  # functions that have a form of their own on CPUs
        patches.setattr(sys.modules[f"{kernels}.{name}"], "native", lambda: None)
    patches.setattr(sys.modules[f"{kernels}.layer"], "kernels_for", lambda x: layer_triton)
    linear = sys.modules[f"{kernels}.decode_linear"]
    before = linear.eager_inference_linear

    def inference(x: Any, weight: Any, bias: Any, out_dtype: Any, max_rows: Any) -> torch.Tensor:
        if max_rows is not None:  # vLLM warms up before the model has exact operators
            return before(x, weight, bias, out_dtype, max_rows)
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        out = decode_linear_triton.decode_linear(rows, weight, bias, out_dtype or x.dtype)
        return out.view(*x.shape[:-1], -1)

    patches.setattr(linear, "eager_inference_linear", inference)
    patches.setattr(linear, "find_kernel", lambda backend: decode_linear_triton.decode_linear)
    launched: set[str] = set()

    def noting(kernel: Any, *arguments: Any, **options: Any) -> None:
        launched.add(kernel.__name__)
        launch(kernel, *arguments, **options)

    modules = (decode_linear_triton, layer_triton, paged_attention_triton, triton_paths)
    for module in (*modules, logprob_triton):
        patches.setattr(module, "launch", noting)
    return launched


@pytest.mark.parametrize(("kind", "dtype"), [("qwen2", "bfloat16"), ("qwen3", "float32")])
def test_rollouts(tmp_path: Path, kind: str, dtype: str) -> None:
    path = save_model(kind, tmp_path / kind, SMALL)
    [result] = run_ranks(interpreted, 1, path, dtype, "cpu", SMALL, timeout_s=250)
    assert result["tokens"] and result["cached"], result
    assert not any(result["differing"].values()), result
    assert result["launched"] >= EXPECTED
