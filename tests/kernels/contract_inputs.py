"""What the contract's cases are made of: tensors, and wrong values of numbers by their domain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from hybridengine import kernels as he

NAN, INF = math.nan, math.inf
NOT_FINITE = (NAN, INF, -INF)
# Wrong values of numbers by their domain.
FINITE = (*NOT_FINITE, None)
ABOVE_0 = (0.0, -1.0, *FINITE)
AT_LEAST_0 = (-1.0, *FINITE)
SHARE = (-1.0, 2.0, *FINITE)  # from 0 to 1
# Wrong values where None has a meaning, and where infinity has one.
OR_NONE = (0.0, -1.0, *NOT_FINITE)
OR_INF = (0.0, -1.0, NAN, -INF)
COUNT = (-1.0, *NOT_FINITE)  # None: counted by the operator
INTEGER = (0, -1, NAN, 1.5)
ANY_INTEGER = (NAN, 1.5, None)
WRONG_ENDS = {
    "from 1": lambda ends: ends.clamp(min=1),
    "not ascending": lambda ends: torch.cat([ends[:-1], ends[-2:-1] - 1, ends[-1:]]),
    "too long": lambda ends: ends + ends.bool(),
    "too short": lambda ends: ends.clamp(max=int(ends[-1]) - 1),
    "none": lambda ends: ends[:0],
}
NOT_LENGTHS = ([-1, 0, 5, 0], [1.5], [NAN], [None], torch.tensor(1))

T, H, V = 12, 16, 29
_GENERATOR = torch.Generator().manual_seed(0)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_GENERATOR)


IDS = torch.randint(0, V, (T,), generator=_GENERATOR)
LOGITS, HIDDEN, WEIGHT, BIAS = draw(T, V), draw(T, H), draw(V, H), draw(V)
TEACHER_HIDDEN, TEACHER_WEIGHT = draw(T, H), draw(V, H)
NEW, OLD, REF, ADVANTAGES = draw(T) - 3, draw(T) - 3, draw(T) - 3, draw(T)
ENTROPY, WEIGHTS = draw(T).abs(), draw(T).exp()
MASK = torch.tensor([1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1]) > 0
CU_SEQLENS, PARENTS = torch.tensor([0, 5, 5, T]), torch.tensor([-1, 0, 0])
TEMPERATURES = torch.linspace(0.5, 2.0, T)
VOCAB_MASK = torch.rand(T, V, generator=_GENERATOR) < 0.7
VOCAB_MASK.scatter_(1, IDS[:, None], True)
KEPT = torch.stack([IDS, (IDS + 1) % V], 1).sort(1).values.flatten()
CU_KEPT = torch.arange(0, 2 * T + 1, 2)
ACTIVE = torch.tensor([0, 2, 5, 11])
# Of tokens that share rows of hidden: masked ones share with masked ones.
HIDDEN_INDEX = torch.tensor([0, 0, 2, 3, 0, 5, 3, 2, 8, 8, 11, 11])
SHARED = {"hidden_index": HIDDEN_INDEX, "temperature": 0.7, "vocab_mask": None}
ENDS, POSITIONS = torch.tensor([5] * 5 + [T] * 7), torch.tensor([*range(5), *range(7)])
HEADS, KEYS, VALUES = draw(T, 4, H), draw(T, 2, H), draw(T, 2, H)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
CACHE = draw(3, 2, 16, 2 * H)
COPIES = torch.tensor(
    [
        [0, 0, 2, 0, 1, 1, 2, 2, 0, 0, 4, 1, 0, 0, 2, 1],
        [1, 0, 0, 4, 1, 1, 1, 3, 0, 0, 0, 2, 0, 0, 0, 1],
    ]
)
MARKS = torch.tensor([0b1011, 0b1], dtype=torch.int32)
PACKED = he.pack([], MASK.view(3, 4))
ROWS = int(MASK.sum())

LINEAR_NUMBERS = {
    "temperature": (*ABOVE_0, torch.zeros(T), torch.full((T,), NAN)),
    "logit_scale": ABOVE_0,
    "softcap": OR_NONE,
    "ignore_index": ANY_INTEGER,
}
WRONG_INDEX = {"hidden_index": tuple(torch.full((T,), row) for row in (-1, T))}
HEAD = {  # of the operators that multiply with WEIGHT
    "weight": (WEIGHT.bfloat16(), WEIGHT.double()),
    "main_grad": (WEIGHT.bfloat16(), WEIGHT.T.contiguous().T, WEIGHT[1:]),
}
ROWS_OF_T = ([2, 0], [1, 1], [-1, 1], [T], range(T + 1))
ACTIVE_ROWS = {"active_rows": tuple(torch.tensor([*rows]) for rows in ROWS_OF_T)}
CHUNKED = {"budget_bytes": INTEGER, "grad_scale": ABOVE_0}
AGGREGATED = {
    "loss_scale_factor": OR_NONE,
    "global_num_tokens": (*COUNT, torch.tensor(-1.0), torch.tensor(NAN)),
    "global_num_seqs": (*COUNT, torch.tensor(-1.0), torch.tensor(NAN)),
}
IS_BOUNDS = {"rollout_is_threshold": OR_INF, "rollout_is_lower": (*OR_NONE, 3.0)}
LOSS_NUMBERS = {
    "clip_ratio_low": (-1.0, NAN, -INF),
    "clip_ratio_high": (-1.0, NAN, -INF),
    "clip_ratio_c": (0.0, 1.0, -1.0, NAN, -INF),
    "tau_pos": ABOVE_0,
    "tau_neg": ABOVE_0,
    "cov_kl_coef": AT_LEAST_0,
    "dro_beta": ABOVE_0,
    "kl_coef": FINITE,
    "kl_input_clamp": (0.0, -1.0, 81.0, NAN, INF),
    "kl_output_clamp": OR_INF,
    "entropy_coeff": FINITE,
    **IS_BOUNDS,
}
LOSS = {
    "old_log_probs": OLD,
    "advantages": ADVANTAGES,
    "response_mask": MASK,
    "cu_seqlens": CU_SEQLENS,
    "ref_log_probs": REF,
    "kl_coef": 0.1,
    "entropy_coeff": 0.1,
    "rollout_log_probs": REF,
}
LINEAR = {
    "hidden": HIDDEN,
    "weight": WEIGHT,
    "token_ids": IDS,
    "temperature": TEMPERATURES,
    "bias": BIAS,
    "vocab_mask": VOCAB_MASK,
}
ROLLOUTS = {
    "old_log_probs": OLD,
    "rollout_log_probs": REF,
    "cu_seqlens": CU_SEQLENS,
    "response_mask": MASK,
}
OF_ROLLOUTS = {
    "rows": ("old_log_probs", "rollout_log_probs", "response_mask"),
    "empty": {"cu_seqlens": torch.tensor([0])},
    "masked": ("old_log_probs", "rollout_log_probs"),
}
BY_SEQUENCE = {
    "loss_agg_mode": "seq-mean-token-mean",
    "seq_num_tokens": torch.tensor([3.0, 1.0, 9.0]),
}
NO_SEQUENCE = {"cu_seqlens": torch.tensor([0])}
NO_TOKENS = {"cu_seqlens": torch.tensor([0, 0]), "seq_num_tokens": torch.tensor([2.0])}


class Case(NamedTuple):
    """An operator and what the contract says of its arguments.

    arguments: of a call.
    gradients: the arguments that it can be differentiated by.
    wrong: wrong values by argument, and () for a number of which every value is right.
    rows: the arguments whose first dimension is empty in a call without rows.
    empty: the other arguments of that call, where they differ.
    written: the arguments that it writes.
    contiguous: the arguments that must be contiguous.
    by_memory: the arguments whose strides are not read: others say where elements are.
    masked: the arguments of which what the mask leaves out does not matter.
    any_number: the arguments that may have integers, or floats for integers.
    any_shape: the arguments that may have any shape.
    any_columns: the arguments whose last dimension no other one has.
    any_dtype: the arguments that may have any dtype.
    names: the operators that its messages name; () is its own.
    registered: the name that its backends are registered by; "" is its own.
    """

    arguments: dict[str, Any]
    gradients: tuple[str, ...] = ()
    wrong: Mapping[str, tuple] = MappingProxyType({})
    rows: tuple[str, ...] = ()
    empty: Mapping[str, Any] = MappingProxyType({})
    written: tuple[str, ...] = ()
    contiguous: tuple[str, ...] = ()
    by_memory: tuple[str, ...] = ()
    masked: tuple[str, ...] = ()
    any_number: tuple[str, ...] = ()
    any_shape: tuple[str, ...] = ()
    any_columns: tuple[str, ...] = ()
    any_dtype: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    registered: str = ""
