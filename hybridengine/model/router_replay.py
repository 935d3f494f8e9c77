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

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybridengine.errors import ModelError

__all__ = [
    "RouteCall",
    "RouterReplay",
    "RoutingCounts",
    "find_routers",
    "merge_routes",
    "pad_routes",
    "route_shape",
]

_KEYWORD = "router_replay"
_ROUTER_NAMES = ("gate", "router")  # of the module beside `experts`
_TOP_K = (torch.topk, Tensor.topk)
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)(?=\.)")


class Router(NamedTuple):
    """A router, and where its layer is."""

    module: nn.Module
    layer: int
    layer_name: str
    num_experts: int
    top_k: int


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


class _SelectedExperts(TorchFunctionMode):
    """While a router runs: `select(scores, natural)` answers `topk` of [T, num_experts]."""

    def __init__(
        self, num_experts: int, top_k: int | None, select: Callable[[Tensor, Any], Any]
    ) -> None:
        super().__init__()
        self._num_experts, self._top_k, self._select = num_experts, top_k, select
        self.num_calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOP_K:
            return result
        scores: Tensor = args[0] if args else (kwargs or {})["input"]
        top_k = result.indices.shape[-1]
        if scores.ndim != 2 or scores.shape[1] != self._num_experts:
            return result  # of groups of experts
        if self._top_k not in (None, top_k):
            return result
        self.num_calls += 1
        return self._select(scores, result)


def find_routers(model: nn.Module) -> list[Router]:
    """Return the routers of `model` in the order of its layers; the model may be sharded.

    Raises:
        ModelError: it has none, or one that does not select by one `topk` over its experts.
    """
    routers = []
    for name, block in model.named_modules():
        children = dict(block.named_children())
        if "experts" not in children:
            continue
        module = next((children[n] for n in _ROUTER_NAMES if n in children), None)
        position = _LAYER.match(name)
        owner = type(block).__name__
        if module is None or type(module) is nn.Linear or position is None:
            raise ModelError(
                f"router replay does not support {owner} of {type(model).__name__}: its experts "
                "are not selected by a router module of their own in a decoder layer"
            )
        num_experts, top_k = _probe(module, block, model)
        routers.append(Router(module, int(position[1]), position[0], num_experts, top_k))
    if not routers:
        raise ModelError(
            f"router replay needs a mixture of experts, and {type(model).__name__} has no module "
            "`experts` with a router beside it"
        )
    if len({router.top_k for router in routers}) > 1:
        raise ModelError(
            f"router replay does not support {type(model).__name__}: its layers select different "
            "numbers of experts"
        )
    return routers


def _probe(router: nn.Module, block: nn.Module, model: nn.Module) -> tuple[int, int]:
    """Return (number of experts, experts per token), by a call of the router on the meta device.

    What the router takes besides hidden states are attributes of its block, of the same names.
    """
    shapes = {
        name: torch.empty(x.shape, dtype=x.dtype, device="meta")
        for named in (router.named_parameters(), router.named_buffers())
        for name, x in named
    }
    weight = next(
        (x for name, x in shapes.items() if name.endswith("weight") and x.ndim == 2), None
    )
    name, problem = type(router).__name__, "its router has no weight"
    if weight is not None:
        num_experts, hidden_size = weight.shape
        chosen: list[int] = []

        def note(scores: Tensor, natural: Any) -> Any:
            chosen.append(natural.indices.shape[1])
            return natural

        try:
            with torch.no_grad(), _SelectedExperts(num_experts, None, note):
                hidden = torch.empty(3, hidden_size, dtype=weight.dtype, device="meta")
                _, _, *others = inspect.signature(type(router).forward).parameters
                more = [getattr(block, name).to("meta") for name in others if hasattr(block, name)]
                torch.func.functional_call(router, shapes, (hidden, *more))
            if len(chosen) == 1:
                return num_experts, chosen[0]
            problem = f"it calls topk over its {num_experts} experts {len(chosen)} times"
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            problem = str(error).partition("\n")[0]
    raise ModelError(
        f"router replay does not support the router {name} of {type(model).__name__}, which "
        f"does not select its experts by one topk ({problem})"
    )


def route_shape(config: Any, trust_remote_code: bool = False) -> tuple[int, int]:
    """Return (layers, experts per token) of a model by its transformers config.

    Raises ModelError as `find_routers`.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return _shape(model, find_routers(model))


def _shape(model: nn.Module, routers: list[Router]) -> tuple[int, int]:
    config = getattr(model, "config", None)
    if config is not None:
        num_layers = config.get_text_config().num_hidden_layers
    else:
        num_layers = 1 + max(router.layer for router in routers)
    return num_layers, routers[0].top_k


def pad_routes(routes: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Put routes of sequences, [t, layers, k] of their first t tokens each, end to end.

    lengths: of the sequences; further tokens have no record. Returns [sum of lengths, layers, k].
    """
    padded = routes[0].new_full((sum(lengths), *routes[0].shape[1:]), -1)
    for part, own in zip(padded.split(list(lengths)), routes, strict=True):
        part[: len(own)] = own[: len(part)]
    return padded


def merge_routes(routes: Tensor, token_index: Tensor) -> Tensor:
    """Return the routes of a batch whose common prefixes are there once.

    routes: [T, layers, k], of plainly packed tokens.
    token_index: int64 [T], where each of them is. A token of several sequences has the routes of
      the first one with a record.
    """
    num_tokens = len(routes)
    rank = torch.arange(num_tokens) + num_tokens * (routes < 0).all(2).all(1)
    first = rank.new_full((int(token_index.max()) + 1,), 2 * num_tokens)
    first = first.scatter_reduce(0, token_index.long(), rank, "amin")
    return routes[first % num_tokens]


class RouterReplay:
    """Lets the routers of `model` replay or record routes, see `replay` and `record`.

    The model is changed in place and computes as before outside of the two. It may be sharded by
    FSDP2 before or after, and gradient checkpointing may be on. One per model: `RouterReplay.of`.

    Attributes:
        shape: (layers of the model, experts per token) of routes; dense layers have no record.
    """

    def __init__(self, model: nn.Module) -> None:
        routers = find_routers(model)
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
        model._hybridengine_router_replay = self  # type: ignore[assignment]

    @staticmethod
    def of(model: nn.Module) -> RouterReplay | None:
        """Return the one of `model`, None where it has none."""
        return getattr(model, "_hybridengine_router_replay", None)

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

    @contextmanager
    def of_batch(self, routes: Tensor | None) -> Iterator[None]:
        """While open, replay `routes`, or route naturally where they are None.

        Inside of `record`, routes that are None are recorded.
        """
        if routes is not None:
            with self.replay(routes):
                yield
        else:
            yield

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
        with _SelectedExperts(router.num_experts, router.top_k, select):
            return forward(*args, **kwargs)
