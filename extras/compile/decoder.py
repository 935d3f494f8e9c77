"""The decoder of a model whose passes over packed micro-batches are captured and replayed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel

from hybridengine.compile.graphs import Graphs, Probe, errors_named
from hybridengine.model.extensions import ModelHook, hooks_of
from hybridengine.model.replica import replica_of
from hybridengine.run.errors import ModelError

_ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")
_TOKENS = ("input_ids", "position_ids")  # [1, T]
_PLAIN = (type(None), bool, int, float, str)


def _round_up(number: int, bits: int, step: int = 1) -> int:
    """Return the next number with so many leading binary digits, a multiple of `step`."""
    step = max(step, 1 << max(0, (number - 1).bit_length() - bits))
    return -(-number // step) * step


class GraphedDecoder:
    """Replaces the forward of the decoder of `model`, in place.

    The first pass of a kind is left as it is, for what is made once. Of each size the first pass
    runs eagerly on padded inputs, the second one is captured. Weights are read where they are:
    values written in place are seen, and after a move to other memory everything is captured again.
    Gradients are added in the graph, to tensors that stay and become the `grad` of parameters. A
    parameter that is also used outside of the decoder, such as a tied embedding, gets its gradient
    by autograd.

    graphs: captures the passes.
    """

    def __init__(self, model: PreTrainedModel, graphs: Graphs) -> None:
        self.graphs, self._model = graphs, model
        self.decoder: nn.Module = model.get_decoder()
        self.forward = forward = self.decoder.forward
        self.name = type(self.decoder).__name__
        self._names = list(inspect.signature(forward).parameters)
        self.sums: dict[nn.Parameter, Tensor] = {}  # of gradients, by the parameter that has them
        self.added: list[nn.Parameter] | None = None  # to whose sums a pass before a capture adds
        self._slots: list[tuple[dict[str, Any], str]] = []  # of parameters in modules
        self._memory: list[Any] = []
        self._passes: dict[Any, _Pass] = {}
        self._seen, self._probed = set[Any](), set[Any]()

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(self._names, args, strict=False)) | kwargs
            if given.get(_ENDS[0]) is None:  # not packed, as in generation
                return forward(*args, **kwargs)
            return self._call(given)

        self.decoder.forward = call

    def _call(self, given: dict[str, Any]) -> Any:
        if not self._slots:
            self._find_state()
        self._check_memory()
        size = _Size.of(given)
        flags = tuple([read(module) for read, module in self._flags])
        has_grad = torch.is_grad_enabled() and self._is_trained
        key = (flags, _signature(given), has_grad, size.tokens)
        if key[:3] not in self._seen:
            self._seen.add(key[:3])
            return self.forward(**given)
        captured = self._passes.get(key)
        if captured is None or not captured.size.holds(size):
            size = size if captured is None else size.union(captured.size)
            captured = self._passes[key] = _Pass(self, given, size, has_grad)
        captured.load(given)
        if key[:2] not in self._probed:
            self._probe(captured)
            self._probed.add(key[:2])
        if not has_grad:
            return captured.output(captured.forward())
        return captured.output(_Decode.apply(captured, captured.anchor, *self.returned))

    def _find_state(self) -> None:
        """Find what a pass depends on: parameters, buffers and flags of the modules."""
        hooks = [x for x in hooks_of(self._model) if type(x).forward is not ModelHook.forward]
        if hooks:
            raise ModelError(
                f"model.cuda_graphs is true, but {type(hooks[0]).__name__} takes part in the "
                "passes of the model, which a replay does not call; set model.cuda_graphs=false"
            )
        if hasattr(self._model, "gathered_base"):
            raise ModelError(
                "model.cuda_graphs is true, but the frozen weights are gathered layer by layer, "
                "into other memory in each pass; set model.cuda_graphs=false"
            )
        modules = list(self.decoder.modules())
        self._slots = [(m._parameters, name) for m in modules for name in m._parameters]
        self._buffers = [(m._buffers, name) for m in modules for name in m._buffers]
        names = [(module, _flag_names(module)) for module in modules]
        self._flags = [(attrgetter(*flags), module) for module, flags in names if flags]
        inside = {*map(id, modules)}
        self._outer = [m._parameters for m in self._model.modules() if id(m) not in inside]

    def _check_memory(self) -> None:
        """Forget all passes if a parameter or buffer has other memory, or is frozen or trained."""
        parameters = [owner[name] for owner, name in self._slots]
        tensors = [*parameters, *(owner[name] for owner, name in self._buffers)]
        memory: list[Any] = [None if x is None else x.data_ptr() for x in tensors]
        memory += [p is not None and p.requires_grad for p in parameters]
        if memory == self._memory:
            return
        if any(isinstance(p, DTensor) for p in parameters):
            raise ModelError(
                "model.cuda_graphs is true, but FSDP2 gathers the weights, into other memory in "
                "each pass; set fsdp_config.fsdp_size=1, or model.cuda_graphs=false"
            )
        self._memory = memory
        self._passes.clear()
        replica = replica_of(self._model)
        copies = {} if replica is None else replica.copies
        masters = {id(copy): master for master, copy in copies.items()}
        unique = {id(p): p for p in parameters if p is not None}
        outer = {id(p) for owner in self._outer for p in owner.values()}
        self.returned = [p for i, p in unique.items() if i in outer and p.requires_grad]
        aliases = {i: nn.Parameter(p.detach(), p.requires_grad) for i, p in unique.items()}
        self._aliases = [aliases.get(id(p)) for p in parameters]
        self._returned = [aliases[id(p)] for p in self.returned]
        self._is_trained = any(p.requires_grad for p in unique.values())
        for i, alias in aliases.items():
            if alias.requires_grad and i not in outer:
                add = functools.partial(self._add_gradient, masters.get(i, unique[i]))
                alias.register_post_accumulate_grad_hook(add)

    def _probe(self, captured: _Pass) -> None:
        """Run a forward that refuses what a replay would not see."""
        known = [*captured.tensors.values(), *self._aliases, *self.decoder.buffers()]
        inputs = [x for x in known if x is not None]
        eager = torch.compiler.set_stance("force_eager")  # a mode cannot see into compiled layers
        named = errors_named(f"the forward of {self.name}")
        with named, eager, torch.no_grad(), self.aliased(), Probe(inputs):
            self.forward(**captured.arguments)
        for module in self.decoder.modules():
            checkpoint = getattr(module, "_gradient_checkpointing_func", None)
            if isinstance(checkpoint, functools.partial):  # no random numbers have been drawn
                checkpoint.keywords["preserve_rng_state"] = False

    @contextmanager
    def aliased(self) -> Iterator[None]:
        """Let the modules compute with leaves of their own, over the memory of the parameters.

        A leaf of a capture must not be one of an eager pass: autograd would add to its gradient on
        the stream of that pass.
        """
        parameters = [owner[name] for owner, name in self._slots]
        for (owner, name), alias in zip(self._slots, self._aliases, strict=True):
            owner[name] = alias
        try:
            yield
        finally:
            for (owner, name), parameter in zip(self._slots, parameters, strict=True):
                owner[name] = parameter

    def take_returned(self) -> list[Tensor | None]:
        """Return the gradients that the last backward has computed for autograd to add."""
        grads = [alias.grad for alias in self._returned]
        for alias in self._returned:
            alias.grad = None
        return grads

    @torch.no_grad()
    def _add_gradient(self, parameter: nn.Parameter, alias: Tensor) -> None:
        grad, alias.grad = alias.grad, None
        assert grad is not None
        if self.added is not None:
            if parameter not in self.sums:
                self.sums[parameter] = torch.zeros_like(parameter)
            self.begin_sums([parameter])
            self.added.append(parameter)
        self.sums[parameter] += grad

    @torch.no_grad()
    def begin_sums(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let the sums of gradients go on from those that the parameters have."""
        others = [p for p in parameters if p.grad is not self.sums[p]]
        given = {self.sums[p]: p.grad for p in others if p.grad is not None}
        if len(given) < len(others):
            torch._foreach_zero_([self.sums[p] for p in others if p.grad is None])
        if given:
            torch._foreach_copy_([*given], [*given.values()])
        for parameter in others:
            parameter.grad = self.sums[parameter]


