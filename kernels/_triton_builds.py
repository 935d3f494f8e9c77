"""Ahead-of-time builds of the Triton kernels, for `make cuda-check`: no GPU is needed.

`builds(capability)` maps a name to a function that compiles that specialisation for the compute
capability (90, say) and returns (registers, shared bytes, spilled bytes) as cuobjdump reports them.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .linear import active_rows as linear_live_rows
from .logprob import triton as logprob_triton
from .policy_loss import triton as policy_loss_triton
from .policy_loss.terms import LOSS_MODES, SEQUENCE_MODES

Usage = tuple[int, int, int]
Build = Callable[[int], Usage]


def builds(capability: int) -> dict[str, Callable[[], Usage]]:
    """One entry per specialisation worth reading, of those that run there."""
    found: dict[str, Build] = {}
    for mode in LOSS_MODES:
        found[f"policy_loss_token_{mode}"] = partial(_policy_loss_token, mode)
    for mode in SEQUENCE_MODES:
        found[f"policy_loss_segment_{mode}"] = partial(_policy_loss_segment, mode)
    for dtype in ("fp32", "bf16"):
        for general in (False, True):
            name = f"{dtype}_{'every_option' if general else 'plain'}"
            found[f"logprob_forward_{name}"] = partial(_logprob, True, dtype, general)
            found[f"logprob_backward_{name}"] = partial(_logprob, False, dtype, general)
        if capability >= 90:
            for name in ("place", "gather", "hidden", "scatter", "weight", "bias"):
                found[f"live_rows_{name}_{dtype}"] = partial(_live_rows, name, dtype)
    return {name: partial(build, capability) for name, build in found.items()}


def compile_kernel(
    kernel,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    capability: int,
    options: Mapping[str, int] | None = None,
) -> Usage:
    """types: argument name -> Triton type; what `constants` names is a constexpr."""
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
    *("segments", "weight_of", "partials", "gradients", "entropy_gradients"),
)
_OPTIONS = (*("low", "high", "c", "tau_pos", "tau_neg", "cov_kl_coef", "kl_coef", "entropy_coeff"),)
_TYPES = {
    **dict.fromkeys(_FLOATS, "*fp32"),
    **dict.fromkeys(_OPTIONS, "fp32"),
    **{"mask": "*i1", "selected": "*i1", "cu_seqlens": "*i32"},
    **{"num_tokens": "i64", "num_sequences": "i32"},
}


def _policy_loss_token(mode: str, capability: int) -> Usage:
    constants = {
        **{"MODE": mode, "BY_COUNT": True, "KL": 3, "STRAIGHT": False},
        **dict.fromkeys(("HAS_MASK", "HAS_SELECTED", "HAS_REF", "HAS_ENTROPY"), True),
        **dict.fromkeys(("HAS_WEIGHTS", "HAS_SEGMENTS", "WANTS_GRADIENT", "WANTS_ENTROPY"), True),
        "BLOCK": policy_loss_triton.BLOCK,
    }
    return compile_kernel(policy_loss_triton._token_kernel, _TYPES, constants, capability)


def _policy_loss_segment(mode: str, capability: int) -> Usage:
    constants = {"MODE": mode, "HAS_MASK": True, "HAS_WEIGHTS": True}
    constants["BLOCK"] = policy_loss_triton.BLOCK
    return compile_kernel(policy_loss_triton._segment_kernel, _TYPES, constants, capability)


def _logprob(forward: bool, dtype: str, general: bool, capability: int) -> Usage:
    kernel = logprob_triton.forward_kernel if forward else logprob_triton.backward_kernel
    types = dict.fromkeys(kernel.arg_names, "*fp32")
    types |= dict.fromkeys(("logits", "out"), f"*{dtype}")
    types |= {"keep": "*u8", "token_ids": "*i64", "bad_label": "*i32", "places": "*i32"}
    types |= dict.fromkeys(("row_stride", "keep_stride", "out_stride", "ignore_index"), "i64")
    types |= {"vocab": "i32", "vocab_range": "*i64"}
    types |= dict.fromkeys(("temperature", "scale", "softcap"), "fp32")
    constants = dict.fromkeys(("HAS_KEEP", "HAS_CAP", "HAS_TEMPERATURES", "PARALLEL"), general)
    if forward:
        constants |= {"WANT_SQUARES": general}
        constants["BLOCK"] = logprob_triton.FORWARD_BLOCK
    else:
        constants |= {"HAS_G": True, "HAS_H": True, "HAS_PLACES": general}
        constants["BLOCK"] = logprob_triton.BACKWARD_BLOCK
    return compile_kernel(kernel, types, constants, capability)


def _live_rows(name: str, dtype: str, capability: int) -> Usage:
    kernel = getattr(linear_live_rows, f"{name}_kernel")
    tiles = dict(linear_live_rows.TILES[4 if dtype == "fp32" else 2])
    options = {key: tiles.pop(key) for key in ("num_warps", "num_stages")}
    m, n, k = tiles.values()
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("state", "places", "origins"), "*i32")
    types |= dict.fromkeys(("by_log_prob", "by_entropy", "partial", "total"), "*fp32")
    types |= dict.fromkeys(("hidden", "live_hidden", "grad_logits", "hidden_grad"), f"*{dtype}")
    if name in ("hidden", "weight"):
        of_logits, other = ((m, k), "weight") if name == "hidden" else ((k, m), "live_hidden")
        types["grad_logits"] = f"tensordesc<{dtype}[{of_logits[0]}, {of_logits[1]}]>"
        types[other] = f"tensordesc<{dtype}[{k}, {n}]>"
    if name == "weight":
        types["total"] = f"tensordesc<fp32[{m}, {n // 2}]>"
    constants = {"SPLITS": linear_live_rows.SPLITS, "LAST": True, "BLOCK": 1024, **tiles}
    if name == "bias":
        constants["BLOCK"] = 128
    constants = {key: constants[key] for key in constants if key in kernel.arg_names}
    return compile_kernel(kernel, types, constants, capability, options)
