"""NeMo RL's vocabulary-parallel log-probs and baselines on our operators (nemo-rl 0.6 and 0.7).

    from hybridengine.integrations import nemo_rl

    nemo_rl.patch()                 # NeMo RL's own functions use these, until unpatch()
    with nemo_rl.patched():         # within the block
        ...

The autograd functions are replaced, so that all that is built on them follows:
from_parallel_logits_to_logprobs and its forms for packed sequences, DTensors and context
parallelism, get_next_token_logprobs_from_logits, the distillation and linear-CE-fusion losses. What
NeMo RL computes with top-k or top-p sampling stays its own. The groups of `patch(*groups)`:

    log_probs    Distributed- and ChunkedDistributedLogprob, ChunkedDistributedGatherLogprob,
                 ChunkedDistributedEntropy, ChunkedDistributedHiddenStatesToLogprobs
    advantages   calculate_baseline_and_std_per_prompt
    packing      (not by default) bins of the modified_first_fit_decreasing packer

Every rank's slice of the vocabulary follows that of the rank before it in the group. A backward
needs the logits and [T] vectors of the forward; NeMo RL's functions keep or recompute a softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.kernels import (
    balance_by_tokens,
    linear_token_log_probs,
    token_entropy,
    token_log_probs,
)

from ._patching import Patches

__all__ = [
    "ChunkedDistributedEntropy",
    "ChunkedDistributedGatherLogprob",
    "ChunkedDistributedHiddenStatesToLogprobs",
    "ChunkedDistributedLogprob",
    "DistributedLogprob",
    "calculate_baseline_and_std_per_prompt",
    "patch",
    "patched",
    "unpatch",
]

_IGNORE_INDEX = -100
Group = dist.ProcessGroup | None


def _recorded(
    ctx: Any, inputs: list[Tensor], needed: list[bool], inference_only: bool, compute: Callable
) -> Any:
    """Return compute(*inputs), recorded for `_gradients` unless inference_only.

    needed: which of the inputs need a gradient.
    """
    leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, needed, strict=True)]
    with torch.set_grad_enabled(not inference_only):
        output = compute(*leaves)
    ctx.recorded = None if inference_only else (leaves, output)
    return output.detach()


def _gradients(ctx: Any, grad_output: Tensor) -> list[Tensor | None]:
    """Return the gradients of the inputs of `_recorded`."""
    leaves, output = ctx.recorded
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad(output, wanted, grad_output, retain_graph=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _several(group: Group) -> Group:
    """Return the group if it has several ranks; None stands for all ranks, as in torch."""
    return (group or dist.group.WORLD) if dist.get_world_size(group) > 1 else None


def _labels(target: Tensor) -> Tensor:
    """Return target with negative ids, whose log-prob is 0, as ignored ones."""
    return target.masked_fill(target < 0, _IGNORE_INDEX)


class DistributedLogprob(torch.autograd.Function):
    """Log-probs [...] of target [...] from this rank's logits [..., V_r], float32."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        vocab_parallel_logits,
        target,
        vocab_start_index,
        vocab_end_index,
        group,
        inference_only=False,
    ):
        """vocab_start_index, vocab_end_index: of this rank; `group` already implies them."""
        return _recorded(
            ctx,
            [vocab_parallel_logits],
            [vocab_parallel_logits.requires_grad],
            inference_only,
            lambda logits: token_log_probs(logits, _labels(target), group=_several(group))[0],
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits, in their dtype."""
        return *_gradients(ctx, grad_outputs[0]), *(None,) * (len(ctx.needs_input_grad) - 1)


class ChunkedDistributedLogprob(torch.autograd.Function):
    """DistributedLogprob; chunk_size has no effect: no temporary has the size of the logits."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        vocab_parallel_logits,
        target,
        vocab_start_index,
        vocab_end_index,
        chunk_size,
        tp_group,
        inference_only=False,
    ):
        """As `DistributedLogprob.forward`."""
        return DistributedLogprob.forward(
            ctx,
            vocab_parallel_logits,
            target,
            vocab_start_index,
            vocab_end_index,
            tp_group,
            inference_only,
        )

    backward = staticmethod(DistributedLogprob.backward)


