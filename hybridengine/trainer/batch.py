"""The batch of one RL step as packed tensors, its split into micro-batches, and its metrics.

Every rank holds the same `RolloutBatch`: per-token numbers are small compared with the model, and
advantages, whitening and metrics then need no collective of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.kernels import balance
from hybridengine.model import Optimizer, PackedBatch, pack_rollouts
from hybridengine.runtime.session import Session
from hybridengine.trainer.rollouts import Rollout


@dataclass(frozen=True)
class RolloutBatch:
    """N responses and their R tokens end to end; per-token tensors are float32 [R] unless noted.

    The step fills in the optional fields with `dataclasses.replace`, in the order in which it
    computes them. old_log_probs is None where the batch is used for one optimizer step only: they
    are then the log-probs of that step (`Actor.update_once`).
    """

    rollouts: Sequence[Rollout]
    cu_seqlens: Tensor  # int32 [N + 1]
    response_mask: Tensor  # bool [R], the tokens that are trained on
    rollout_log_probs: Tensor  # of the rollout engine
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    is_weights: Tensor | None = None  # importance weights of the rollout correction
    selected: Tensor | None = None  # bool [R], the tokens that clip_cov and kl_cov choose

    @staticmethod
    def pack(rollouts: Sequence[Rollout], device: torch.device) -> RolloutBatch:
        """Pack `rollouts`; every response token is trained on."""
        ends = [0, *accumulate(len(r.response_ids) for r in rollouts)]
        log_probs = [p for r in rollouts for p in r.log_probs]
        return RolloutBatch(
            rollouts,
            torch.tensor(ends, dtype=torch.int32, device=device),
            torch.ones(ends[-1], dtype=torch.bool, device=device),
            torch.tensor(log_probs, dtype=torch.float32, device=device),
        )

    @property
    def sequence_ids(self) -> Tensor:
        """int64 [R], the response that a token belongs to."""
        lengths = self.cu_seqlens.diff().long()
        return torch.repeat_interleave(lengths, output_size=self.response_mask.numel())

    def sequence_sums(self, per_token: Tensor) -> Tensor:
        """Sum over the tokens of each response: [R] -> [N]."""
        sums = per_token.new_zeros(len(self.rollouts))
        return sums.index_add(0, self.sequence_ids, per_token)

    def per_response(self, values: Sequence[float]) -> Tensor:
        """float32 [N] on the batch's device."""
        return self.rollout_log_probs.new_tensor(values)


