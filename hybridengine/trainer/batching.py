"""One step's rollouts as packed tensors, and which rank trains on which of them.

Every rank holds the same `Batch`: per-token numbers are small beside the model, and advantages,
whitening and metrics then need no collective of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.kernels import balance
from hybridengine.model import Optimizer, PackedBatch, pack_rollouts
from hybridengine.runtime import Session
from hybridengine.trainer.rollouts import Rollout

__all__ = ["Batch", "Micro", "MicroBatch", "Mini", "Replicas", "means", "split_micro_batches"]


@dataclass
class Batch:
    """N responses and their R tokens end to end; per-token tensors are [R], float32."""

    rollouts: Sequence[Rollout]
    cu_seqlens: Tensor  # int32 [N + 1]
    response_mask: Tensor  # bool [R], the tokens that are trained on
    rollout_log_probs: Tensor  # the engine's
    old_log_probs: Tensor | None = None  # None: those of the only optimizer step itself
    ref_log_probs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    is_weights: Tensor | None = None  # of the rollout correction
    selected: Tensor | None = None  # bool, of clip_cov and kl_cov

    @staticmethod
    def of(rollouts: Sequence[Rollout], device: torch.device) -> Batch:
        ends = [0, *accumulate(len(r.response_ids) for r in rollouts)]
        log_probs = [p for r in rollouts for p in r.log_probs]
        return Batch(
            rollouts,
            torch.tensor(ends, dtype=torch.int32, device=device),
            torch.ones(ends[-1], dtype=torch.bool, device=device),
            torch.tensor(log_probs, dtype=torch.float32, device=device),
        )

    @property
    def sequence_ids(self) -> Tensor:
        """int64 [R], which response a token belongs to."""
        lengths = self.cu_seqlens.diff().long()
        return torch.repeat_interleave(lengths, output_size=self.response_mask.numel())

    def sequence_sums(self, per_token: Tensor) -> Tensor:
        """[R] -> [N]."""
        sums = per_token.new_zeros(len(self.rollouts))
        return sums.index_add(0, self.sequence_ids, per_token)


@dataclass(frozen=True)
class Micro:
    """What one rank runs at once: s responses with r tokens."""

    packed: PackedBatch
    places: Tensor  # int64 [r], where its tokens are in the batch
    cu_seqlens: Tensor  # int32 [s + 1]
    counted: bool  # False for a stand-in, see MicroBatch

    def of(self, per_token: Tensor | None) -> Tensor | None:
        return None if per_token is None else per_token[self.places]

    def mask(self, batch: Batch) -> Tensor:
        return batch.response_mask[self.places] & self.counted


@dataclass(frozen=True)
class Mini:
    """One optimizer step: this rank's micro-batches, and all ranks' tokens."""

    micros: list[Micro]
    places: Tensor  # int64, its tokens in the batch

    def counts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(tokens, responses with a token) that count towards the loss, over all ranks; 0-d."""
        mask = batch.response_mask[self.places]
        trained = torch.zeros(len(batch.rollouts), dtype=torch.bool, device=mask.device)
        trained[batch.sequence_ids[self.places[mask]]] = True
        return mask.sum(), trained.sum()