class ChunkedDistributedEntropy(torch.autograd.Function):
    """sum_v p_v log p_v [B, S], the negative entropy, from this rank's logits [B, S, V_r]."""

    @staticmethod
    def forward(ctx, vocab_parallel_logits, chunk_size, tp_group, inference_only=False):  # type: ignore[no-untyped-def]
        """chunk_size has no effect."""
        return _recorded(
            ctx,
            [vocab_parallel_logits],
            [vocab_parallel_logits.requires_grad],
            inference_only,
            lambda logits: -token_entropy(logits, group=_several(tp_group)),
        )

    backward = staticmethod(DistributedLogprob.backward)


class ChunkedDistributedGatherLogprob(torch.autograd.Function):
    """Log-probs [B, S, K] of global_indices [B, S, K] from this rank's logits [B, S, V_r]."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        vocab_parallel_logits,
        global_indices,
        vocab_start_index,
        vocab_end_index,
        chunk_size,
        tp_group,
        inference_only=False,
    ):
        """chunk_size has no effect."""
        own = vocab_parallel_logits.detach().requires_grad_(not inference_only)
        group = _several(tp_group)
        with torch.set_grad_enabled(not inference_only):
            # Of the first id: its gradient has the softmax that all K share.
            first, _, stats = token_log_probs(
                own, global_indices[..., 0], group=group, return_stats=True
            )
        here = (global_indices >= vocab_start_index) & (global_indices < vocab_end_index)
        column = torch.where(here, global_indices - vocab_start_index, 0)
        selected = own.detach().gather(-1, column).float()
        # masked_fill: a product with 0 is NaN for a logit of -inf
        selected = selected.masked_fill(~here, 0)
        if group is not None:
            dist.all_reduce(selected, group=group)
        if not inference_only:
            ctx.save_for_backward(column, here)
            ctx.recorded = ([own], first)
        return selected - stats.lse.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits, in their dtype."""
        column, here = ctx.saved_tensors
        grads = grad_outputs[0].masked_fill(~here, 0)
        total = grad_outputs[0].sum(-1)
        (grad,) = _gradients(ctx, total)
        assert grad is not None
        at_first = torch.where(here[..., :1], total.unsqueeze(-1), 0)
        grad.scatter_add_(-1, column[..., :1], -at_first.to(grad.dtype))
        grad.scatter_add_(-1, column, grads.to(grad.dtype))
        return grad, *(None,) * (len(ctx.needs_input_grad) - 1)


