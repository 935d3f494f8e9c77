"""Ahead-of-time builds of the Triton kernels, for `make cuda-check`: no GPU is needed.

`builds(capability)` maps a name to a function that compiles that specialization for a compute
capability (such as 90) and returns registers, shared bytes and spilled bytes, read by cuobjdump.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .linear import active_rows
from .logprob import triton as logprob_triton
from .policy_loss import triton as policy_loss_triton
from .policy_loss.terms import LOSS_MODES, SEQUENCE_MODES
from .sparse_linear import triton as sparse_triton

Usage = tuple[int, int, int]
Build = Callable[[int], Usage]


def builds(capability: int) -> dict[str, Callable[[], Usage]]:
    """Return the specializations that run on this compute capability, by name."""
    by_name: dict[str, Build] = {}
    for mode in LOSS_MODES:
        by_name[f"policy_loss_token_{mode}"] = partial(_policy_loss_token, mode)
    for mode in SEQUENCE_MODES:
        by_name[f"policy_loss_sequence_{mode}"] = partial(_policy_loss_sequence, mode)
    for dtype in ("fp32", "bf16"):
        for general in (False, True):
            name = f"{dtype}_{'every_option' if general else 'plain'}"
            by_name[f"logprob_forward_{name}"] = partial(_logprob, True, dtype, general)
            by_name[f"logprob_backward_{name}"] = partial(_logprob, False, dtype, general)
        for name in ("logits", "hidden_grad", "weight_grad"):
            by_name[f"sparse_{name}_{dtype}"] = partial(_sparse_linear, name, dtype)
        if capability >= 90:
            for name in ("index", "gather", "hidden", "scatter", "weight", "bias"):
                by_name[f"active_rows_{name}_{dtype}"] = partial(_active_rows, name, dtype)
    return {name: partial(build, capability) for name, build in by_name.items()}


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    capability: int,
    options: Mapping[str, int] | None = None,
) -> Usage:
    """Compile a kernel. types: argument name -> Triton type; `constants` are constexpr."""
    signature = {
        name: "constexpr" if name in constants else types[name] for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, dict(constants))
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        report = subprocess.run(
            [str(tool), "-res-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    usage = dict(re.findall(r"(REG|STACK):(\d+)", report))  # spills are on the stack
    return int(usage["REG"]), compiled.metadata.shared, int(usage["STACK"])


_FLOATS = (
    *("log_probs", "old_log_probs", "advantages", "ref_log_probs", "entropy", "is_weights"),
    *("sequence_stats", "shared_weight", "partials", "gradients", "entropy_gradients"),
)
_OPTIONS = (*("low", "high", "c", "tau_pos", "tau_neg", "cov_kl_coef", "kl_coef", "entropy_coeff"),)
_TYPES = {
    **dict.fromkeys(_FLOATS, "*fp32"),
    **dict.fromkeys(_OPTIONS, "fp32"),
    **{"mask": "*i1", "selected": "*i1", "cu_seqlens": "*i32"},
    **{"num_tokens": "i64", "num_sequences": "i32"},
}


def _flags(kernel: Any, **values: object) -> dict[str, object]:
    """Return the constexpr arguments of a kernel, which have upper-case names: True by default."""
    return {name: values.get(name, True) for name in kernel.arg_names if name.isupper()}


def _policy_loss_token(mode: str, capability: int) -> Usage:
    kernel = policy_loss_triton._token_kernel
    constants = _flags(kernel, MODE=mode, KL=3, STRAIGHT=False, BLOCK=policy_loss_triton.BLOCK)
    return compile_kernel(kernel, _TYPES, constants, capability)


def _policy_loss_sequence(mode: str, capability: int) -> Usage:
    kernel = policy_loss_triton._sequence_kernel
    constants = _flags(kernel, MODE=mode, BLOCK=policy_loss_triton.BLOCK)
    return compile_kernel(kernel, _TYPES, constants, capability)


def _logprob(forward: bool, dtype: str, general: bool, capability: int) -> Usage:
    kernel = logprob_triton.forward_kernel if forward else logprob_triton.backward_kernel
    types = dict.fromkeys(kernel.arg_names, "*fp32")
    types |= dict.fromkeys(("logits", "out"), f"*{dtype}")
    types |= {"vocab_mask": "*u8", "token_ids": "*i64", "bad_label": "*i32", "row_index": "*i32"}
    types |= dict.fromkeys(("row_stride", "mask_stride", "out_stride", "ignore_index"), "i64")
    types |= {"vocab": "i32", "vocab_range": "*i64"}
    types |= dict.fromkeys(("temperature", "scale", "softcap"), "fp32")
    optional = ("HAS_MASK", "HAS_CAP", "HAS_TEMPERATURES", "PARALLEL", "WANT_SQUARES")
    values: dict[str, object] = dict.fromkeys((*optional, "HAS_ROW_INDEX"), general)
    values["BLOCK"] = logprob_triton.FORWARD_BLOCK if forward else logprob_triton.BACKWARD_BLOCK
    constants = _flags(kernel, **values)
    return compile_kernel(kernel, types, constants, capability)


def _active_rows(name: str, dtype: str, capability: int) -> Usage:
    kernel = getattr(active_rows, f"{name}_kernel")
    tiles = dict(active_rows.TILES[4 if dtype == "fp32" else 2])
    options = {key: tiles.pop(key) for key in ("num_warps", "num_stages")}
    m, n, k = tiles.values()
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("state", "row_index", "src_index"), "*i32")
    types |= dict.fromkeys(("grad_log_probs", "grad_entropy", "partial", "total"), "*fp32")
    types |= dict.fromkeys(("hidden", "active_hidden", "grad_logits", "hidden_grad"), f"*{dtype}")
    if name in ("hidden", "weight"):
        tile, other = ((m, k), "weight") if name == "hidden" else ((k, m), "active_hidden")
        types["grad_logits"] = f"tensordesc<{dtype}[{tile[0]}, {tile[1]}]>"
        types[other] = f"tensordesc<{dtype}[{k}, {n}]>"
    if name == "weight":
        types["total"] = f"tensordesc<fp32[{m}, {n // 2}]>"
    block = 128 if name == "bias" else 1024
    constants = _flags(kernel, SPLITS=active_rows.SPLITS, BLOCK=block, **tiles)
    return compile_kernel(kernel, types, constants, capability, options)


def _sparse_linear(name: str, dtype: str, capability: int) -> Usage:
    kernel = getattr(sparse_triton, f"{name}_kernel")
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("hidden", "weight", "out"), f"*{dtype}")
    types |= {"ids": "*i32", "ends": "*i32", "logits": "*fp32", "grad_logits": "*fp32"}
    types |= dict.fromkeys(("row", "vocab_range", "order", "begin"), "*i64")
    constants = _flags(kernel, ACCUMULATE=False, BLOCK=sparse_triton.BLOCK)
    return compile_kernel(kernel, types, constants, capability)