class Replicas:
    """Ranks that each run micro-batches of their own, or in groups that share theirs (Ulysses)."""

    def __init__(self, session: Session, sequence_parallel_size: int, max_tokens: int) -> None:
        self.session, self._size, self._max_tokens = session, sequence_parallel_size, max_tokens
        self._group, _ = dist.new_subgroups(sequence_parallel_size)

    def cut(self, batch: Batch, mini_batches: int) -> list[Mini]:
        """`mini_batches` optimizer steps of whole groups; each split evenly over the replicas."""
        groups = [r.group for r in batch.rollouts]
        numbers = {group: i for i, group in enumerate(sorted(set(groups)))}
        ends = batch.cu_seqlens.tolist()
        minis = []
        for k in range(mini_batches):
            chosen = [
                i for i, g in enumerate(groups) if numbers[g] * mini_batches // len(numbers) == k
            ]
            split = split_micro_batches(
                [batch.rollouts[i].num_tokens for i in chosen],
                self.session.world_size // self._size,
                self._max_tokens * self._size,
            )
            mine = split[self.session.rank // self._size]
            micros = [
                self._micro(batch, ends, [chosen[i] for i in m.indices], m.counted) for m in mine
            ]
            minis.append(Mini(micros, self._places(ends, chosen)))
        return minis

    def _micro(self, batch: Batch, ends: list[int], indices: list[int], counted: bool) -> Micro:
        chosen = [batch.rollouts[i] for i in indices]
        lengths = [0, *accumulate(len(r.response_ids) for r in chosen)]
        return Micro(
            pack_rollouts(
                [(r.sample.prompt_ids, r.response_ids) for r in chosen],
                self.session.device,
                self._group if self._size > 1 else None,
            ),
            self._places(ends, indices),
            torch.tensor(lengths, dtype=torch.int32, device=self.session.device),
            counted,
        )

    def _places(self, ends: list[int], indices: list[int]) -> Tensor:
        places = torch.cat([torch.arange(ends[i], ends[i + 1]) for i in indices])
        return places.to(self.session.device)

    @torch.no_grad()
    def per_token(self, minis: list[Mini], forward: Callable[[PackedBatch], Tensor]) -> Tensor:
        """`forward` of every micro-batch, [R], on every rank; collective."""
        micros = [micro for mini in minis for micro in mini.micros]
        size = sum(mini.places.numel() for mini in minis)
        whole = torch.zeros(size, device=self.session.device)
        for micro in micros:
            values = forward(micro.packed)
            if micro.counted:
                whole[micro.places] = values
        return self.joined(whole)

    def joined(self, mine: Tensor) -> Tensor:
        """[R], what this rank has and zeros elsewhere -> what all ranks have; collective."""
        if self.session.rank % self._size:  # its neighbour has the same
            mine.zero_()
        dist.all_reduce(mine)
        return mine

    def update(
        self,
        name: str,
        mini: Mini,
        optimizer: Optimizer,
        grad_clip: float,
        loss_of: Callable[[Micro], tuple[Tensor, dict[str, Tensor]]],
    ) -> dict[str, Tensor]:
        """One optimizer step on parts of a loss that is a mean over all ranks; its metrics."""
        parts = []
        for micro in mini.micros:
            loss, metrics = loss_of(micro)
            # FSDP2 averages gradients over the ranks; the loss is already a global mean.
            (loss * self.session.world_size * optimizer.loss_scale).backward()
            parts.append(metrics)
        reduced = _reduced(parts, self._size)
        reduced[f"{name}/grad_norm"] = optimizer.step(grad_clip)
        reduced[f"{name}/lr"] = torch.tensor(optimizer.last_lr)
        return reduced


def _reduced(parts: Sequence[Mapping[str, Tensor]], copies: int) -> dict[str, Tensor]:
    """Metrics of an optimizer step from those of its micro-batches, over all ranks; collective.

    What ends in _max is a maximum; the rest are parts of a sum, which `copies` ranks each have.
    """
    sums = sorted(name for name in parts[0] if not name.endswith("_max"))
    maxima = sorted(parts[0].keys() - set(sums))
    stacked = [torch.stack([part[n].detach().double() for n in sums + maxima]) for part in parts]
    added, largest = torch.stack(stacked).split([len(sums), len(maxima)], dim=1)
    added, largest = added.sum(0), largest.amax(0)
    dist.all_reduce(added)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(sums + maxima, torch.cat([added / copies, largest]), strict=True))


def means(steps: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Of the metrics of several optimizer steps."""
    return {name: float(sum(s[name] for s in steps)) / len(steps) for name in steps[0]}


@dataclass(frozen=True)
class MicroBatch:
    """Indices of the sequences one replica runs together.

    counted is False for a stand-in: a replica with fewer sequences than others has micro-batches
    must still take part in the collectives of their forward and backward; its loss then weighs
    nothing.
    """

    indices: list[int]
    counted: bool = True


def split_micro_batches(
    lengths: Sequence[int], replicas: int, max_tokens: int
) -> list[list[MicroBatch]]:
    """For each replica the same number of micro-batches, each of at most max_tokens tokens.

    A sequence longer than max_tokens gets a micro-batch of its own. Deterministic in its arguments,
    so every rank computes the same split.
    """
    ranks = balance(lengths, replicas)
    count = max(1, *(-(-sum(lengths[i] for i in rank) // max_tokens) for rank in ranks))
    while True:
        parts = [_split(rank, lengths, count) for rank in ranks]
        crowded = any(
            len(part) > 1 and sum(lengths[i] for i in part) > max_tokens
            for rank in parts
            for part in rank
        )
        if not crowded:
            break
        count += 1
    shortest = min(range(len(lengths)), key=lambda i: lengths[i])
    return [
        [MicroBatch(part) if part else MicroBatch([shortest], counted=False) for part in rank]
        for rank in parts
    ]


def _split(indices: list[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    bins = balance([lengths[i] for i in indices], count)
    return [[indices[k] for k in part] for part in bins]