@dataclass(frozen=True)
class _Size:
    """Of a micro-batch, rounded up: tokens, ends of sequences, and the longest sequence."""

    tokens: int
    ends: int
    longest: int

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _Size:
        num_tokens = given["input_ids"].shape[-1] if given.get("input_ids") is not None else 0
        if not num_tokens:
            raise ModelError(
                "model.cuda_graphs is true, but the decoder gets no input_ids, as with images; "
                "set model.cuda_graphs=false"
            )
        tokens = _round_up(num_tokens, 4, 64)
        longest = max(given.get(_LONGEST[0]) or num_tokens, tokens - num_tokens)
        ends = given[_ENDS[0]].numel() + 1
        return cls(tokens, _round_up(ends, 1), min(_round_up(longest, 1), tokens))

    def holds(self, other: _Size) -> bool:
        return self.union(other) == self

    def union(self, other: _Size) -> _Size:
        ends, longest = max(self.ends, other.ends), max(self.longest, other.longest)
        return _Size(self.tokens, ends, longest)


class _Pass:
    """Forward and backward over micro-batches of one size, with inputs in memory of their own.

    arguments: of the decoder. tensors: those of them that are filled for each micro-batch.
    anchor: requires a gradient, so that autograd calls the backward; it gets none.
    """

    def __init__(
        self, owner: GraphedDecoder, given: Mapping[str, Any], size: _Size, has_grad: bool
    ) -> None:
        self.size, self.owner, self._has_grad = size, owner, has_grad
        ids = given["input_ids"]
        self.tensors = {
            name: x.new_empty(size.ends if name in _ENDS else (*x.shape[:-1], size.tokens))
            for name, x in given.items()
            if isinstance(x, Tensor)
        }
        if given.get(_ENDS[1]) is given[_ENDS[0]]:  # attention compares the objects
            self.tensors[_ENDS[1]] = self.tensors[_ENDS[0]]
        longest = {name: size.longest for name in _LONGEST if name in given}
        self.arguments = {**given, **self.tensors, **longest}
        self.anchor = torch.zeros((), device=ids.device, requires_grad=True)
        self._positions = torch.arange(size.tokens, device=ids.device)
        self._num_tokens, self._is_warm = 0, False
        self._hidden: Any = None  # of the newest forward, [1, T, H]
        self._grad_hidden: Any = None
        self._replays: list[Callable[[], object]] = []
        self._returned: list[Tensor | None] = []
        self._trained: list[nn.Parameter] = []
        self._output: Any = None

    def load(self, given: Mapping[str, Any]) -> None:
        """Copy the arguments of a micro-batch, and pad them by a sequence of its own."""
        self._num_tokens = given["input_ids"].shape[-1]
        for name, tensor in self.tensors.items():
            count = given[name].shape[-1]
            tensor[..., :count].copy_(given[name])
            rest = tensor[..., count:]
            if name == "position_ids":
                rest.copy_(self._positions[: rest.shape[-1]])
            else:
                rest.fill_(self.size.tokens if name in _ENDS else 0)

    def forward(self) -> Tensor:
        """Return the hidden states of the loaded micro-batch, in memory of their own."""
        graphs = self.owner.graphs
        graphs.runs += 1
        if not self._is_warm:
            with errors_named(f"the forward of {self.owner.name}"):
                self._hidden = graphs.warm_up(self._run_forward)
            self._is_warm = not self._has_grad
        else:
            if not self._replays:
                with errors_named(f"the passes of {self.owner.name}"):
                    self._capture(graphs)
            self._replays[0]()
        return self._hidden.detach()[:, : self._num_tokens].clone()

    def backward(self, grad: Tensor) -> list[Tensor | None]:
        """Add the gradients of the parameters; return those of `GraphedDecoder.returned`."""
        graphs, n = self.owner.graphs, grad.shape[1]
        graphs.runs += 1
        if self._grad_hidden is None:
            self._grad_hidden = torch.empty_like(self._hidden, requires_grad=False)
        self._grad_hidden[:, :n].copy_(grad)
        self._grad_hidden[:, n:].zero_()
        self.owner.begin_sums(self._trained)
        if self._replays:
            self._replays[1]()
            return [None if x is None else x.clone() for x in self._returned]
        self._trained = self.owner.added = []
        try:
            with errors_named(f"the backward of {self.owner.name}"):
                return graphs.warm_up(self._run_backward)
        finally:
            self.owner.added, self._hidden, self._is_warm = None, None, True

    def _capture(self, graphs: Graphs) -> None:
        self._hidden, replay = graphs.capture(self._run_forward)
        replays = [replay]
        if self._has_grad:
            self._returned, replay = graphs.capture(self._run_backward)
            replays.append(replay)
        self._hidden, self._replays = self._hidden.detach(), replays

    def _run_forward(self) -> Tensor:
        with torch.set_grad_enabled(self._has_grad), self.owner.aliased():
            leaves, spec = tree_flatten(self.owner.forward(**self.arguments))
        hidden = [x for x in leaves if isinstance(x, Tensor)]
        if len(hidden) != 1:
            raise ModelError(
                f"model.cuda_graphs is true, but {self.owner.name} returns {len(hidden)} tensors, "
                "expected the hidden states alone; set model.cuda_graphs=false"
            )
        self._output = [None if isinstance(x, Tensor) else x for x in leaves], spec
        return hidden[0]

    def _run_backward(self) -> list[Tensor | None]:
        with self.owner.aliased():
            torch.autograd.backward(self._hidden, self._grad_hidden)
        return self.owner.take_returned()

    def output(self, hidden: Tensor) -> Any:
        """Return what the decoder returns, with these hidden states."""
        leaves, spec = self._output
        return tree_unflatten([hidden if x is None else x for x in leaves], spec)


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: _Pass, anchor: Tensor, *returned: Tensor) -> Tensor:
        hidden = captured.forward()
        ctx.captured, ctx.run = captured, captured.owner.graphs.runs
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        captured: _Pass = ctx.captured
        if ctx.run != captured.owner.graphs.runs:
            raise ModelError(
                "model.cuda_graphs is true, and a later pass has overwritten what this backward "
                "reads; call backward once, before the next forward, or set model.cuda_graphs=false"
            )
        return None, None, *captured.backward(grad)


