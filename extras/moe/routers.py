"""The routers of a mixture of experts, found without code for one architecture.

transformers' router is a module beside `experts` that returns the logits of all experts, the
weights of the selected ones, and their indices, and selects by one `torch.topk` of
[tokens, experts]. A router that selects in another way is refused by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybridengine.run.errors import ModelError

__all__ = [
    "SIGMOID",
    "TOP_K",
    "Router",
    "RouterOutputs",
    "SelectedExperts",
    "find_routers",
    "layer_index",
    "router_blocks",
]

_ROUTER_NAMES = ("gate", "router")  # of the module beside `experts`
TOP_K = (torch.topk, Tensor.topk)
SIGMOID = (torch.sigmoid, Tensor.sigmoid, torch.special.expit)
_SOFTMAX = (torch.softmax, Tensor.softmax, nn.functional.softmax)
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)(?=\.)")


class RouterOutputs(NamedTuple):
    """Where logits [T, E], weights [T, k] and indices [T, k] are in the result of a router."""

    logits: int
    weights: int
    indices: int


class Router(NamedTuple):
    """A router, and where its layer is.

    block: the module of router and experts.
    outputs: None where the result of the router has no logits.
    is_sigmoid: whether scores are sigmoids of the logits; otherwise they are their softmax.
    """

    module: nn.Module
    block: nn.Module
    layer: int
    layer_name: str
    num_experts: int
    top_k: int
    outputs: RouterOutputs | None
    is_sigmoid: bool


class SelectedExperts(TorchFunctionMode):
    """While a router runs: `select(scores, natural)` answers `topk` of [T, num_experts]."""

    def __init__(
        self, num_experts: int, top_k: int | None, select: Callable[[Tensor, Any], Any]
    ) -> None:
        super().__init__()
        self.num_experts, self._top_k, self._select = num_experts, top_k, select

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in TOP_K:
            self._see(func, result)
            return result
        scores: Tensor = args[0] if args else (kwargs or {})["input"]
        top_k = result.indices.shape[-1]
        if scores.ndim != 2 or scores.shape[1] != self.num_experts:
            return result  # of groups of experts
        if self._top_k not in (None, top_k):
            return result
        return self._select(scores, result)

    def _see(self, func: Callable[..., Any], result: Any) -> None:
        """Take note of the result of another function."""


class _Probe(SelectedExperts):
    """While a router runs: notes what it selects, and which tensors are sigmoids or a softmax."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts, None, self._note)
        self.top_k = list[int]()
        self.sigmoids, self.softmaxes = list[Tensor](), list[Tensor]()

    def _note(self, scores: Tensor, natural: Any) -> Any:
        self.top_k.append(natural.indices.shape[1])
        return natural

    def _see(self, func: Callable[..., Any], result: Any) -> None:
        if func in SIGMOID:
            self.sigmoids.append(result)
        elif func in _SOFTMAX:
            self.softmaxes.append(result)

    def outputs(self, result: Any) -> RouterOutputs | None:
        """Return where the tensors are in `result` of the router; None if one is not there."""
        if not isinstance(result, tuple) or not self.top_k:
            return None
        shapes = [x.shape[1:] if isinstance(x, Tensor) else None for x in result]
        computed = [*self.sigmoids, *self.softmaxes]
        logits, weights, indices = list[int](), list[int](), list[int]()
        for i, x in enumerate(result):
            if shapes[i] == (self.num_experts,) and x.is_floating_point():
                logits += [] if any(x is other for other in computed) else [i]
            elif shapes[i] == (self.top_k[0],):
                (weights if x.is_floating_point() else indices).append(i)
        if len(logits) == len(weights) == len(indices) == 1:
            return RouterOutputs(logits[0], weights[0], indices[0])
        return None


def router_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Yield name, module and router (None: no module of its own) of what contains `experts`."""
    for name, block in model.named_modules():
        children = dict(block.named_children())
        if "experts" in children:
            router = next((children[n] for n in _ROUTER_NAMES if n in children), None)
            yield name, block, router


def layer_index(name: str) -> int | None:
    """Return in which decoder layer a module of this name is; None: in none."""
    found = _LAYER.match(f"{name}.")
    return int(found[1]) if found else None


def find_routers(model: nn.Module, purpose: str = "router replay") -> list[Router]:
    """Return the routers of `model` in the order of its layers; the model may be sharded.

    purpose: what needs them, for messages.

    Raises:
        ModelError: it has none, or one that does not select by one `topk` over its experts.
    """
    routers = []
    for name, block, module in router_blocks(model):
        position = _LAYER.match(name)
        if module is None or type(module) is nn.Linear or position is None:
            raise ModelError(
                f"{purpose} does not support {type(block).__name__} of {type(model).__name__}: its "
                "experts are not selected by a router module of their own in a decoder layer"
            )
        try:
            found = _probe(module, block)
        except ModelError as error:
            raise ModelError(
                f"{purpose} does not support the router {type(module).__name__} of "
                f"{type(model).__name__}, which does not select its experts by one topk ({error})"
            ) from None
        routers.append(Router(module, block, int(position[1]), position[0], *found))
    if not routers:
        raise ModelError(
            f"{purpose} needs a mixture of experts, and {type(model).__name__} has no module "
            "`experts` with a router beside it"
        )
    check_alike([router.top_k for router in routers], f"{purpose}: the layers select", model)
    return routers


def check_alike(numbers: Sequence[int], what: str, model: nn.Module) -> None:
    """Raise ModelError if layers differ in a number of experts; what: for the message."""
    if len({*numbers}) > 1:
        raise ModelError(
            f"{what} different numbers of experts, {sorted({*numbers})}, which is not supported "
            f"({type(model).__name__})"
        )


def _probe(router: nn.Module, block: nn.Module) -> tuple[int, int, RouterOutputs | None, bool]:
    """Return (number of experts, experts per token, outputs, whether scores are sigmoids).

    By a call of the router on the meta device; what it takes besides hidden states are attributes
    of its block, of the same names. Raises ModelError if it calls no topk, or several.
    """
    shapes = {
        name: torch.empty(x.shape, dtype=x.dtype, device="meta")
        for named in (router.named_parameters(), router.named_buffers())
        for name, x in named
    }
    weight = next(
        (x for name, x in shapes.items() if name.endswith("weight") and x.ndim == 2), None
    )
    if weight is None:
        raise ModelError("its router has no weight")
    num_experts, hidden_size = weight.shape
    try:
        with torch.no_grad(), _Probe(num_experts) as probe:
            hidden = torch.empty(3, hidden_size, dtype=weight.dtype, device="meta")
            _, _, *others = inspect.signature(type(router).forward).parameters
            more = [getattr(block, name).to("meta") for name in others if hasattr(block, name)]
            result = torch.func.functional_call(router, shapes, (hidden, *more))
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise ModelError(str(error).partition("\n")[0]) from error
    if len(probe.top_k) != 1:
        raise ModelError(f"it calls topk over its {num_experts} experts {len(probe.top_k)} times")
    is_sigmoid = any(x.shape[-1] == num_experts for x in probe.sigmoids)
    return num_experts, probe.top_k[0], probe.outputs(result), is_sigmoid