@dataclass(frozen=True)
class MicroBatch:
    """What one rank runs at once: s responses with r tokens of the batch.

    is_dummy: the rank only takes part in the collectives, see `MicroBatchIndices`.
    """

    packed: PackedBatch
    token_index: Tensor  # int64 [r], positions of its tokens in the batch
    cu_seqlens: Tensor  # int32 [s + 1], of the response tokens
    is_dummy: bool

    def take(self, per_token: Tensor | None) -> Tensor | None:
        """Select this micro-batch's tokens: [R] -> [r]."""
        return None if per_token is None else per_token[self.token_index]

    def response_mask(self, batch: RolloutBatch) -> Tensor:
        """bool [r]; all False in a dummy micro-batch."""
        return batch.response_mask[self.token_index] & (not self.is_dummy)


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: this rank's micro-batches, and the tokens of all ranks."""

    micro_batches: list[MicroBatch]
    token_index: Tensor  # int64, positions of all ranks' tokens in the batch

    def num_trained(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Count (tokens, responses with a token) that are trained on, over all ranks; 0-d."""
        mask = batch.response_mask[self.token_index]
        trained = torch.zeros(len(batch.rollouts), dtype=torch.bool, device=mask.device)
        trained[batch.sequence_ids[self.token_index[mask]]] = True
        return mask.sum(), trained.sum()


class DataParallel:
    """The ranks as data-parallel replicas of `sp_size` neighbours each, which share micro-batches.

    sp_size: ranks of sequence parallelism (Ulysses); 1: every rank is a replica.
    """

    def __init__(self, session: Session, sp_size: int) -> None:
        group, _ = dist.new_subgroups(sp_size)
        self.session, self.sp_size = session, sp_size
        self.sp_group = group if sp_size > 1 else None

    def micro_batches(self, lengths: Sequence[int], max_tokens: int) -> list[MicroBatchIndices]:
        """Split sequences over the replicas; return the micro-batches of this rank's."""
        dp_size = self.session.world_size // self.sp_size
        return split_micro_batches(lengths, dp_size, max_tokens)[self.session.rank // self.sp_size]

    def split(self, batch: RolloutBatch, num_mini_batches: int, max_tokens: int) -> list[MiniBatch]:
        """Split into optimizer steps of whole groups, each balanced over the replicas.

        max_tokens: of a micro-batch, per rank.
        """
        groups = [r.group for r in batch.rollouts]
        numbers = {group: i for i, group in enumerate(sorted(set(groups)))}
        ends = batch.cu_seqlens.tolist()
        mini_batches = []
        for k in range(num_mini_batches):
            chosen = [
                i
                for i, group in enumerate(groups)
                if numbers[group] * num_mini_batches // len(numbers) == k
            ]
            lengths = [batch.rollouts[i].num_tokens for i in chosen]
            micro_batches = [
                self._pack(batch, ends, [chosen[i] for i in m.indices], m.is_dummy)
                for m in self.micro_batches(lengths, max_tokens * self.sp_size)
            ]
            mini_batches.append(MiniBatch(micro_batches, self._token_index(ends, chosen)))
        return mini_batches

    def _pack(
        self, batch: RolloutBatch, ends: list[int], indices: list[int], is_dummy: bool
    ) -> MicroBatch:
        chosen = [batch.rollouts[i] for i in indices]
        pairs = [(r.sample.prompt_ids, r.response_ids) for r in chosen]
        response_ends = [0, *accumulate(len(r.response_ids) for r in chosen)]
        return MicroBatch(
            pack_rollouts(pairs, self.session.device, self.sp_group),
            self._token_index(ends, indices),
            torch.tensor(response_ends, dtype=torch.int32, device=self.session.device),
            is_dummy,
        )

    def _token_index(self, ends: list[int], indices: list[int]) -> Tensor:
        index = torch.cat([torch.arange(ends[i], ends[i + 1]) for i in indices])
        return index.to(self.session.device)

    @torch.no_grad()
    def per_token(
        self, mini_batches: list[MiniBatch], forward: Callable[[PackedBatch], Tensor]
    ) -> Tensor:
        """Compute `forward` of every micro-batch without gradient, [R]. Collective."""
        micro_batches = [micro for mini in mini_batches for micro in mini.micro_batches]
        parts = [forward(micro.packed) for micro in micro_batches]
        return self.gather_tokens(mini_batches, parts)

    def gather_tokens(self, mini_batches: list[MiniBatch], parts: Sequence[Tensor]) -> Tensor:
        """Assemble [R] on every rank from `parts`, one [r] per micro-batch. Collective."""
        num_tokens = sum(mini.token_index.numel() for mini in mini_batches)
        tokens = torch.zeros(num_tokens, device=self.session.device)
        if self.session.rank % self.sp_size == 0:  # its neighbours have the same parts
            micro_batches = [micro for mini in mini_batches for micro in mini.micro_batches]
            for micro, part in zip(micro_batches, parts, strict=True):
                if not micro.is_dummy:
                    tokens[micro.token_index] = part
        dist.all_reduce(tokens)
        return tokens

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        """Run the backward of a micro-batch's part of a mean over all ranks."""
        # FSDP2 averages gradients over the ranks; the loss is already a global mean.
        (loss * self.session.world_size * optimizer.loss_scale).backward()

    def reduce_metrics(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Reduce the metrics of a mini-batch's micro-batches over all ranks. Collective.

        Names that end in _max are maxima; all others are parts of a sum.
        """
        sums = sorted(name for name in parts[0] if not name.endswith("_max"))
        names = [*sums, *sorted(parts[0].keys() - set(sums))]
        stacked = torch.stack(
            [torch.stack([part[n].detach().double() for n in names]) for part in parts]
        )
        added, largest = stacked[:, : len(sums)].sum(0), stacked[:, len(sums) :].amax(0)
        dist.all_reduce(added)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        added /= self.sp_size  # each rank of a sequence-parallel group has added its replica's
        return dict(zip(names, torch.cat([added, largest]), strict=True))


def mean_metrics(steps: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Average the metrics of several optimizer steps."""
    return {name: float(sum(s[name] for s in steps)) / len(steps) for name in steps[0]}


@dataclass(frozen=True)
class MicroBatchIndices:
    """Indices of the sequences that one replica runs together.

    is_dummy: a replica with fewer sequences than others have micro-batches must still take part in
    the collectives of their forward and backward. It runs a sequence that another replica trains
    on, masked out of the loss.
    """

    indices: list[int]
    is_dummy: bool = False


def split_micro_batches(
    lengths: Sequence[int], dp_size: int, max_tokens: int
) -> list[list[MicroBatchIndices]]:
    """Split sequences into the same number of micro-batches for each of `dp_size` replicas.

    A micro-batch has at most max_tokens tokens; a longer sequence gets one of its own. The split is
    a function of its arguments, so every rank computes the same one.
    """
    replicas = balance(lengths, dp_size)
    count = max(1, *(-(-sum(lengths[i] for i in part) // max_tokens) for part in replicas))
    split = [_split(part, lengths, count) for part in replicas]
    while any(_exceeds(part, lengths, max_tokens) for parts in split for part in parts):
        count += 1
        split = [_split(part, lengths, count) for part in replicas]
    shortest = min(range(len(lengths)), key=lambda i: lengths[i])
    return [
        [
            MicroBatchIndices(part) if part else MicroBatchIndices([shortest], is_dummy=True)
            for part in parts
        ]
        for parts in split
    ]


def _exceeds(indices: list[int], lengths: Sequence[int], max_tokens: int) -> bool:
    return len(indices) > 1 and sum(lengths[i] for i in indices) > max_tokens


def _split(indices: list[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    bins = balance([lengths[i] for i in indices], count)
    return [[indices[k] for k in part] for part in bins]


def batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Summarize scores, advantages, returns, values, lengths and further results of the reward."""
    rollouts = batch.rollouts
    scores_by_group: dict[int, set[float]] = {}
    for r in rollouts:
        scores_by_group.setdefault(r.group, set()).add(r.score)
    metrics = {
        **mean_max_min("critic/score", torch.tensor([r.score for r in rollouts])),
        **mean_max_min("critic/advantages", batch.advantages),
        **mean_max_min("critic/returns", batch.returns),
        **mean_max_min("critic/values", batch.values),
        **mean_max_min("response_length", batch.cu_seqlens.diff()),
        **mean_max_min("prompt_length", torch.tensor([len(r.sample.prompt_ids) for r in rollouts])),
        "response_length/clip_ratio": fmean(r.finish_reason == "length" for r in rollouts),
        "frac_reward_zero_std": fmean(len(scores) == 1 for scores in scores_by_group.values()),
    }
    for name in rollouts[0].extras:
        metrics[f"reward/{name}"] = fmean(r.extras[name] for r in rollouts)
    return metrics


def mean_max_min(name: str, values: Tensor | None) -> dict[str, float]:
    """Mean, maximum and minimum of `values` as <name>/mean and so on; nothing for None."""
    if values is None:
        return {}
    numbers = {"mean": values.double().mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{kind}": float(value) for kind, value in numbers.items()}


def probs_diff(batch: RolloutBatch) -> dict[str, float]:
    """Compare the engine's probabilities with the trainer's of the same tokens.

    Names are verl's. A mean below 0.005 is healthy; above 0.01 engine and trainer run different
    models.
    """
    assert batch.old_log_probs is not None
    p = batch.old_log_probs[batch.response_mask].double().exp()
    q = batch.rollout_log_probs[batch.response_mask].double().exp()
    diff, both = (p - q).abs(), torch.stack([p, q])
    correlation = torch.corrcoef(both)[0, 1] if p.numel() > 1 else p.new_tensor(1.0)
    return {
        "training/rollout_probs_diff_mean": float(diff.mean()) if p.numel() else 0.0,
        "training/rollout_probs_diff_max": float(diff.max()) if p.numel() else 0.0,
        "training/rollout_actor_probs_pearson_corr": float(correlation.nan_to_num(1.0)),
    }
