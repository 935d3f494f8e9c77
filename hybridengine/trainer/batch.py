"""The batch of one RL step: each data-parallel replica holds the tokens that it trains on.

The split of all responses over replicas, optimizer steps and micro-batches is a pure function of
lengths and groups. Tokens then move once, from the rank that generated them to the ranks that train
on them; what a step computes per token stays there, and statistics come from reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.data import PromptSample
from hybridengine.model import KeptIds, Optimizer, PackedBatch, SavedWork, pack_rollouts
from hybridengine.rollout.columns import COLUMNS
from hybridengine.runtime.all_ranks import group_timeout
from hybridengine.runtime.session import Session
from hybridengine.trainer.exchange import RowExchange, RowLocations
from hybridengine.trainer.outcomes import Outcomes
from hybridengine.trainer.rollouts import Rollouts
from hybridengine.trainer.routes import response_routes
from hybridengine.trainer.split import MicroBatchIndices, split_micro_batches


@dataclass(frozen=True)
class RolloutBatch:
    """The n responses of this replica and their R tokens end to end, among N of all replicas.

    Per-token tensors are float32 [R] unless noted. The step fills in the optional fields with
    `dataclasses.replace`, in the order in which it computes them. old_log_probs is None where the
    batch is used for one optimizer step only: they are then the log-probs of that step
    (`Actor.update_once`).

    is_dummy: the replica trains on nothing. It holds one response of another replica, masked, for
    the collectives of forward and backward.
    """

    outcomes: Outcomes  # of all N responses
    index: Tensor  # int64 [n], which of them are here; ascending
    cu_seqlens: Tensor  # int32 [n + 1]
    response_mask: Tensor  # bool [R], the tokens that are trained on
    rollout_log_probs: Tensor  # of the rollout engine
    is_dummy: bool = False
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # [R, …], declared ones by name
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    is_weights: Tensor | None = None  # importance weights of the rollout correction
    selected: Tensor | None = None  # bool [R], the tokens that clip_cov and kl_cov choose
    placement: RowLocations | None = None  # of all N responses on the ranks that train on them

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


@dataclass(frozen=True)
class MicroBatch:
    """What one rank runs at once: s responses with r tokens of the batch.

    is_dummy: the rank only takes part in the collectives, see `MicroBatchIndices`.
    active_rows: int64, ascending, its tokens that may have a gradient; None: all may.
    """

    packed: PackedBatch
    token_index: Tensor  # int64 [r], positions of its tokens in the batch
    cu_seqlens: Tensor  # int32 [s + 1], of the response tokens
    is_dummy: bool
    kept: KeptIds | None = None  # what its tokens were sampled from; None: the full vocabulary
    active_rows: Tensor | None = None

    def take(self, per_token: Tensor | None) -> Tensor | None:
        """Select this micro-batch's tokens: [R] -> [r]."""
        return None if per_token is None else per_token[self.token_index]

    def response_mask(self, batch: RolloutBatch) -> Tensor:
        """bool [r]; all False in a dummy micro-batch."""
        return batch.response_mask[self.token_index] & (not self.is_dummy)


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: this replica's micro-batches, and which of all responses it trains on."""

    micro_batches: list[MicroBatch]
    responses: Tensor  # int64, of the N responses of all replicas; ascending
    token_index: Tensor  # int64, positions of its tokens that are in this replica's batch


