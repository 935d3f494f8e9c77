"""Router replay: the routers of a mixture of experts select experts that were recorded before.

A token's weights of its experts are still computed from the model's own router logits, so gradients
flow into the router; only the choice is replaced. This is R3 (arXiv 2510.11370) with the choices of
the rollout engine, and R2 (arXiv 2507.18071) with those of the pass of the old log-probs.

No code here belongs to one architecture. transformers' router is a module beside `experts`, and
selects by one `torch.topk` of [tokens, experts]; while a router runs, that call is answered with
the recorded experts. A router that selects in another way is refused by name.

The routes travel with the call of the model: a hook puts them among the keyword arguments, which
transformers passes to every decoder layer, and a layer that gradient checkpointing computes again
gets the same ones. FSDP2, packing and the order of forward and backward passes do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridengine.model.extensions import ModelHook, add_hook, hooks_of
from hybridengine.model.packed import PackedBatch, Part
from hybridengine.model.validation import meta_model
from hybridengine.moe.routers import Router, SelectedExperts, find_routers
from hybridengine.run.errors import ModelError

__all__ = [
    "RouteCall",
    "RouterReplay",
    "Routes",
    "RoutingCounts",
    "SequenceRoutes",
    "pad_routes",
    "route_shape",
]

_KEYWORD = "router_replay"


class RoutingCounts(NamedTuple):
    """Numbers of tokens in replayed calls, float64 scalars.

    total: all.
    tokens: with a record.
    differing_tokens: whose natural choice is another set of experts in some layer.
    pairs, differing_pairs: the same of (token, layer).
    """

    total: Tensor
    tokens: Tensor
    differing_tokens: Tensor
    pairs: Tensor
    differing_pairs: Tensor


class RouteCall:
    """Routes of one call of the model.

    FSDP2 copies dataclasses among the arguments of a module; this is none, and stays one object.

    Attributes:
        routes: int16 [T, layers, k], -1 where a token has no record and routes naturally; with
            `records`, what the routers select is written to it.
        differs: bool [T, layers], tokens whose natural choice is another set of experts.
        layers: those whose routers have run.
    """

    def __init__(self, routes: Tensor, records: bool = False) -> None:
        self.routes, self.records, self.layers = routes, records, set[int]()
        self.differs = routes.new_zeros(routes.shape[:2], dtype=torch.bool)

    def select(self, scores: Tensor, natural: Any, layer: int) -> Any:
        """Return what `topk` of `scores`, [T, E], is to return in place of `natural`."""
        self.layers.add(layer)
        if scores.shape[0] != self.routes.shape[0]:
            raise ModelError(
                f"router replay has the routes of {self.routes.shape[0]} tokens for a forward "
                f"pass of {scores.shape[0]}"
            )
        if self.records:
            self.routes[:, layer] = natural.indices.to(self.routes.dtype)
            return natural
        recorded = self.routes[:, layer].long()
        has_record = recorded[:, :1] >= 0
        same = (recorded.sort(1).values == natural.indices.sort(1).values).all(1, keepdim=True)
        self.differs[:, layer] = (has_record & ~same)[:, 0]  # idempotent: layers may run twice
        recorded = recorded.clamp(min=0)
        # In topk's order; where the sets agree its own indices, so that all sums are the same.
        ranked = scores.detach().gather(1, recorded).sort(dim=1, descending=True, stable=True)
        indices = torch.where(
            has_record & ~same, recorded.gather(1, ranked.indices), natural.indices
        )
        return torch.return_types.topk((scores.gather(1, indices), indices))


def route_shape(config: Any, trust_remote_code: bool = False) -> tuple[int, int]:
    """Return (layers, experts per token) of a model by its transformers config.

    Raises ModelError as `find_routers`.
    """
    model = meta_model(config, trust_remote_code)
    return _shape(model, find_routers(model))


def _shape(model: nn.Module, routers: list[Router]) -> tuple[int, int]:
    config = getattr(model, "config", None)
    if config is not None:
        num_layers = config.get_text_config().num_hidden_layers
    else:
        num_layers = 1 + max(router.layer for router in routers)
    return num_layers, routers[0].top_k


@dataclass(frozen=True)
class Routes(Part):
    """The recorded experts of the tokens of a packed batch, see `RouterReplay.replay`.

    experts: int16 [T, layers, k], -1 where a token has no record.
    """

    experts: Tensor

    def share(self, token_index: Tensor, num_tokens: int) -> Routes:
        """A token of several sequences has the routes of the first one with a record."""
        size = len(self.experts)
        rank = torch.arange(size) + size * (self.experts < 0).all(2).all(1)
        first = rank.new_full((num_tokens,), 2 * size)
        first = first.scatter_reduce(0, token_index.long(), rank, "amin")
        return Routes(self.experts[first % size])

    def pad(self, padding: int) -> Routes:
        filler = self.experts.new_full((padding, *self.experts.shape[1:]), -1)
        return Routes(torch.cat([self.experts, filler]))

    def local(self, tokens: slice, rows: Tensor) -> Routes:
        return Routes(self.experts[tokens])

    def as_dummy(self) -> None:
        return None

    def to(self, device: torch.device | str) -> Routes:
        return Routes(self.experts.to(device))

    def context(self, model: nn.Module) -> AbstractContextManager[object]:
        replay = RouterReplay.of(model)
        return nullcontext() if replay is None else replay.replay(self.experts)


@dataclass(frozen=True)
class SequenceRoutes:
    """Recorded experts, int16 [t, layers, k] of the first t tokens of each sequence."""

    needs_tails: ClassVar[bool] = False
    sequences: Sequence[Tensor]

    def select(self, sequences: Sequence[int], rows: Tensor) -> SequenceRoutes:
        return SequenceRoutes([self.sequences[i] for i in sequences])

    def place(self, input_ids: Tensor, cu_seqlens: Tensor) -> Routes:
        return Routes(pad_routes(self.sequences, cu_seqlens.diff().tolist()))


def pad_routes(routes: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Put routes of sequences, [t, layers, k] of their first t tokens each, end to end.

    lengths: of the sequences; further tokens have no record. Returns [sum of lengths, layers, k].
    """
    padded = routes[0].new_full((sum(lengths), *routes[0].shape[1:]), -1)
    for part, own in zip(padded.split(list(lengths)), routes, strict=True):
        part[: len(own)] = own[: len(part)]
    return padded


