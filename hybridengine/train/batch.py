"""The batch of one RL step: each data-parallel replica holds the tokens that it trains on.

The split of all responses over replicas, optimizer steps and micro-batches is a pure function of
lengths and groups. Tokens then move once, from the rank that generated them to the ranks that train
on them; what a step computes per token stays there, and statistics come from reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridengine.engine.response import COLUMNS
from hybridengine.model import KeptIds, Optimizer, PackedBatch, SavedWork, pack_rollouts
from hybridengine.model.attachments import AttachmentPreparer
from hybridengine.model.extensions import PartReader, hooks_of
from hybridengine.model.packed import Part, PartSource
from hybridengine.run.messages import group_timeout
from hybridengine.run.session import Session
from hybridengine.train.exchange import RowExchange, RowLocations, split_micro_batches
from hybridengine.train.rollouts import Outcomes, Rollouts

# Of the rows of a micro-batch: from here on a pass of their own costs less than their gradients.
_PASSIVE_SHARE = 0.25


@dataclass(frozen=True)
class RolloutBatch:
    """The n responses of this replica and their R tokens end to end, among N of all replicas.

    Per-token tensors are float32 [R] unless noted. The step fills in the optional fields with
    `dataclasses.replace`, in the order in which it computes them. old_log_probs is None where the
    batch is used for one optimizer step only: they are then the log-probs of that step
    (`Actor.update`).

    pack: makes a micro-batch of some of the responses here, numbered among all N; of none a dummy.
    mini_batches: the micro-batches of each optimizer step; their rows are these tokens.
    is_dummy: the replica trains on nothing. It holds one response of another replica, masked, for
      the collectives of forward and backward.
    """

    outcomes: Outcomes  # of all N responses
    index: Tensor  # int64 [n], which of them are here; ascending
    cu_seqlens: Tensor  # int32 [n + 1]
    response_mask: Tensor  # bool [R], the tokens that are trained on
    rollout_log_probs: Tensor  # of the rollout engine
    pack: Callable[[Sequence[int]], PackedBatch]
    mini_batches: Sequence[Sequence[PackedBatch]]
    mini_batch_of: Tensor  # int64 [N], the optimizer step that trains on a response
    placement: RowLocations  # of all N responses on the ranks that train on them
    is_dummy: bool = False
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # [R, …], declared ones by name
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    is_weights: Tensor | None = None  # importance weights of the rollout correction
    selected: Tensor | None = None  # bool [R], the tokens that clip_cov and kl_cov choose

    @property
    def micro_batches(self) -> list[PackedBatch]:
        """Those of all mini-batches, in their order."""
        return [micro_batch for mini_batch in self.mini_batches for micro_batch in mini_batch]

    @property
    def sampled(self) -> Tensor | None:
        """bool [R], the tokens of the model, not those of tools or users; None: all are."""
        sampled = self.columns.get("sampled")
        return None if sampled is None else sampled.bool()

    @property
    def sequence_ids(self) -> Tensor:
        """int64 [R], the response of this replica that a token belongs to."""
        lengths = self.cu_seqlens.diff().long()
        return torch.repeat_interleave(lengths, output_size=self.response_mask.numel())

    def sequence_sums(self, per_token: Tensor) -> Tensor:
        """Sum over the tokens of each response: [R] -> [n]."""
        sums = per_token.new_zeros(self.index.numel())
        return sums.index_add(0, self.sequence_ids, per_token)

    def sequence_means(self, per_token: Tensor) -> Tensor:
        """Average over the model's tokens of each response: [R] -> float64 [n]."""
        counts = torch.ones_like(per_token) if self.sampled is None else self.sampled
        sums = self.sequence_sums(per_token.double() * counts)
        return sums / self.sequence_sums(counts.double()).clamp(min=1)

    def per_response(self, numbers: Tensor) -> Tensor:
        """Select this replica's entries of a number per response, on its device: [N] -> [n]."""
        return numbers.to(self.index.device)[self.index]

    def in_mini_batch(self, number: int) -> Tensor:
        """bool [R], the tokens of mini-batch `number` that this replica trains on."""
        is_in = self.per_response(self.mini_batch_of) == number
        return is_in[self.sequence_ids] & (not self.is_dummy)

    def mask_of(self, micro_batch: PackedBatch) -> Tensor:
        """bool [r], which tokens of a micro-batch are trained on; none of a dummy."""
        return micro_batch.take(self.response_mask) & (not micro_batch.is_dummy)

    @torch.no_grad()
    def per_token(self, forward: Callable[[PackedBatch], Tensor]) -> Tensor:
        """Compute `forward` of every micro-batch without gradient, [R]. Collective."""
        return self.join([forward(micro_batch) for micro_batch in self.micro_batches])

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        """Assemble [R] from `parts`, one [r] per micro-batch."""
        tokens = torch.zeros_like(self.rollout_log_probs)
        for micro_batch, part in zip(self.micro_batches, parts, strict=True):
            if not micro_batch.is_dummy:
                tokens[micro_batch.row_index] = part
        return tokens

    def with_parts(self, parts: Mapping[str, Sequence[Part]]) -> RolloutBatch:
        """Add parts to the micro-batches: by name, one for each of them."""
        given = [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]
        merged = [{**m.parts, **own} for m, own in zip(self.micro_batches, given, strict=True)]
        return self.with_each("parts", merged)

    def with_each(self, name: str, values: Iterable[Any]) -> RolloutBatch:
        """Set the field `name` of the micro-batches, in their order."""
        given: Iterator[Any] = iter(values)
        mini_batches = [
            [replace(m, **{name: next(given)}) for m in mini_batch]
            for mini_batch in self.mini_batches
        ]
        return replace(self, mini_batches=mini_batches)