class ChunkedDistributedHiddenStatesToLogprobs(torch.autograd.Function):
    """Log-probs [B, S] of target [B, S] from hidden states split by sequence, without logits.

    tensor_parallel_hidden_states: [S / ranks, B, H]; output_weight_layer: [V_r, H].
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        tensor_parallel_hidden_states,
        target,
        output_weight_layer,
        vocab_start_index,
        vocab_end_index,
        chunk_size,
        tp_group,
        inference_only=False,
    ):
        """chunk_size has no effect: chunks follow `linear_token_log_probs`' budget in bytes."""
        group, hidden = _several(tp_group), tensor_parallel_hidden_states
        ctx.own = slice(0, hidden.shape[0])
        full = hidden
        if group is not None:
            parts = [torch.empty_like(hidden) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, hidden.contiguous(), group=group)
            full = torch.cat(parts)
            first = dist.get_rank(group) * hidden.shape[0]
            ctx.own = slice(first, first + hidden.shape[0])
        labels = _labels(target).t()

        def compute(hidden: Tensor, weight: Tensor) -> Tensor:
            return linear_token_log_probs(hidden, weight.to(hidden.dtype), labels, group=group)[0]

        inputs, needed = [full, output_weight_layer], list(ctx.needs_input_grad[:3:2])
        log_probs = _recorded(ctx, inputs, needed, inference_only, compute)
        return log_probs.t().contiguous()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the hidden states and, third, of the weight."""
        grad_hidden, grad_weight = _gradients(ctx, grad_outputs[0].t())
        if grad_hidden is not None:  # summed over the ranks already
            grad_hidden = grad_hidden[ctx.own]
        return grad_hidden, None, grad_weight, *(None,) * (len(ctx.needs_input_grad) - 3)


def calculate_baseline_and_std_per_prompt(
    prompts: Tensor,
    rewards: Tensor,
    valid_mask: Tensor,
    leave_one_out_baseline: bool = True,
    std_rewards: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the baseline and the standard deviation of every response's group, all at once.

    Args:
        prompts: [N, S] ids; equal rows are a group. rewards: [N].
        valid_mask: [N], 0 leaves a response out of the statistics.
        leave_one_out_baseline: leave out the response itself.
        std_rewards: [N], for the standard deviation; None: rewards.

    Returns:
        (baseline [N], std [N]), in the dtype of rewards. A group with at most one valid response
        has its rewards as the baseline, and std 0. What a response that is left out gets has no
        meaning.
    """
    _, group = torch.unique(prompts.to(rewards.device), dim=0, return_inverse=True)
    valid = valid_mask.to(rewards.device).double()

    def summed(values: Tensor) -> Tensor:
        """Return the sum of each response's group, without itself if one is left out."""
        total = values.new_zeros(len(rewards)).index_add_(0, group, values)[group]
        return total - values if leave_one_out_baseline else total

    count = valid.new_zeros(len(rewards)).index_add_(0, group, valid)[group]
    # Deviations from the group's mean, so that the variance of equal rewards is 0.
    others = (count - int(leave_one_out_baseline)).clamp(min=1)

    def moments(values: Tensor) -> tuple[Tensor, Tensor]:
        total = valid.new_zeros(len(rewards)).index_add_(0, group, values * valid)[group]
        centre = total / count.clamp(min=1)
        deviation = values - centre
        mean = summed(deviation * valid) / others
        square = summed(deviation.square() * valid) / others
        unbiased = others / (others - 1).clamp(min=1)
        # NeMo RL divides by `others` also where a response that is left out has one more.
        return mean + centre * (summed(valid) / others), (square - mean.square()).clamp(
            min=0
        ) * unbiased

    baseline, variance = moments(rewards.double())
    if std_rewards is not None:
        variance = moments(std_rewards.double())[1]
    baseline = torch.where(count > 1, baseline, rewards.double())
    std = torch.where((count > 1) & (others > 1), variance.sqrt(), 0)
    return baseline.to(rewards.dtype), std.to(rewards.dtype)


def _pack_implementation(self: Any, sequence_lengths: list[int]) -> list[list[int]]:
    """Return the fewest balanced bins of at most `self.bin_capacity` tokens."""
    self._validate_sequence_lengths(sequence_lengths)
    if not sequence_lengths:
        return []
    return balance_by_tokens(sequence_lengths, self.bin_capacity)


NemoPatches = partial(Patches, "nemo_rl", distribution="nemo-rl")
_FUNCTIONS = (
    DistributedLogprob,
    ChunkedDistributedLogprob,
    ChunkedDistributedGatherLogprob,
    ChunkedDistributedEntropy,
    ChunkedDistributedHiddenStatesToLogprobs,
)
_PACKER = "data.packing.algorithms.ModifiedFirstFitDecreasingPacker"
_PATCHES = NemoPatches(
    {
        "log_probs": {
            f"distributed.model_utils.{ours.__name__}.{name}": vars(ours)[name]
            for ours in _FUNCTIONS
            for name in ("forward", "backward")
        },
        "advantages": {
            "algorithms.utils.calculate_baseline_and_std_per_prompt": (
                calculate_baseline_and_std_per_prompt
            )
        },
        "packing": {f"{_PACKER}._pack_implementation": _pack_implementation},
    },
    default_groups=("log_probs", "advantages"),
)
patch, unpatch, patched = _PATCHES.patch, _PATCHES.unpatch, _PATCHES.patched
