"""Type stub of the native extension (csrc/), which hybridengine.kernels calls."""

from collections.abc import Sequence

import torch
from torch import Tensor

cpu_isa: str
with_cuda: bool
tensor_chunk: int

class LogProbOptions:
    def __init__(
        self,
        temperature: float,
        temperatures: Tensor | None,
        logit_scale: float,
        softcap: float,
        ignore_index: int,
        vocab_mask: Tensor | None,
        vocab_range: Tensor | None,
        negate: bool,
    ) -> None: ...

def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    subtree_ends: Tensor,
    position_ids: Tensor | None,
    softmax_scale: float,
    window_size: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]: ...
def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    subtree_ends: Tensor,
    position_ids: Tensor | None,
    softmax_scale: float,
    window_size: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def balance(lengths: Sequence[int], num_bins: int, equal_count: bool) -> list[list[int]]: ...
def balance_by_tokens(
    lengths: Sequence[int], max_tokens: int, min_bins: int, multiple_of: int
) -> list[list[int]]: ...
def block_quantize(weight: Tensor) -> tuple[Tensor, Tensor]: ...
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    parents: Tensor | None,
    initial_state: Tensor | None,
    silu: bool,
) -> Tensor: ...
def causal_conv1d_update(
    x: Tensor, weight: Tensor, cache: Tensor, slots: Tensor, silu: bool
) -> Tensor: ...
def causal_conv1d_backward(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    parents: Tensor | None,
    initial_state: Tensor | None,
    silu: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]: ...
def gae(
    rewards: Tensor,
    values: Tensor | None,
    cu_seqlens: Tensor,
    token_mask: Tensor | None,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]: ...
def group_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    estimator: int,
    norm_by_std: bool,
    epsilon: float,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    num_tokens: int,
) -> tuple[Tensor, Tensor]: ...
def empty_from_pool(shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...
def has_mixed_gemm(dtype: torch.dtype) -> bool: ...
def log_prob_forward(
    logits: Tensor,
    token_ids: Tensor,
    options: LogProbOptions,
    want_sum_p_squared: bool,
    bad_label: Tensor | None,
    cu_tokens: Tensor | None,
) -> list[Tensor]: ...
def log_prob_partial(
    logits: Tensor, token_ids: Tensor, options: LogProbOptions, bad_label: Tensor | None
) -> Tensor: ...
def soft_cap_(logits: Tensor, softcap: float) -> None: ...
def log_prob_backward(
    logits: Tensor,
    token_ids: Tensor,
    options: LogProbOptions,
    row_results: Sequence[Tensor],
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_logits: Tensor,
    row_index: Tensor | None,
    cu_tokens: Tensor | None,
) -> None: ...
def count_changed(masks: Sequence[Tensor], numels: Sequence[int]) -> Tensor: ...
def decode_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor: ...
def distillation(
    student: Tensor,
    teacher: Tensor,
    student_transform: tuple[float, float, float],
    teacher_transform: tuple[float, float, float],
    beta: float,
    losses: Tensor,
    incoming: Tensor | None,
    grad: Tensor | None,
) -> None: ...

class Graph:
    def __init__(self, rows: int) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def num_calls(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def begin(self) -> None: ...
    def end(self) -> str: ...
    def refuse(self, reason: str) -> None: ...
    def replay(self, rows: int) -> None: ...

def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor: ...
def delta_gates(a: Tensor, b: Tensor, log_rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]: ...
def gated_activation_backward(
    grad_out: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]: ...
def add_scaled_(out: Tensor, update: Tensor, scale: float) -> None: ...
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    round_first: bool,
    wants_inverse: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, wants_inverse: bool
) -> tuple[Tensor, Tensor]: ...
def layer_norm_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor
) -> tuple[Tensor, Tensor, Tensor]: ...
def rotary_(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> None: ...
def rms_norm_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor, offset: float
) -> tuple[Tensor, Tensor]: ...
def grouped_linear(x: Tensor, weight: Tensor, cu_counts: Tensor, out: Tensor) -> None: ...
def grouped_weight_grad(grad: Tensor, x: Tensor, cu_counts: Tensor, out: Tensor) -> None: ...
def linear_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    cu_seqlens: Tensor,
    parents: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
    delta: bool,
    l2_norm: bool,
    keep_states: bool,
    wants_final: bool,
) -> tuple[Tensor, Tensor, Tensor]: ...
def linear_recurrence_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    states: Tensor,
    slots: Tensor,
    scale: float,
    delta: bool,
    l2_norm: bool,
) -> Tensor: ...
def linear_recurrence_backward(
    grad_out: Tensor,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    cu_seqlens: Tensor,
    parents: Tensor | None,
    initial_state: Tensor | None,
    states: Tensor,
    scale: float,
    delta: bool,
    l2_norm: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]: ...