class DataParallel:
    """The ranks as data-parallel replicas of `sp_size` neighbours each, which share micro-batches.

    sp_size: ranks of sequence parallelism (Ulysses); 1: every rank is a replica.
    shared_prefix: compute common prefixes once; pair_cost: see `split_micro_batches`.
    part_readers: make parts of packed batches of the columns of responses, by name.
    preparer: of the images of sequences; None: there are none.

    Attributes:
        replica, dp_size: index of this rank's replica, and how many there are.
        sp_group: the ranks of this replica; None: this rank alone.
        group: one rank of every replica, so that a reduction counts each replica once; None: all.
    """

    def __init__(
        self,
        session: Session,
        sp_size: int,
        *,
        shared_prefix: bool = False,
        pair_cost: float = 0.0,
        part_readers: Mapping[str, PartReader] = MappingProxyType({}),
        preparer: AttachmentPreparer | None = None,
    ) -> None:
        self.session, self.sp_size, self.part_readers = session, sp_size, part_readers
        self.preparer = preparer
        self.shared_prefix, self.pair_cost = shared_prefix, pair_cost
        self.dp_size, self.replica = session.world_size // sp_size, session.rank // sp_size
        self.sp_group: dist.ProcessGroup | None = None
        self.group: dist.ProcessGroup | None = None
        if sp_size > 1:
            timeout = group_timeout()
            self.sp_group, _ = dist.new_subgroups(sp_size, timeout=timeout)
            across = [list(range(i, session.world_size, sp_size)) for i in range(sp_size)]
            self.group, _ = dist.new_subgroups_by_enumeration(across, timeout)

    def micro_batches(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        prompts: Sequence[tuple[Hashable, int]] | None = None,
    ) -> list[list[list[int]]]:
        """Split sequences into the micro-batches of each replica, see `split_micro_batches`."""
        return split_micro_batches(
            lengths,
            self.dp_size,
            max_tokens,
            prompts=prompts if self.shared_prefix else None,
            pair_cost=self.pair_cost if self.shared_prefix else 0.0,
        )

    def build_batch(
        self,
        rollouts: Rollouts,
        num_mini_batches: int,
        max_tokens: int,
        receive: Callable[[RowLocations], Mapping[str, Tensor]] | None = None,
    ) -> RolloutBatch:
        """Split rollouts into optimizer steps of whole groups, each balanced over the replicas.

        Every rank receives the tokens that its replica trains on. max_tokens: of a micro-batch, per
        rank. receive: returns the columns of the responses that this rank is to hold, see
        `Rollouts.move`; None: they are on these ranks. Collective.
        """
        outcomes, device = rollouts.outcomes, self.session.device
        rollouts.check_images(self.preparer is not None)
        _, groups = outcomes.groups.unique(return_inverse=True)
        mini_batch_of = groups * num_mini_batches // (int(groups.max()) + 1)
        split = self._split(outcomes, mini_batch_of, num_mini_batches, max_tokens * self.sp_size)
        trained = [
            sorted(i for replicas in split for rows in replicas[k] for i in rows)
            for k in range(self.dp_size)
        ]
        is_dummy, shortest = not trained[self.replica], int(outcomes.lengths.argmin())
        sources = torch.empty(len(outcomes), dtype=torch.int64)
        for replica, rows in enumerate(trained):
            sources[rows] = replica * self.sp_size
        held = [rows or [shortest] for rows in trained for _ in range(self.sp_size)]
        placement = RowLocations(held, sources)
        receive = receive or (lambda _: rollouts.move(RowExchange(outcomes.ranks, held)))
        with self.session.phase("exchange_rollouts"):
            received = receive(placement)
        index = torch.tensor(held[self.session.rank])
        ends = [0, *accumulate(outcomes.response_lengths[index].tolist())]
        columns = {  # [R, …]; the others are read on the host, where batches are packed
            name: received[name].unflatten(0, (ends[-1], *column.shape)).to(device)
            for name, column in COLUMNS.items()
            if name in received and column.counts is None
        }
        mask = torch.full((ends[-1],), not is_dummy, device=device)
        if "sampled" in columns:
            mask &= columns["sampled"].bool()
        pack = self._packer(rollouts, index, received)
        return RolloutBatch(
            outcomes=outcomes,
            index=index.to(device),
            cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device),
            response_mask=mask,
            rollout_log_probs=received["log_probs"].to(device),
            pack=pack,
            mini_batches=[[pack(rows) for rows in replicas[self.replica]] for replicas in split],
            mini_batch_of=mini_batch_of.to(device),
            placement=placement,
            is_dummy=is_dummy,
            columns=columns,
        )

    def _split(
        self, outcomes: Outcomes, mini_batch_of: Tensor, num_mini_batches: int, max_tokens: int
    ) -> list[list[list[list[int]]]]:
        """Return the rows of each micro-batch of each replica, by mini-batch."""
        groups, lengths = outcomes.groups.tolist(), outcomes.lengths.tolist()
        # A response with a prompt of its own begins with its group's in general.
        shared: dict[int, int] = {}
        for group, length in zip(groups, outcomes.prompt_lengths.tolist(), strict=True):
            shared[group] = min(length, shared.get(group, length))
        split = []
        for number in range(num_mini_batches):
            rows = (mini_batch_of == number).nonzero().flatten().tolist()
            prompts = [(groups[i], shared[groups[i]]) for i in rows]
            replicas = self.micro_batches([lengths[i] for i in rows], max_tokens, prompts)
            split.append([[[rows[i] for i in part] for part in parts] for parts in replicas])
        return split

    def _packer(
        self, rollouts: Rollouts, index: Tensor, columns: Mapping[str, Tensor]
    ) -> Callable[[Sequence[int]], PackedBatch]:
        """Return what packs some of the responses `index` of this replica, and moves them once.

        columns: of these responses. A dummy runs the shortest one.
        """
        outcomes, device = rollouts.outcomes, self.session.device
        lengths = outcomes.response_lengths[index].tolist()
        response_ids = columns["token_ids"].split(lengths)
        contexts = columns.get("context_ids", torch.empty(0))
        own_prompts = contexts.split(outcomes.sizes["context_ids"][index].tolist())
        token_index = torch.arange(sum(lengths)).split(lengths)
        sources: dict[str, PartSource] = {}
        for name in ("kept", "likely"):
            if (ids := columns.get(f"{name}_ids")) is not None:
                given = columns[f"num_{name}"], columns.get(f"{name}_log_probs")
                sources[name] = KeptIds.from_counts(ids, *given)
        for name, read in self.part_readers.items():
            if (source := read(columns, lengths)) is not None:
                sources[name] = source
        images = None if self.preparer is None else rollouts.images_of(index.tolist(), columns)
        position = {row: k for k, row in enumerate(index.tolist())}
        shortest = int(outcomes.lengths[index].argmin())

        def pack(rows: Sequence[int]) -> PackedBatch:
            chosen = [position[row] for row in rows] or [shortest]
            groups = outcomes.groups[index[chosen]].tolist()
            prompts = {g: torch.tensor(rollouts.prompts[g].prompt_ids) for g in set(groups)}
            tokens = torch.cat([token_index[k] for k in chosen])
            parts = {name: source.select(chosen, tokens) for name, source in sources.items()}
            if self.preparer is not None and images is not None:
                parts |= self.preparer.parts([images[k] for k in chosen])
            packed = pack_rollouts(
                [
                    (own_prompts[k] if own_prompts[k].numel() else prompts[g], response_ids[k])
                    for g, k in zip(groups, chosen, strict=True)
                ],
                sequence_parallel=self.sp_group,
                shared_prefix=self.shared_prefix,
                parts=parts,
            )
            packed = replace(packed, row_index=tokens).to(device)
            return packed if rows else packed.as_dummy()

        return pack

    def divide(self, batch: RolloutBatch, is_active: Tensor) -> RolloutBatch:
        """Have the groups of a micro-batch without an active token computed without gradient.

        A micro-batch stays whole where they have few of its rows on some replica: all wait for the
        slowest. A dummy, one response in place of none, has none to leave out.

        is_active: bool [R]. Collective.
        """
        index, groups = batch.index.cpu(), batch.outcomes.groups
        found = groups[index[batch.sequence_sums(is_active.long()).cpu() > 0]]
        has_active, responses = torch.isin(groups, found), index[batch.sequence_ids.cpu()]
        parts = [whole.row_index for whole in batch.micro_batches]
        of_rows = responses[torch.cat(parts).cpu()].split([len(part) for part in parts])
        given = list(zip(batch.micro_batches, of_rows, strict=True))
        passive_rows = [0 if x.is_dummy else (~has_active[rows]).sum().item() for x, rows in given]
        shares = [
            count / max(1, len(rows)) for count, (_, rows) in zip(passive_rows, given, strict=True)
        ]
        share = torch.tensor(shares, device=self.session.device)
        dist.all_reduce(share, dist.ReduceOp.MIN)
        divided = []
        for (whole, rows), least in zip(given, share.tolist(), strict=True):
            divided.append([whole])
            if least >= _PASSIVE_SHARE:
                here, active = rows.unique(), has_active[rows.unique()]
                passive = replace(batch.pack(here[~active].tolist()), has_gradient=False)
                divided[-1] = [passive, batch.pack(here[active].tolist())]
        kept = iter(divided)
        mini_batches = [[part for _ in x for part in next(kept)] for x in batch.mini_batches]
        return replace(batch, mini_batches=mini_batches)

    def num_trained(self, batch: RolloutBatch, number: int) -> tuple[Tensor, Tensor]:
        """Count (tokens, responses with a token) that a mini-batch trains on, over all ranks; 0-d.

        Collective.
        """
        mask = batch.response_mask & batch.in_mini_batch(number)
        counts = torch.stack([mask.sum(), (batch.sequence_sums(mask.long()) > 0).sum()])
        dist.all_reduce(counts, group=self.group)
        return counts[0], counts[1]

    def sum_saved(self, parts: Iterable[SavedWork]) -> SavedWork:
        """Sum what shared prefixes save in the micro-batches of all replicas. Collective."""
        total = torch.tensor([SavedWork(), *parts], device=self.session.device).sum(0)
        dist.all_reduce(total, group=self.group)
        return SavedWork(*total.tolist())

    def gather_responses(self, batch: RolloutBatch, per_response: Tensor) -> Tensor:
        """Gather a number per response of each replica to all ranks: [n] -> [N]. Collective."""
        gathered = per_response.new_zeros(len(batch.outcomes))
        if not batch.is_dummy:
            gathered[batch.index] = per_response
        dist.all_reduce(gathered, group=self.group)  # exact: one replica's value plus zeros
        return gathered

    def gather_tokens(
        self, batch: RolloutBatch, number: int, per_token: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gather numbers per token of a mini-batch to all ranks: [K, R] -> [K, all tokens].

        In the order of the responses. Returns (numbers, bool mask of this replica's tokens).
        Collective; for what no reduction can compute, as it takes 4 bytes per token of all ranks.
        """
        responses = (batch.mini_batch_of.cpu() == number).nonzero().flatten()
        here = torch.isin(responses, batch.index.cpu()) & (not batch.is_dummy)
        lengths = batch.outcomes.response_lengths[responses]
        is_own = here.repeat_interleave(lengths).to(per_token.device)
        gathered = per_token.new_zeros(per_token.shape[0], is_own.numel())
        gathered[:, is_own] = per_token[:, batch.in_mini_batch(number)]
        dist.all_reduce(gathered, group=self.group)  # exact: one replica's value plus zeros
        return gathered, is_own

    def grad_scale(self, optimizer: Optimizer) -> float:
        """Return the gradient that `optimizer_step` gives to a loss."""
        # Gradients are averaged over the ranks; the loss is already a global mean.
        return self.session.world_size * optimizer.loss_scale

    def optimizer_step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        micro_batches: Sequence[PackedBatch],
        loss_of: Callable[[PackedBatch], tuple[Tensor, Tensor | None]],
        max_norm: float,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run forward and backward of each micro-batch, then the update. Collective.

        loss_of: returns a micro-batch's part of a mean over all ranks and the outputs that it was
          computed from, see `Optimizer.observe_loss`.
        max_norm: gradients of a larger norm are clipped.

        Returns (norm of the gradients, metrics of the model's hooks).
        """
        scale, hooks, metrics = self.grad_scale(optimizer), hooks_of(model), dict[str, Tensor]()
        for hook in hooks:
            hook.begin_step([m for m in micro_batches if m.has_gradient], scale)
        for micro_batch in micro_batches:
            with torch.set_grad_enabled(micro_batch.has_gradient):
                loss, outputs = loss_of(micro_batch)
            optimizer.observe_loss(loss, outputs)
            if micro_batch.has_gradient:
                (loss * scale).backward()
        norm = optimizer.step(max_norm)
        for hook in hooks:
            metrics |= hook.end_step(updated=not optimizer.skipped_in_a_row)
        return norm, metrics

    def reduce_metrics(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Reduce the metrics of a mini-batch's micro-batches over all replicas. Collective.

        Names that end in _max are maxima; all others are parts of a sum.
        """
        sums = sorted(name for name in parts[0] if not name.endswith("_max"))
        names = [*sums, *sorted(parts[0].keys() - set(sums))]
        stacked = torch.stack(
            [torch.stack([part[n].detach().double() for n in names]) for part in parts]
        )
        added, largest = stacked[:, : len(sums)].sum(0), stacked[:, len(sums) :].amax(0)
        dist.all_reduce(added, group=self.group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return dict(zip(names, torch.cat([added, largest]), strict=True))


def mean_metrics(steps: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Average the metrics of several optimizer steps."""
    return {name: float(sum(s[name] for s in steps)) / len(steps) for name in steps[0]}
