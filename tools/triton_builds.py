"""Ahead-of-time builds of the Triton kernels, for `make cuda-check`: no GPU is needed.

`builds(capability)` maps a name to a function that compiles that specialization for a compute
capability (such as 90) and returns registers, shared bytes and spilled bytes, read by cuobjdump.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hybridengine.kernels import (
    causal_conv1d_triton,
    decode_linear_triton,
    grouped_linear_triton,
    layer_triton,
    linear_recurrence_triton,
    linear_recurrence_triton_backward,
    orthogonalize_triton,
    paged_attention_triton,
)
from hybridengine.kernels._launch import COMPILE_OPTIONS
from hybridengine.kernels.advantage import whiten_triton
from hybridengine.kernels.attention import (
    cascade,
    triton_backward,
    triton_finite,
    triton_forward,
    triton_paths,
    triton_tables,
)
from hybridengine.kernels.attention.triton_tiles import Form, Inputs, Tiles, choose_tiles
from hybridengine.kernels.linear import distillation_triton, rescale
from hybridengine.kernels.logprob import triton as logprob_triton
from hybridengine.kernels.logprob import triton_unscaled
from hybridengine.kernels.policy_loss import triton as policy_loss_triton
from hybridengine.kernels.policy_loss.terms import KERNEL_MODES, SEQUENCE_MODES, LossOptions
from hybridengine.kernels.rollout_correction import triton as correction_triton
from hybridengine.kernels.rollout_correction.reference import REJECTION_CRITERIA
from hybridengine.kernels.sampling import triton as sampling_triton
from hybridengine.kernels.sparse_linear import triton as sparse_triton
from hybridengine.kernels.sparse_linear import triton_rows as sparse_rows

Usage = tuple[int, int, int]
Build = Callable[[int], Usage]


def builds(capability: int) -> dict[str, Callable[[], Usage]]:
    """Return the specializations that run on this compute capability, by name."""
    by_name: dict[str, Build] = {}
    for mode in KERNEL_MODES:
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
        by_name[f"rescale_{dtype}"] = partial(_rescale, dtype)
        for name in ("summarize", "sample"):
            by_name[f"sampling_{name}_{dtype}"] = partial(_sampling, name, dtype)
        for form, general in itertools.product(range(3), (False, True)):
            name = f"{('forward', 'reverse', 'jsd')[form]}_{'softcap' if general else 'plain'}"
            by_name[f"distillation_{name}_{dtype}"] = partial(_distillation, form, dtype, general)
        named = {"bf16": torch.bfloat16, "fp32": torch.float32}
        by_name[f"decode_linear_join_{dtype}"] = partial(_join, dtype)
        for rows, tiles in decode_linear_triton.TILES[named[dtype]].items():
            for apart, suffix in ((False, ""), (True, "_apart")):
                name = f"decode_linear_{rows or 'many'}{suffix}_{dtype}"
                by_name[name] = partial(_linear, tiles, apart, dtype)
        for rows, tiles in grouped_linear_triton.TILES[named[dtype]].items():
            for inner in "kn":
                name = f"grouped_linear_{rows or 'many'}_along_{inner}_{dtype}"
                by_name[name] = partial(_grouped_linear, tiles, inner, dtype)
        by_name[f"grouped_weight_grad_{dtype}"] = partial(_grouped_weight_grad, tiles, dtype)
        norms = itertools.product((128, 4096, 8192), ("norm", "norm_backward"), (False, True))
        for width, name, centered in norms:
            prefix = "layer" if centered else "rms"
            norm = partial(_norm, name, width, dtype, centered)
            by_name[f"{prefix}_{name}_{width}_{dtype}"] = norm
        for name in ("gated", "gated_backward"):
            by_name[f"{name}_activation_{dtype}"] = partial(_gated, name, dtype)
        for general, name in itertools.product((False, True), _CONVOLUTION):
            suffix = "every_option" if general else "plain"
            by_name[f"causal_conv1d_{name}_{suffix}_{dtype}"] = partial(
                _convolution, name, dtype, general
            )
        for (model, widths), name in itertools.product(_RECURRENCES.items(), _RECURRENCE_KERNELS):
            for size in widths[: 2 if dtype == "fp32" else 3]:
                by_name[f"linear_recurrence_{name}_{model}_{size}_{dtype}"] = partial(
                    _linear_recurrence, name, model, size, dtype
                )
    for add in (False, True):
        by_name[f"orthogonalize_{'square' if add else 'gram'}"] = partial(_orthogonalize, add)
    by_name["sparse_index"] = partial(_sparse_rows, "index", False)
    for general, name in itertools.product((False, True), ("forward", "backward")):
        suffix = "every_option" if general else "plain"
        by_name[f"sparse_{name}_{suffix}"] = partial(_sparse_rows, name, general)
    by_name["causal_conv1d_heads"] = _convolution_heads
    by_name["linear_recurrence_roots"] = _recurrence_roots
    for general in (False, True):
        name = f"logprob_unscaled_{'every_option' if general else 'plain'}"
        by_name[name] = partial(_unscaled, general)
    # Float32 is for exactness, without tensor cores: its plain form shows whether tiles fit.
    forms = (("bf16", False), ("bf16", True), ("fp32", False))
    for (dtype, options), head_size in itertools.product(forms, (64, 128, 256)):
        for name in ("forward", "query_grad", "key_grad"):
            suffix = f"{dtype}_{head_size}_{'every_option' if options else 'plain'}"
            build = partial(_attention, name, dtype, head_size, options)
            by_name[f"attention_{name}_{suffix}"] = build
        for name in ("path", "paged"):
            suffix = f"{dtype}_{head_size}_{'every_option' if options else 'plain'}"
            build = partial(_invariant_attention, name, dtype, head_size, options)
            by_name[f"attention_{name}_{suffix}"] = build
    for name in ("moments", "join", "apply"):
        by_name[f"whiten_{name}"] = partial(_whiten, name)
    for name in ("sequence", "token", "sum"):
        by_name[f"rollout_correction_{name}"] = partial(_rollout_correction, name)
    for name, size in itertools.product(("join", "sum", "replace"), (64, 128, 256)):
        by_name[f"attention_{name}_{size}"] = partial(_attention_rows, name, size)
    by_name["attention_parents"] = _attention_parents
    by_name["attention_write_kv_cache"] = _write_kv_cache
    for name in ("bounds", "links", "window", "delta"):
        by_name[f"attention_{name}"] = partial(_attention_tables, name)
    return {name: partial(build, capability) for name, build in by_name.items()}


def compile_kernel(
    kernel: Any,
    types: Mapping[str, Any],
    constants: Mapping[str, object],
    capability: int,
    options: Mapping[str, int] | None = None,
    aligned: Collection[str] = (),
) -> Usage:
    """Compile a kernel. types: argument name -> Triton type; `constants` are constexpr.

    types: of a tuple, a tuple of the types of its fields; None is absent.
    aligned: arguments and fields that are multiples of 16, which a launch finds out itself.
    """
    signature: dict[str, Any] = {}
    absent: dict[Any, object] = {}
    attributes = {}

    def described(path: tuple[int, ...], name: str, given: Any) -> Any:
        if isinstance(given, tuple):
            pairs = zip(getattr(given, "_fields", [name] * len(given)), given, strict=True)
            fields = [described((*path, j), *field) for j, field in enumerate(pairs)]
            return given._make(fields) if hasattr(given, "_make") else tuple(fields)
        if given is None:
            absent[path] = None
            return "constexpr"
        if name in aligned and given != "constexpr":
            attributes[path] = [["tt.divisibility", 16]]
        return given

    for i, name in enumerate(kernel.arg_names):
        given = "constexpr" if name in constants else types[name]
        signature[name] = described((i,), name, given)
    source = ASTSource(kernel, signature, dict(constants) | absent, attributes)
    options = {**(options or {}), **COMPILE_OPTIONS}
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


def _flags(kernel: Any, **values: object) -> dict[str, object]:
    """Return the constexpr arguments of a kernel, which have upper-case names: True by default."""
    return {name: values.get(name, True) for name in kernel.arg_names if name.isupper()}


def _policy_loss_types() -> dict[str, Any]:
    tensors: dict[str, Any] = dict.fromkeys(policy_loss_triton.LossTensors._fields, "*fp32")
    tensors |= {"mask": "*i1", "selected": "*i1", "cu_seqlens": "*i32", "denominators": None}
    return {
        "given": policy_loss_triton.LossTensors(**tensors),
        "numbers": LossOptions._make(["fp32"] * len(LossOptions._fields)),
        "coefficients": ("fp32", "fp32"),
        "outputs": ("*fp32", "*fp32", "*fp32", "*i1"),
        **dict.fromkeys(("sequence_stats", "shared_weight", "partials"), "*fp32"),
        **{"num_tokens": "i64", "num_sequences": "i32"},
    }


def _policy_loss_token(mode: str, capability: int) -> Usage:
    kernel = policy_loss_triton._token_kernel
    constants = _flags(kernel, MODE=mode, KL=3, STRAIGHT=False, BLOCK=policy_loss_triton.BLOCK)
    return compile_kernel(kernel, _policy_loss_types(), constants, capability)


def _policy_loss_sequence(mode: str, capability: int) -> Usage:
    kernel = policy_loss_triton._sequence_kernel
    constants = _flags(kernel, MODE=mode, KL=3, BLOCK=policy_loss_triton.BLOCK)
    return compile_kernel(kernel, _policy_loss_types(), constants, capability)


def _logprob_inputs(logits: str, general: bool, parallel: bool) -> logprob_triton.Inputs:
    return logprob_triton.Inputs(
        logits=logits,
        vocab_mask="*u8" if general else None,
        token_ids="*i64",
        temperatures="*fp32" if general else None,
        vocab_range="*i64" if parallel else None,
        row_stride="i64",
        mask_stride="i64",
        vocab="i32",
        ignore_index="i64",
        temperature="fp32",
        scale="fp32",
        softcap="fp32" if general else None,
        negate="i32" if general else None,
    )


def _logprob(forward: bool, dtype: str, general: bool, capability: int) -> Usage:
    kernel = logprob_triton.forward_kernel if forward else logprob_triton.backward_kernel
    types: dict[str, Any] = dict.fromkeys(kernel.arg_names, "*fp32")
    types |= {"inputs": _logprob_inputs(f"*{dtype}", general, general), "out": f"*{dtype}"}
    types |= {"results": ("*fp32",) * 3, "bad_label": "*i32", "out_stride": "i64"}
    types |= {"row_index": "*i32" if general else None, "stats_width": "i32"}
    block = logprob_triton.FORWARD_BLOCK if forward else logprob_triton.BACKWARD_BLOCK
    constants = _flags(kernel, WANT_SQUARES=general, BLOCK=block)
    aligned = () if general else ("logits", "out", "row_stride", "out_stride", "vocab")
    return compile_kernel(kernel, types, constants, capability, {"num_warps": 8}, aligned)


def _unscaled(general: bool, capability: int) -> Usage:
    types = {"inputs": _logprob_inputs("*fp32", general, False), "results": ("*fp32",) * 3}
    types |= {"out": "*bf16", "bad_label": "*i32", "out_stride": "i64"}
    constants = {"BLOCK": triton_unscaled.BLOCKS[general]}
    aligned = {"logits", "out", "vocab_mask", "row_stride", "mask_stride", "out_stride", "vocab"}
    options = {"num_warps": triton_unscaled.NUM_WARPS}
    kernel = triton_unscaled.unscaled_kernel
    return compile_kernel(kernel, types, constants, capability, options, aligned)


def _rescale(dtype: str, capability: int) -> Usage:
    types = {"values": f"*{dtype}", "factor": "*fp32", "size": "i64"}
    kernel = rescale.rescale_kernel
    constants = {"BLOCK": rescale.BLOCK_SIZE}
    return compile_kernel(
        kernel, types, constants, capability, {"num_warps": 8}, {"values", "size"}
    )


def _distillation(form: int, dtype: str, softcap: bool, capability: int) -> Usage:
    kernel = distillation_triton.distillation_kernel
    types = dict.fromkeys(kernel.arg_names, "fp32")
    types |= dict.fromkeys(("student", "teacher", "losses", "incoming"), "*fp32")
    strides = ("student_stride", "teacher_stride", "out_stride")
    types |= {"out": f"*{dtype}", **dict.fromkeys(strides, "i64"), "vocab": "i32"}
    constants = _flags(
        kernel, FORM=form, HAS_CAP=softcap, TEACHER_HAS_CAP=softcap, BLOCK=distillation_triton.BLOCK
    )
    aligned = {"student", "teacher", "out", "vocab", *strides}
    return compile_kernel(kernel, types, constants, capability, {"num_warps": 8}, aligned)


def _sparse_linear(name: str, dtype: str, capability: int) -> Usage:
    kernel = getattr(sparse_triton, f"{name}_kernel")
    types: dict[str, Any] = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("hidden", "weight"), (f"*{dtype}", "i32")) | {"out": f"*{dtype}"}
    types |= {"ids": "*i32", "ends": "*i32", "logits": "*fp32", "grad_logits": "*fp32"}
    types |= dict.fromkeys(("row", "vocab_range", "order", "begin"), "*i64")
    constants = _flags(kernel, ACCUMULATE=False, BLOCK=sparse_triton.BLOCK)
    return compile_kernel(kernel, types, constants, capability)


def _sparse_rows(name: str, general: bool, capability: int) -> Usage:
    kernel = getattr(sparse_rows, f"{name}_kernel")
    pair, cap = ("fp32", "fp32"), "fp32" if general else None
    options = (*pair, cap, cap, *pair, "*fp32" if general else None)
    types: dict[str, Any] = dict.fromkeys(kernel.arg_names, "*fp32")
    types |= {"ids": "*i32", "ends": "*i32", "token_ids": "*i64", "rows": "*i64"}
    types |= {"weight_rows": "i32", "ignore_index": "i32"}
    types |= {"transform": (*options, "*i64" if general else None)}
    return compile_kernel(kernel, types, _flags(kernel, BLOCK=sparse_rows.BLOCK), capability)


def _sampling(name: str, dtype: str, capability: int) -> Usage:
    kernel = getattr(sampling_triton, f"{name}_kernel")
    types = dict.fromkeys(kernel.arg_names, "*fp32")
    types |= {
        "logits": f"*{dtype}",
        "row_stride": "i64",
        "vocab": "i32",
        "tiles": "i32",
        "width": "i32",
    }
    types |= dict.fromkeys(("group_keys", "keys", "ids", "top_k", "num_kept"), "*i32")
    types |= dict.fromkeys(("seeds", "positions", "tokens"), "*i64")
    sizes = {size: getattr(sampling_triton, size) for size in ("TILE", "GROUP", "CHUNK", "FAN")}
    constants = _flags(kernel, TILES=64, **sizes)
    options = {"num_warps": 8 if name == "sample" else 4}
    return compile_kernel(kernel, types, constants, capability, options, {"logits", "row_stride"})


def _linear(tiles: decode_linear_triton.Tiles, apart: bool, dtype: str, capability: int) -> Usage:
    kernel = decode_linear_triton.linear_kernel
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}")
    if apart:
        types["out"] = "*fp32"
    blocks = tiles.arguments
    options = {key: blocks.pop(key) for key in ("num_warps", "num_stages")}
    flags = {"APART": apart, "HAS_BIAS": not apart, "GROUP": decode_linear_triton.GROUP}
    constants = _flags(kernel, **flags, **blocks)
    aligned = {"x", "weight", "out", "n", "k", "part", "part_stride"}
    aligned |= {"x_stride", "weight_stride", "out_stride"}
    return compile_kernel(kernel, types, constants, capability, options, aligned)


def _join(dtype: str, capability: int) -> Usage:
    kernel = decode_linear_triton.join_kernel
    types = dict.fromkeys(kernel.arg_names, "i32") | {"parts": "*fp32"}
    types |= dict.fromkeys(("bias", "out"), f"*{dtype}")
    block = decode_linear_triton.JOIN_BLOCK
    constants = _flags(kernel, PARTS=decode_linear_triton.PARTS, BLOCK=block)
    return compile_kernel(kernel, types, constants, capability)


def _grouped_linear(
    tiles: decode_linear_triton.Tiles, inner: str, dtype: str, capability: int
) -> Usage:
    """inner: the dimension along which the weight has stride 1."""
    kernel = grouped_linear_triton.product_kernel
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("x", "weight", "out"), f"*{dtype}") | {"cu_counts": "*i32"}
    blocks = tiles.arguments
    options = {key: blocks.pop(key) for key in ("num_warps", "num_stages")}
    sizes = {size: getattr(grouped_linear_triton, size) for size in ("GROUP", "SEARCH")}
    constants = _flags(kernel, **sizes, **blocks) | {f"{inner}_stride": 1}
    aligned = {*types} - {*constants, "rows"}
    return compile_kernel(kernel, types, constants, capability, options, aligned)


def _grouped_weight_grad(tiles: decode_linear_triton.Tiles, dtype: str, capability: int) -> Usage:
    kernel = grouped_linear_triton.weight_grad_kernel
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("left", "right", "out"), f"*{dtype}") | {"cu_counts": "*i32"}
    blocks = tiles.arguments
    options = {key: blocks.pop(key) for key in ("num_warps", "num_stages")}
    constants = _flags(kernel, **blocks)
    aligned = {*types} - {*constants}
    return compile_kernel(kernel, types, constants, capability, options, aligned)


def _orthogonalize(add: bool, capability: int) -> Usage:
    kernel = orthogonalize_triton.symmetric_kernel
    types = {"x": "*bf16", "out": "*bf16", "rows": "i32", "k": "i32"}
    types |= {"alpha": "fp32", "beta": "fp32"}
    sizes = {"TILE": orthogonalize_triton.TILE, "TILE_K": orthogonalize_triton.TILE_K}
    constants = _flags(kernel, ADD=add, **sizes)
    options = orthogonalize_triton.OPTIONS
    return compile_kernel(kernel, types, constants, capability, options, {"x", "out", "rows", "k"})


def _norm(name: str, width: int, dtype: str, centered: bool, capability: int) -> Usage:
    kernel = getattr(layer_triton, f"{name}_kernel")
    types = dict.fromkeys(kernel.arg_names, f"*{dtype}")
    types |= dict.fromkeys(("inverse_rms", "partials", "bias_partials"), "*fp32")
    types |= dict.fromkeys(("rows", "width", "x_stride", "grad_stride"), "i32")
    types |= dict.fromkeys(("eps", "offset"), "fp32")
    tile = layer_triton.norm_tile(width)
    options = {"num_warps": tile.pop("num_warps")}
    flags = {"CENTERED": centered, "ROUND_FIRST": not centered}
    constants = _flags(kernel, PARTIAL_ROWS=layer_triton.PARTIAL_ROWS, **flags, **tile)
    if not centered and "bias" in types:
        types.pop("bias")
        constants["bias"] = None
    aligned = {"x", "grad", "weight", "out", "grad_x", "width", "x_stride", "grad_stride"}
    return compile_kernel(kernel, types, constants, capability, options, aligned)


def _gated(name: str, dtype: str, capability: int) -> Usage:
    kernel = getattr(layer_triton, f"{name}_kernel")
    types = dict.fromkeys(kernel.arg_names, f"*{dtype}")
    strides = ("width", "grad_stride", "gate_stride", "up_stride")
    types |= dict.fromkeys(strides, "i32")
    constants = _flags(kernel, BLOCK=layer_triton.GATED_BLOCK)
    return compile_kernel(kernel, types, constants, capability, aligned={*types} - {*constants})


_CONVOLUTION = ("forward", "first_grads", "backward")


def _convolution(name: str, dtype: str, general: bool, capability: int) -> Usage:
    kernel = getattr(causal_conv1d_triton, f"{name}_kernel")
    types = dict.fromkeys((*kernel.arg_names, *causal_conv1d_triton.Inputs._fields), "i32")
    tensors = ("x", "grad_out", "state", "out", "grad_rows")
    types |= dict.fromkeys(tensors, f"*{dtype}")
    types |= dict.fromkeys(("taps", "bias", "partials", "first_grads"), "*fp32") | {"order": "*i64"}
    types |= dict.fromkeys(("ends", "segment_ids", "heads", "run_ends"), "*i32")
    absent = () if general else ("bias", "state", *(() if name == "first_grads" else ("heads",)))
    fields = causal_conv1d_triton.Inputs._fields
    inputs = (None if name in absent else types[name] for name in fields)
    types["inputs"] = causal_conv1d_triton.Inputs._make(inputs)
    constants = _flags(kernel, WIDTH=4, **causal_conv1d_triton.TILE)
    aligned = {*tensors, "taps", "channels", "stride", "grad_stride"}
    launch = {"num_warps": causal_conv1d_triton.NUM_WARPS[name == "backward"]}
    return compile_kernel(kernel, types, constants, capability, launch, aligned)


def _convolution_heads(capability: int) -> Usage:
    kernel = causal_conv1d_triton.heads_kernel
    types = dict.fromkeys(("ends", "parents", "heads"), "*i32") | {"tokens": "i32"}
    return compile_kernel(kernel, types, _flags(kernel, WIDTH=4), capability)


_RECURRENCES = {"gated_delta": (64, 128), "kda": (64, 128), "mamba2": (64, 128, 256)}
_RECURRENCE_KERNELS = (
    *("decays", "scores", "inverse", "states", "out"),
    *("state_grads", "value_grads", "key_grads", "score_grads"),
)


def _linear_recurrence(name: str, form: str, width: int, dtype: str, capability: int) -> Usage:
    module = linear_recurrence_triton_backward if "grads" in name else linear_recurrence_triton
    kernel = getattr(module, f"{name}_kernel")
    of_inputs = linear_recurrence_triton.Inputs
    types: dict[str, Any] = dict.fromkeys((*kernel.arg_names, *of_inputs._fields), "*fp32")
    types |= dict.fromkeys(("grad_v", "out"), f"*{dtype}")
    types |= dict.fromkeys(("q", "k", "v", "grad_out"), (f"*{dtype}", "i32", "i32"))
    types |= dict.fromkeys(("ends", "owners", "parents", "roots"), "*i32")
    integers = ("heads", "shared", "segments", "tokens")
    types |= dict.fromkeys(integers, "i32") | {"scale": "fp32"}
    types["decays"] = "*fp32" if form == "kda" else "*fp64"
    types["inputs"] = of_inputs._make(types[name] for name in of_inputs._fields)
    given = torch.float32 if dtype == "fp32" else torch.bfloat16
    flags = {"CHANNELS": form == "kda", "DELTA": form != "mamba2", "L2_NORM": form != "mamba2"}
    sizes = linear_recurrence_triton.form_of(width, width, given, **flags)
    if name == "key_grads":
        block_k = linear_recurrence_triton_backward.key_tile(sizes.BLOCK_K)
        sizes = sizes._replace(BLOCK_K=block_k)
    aligned = {*types} - {*integers, "scale"}
    launch = {"num_warps": linear_recurrence_triton.NUM_WARPS}
    return compile_kernel(kernel, types, {"form": sizes}, capability, launch, aligned)


def _recurrence_roots(capability: int) -> Usage:
    kernel = linear_recurrence_triton.roots_kernel
    return compile_kernel(kernel, dict.fromkeys(kernel.arg_names, "*i32"), {}, capability)


def _attention(name: str, dtype: str, head_size: int, options: bool, capability: int) -> Usage:
    module = triton_forward if name == "forward" else triton_backward
    itemsize = 4 if dtype == "fp32" else 2
    tiles = choose_tiles(name, head_size, itemsize, capability, not options)
    kernel = getattr(module, f"{name}_kernel")
    return _attention_kernel(kernel, dtype, head_size, options, tiles, capability)


def _invariant_attention(
    name: str, dtype: str, head_size: int, options: bool, capability: int
) -> Usage:
    module = triton_paths if name == "path" else paged_attention_triton
    tiles = triton_paths.path_tiles(head_size, 4 if dtype == "fp32" else 2, capability)
    kernel = getattr(module, f"{name}_kernel")
    return _attention_kernel(kernel, dtype, head_size, options, tiles, capability)


def _attention_inputs(dtype: str) -> Inputs:
    heads = [(f"*{dtype}", "i32", "i32")] * 4
    return Inputs(*heads, "i32", "i32", "i32", "fp32", "fp32", "fp32")


def _attention_kernel(
    kernel: Any, dtype: str, head_size: int, options: bool, tiles: Tiles, capability: int
) -> Usage:
    types: dict[str, Any] = dict.fromkeys(kernel.arg_names, "i32")
    types |= {"out": f"*{dtype}", "grad_query": f"*{dtype}", "grads": (f"*{dtype}",) * 2}
    types |= {"cache": (f"*{dtype}", "i32", "i32"), "inputs": _attention_inputs(dtype)}
    types |= dict.fromkeys(("positions", "begins", "parents"), "*i32")
    types |= {"trees": ("*i32",) * 3, "tables": ("*i32", "i32", "*i32", "*i32")}
    types |= {"sinks": "*fp32" if options else None, "lse": "*fp32", "delta": "*fp32"}
    form = Form(options, options, True, head_size, head_size, *tiles[:2])
    constants = {"form": form, "SIZE": 16} if "SIZE" in kernel.arg_names else {"form": form}
    aligned = {"query", "key", "value", "grad_out", "cache", "out", "grad_query", "grads"}
    aligned |= {"width", "value_width", "out_stride"}
    return compile_kernel(kernel, types, constants, capability, tiles.options, aligned)


def _attention_rows(name: str, size: int, capability: int) -> Usage:
    """Of joining two levels, and of replacing rows: copies, in bfloat16."""
    kernel = getattr(triton_finite if name == "replace" else cascade, f"{name}_kernel")
    heads = "*bf16"
    part = heads if name == "sum" else (heads, "*fp32")
    types: dict[str, Any] = {"own": part, "parts": (part,) * 2, "out": heads}
    types |= {"tensors": ((heads, "i32", "i32", "i32"),) * 3, "results": (heads,) * 3}
    types |= dict.fromkeys(("lse", "new_lse"), "*fp32") | dict.fromkeys(("tokens", "width"), "i32")
    types |= dict.fromkeys(("levels", "ranges"), "*i32")
    constants = _flags(kernel, BLOCK=16 if name == "replace" else 32, BLOCK_W=size, BLOCK_D=size)
    aligned = {"own", "parts", "out", "tensors", "results", "width"}
    return compile_kernel(kernel, types, constants, capability, None, aligned)


def _attention_parents(capability: int) -> Usage:
    kernel = triton_paths.parents_kernel
    types = dict.fromkeys(kernel.arg_names, "*i32")
    return compile_kernel(kernel, types, {"SCAN": 1024}, capability)


def _write_kv_cache(capability: int) -> Usage:
    kernel = paged_attention_triton.write_kernel
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("key", "value", "cache"), "*bf16")
    types["slots"] = "*i64"
    sizes = dict.fromkeys(("WIDTH", "VALUE_WIDTH", "BLOCK_D", "BLOCK_V"), 128)
    return compile_kernel(kernel, types, {"SIZE": 16, **sizes}, capability)


def _attention_tables(name: str, capability: int) -> Usage:
    kernel = getattr(triton_backward if name == "delta" else triton_tables, f"{name}_kernel")
    types: dict[str, Any] = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("ends", "positions", "tables"), "*i32")
    types |= {"inputs": _attention_inputs("bf16"), "out": "*bf16", "delta": "*fp32"}
    constants = _flags(kernel, BLOCK=64, BLOCK_M=128, BLOCK_V=128, SCAN=1024)
    return compile_kernel(kernel, types, constants, capability)


def _whiten(name: str, capability: int) -> Usage:
    kernel = getattr(whiten_triton, f"{name}_kernel")
    types = dict.fromkeys(("values", "out"), "*fp64" if name == "join" else "*fp32")
    types |= {"mask": "*i1", "moments": "*fp64", "epsilon": "fp32"}
    types |= {"size": "i64", "rows": "i32", "ranks": "i32"}
    block = whiten_triton.JOIN_BLOCK if name == "join" else whiten_triton.BLOCK
    constants = _flags(kernel, BLOCK=block, JOIN_BLOCK=whiten_triton.JOIN_BLOCK)
    return compile_kernel(kernel, types, constants, capability)


def _rollout_correction(name: str, capability: int) -> Usage:
    kernel = getattr(correction_triton, f"{name}_kernel")
    types: dict[str, Any] = dict.fromkeys(kernel.arg_names, "*fp32")
    types |= {"mask": "*i1", "remaining": "*i1", "cu_seqlens": "*i32", "metrics": "*fp64"}
    types |= {"denominators": "*fp64", "num_tokens": "fp32" if name == "sum" else "i32"}
    types |= dict.fromkeys(("blocks", "num_sequences"), "i32")
    types |= dict.fromkeys(("upper", "lower"), "fp32")
    types["bounds"] = ("fp32",) * (2 * len(REJECTION_CRITERIA))
    every_criterion = (1 << len(REJECTION_CRITERIA)) - 1
    sizes = {"sequence": "SEQUENCE_BLOCK", "token": "BLOCK", "sum": "SUM_BLOCK"}
    block = getattr(correction_triton, sizes[name])
    constants = _flags(kernel, LEVEL=2, CRITERIA=every_criterion, BLOCK=block)
    return compile_kernel(kernel, types, constants, capability)
