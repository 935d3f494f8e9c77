"""Ahead-of-time builds of the Triton kernels, for `make cuda-check`: no GPU is needed.

`builds()` maps a name to a function of the compute capability (90, say) that compiles that
specialisation and returns (registers, shared bytes, spilled bytes) as cuobjdump reports them.
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

from . import logprob_triton, policy_loss_triton
from .token_loss import LOSS_MODES, SEQUENCE_MODES

Build = Callable[[int], tuple[int, int, int]]


def builds() -> dict[str, Build]:
    """One entry per specialisation worth reading."""
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
    return found


def compile_kernel(
    kernel, types: Mapping[str, str], constants: Mapping[str, object], capability: int
) -> tuple[int, int, int]:
    """types: argument name -> Triton type; what `constants` names is a constexpr."""
    signature = {
        name: "constexpr" if name in constants else types[name] for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, dict(constants))
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        report = subprocess.run(
            [str(tool), "-res-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    usage = dict(re.findall(r"(REG|SHARED|LOCAL):(\d+)", report))
    return int(usage["REG"]), compiled.metadata.shared, int(usage["LOCAL"])


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


def _policy_loss_token(mode: str, capability: int) -> tuple[int, int, int]:
    constants = {
        **{"MODE": mode, "BY_COUNT": True, "KL": 3, "STRAIGHT": False},
        **dict.fromkeys(("HAS_MASK", "HAS_SELECTED", "HAS_REF", "HAS_ENTROPY"), True),
        **dict.fromkeys(("HAS_WEIGHTS", "HAS_SEGMENTS", "WANTS_GRADIENT", "WANTS_ENTROPY"), True),
        "BLOCK": policy_loss_triton.BLOCK,
    }
    return compile_kernel(policy_loss_triton._token_kernel, _TYPES, constants, capability)


def _policy_loss_segment(mode: str, capability: int) -> tuple[int, int, int]:
    constants = {"MODE": mode, "HAS_MASK": True, "HAS_WEIGHTS": True}
    constants["BLOCK"] = policy_loss_triton.BLOCK
    return compile_kernel(policy_loss_triton._segment_kernel, _TYPES, constants, capability)


def _logprob(forward: bool, dtype: str, general: bool, capability: int) -> tuple[int, int, int]:
    kernel = logprob_triton.forward_kernel if forward else logprob_triton.backward_kernel
    types = dict.fromkeys(kernel.arg_names, "*fp32")
    types |= dict.fromkeys(("logits", "out"), f"*{dtype}")
    types |= {"keep": "*u8", "token_ids": "*i64", "bad_label": "*i32"}
    types |= dict.fromkeys(("row_stride", "keep_stride", "out_stride", "ignore_index"), "i64")
    types |= dict.fromkeys(("vocab", "vocab_start", "vocab_total"), "i32")
    types |= dict.fromkeys(("temperature", "scale", "softcap"), "fp32")
    constants = dict.fromkeys(("HAS_KEEP", "HAS_CAP", "HAS_TEMPERATURES"), general)
    if forward:
        constants |= {"WANT_SQUARES": general, "PARTIAL": False}
        constants["BLOCK"] = logprob_triton.FORWARD_BLOCK
    else:
        constants |= {"HAS_G": True, "HAS_H": True, "BLOCK": logprob_triton.BACKWARD_BLOCK}
    return compile_kernel(kernel, types, constants, capability)