def _signature(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a capture takes as it is; ModelError for an argument that cannot be padded."""
    parts: list[Any] = []
    for name, value in given.items():
        if isinstance(value, Tensor):
            if name not in (*_TOKENS, *_ENDS):
                raise ModelError(
                    f"model.cuda_graphs is true, but the decoder gets the tensor {name} "
                    f"{list(value.shape)}, which is not padded; set model.cuda_graphs=false"
                    + (", or actor.shared_prefix=off" if name == "subtree_ends" else "")
                )
            parts.append((name, value.dtype, value.shape[:-1]))
        elif name not in _LONGEST:
            if not isinstance(value, _PLAIN):
                raise ModelError(
                    f"model.cuda_graphs is true, but the decoder gets {name}, a "
                    f"{type(value).__name__}, which may change; set model.cuda_graphs=false"
                )
            parts.append((name, value))
    return *parts, given.get(_ENDS[1]) is given[_ENDS[0]]


def _flag_names(module: nn.Module) -> list[str]:
    """Return the attributes of a module that are True or False, such as `training`."""
    names = {"training"}
    for kind in type(module).__mro__:
        if kind not in nn.Module.__mro__:
            names |= {name for name, x in vars(kind).items() if isinstance(x, bool)}
    return sorted(names | {name for name, x in vars(module).items() if isinstance(x, bool)})