def mixed_gemm(
    a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool
) -> None: ...
def move_rows(
    sources: Sequence[Tensor],
    index: Tensor,
    position_ids: Tensor | None,
    leading: int,
    out_shape: Sequence[int],
    fills: Sequence[float],
    shifts: Sequence[int],
) -> list[Tensor]: ...
def pack_forest(tokens: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...
def pack_layout(
    mask: Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]: ...
def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    window_size: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None: ...
def write_kv_cache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None: ...
def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    selected: Tensor | None,
    ref_log_probs: Tensor | None,
    entropy: Tensor | None,
    is_weights: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_num_tokens: Tensor | None,
    denominators: Tensor | None,
    mode: int,
    agg_mode: int,
    kl_type: int,
    kl_straight_through: bool,
    kl_times_ratio: bool,
    options: Sequence[float],
    coefficients: Sequence[float],
    wants_tokens: bool,
    wants_gradient: bool,
    wants_entropy_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...

class CopyTable:
    def __init__(self, table: Tensor, blocks: Tensor | None = None) -> None: ...
    def copy(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None: ...
    def absmax(self, sources: Sequence[Tensor], absmax: Tensor, dtype: torch.dtype) -> None: ...
    def quantize(
        self,
        sources: Sequence[Tensor],
        destinations: Sequence[Tensor],
        scale: Tensor,
        dtype: torch.dtype,
    ) -> None: ...

def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    return_kept_ids: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def sparse_logits(
    hidden: Tensor, weight: Tensor, ids: Tensor, ends: Tensor, first_id: int
) -> Tensor: ...
def sparse_log_probs(
    logits: Tensor, ids: Tensor, ends: Tensor, token_ids: Tensor, options: LogProbOptions
) -> list[Tensor]: ...
def sparse_hidden_grad(
    hidden: Tensor, weight: Tensor, ids: Tensor, ends: Tensor, first_id: int, grad_logits: Tensor
) -> Tensor: ...
def sparse_weight_grad(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    ends: Tensor,
    first_id: int,
    grad_logits: Tensor,
    out: Tensor,
    accumulate: bool,
) -> None: ...
def strided_copy(
    sources: Sequence[Tensor], destinations: Sequence[Tensor], table: Tensor
) -> None: ...
def bit_checksum(data: Tensor) -> Tensor: ...
def mark_changed(current: Tensor, sent: Tensor, mask: Tensor) -> None: ...
def encode_gaps(positions: Tensor, start: int) -> tuple[Tensor, int]: ...
def decode_gaps(gaps: Tensor, width: int, start: int, end: int, count: int) -> Tensor: ...

class ChangeTable:
    def __init__(self, table: Tensor, device: torch.device) -> None: ...
    def map(self, indices: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]: ...
    def scatter(
        self, indices: Sequence[Tensor], values: Sequence[Tensor], destinations: Sequence[Tensor]
    ) -> Tensor: ...

def take_changed(
    masks: Sequence[Tensor], sources: Sequence[Tensor], ends: Tensor, num_changed: int
) -> tuple[Tensor, Tensor]: ...