class RouterReplay(ModelHook):
    """Lets the routers of `model` replay or record routes, see `replay` and `record`.

    records: `recording` collects the routes of forward passes, which later ones replay.

    The model is changed in place and computes as before outside of the two. It may be sharded by
    FSDP2 before or after, and gradient checkpointing may be on. One per model: `RouterReplay.of`.

    Attributes:
        shape: (layers of the model, experts per token) of routes; dense layers have no record.
    """

    name = "routes"

    def __init__(self, model: nn.Module, *, records: bool = False) -> None:
        routers = find_routers(model)
        self._records, self.divisible = records, not records
        self._recorded: list[Part] | None = None
        self.shape = _shape(model, routers)
        self._layers = {router.layer for router in routers}
        self._pending: RouteCall | None = None  # of the next calls of the model
        self._current: RouteCall | None = None  # of the layer that runs
        self._counts = list[RoutingCounts]()
        for name in dict.fromkeys(router.layer_name for router in routers):
            layer = model.get_submodule(name)
            layer = dict(layer.named_children()).get("_checkpoint_wrapped_module", layer)
            layer.register_forward_pre_hook(self._enter_layer, with_kwargs=True, prepend=True)
            layer.register_forward_hook(self._leave_layer, always_call=True)
        for router in routers:
            router.module.forward = partial(self._route, router, router.module.forward)
        model.register_forward_pre_hook(self._enter_model, with_kwargs=True, prepend=True)
        add_hook(model, self)

    @staticmethod
    def of(model: nn.Module) -> RouterReplay | None:
        """Return the one of `model`, None where it has none."""
        return next((hook for hook in hooks_of(model) if isinstance(hook, RouterReplay)), None)

    @contextmanager
    def replay(self, routes: Tensor) -> Iterator[RouteCall]:
        """While open, calls of the model select the experts `routes`.

        routes: integers [..., layers, k], for the tokens of the call in their order; -1 where a
        token has no record. Backward passes may run later.

        Raises:
            ModelError: a wrong shape, or a model that passes no keyword arguments to its layers.
        """
        if tuple(routes.shape[-2:]) != self.shape:
            raise ModelError(
                f"router replay got routes of shape {list(routes.shape)}; expected "
                f"[tokens, layers, experts per token] = [T, {self.shape[0]}, {self.shape[1]}]"
            )
        with self._call(RouteCall(routes.reshape(-1, *self.shape))) as call:
            yield call
        self._counts.append(self._count(call))

    @contextmanager
    def record(self, num_tokens: int, device: torch.device | str = "cpu") -> Iterator[RouteCall]:
        """While open, a call of the model routes naturally and notes it in `routes` of the result.

        num_tokens: of the call, those of all sequences with their padding.
        """
        routes = torch.full((num_tokens, *self.shape), -1, dtype=torch.int16, device=device)
        with self._call(RouteCall(routes, records=True)) as call:
            yield call

    def recording(self) -> AbstractContextManager[list[Part]] | None:
        return self._recording() if self._records else None

    @contextmanager
    def _recording(self) -> Iterator[list[Part]]:
        recorded: list[Part] = []
        self._recorded = recorded
        try:
            yield recorded
        finally:
            self._recorded = None

    @contextmanager
    def forward(self, batch: PackedBatch) -> Iterator[None]:
        """Record the routes of `batch` inside of `recording`."""
        if self._recorded is None:
            yield
            return
        with self.record(batch.input_ids.numel(), batch.input_ids.device) as call:
            yield
        self._recorded.append(Routes(call.routes))

    @contextmanager
    def _call(self, call: RouteCall) -> Iterator[RouteCall]:
        self._pending, before = call, self._pending
        try:
            yield call
        finally:
            self._pending = before
        if call.layers != self._layers:
            missing = sorted(self._layers - call.layers)
            raise ModelError(
                f"router replay did not reach the routers of layers {missing}: the model was not "
                "called, or it does not pass its keyword arguments to its decoder layers"
            )

    def pop_counts(self) -> RoutingCounts:
        """Return the sums over the calls of `replay` since the last time."""
        counts, self._counts = self._counts, []
        zeros = RoutingCounts(*torch.zeros(len(RoutingCounts._fields), dtype=torch.float64))
        return RoutingCounts(*(sum(values) for values in zip(zeros, *counts, strict=True)))

    def pop_metrics(self) -> dict[str, float]:
        """Return how far the routers' own choices differ from those that they replayed.

        Over all forward passes on all ranks since the last call. Collective.
        """
        counts = torch.stack(list(self.pop_counts()))
        dist.all_reduce(counts)
        total, tokens, differing_tokens, pairs, differing_pairs = counts.tolist()
        if not total:
            return {}
        return {
            "routing/replayed_tokens": tokens / total,
            "routing/mismatched_tokens": differing_tokens / max(tokens, 1),
            "routing/mismatched_routes": differing_pairs / max(pairs, 1),
        }

    def _count(self, call: RouteCall) -> RoutingCounts:
        layers = sorted(self._layers)
        has_record = call.routes[:, layers, 0] >= 0
        differs = call.differs[:, layers]
        values = (
            torch.ones_like(differs[:, 0]),
            has_record.any(1),
            differs.any(1),
            has_record,
            differs,
        )
        return RoutingCounts(*(x.sum(dtype=torch.float64) for x in values))

    def _enter_model(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        return None if self._pending is None else (args, kwargs | {_KEYWORD: self._pending})

    def _enter_layer(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._current = kwargs.get(_KEYWORD)
        return args, {name: value for name, value in kwargs.items() if name != _KEYWORD}

    def _leave_layer(self, *_: Any) -> None:
        self._current = None

    def _route(self, router: Router, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = self._current
        if call is None:
            return forward(*args, **kwargs)
        select = partial(call.select, layer=router.layer)
        with SelectedExperts(router.num_experts, router.top_k, select):
            return forward(*args, **kwargs)