class DataParallel:
    """The ranks as data-parallel replicas of `sp_size` neighbours each, which share micro-batches.

    sp_size: ranks of sequence parallelism (Ulysses); 1: every rank is a replica.
    shared_prefix: compute common prefixes once; pair_cost: see `split_micro_batches`.
    route_shape: of a token's routes, where the engine's are replayed.

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
        route_shape: tuple[int, int] | None = None,
    ) -> None:
        self.session, self.sp_size, self.route_shape = session, sp_size, route_shape
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
    ) -> list[list[MicroBatchIndices]]:
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
    ) -> tuple[RolloutBatch, list[MiniBatch]]:
        """Split rollouts into optimizer steps of whole groups, each balanced over the replicas.

        Every rank receives the tokens that its replica trains on. max_tokens: of a micro-batch, per
        rank. receive: returns the columns of the responses that this rank is to hold; None: they
        are on these ranks. Collective.
        """
        outcomes, device = rollouts.outcomes, self.session.device
        split = self._split(outcomes, num_mini_batches, max_tokens * self.sp_size)
        trained = [
            sorted(
                i for _, replicas in split for m in replicas[k] if not m.is_dummy for i in m.indices
            )
            for k in range(self.dp_size)
        ]
        placement = self._place(outcomes, trained)
        with self.session.phase("exchange_rollouts"):
            if receive is None:
                exchange = RowExchange(outcomes.ranks, placement.held)
                columns = rollouts.move(exchange, device)
            else:
                columns = {name: x.to(device) for name, x in receive(placement).items()}
        is_dummy = not trained[self.replica]
        index = torch.tensor(placement.held[self.session.rank])
        ends = [0, *accumulate(outcomes.response_lengths[index].tolist())]
        batch = RolloutBatch(
            outcomes,
            index.to(device),
            torch.tensor(ends, dtype=torch.int32, device=device),
            torch.full((ends[-1],), not is_dummy, device=device),
            columns["log_probs"],
            is_dummy,
            {
                name: columns[name].unflatten(0, (ends[-1], *column.shape))
                for name, column in COLUMNS.items()
                if name in columns and column.counts is None
            },
            placement=placement,
        )
        if batch.sampled is not None:
            batch = replace(batch, response_mask=batch.response_mask & batch.sampled)
        kept = None
        if "kept_ids" in columns:
            kept = KeptIds.from_counts(columns["kept_ids"], columns["num_kept"].cpu())
        response_ids = columns["token_ids"].cpu()
        contexts = columns["context_ids"].cpu() if "context_ids" in columns else response_ids[:0]
        own_prompts = contexts.split(outcomes.sizes["context_ids"][index].tolist())
        routes = response_routes(
            columns, outcomes.response_lengths[index].tolist(), self.route_shape
        )
        packing = _Packing(
            self, rollouts.prompts, outcomes, index, ends, response_ids, own_prompts, kept, routes
        )
        return batch, [packing.mini_batch(rows, replicas[self.replica]) for rows, replicas in split]

    def _place(self, outcomes: Outcomes, trained: Sequence[list[int]]) -> RowLocations:
        """trained: the rows that each replica trains on; without any it holds the shortest one."""
        shortest = int(outcomes.lengths.argmin())
        held = [rows or [shortest] for rows in trained for _ in range(self.sp_size)]
        sources = torch.empty(len(outcomes), dtype=torch.int64)
        for replica, rows in enumerate(trained):
            sources[rows] = replica * self.sp_size
        return RowLocations(held, sources)

    def _split(
        self, outcomes: Outcomes, num_mini_batches: int, max_tokens: int
    ) -> list[tuple[list[int], list[list[MicroBatchIndices]]]]:
        """Split into mini-batches: (rows of all replicas, micro-batches of each replica)."""
        groups, lengths = outcomes.groups.tolist(), outcomes.lengths.tolist()
        prompts = list(zip(groups, self._shared_lengths(outcomes), strict=True))
        numbers = {group: i for i, group in enumerate(sorted(set(groups)))}
        split = []
        for k in range(num_mini_batches):
            rows = [
                i
                for i, group in enumerate(groups)
                if numbers[group] * num_mini_batches // len(numbers) == k
            ]
            replicas = [
                [MicroBatchIndices([rows[i] for i in m.indices], m.is_dummy) for m in micro_batches]
                for micro_batches in self.micro_batches(
                    [lengths[i] for i in rows], max_tokens, [prompts[i] for i in rows]
                )
            ]
            split.append((rows, replicas))
        return split

    @staticmethod
    def _shared_lengths(outcomes: Outcomes) -> list[int]:
        """Return how many tokens the responses of each one's group begin with.

        A response with a prompt of its own begins with its group's in general.
        """
        lengths = outcomes.prompt_lengths
        shortest: dict[int, int] = {}
        for group, length in zip(outcomes.groups.tolist(), lengths.tolist(), strict=True):
            shortest[group] = min(length, shortest.get(group, length))
        return [shortest[group] for group in outcomes.groups.tolist()]

    @torch.no_grad()
    def per_token(
        self, mini_batches: list[MiniBatch], forward: Callable[[MicroBatch], Tensor]
    ) -> Tensor:
        """Compute `forward` of every micro-batch without gradient, [R]. Collective."""
        micro_batches = [micro for mini in mini_batches for micro in mini.micro_batches]
        parts = [forward(micro) for micro in micro_batches]
        return self.join_tokens(mini_batches, parts)

    def join_tokens(self, mini_batches: list[MiniBatch], parts: Sequence[Tensor]) -> Tensor:
        """Assemble [R] from `parts`, one [r] per micro-batch."""
        micro_batches = [micro for mini in mini_batches for micro in mini.micro_batches]
        trained = [not micro.is_dummy for micro in micro_batches]
        sizes = [micro.token_index.numel() for micro in compress(micro_batches, trained)]
        # A replica that trains on nothing holds the response of its dummy micro-batches.
        num_tokens = sum(sizes) or micro_batches[0].token_index.numel()
        tokens = torch.zeros(num_tokens, device=self.session.device)
        for micro, part in compress(zip(micro_batches, parts, strict=True), trained):
            tokens[micro.token_index] = part
        return tokens

    def num_trained(self, batch: RolloutBatch, mini_batch: MiniBatch) -> tuple[Tensor, Tensor]:
        """Count (tokens, responses with a token) that a mini-batch trains on, over all ranks; 0-d.

        Collective.
        """
        mask = batch.response_mask[mini_batch.token_index]
        trained = torch.zeros_like(batch.index, dtype=torch.bool)
        trained[batch.sequence_ids[mini_batch.token_index[mask]]] = True
        counts = torch.stack([mask.sum(), trained.sum()])
        dist.all_reduce(counts, group=self.group)
        return counts[0], counts[1]

    def saved_work(self, mini_batches: Iterable[MiniBatch]) -> SavedWork:
        """Sum what shared prefixes save in one pass over all replicas' tokens. Collective."""
        micro_batches = [micro for mini in mini_batches for micro in mini.micro_batches]
        return self.sum_saved(micro.packed.saved for micro in micro_batches if not micro.is_dummy)

    def sum_saved(self, parts: Iterable[SavedWork]) -> SavedWork:
        """Sum the parts of all replicas. Collective."""
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
        self, batch: RolloutBatch, mini_batch: MiniBatch, per_token: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gather numbers per token of a mini-batch to all ranks: [K, R] -> [K, all tokens].

        In the order of the responses. Returns (numbers, bool mask of this replica's tokens).
        Collective; for what no reduction can compute, as it takes 4 bytes per token of all ranks.
        """
        here = torch.isin(mini_batch.responses, batch.index.cpu()) & (not batch.is_dummy)
        lengths = batch.outcomes.response_lengths[mini_batch.responses]
        is_own = here.repeat_interleave(lengths).to(per_token.device)
        gathered = per_token.new_zeros(per_token.shape[0], is_own.numel())
        gathered[:, is_own] = per_token[:, mini_batch.token_index]
        dist.all_reduce(gathered, group=self.group)  # exact: one replica's value plus zeros
        return gathered, is_own

    def backward(self, loss: Tensor, optimizer: Optimizer, outputs: Tensor | None = None) -> None:
        """Run the backward of a micro-batch's part of a mean over all ranks.

        outputs: of the model, see `Optimizer.observe_loss`.
        """
        optimizer.observe_loss(loss, outputs)
        (loss * self.grad_scale(optimizer)).backward()

    def grad_scale(self, optimizer: Optimizer) -> float:
        """Return the gradient that `backward` gives to a loss."""
        # FSDP2 averages gradients over the ranks; the loss is already a global mean.
        return self.session.world_size * optimizer.loss_scale

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


@dataclass(frozen=True)
class _Packing:
    """Packs the responses `index` of a replica, whose tokens are `response_ids` by `ends`."""

    dp: DataParallel
    prompts: Sequence[PromptSample]
    outcomes: Outcomes
    index: Tensor  # int64 [n]
    ends: list[int]  # [n + 1]
    response_ids: Tensor  # int32 [R], on the CPU
    own_prompts: Sequence[Tensor]  # int32, of each response; empty: that of its group
    kept: KeptIds | None
    routes: list[Tensor] | None  # of the responses' sequences

    def mini_batch(self, rows: list[int], micro_batches: list[MicroBatchIndices]) -> MiniBatch:
        position = {row: k for k, row in enumerate(self.index.tolist())}
        own = [position[i] for m in micro_batches if not m.is_dummy for i in m.indices]
        lengths = self.outcomes.lengths[self.index]
        dummy = [int(lengths.argmin())]
        return MiniBatch(
            [
                self._micro_batch(dummy if m.is_dummy else [position[i] for i in m.indices], m)
                for m in micro_batches
            ],
            torch.tensor(rows),
            self._token_index(sorted(own)).to(self.dp.session.device),
        )

    def _micro_batch(self, chosen: list[int], micro: MicroBatchIndices) -> MicroBatch:
        device = self.dp.session.device
        groups = self.outcomes.groups[self.index[chosen]].tolist()
        prompt_of = {group: torch.tensor(self.prompts[group].prompt_ids) for group in set(groups)}
        ends, ids = self.ends, self.response_ids
        own = self.own_prompts
        pairs = [
            (own[k] if own[k].numel() else prompt_of[group], ids[ends[k] : ends[k + 1]])
            for group, k in zip(groups, chosen, strict=True)
        ]
        response_ends = [0, *accumulate(len(response) for _, response in pairs)]
        token_index = self._token_index(chosen)
        routes = self.routes if not micro.is_dummy else None
        return MicroBatch(
            pack_rollouts(
                pairs,
                device,
                self.dp.sp_group,
                shared_prefix=self.dp.shared_prefix,
                routes=None if routes is None else [routes[k] for k in chosen],
            ),
            token_index.to(device),
            torch.tensor(response_ends, dtype=torch.int32, device=device),
            micro.is_dummy,
            None if self.kept is None else self.kept.take(token_index),
        )

    def _token_index(self, chosen: Iterable[int]) -> Tensor:
        ranges = [torch.arange(self.ends[k], self.ends[k + 1]) for k in chosen]
        return torch.cat([torch.empty(0, dtype=torch.int64), *ranges])


def mean_metrics(steps: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Average the metrics of several optimizer steps."""
    return {name: float(sum(s[name] for s in steps)) / len(steps) for name in steps[0]}
