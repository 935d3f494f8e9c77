"""Every operator of `hybridengine.kernels` with arguments that it takes, for test_contract.py."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch

from hybridengine import kernels as he
from tests.kernels import contract_token_cases
from tests.kernels.contract_inputs import (
    ABOVE_0,
    ACTIVE,
    ACTIVE_ROWS,
    ANY_INTEGER,
    AT_LEAST_0,
    BIAS,
    CACHE,
    CHUNKED,
    COPIES,
    COUNT,
    CU_KEPT,
    CU_SEQLENS,
    ENDS,
    FINITE,
    HEAD,
    HEADS,
    HIDDEN,
    IDS,
    INTEGER,
    KEPT,
    KEYS,
    LINEAR,
    LINEAR_NUMBERS,
    LOGITS,
    MARKS,
    MASK,
    NAN,
    NEW,
    NO_SEQUENCE,
    NOT_FINITE,
    NOT_LENGTHS,
    OR_NONE,
    PACKED,
    PARENTS,
    POSITIONS,
    ROWS,
    SHARE,
    SHARED,
    SINKS,
    TEACHER_HIDDEN,
    TEACHER_WEIGHT,
    TEMPERATURES,
    VALUES,
    VOCAB_MASK,
    WEIGHT,
    WEIGHTS,
    WRONG_INDEX,
    Case,
    H,
    T,
    V,
    draw,
)

CASES = {
    **contract_token_cases.CASES,
    "balance": Case(
        {"lengths": CU_SEQLENS, "num_bins": 2, "group_ids": torch.tensor([1, 2, 1, 3])},
        wrong={"num_bins": (*INTEGER, None), "lengths": NOT_LENGTHS},
        rows=("lengths", "group_ids"),
    ),
    "balance_by_tokens": Case(
        {"lengths": CU_SEQLENS, "max_tokens": T},
        wrong={
            "lengths": NOT_LENGTHS,
            "max_tokens": (*INTEGER, None),
            "min_bins": (-1, 1.5, NAN, None),
            "multiple_of": (*INTEGER, None),
        },
        rows=("lengths",),
    ),
    "bit_checksum": Case({"tensor": LOGITS}, rows=("tensor",)),
    "block_quantize": Case({"weight": WEIGHT}, rows=("weight",), any_shape=("weight",)),
    "causal_conv1d": Case(
        {
            "x": HIDDEN,
            "weight": draw(H, 4),
            "bias": draw(H),
            "cu_seqlens": CU_SEQLENS,
            "parents": PARENTS,
            "initial_state": draw(3, 3, H),
            "activation": "silu",
        },
        ("x", "weight", "bias", "initial_state"),
        rows=("x", "parents", "initial_state"),
        empty=NO_SEQUENCE,
    ),
    "change_mask": Case({"tensor": WEIGHT}, rows=("tensor",)),
    "cross_entropy": Case(
        {"logits": LOGITS, "labels": IDS, "label_smoothing": 0.1, "lse_square_scale": 0.1},
        ("logits",),
        {
            "label_smoothing": SHARE,
            "lse_square_scale": AT_LEAST_0,
            "logit_scale": ABOVE_0,
            "ignore_index": ANY_INTEGER,
        },
        ("logits", "labels"),
        any_columns=("logits",),
        names=("cross_entropy", "token_log_probs"),
        registered="token_log_probs",
    ),
    "decode_linear": Case(
        {"x": HIDDEN, "weight": WEIGHT, "bias": BIAS, "splits": 2},
        ("x", "weight", "bias"),
        {"splits": (0, -1, 3, NAN, 1.5, None)},
        ("x",),
        any_shape=("x",),
    ),
    "gated_activation": Case(
        {"gate": HIDDEN, "up": TEACHER_HIDDEN}, ("gate", "up"), {}, ("gate", "up")
    ),
    "grouped_linear": Case(
        {"x": HIDDEN, "weight": draw(3, V, H), "cu_counts": CU_SEQLENS},
        ("x", "weight"),
        rows=("x",),
        empty={"cu_counts": torch.zeros(4, dtype=torch.int32)},
    ),
    "imbalance": Case(
        {"lengths": CU_SEQLENS, "bins": [[0, 1], [2, 3]]},
        wrong={"lengths": NOT_LENGTHS, "bins": ([], [[0], [4]], [[-1]], [[0.0]])},
    ),
    "layer_norm": Case(
        {"x": HIDDEN, "weight": WEIGHT[0], "bias": WEIGHT[1], "eps": 1e-6},
        ("x", "weight", "bias"),
        {"eps": AT_LEAST_0},
        ("x",),
        any_shape=("x",),
    ),
    "linear_cross_entropy": Case(
        {
            "hidden": HIDDEN,
            "weight": WEIGHT,
            "labels": IDS,
            "temperature": TEMPERATURES,
            "bias": BIAS,
            "label_smoothing": 0.1,
            "lse_square_scale": 0.1,
            "active_rows": ACTIVE,
        },
        ("hidden", "weight", "bias"),
        {
            **LINEAR_NUMBERS,
            **CHUNKED,
            **HEAD,
            **ACTIVE_ROWS,
            "label_smoothing": SHARE,
            "lse_square_scale": AT_LEAST_0,
            "num_items_in_batch": (*COUNT, torch.tensor(-1.0)),
        },
        ("hidden", "labels", "temperature", "active_rows"),
    ),
    "linear_distillation_loss": Case(
        {
            "student_hidden": HIDDEN,
            "student_weight": WEIGHT,
            "teacher_hidden": TEACHER_HIDDEN,
            "teacher_weight": TEACHER_WEIGHT,
            "response_mask": MASK,
            "student_bias": BIAS,
            "teacher_bias": draw(V),
            "active_rows": ACTIVE,
        },
        ("student_hidden", "student_weight", "student_bias"),
        {
            **CHUNKED,
            **ACTIVE_ROWS,
            "student_weight": HEAD["weight"],
            "beta": SHARE,
            "temperature": ABOVE_0,
            "student_logit_scale": ABOVE_0,
            "student_softcap": OR_NONE,
            "teacher_logit_scale": ABOVE_0,
            "teacher_softcap": OR_NONE,
            "num_items_in_batch": (*COUNT, torch.tensor(-1.0)),
        },
        ("student_hidden", "teacher_hidden", "response_mask", "active_rows"),
        masked=("student_hidden", "teacher_hidden"),
    ),
    "linear_recurrence": Case(
        {
            "q": draw(T, 1, 4),
            "k": draw(T, 1, 4),
            "v": draw(T, 2, 3),
            "g": -draw(T, 2).square(),
            "beta": draw(T, 2),
            "cu_seqlens": CU_SEQLENS,
            "parents": PARENTS,
            "initial_state": draw(3, 2, 4, 3),
            "l2_norm": True,
            "output_final_state": True,
        },
        ("q", "k", "v", "g", "beta", "initial_state"),
        {"scale": OR_NONE},
        ("q", "k", "v", "g", "beta", "parents", "initial_state"),
        NO_SEQUENCE,
    ),
    "linear_token_log_probs": Case(
        LINEAR,
        ("hidden", "weight", "bias"),
        {**LINEAR_NUMBERS, **HEAD, **WRONG_INDEX, "budget_bytes": INTEGER, "token_ids": (IDS + V,)},
        ("hidden", "token_ids", "temperature", "vocab_mask"),
        names=("linear_token_log_probs", "token_log_probs"),
    ),
    "mark_changed_": Case(
        {
            "current": WEIGHT[0] + 0.1,
            "sent": WEIGHT[0].bfloat16(),
            "mask": torch.zeros(1, dtype=torch.int32),
        },
        rows=("current", "sent", "mask"),
        written=("sent", "mask"),
        contiguous=("sent", "mask"),
    ),
    "mixed_gemm": Case(
        {"out": draw(T, V), "a": HIDDEN, "b": WEIGHT, "bias": BIAS},
        rows=("out", "a"),
        written=("out",),
    ),
    "orthogonalize": Case({"x": draw(3, 5, 7)}, rows=("x",), any_shape=("x",)),
    "pack": Case(
        {
            "tensors": [NEW.view(3, 4), HIDDEN.view(3, 4, H)],
            "mask": MASK.view(3, 4),
            "fill_values": [-1.0, 0.5],
            "capacity": T,
        },
        ("tensors",),
        {
            "capacity": (-1, 1.5, NAN),
            "fill_values": ([1.0], [1.0, None]),
            "shifted": ([2], [-1], [1.5]),
        },
        ("tensors", "mask"),
        any_dtype=("tensors",),
        any_columns=("tensors",),
        registered="move_rows",
    ),
    "pack_forest": Case(
        {"input_ids": IDS, "cu_seqlens": CU_SEQLENS}, rows=("input_ids",), empty=NO_SEQUENCE
    ),
    "pack_sequences": Case({"fields": [HIDDEN[:5], HIDDEN[5:]]}, ("fields",), rows=("fields",)),
    "paged_attention": Case(
        {
            "query": HEADS[:5],
            "kv_cache": CACHE,
            "block_table": torch.tensor([[1, 0], [2, 0]]).int(),
            "query_start_loc": torch.tensor([0, 2, 5]).int(),
            "seq_lens": torch.tensor([18, 7]).int(),
            "sinks": SINKS,
            "out": torch.zeros(5, 4, H),
        },
        wrong={"softmax_scale": NOT_FINITE, "window_size": INTEGER, "softcap": OR_NONE},
        rows=("query", "block_table", "seq_lens", "out"),
        empty={"query_start_loc": torch.zeros(1, dtype=torch.int32)},
        written=("out",),
        contiguous=("kv_cache", "out"),
    ),
    "rms_norm": Case(
        {"x": HIDDEN, "weight": WEIGHT[0], "eps": 1e-6},
        ("x", "weight"),
        {"eps": AT_LEAST_0, "offset": FINITE},
        ("x",),
        any_shape=("x",),
    ),
    "sample_tokens": Case(
        {
            "logits": LOGITS,
            "seeds": IDS,
            "positions": torch.arange(T),
            "temperature": TEMPERATURES,
            "top_k": torch.arange(T) % 4,
            "top_p": torch.linspace(0.5, 1.0, T),
            "min_p": torch.linspace(0.0, 0.1, T),
            "return_kept_ids": True,
        },
        wrong={
            "temperature": (*AT_LEAST_0, torch.full((T,), -1.0), torch.full((T,), NAN)),
            "top_k": (-2, NAN, 1.5, None, torch.full((T,), -2)),
            "top_p": (*SHARE, 0.0, torch.zeros(T), torch.full((T,), NAN)),
            "min_p": (*SHARE, torch.full((T,), 2.0), torch.full((T,), NAN)),
        },
        rows=("logits", "seeds", "positions", "temperature", "top_k", "top_p", "min_p"),
        any_columns=("logits",),
    ),
    "sparse_linear_token_log_probs": Case(
        {
            "hidden": HIDDEN,
            "weight": draw(500, H),
            "token_ids": IDS,
            "kept_ids": KEPT,
            "cu_kept": CU_KEPT,
            "temperature": TEMPERATURES,
            "bias": draw(500),
        },
        ("hidden", "weight", "bias"),
        LINEAR_NUMBERS,
        ("hidden", "token_ids", "kept_ids", "temperature"),
        {"cu_kept": torch.tensor([0])},
    ),
    "strided_copy": Case(
        {
            "sources": [draw(10), draw(6)],
            "destinations": [torch.zeros(7)],
            "table": COPIES,
        },
        rows=("table",),
        written=("destinations",),
        by_memory=("sources", "destinations"),
    ),
    "take_changed": Case(
        {"masks": [MARKS], "sources": [WEIGHT[:4].flatten()[:50].bfloat16()], "max_share": 1.0},
        wrong={"max_share": SHARE},
        rows=("masks", "sources"),
        written=("masks",),
        contiguous=("masks", "sources"),
    ),
    "token_entropy": Case(
        {
            "logits": LOGITS,
            "temperature": TEMPERATURES,
            "row_mask": MASK,
            "vocab_mask": VOCAB_MASK,
        },
        ("logits",),
        {k: v for k, v in LINEAR_NUMBERS.items() if k != "ignore_index"},
        ("logits", "temperature", "row_mask", "vocab_mask"),
        masked=("logits",),
        names=("token_entropy", "token_log_probs"),
        registered="token_log_probs",
    ),
    "token_log_probs": Case(
        {
            "logits": LOGITS,
            "token_ids": IDS,
            "temperature": TEMPERATURES,
            "vocab_mask": VOCAB_MASK,
        },
        ("logits",),
        {**LINEAR_NUMBERS, "token_ids": (IDS + V,)},
        ("logits", "token_ids", "temperature", "vocab_mask"),
        any_columns=("token_ids",),  # K
    ),
    "tree_attention": Case(
        {
            "query": HEADS,
            "key": KEYS,
            "value": VALUES,
            "subtree_ends": ENDS,
            "position_ids": POSITIONS,
            "window_size": 3,
            "sinks": SINKS,
        },
        ("query", "key", "value", "sinks"),
        {"softmax_scale": NOT_FINITE, "window_size": INTEGER, "softcap": OR_NONE},
        ("query", "key", "value", "subtree_ends", "position_ids"),
        any_columns=("value",),
    ),
    "unpack": Case(
        {"tensors": [draw(ROWS), draw(ROWS, H)], "packed": PACKED},
        ("tensors",),
        {"padding_value": (None,)},
        ("tensors",),
        {"packed": he.pack([], MASK[:0].view(0, 4))},
        any_dtype=("tensors",),
        any_columns=("tensors",),
        registered="move_rows",
    ),
    "write_kv_cache": Case(
        {
            "key": KEYS[:4],
            "value": VALUES[:4],
            "kv_cache": CACHE,
            "slot_mapping": torch.tensor([3, 40, -1, 17]),
        },
        rows=("key", "value", "slot_mapping"),
        written=("kv_cache",),
        contiguous=("kv_cache",),
        registered="paged_attention",
    ),
}

# Other ways through some of them.
_VARIANTS: dict[str, dict[str, Any]] = {
    "decode_linear, without parts": {"splits": 1},
    "linear_cross_entropy, deterministic": {"deterministic": True},
    "linear_cross_entropy, none": {"reduction": "none"},
    "linear_distillation_loss, deterministic": {"deterministic": True},
    "linear_recurrence, without the delta rule": {"delta_rule": False, "beta": None},
    "linear_policy_loss, shared rows": SHARED,
    "linear_token_log_probs, deterministic": {"deterministic": True},
    "linear_token_log_probs, shared rows": SHARED,
    "linear_token_log_probs, small chunks": {"budget_bytes": 1},
    "policy_loss, by sequence": {"loss_mode": "gspo"},
    "policy_loss, centered": {"score_centering": WEIGHTS},
    "policy_loss, selected": {"loss_mode": "clip_cov", "selected": ~MASK},
    "policy_loss, weights": {"rollout_log_probs": None, "rollout_is_weights": WEIGHTS},
    "rms_norm, rounded": {"round_first": True, "offset": 1.0},
    "rollout_correction, rejection alone": {"rollout_is": None},
    "rollout_correction, token": {"rollout_is": "token", "rollout_is_lower": 0.5},
    "tree_attention, soft-cap": {"softcap": 2.0, "sinks": None, "window_size": None},
    "token_log_probs, entries": {"token_ids": torch.stack([IDS, (IDS + 1) % V], 1)},
    "whiten, all": {"mask": None},
}
for _name, _options in _VARIANTS.items():
    _case = CASES[_name.partition(",")[0]]
    CASES[_name] = _case._replace(
        arguments=_case.arguments | _options, wrong={}, rows=(*_case.rows, *_options)
    )


def operator(name: str) -> str:
    """Return the operator of a case."""
    return name.partition(",")[0]


# Functions of `hybridengine.kernels` that compute nothing from tensors.
NOT_OPERATORS = {
    "backend_table",
    "check_labels",
    "choose_backend",
    "empty_from_pool",
    "has_fast_products",
}
OPERATORS = {name: getattr(he, operator(name)) for name in CASES}


def annotated(name: str, *kinds: str) -> set[str]:
    """Return the arguments of an operator whose annotation names one of these types."""
    parameters = inspect.signature(OPERATORS[name]).parameters.values()
    return {
        parameter.name
        for parameter in parameters
        if not {*kinds}.isdisjoint(re.findall(r"\w+", str(parameter.annotation)))
    }
