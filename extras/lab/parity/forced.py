"""The trained model run on an engine's values: the difference of every operator by itself.

The forward pass of the trained model runs over the same tokens. After each point its value is
recorded and replaced by the engine's, so the next operator has the engine's input. What differs at
a point is then the operator's own, not what earlier ones passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybridengine.lab.parity.points import LOGITS, EngineRecord
from hybridengine.model.parameters import unwrapped_name

Forward = Callable[[nn.Module, Tensor], Tensor]  # model, token_ids [T] -> logits [T, V]


class ForcedForward:
    """One forward pass over the tokens of `record`.

    Attributes:
        record: what the engine computed.
        points: what the trained model computed from the engine's inputs, for the same rows.
        attention: by the name of its module, the keyword arguments that attention was called with.
    """

    def __init__(self, model: nn.Module, record: EngineRecord, forward: Forward) -> None:
        record = _scaled_embedding(model, record)
        self.record = record
        self._rows = torch.tensor(record.positions)
        self.points, self.attention = dict[str, Tensor](), dict[str, dict[str, Any]]()
        tokens = torch.tensor(record.token_ids[:-1], device=next(model.parameters()).device)
        with torch.no_grad(), self._hooked(model):
            self.logits = forward(model, tokens)[record.num_prompt - 1 :].float()
        self._forced(LOGITS, self.logits)

    @contextmanager
    def _hooked(self, model: nn.Module) -> Iterator[None]:
        names = {id(module): _module_name(name) for name, module in model.named_modules()}
        with ExitStack() as stack:
            for module in model.modules():
                name = names[id(module)]
                if name in self.record.points and name != LOGITS:
                    handle = module.register_forward_hook(self._replace_output(name))
                    stack.callback(handle.remove)
                if name.endswith(".down_proj"):
                    point = name.removesuffix("down_proj") + "activation"
                    handle = module.register_forward_pre_hook(self._replace_input(point))
                    stack.callback(handle.remove)
            implementation = model.config._attn_implementation  # type: ignore[union-attr]
            if implementation not in ALL_ATTENTION_FUNCTIONS:
                raise ValueError(
                    f"attn_implementation is {implementation!r}, whose operands cannot be "
                    "recorded; load the model with 'sdpa'"
                )
            function = ALL_ATTENTION_FUNCTIONS[implementation]
            forced = {implementation: self._attention(function, names)}
            # The table's own entries, which go before those of transformers.
            stack.enter_context(patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping, forced))
            yield

    def _replace_output(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple, out: Any) -> Any:
            if not isinstance(out, tuple):
                return self._forced(name, out)
            return (self._forced(name, out[0]), *out[1:])

        return hook

    def _replace_input(self, name: str) -> Any:
        return lambda module, args: (self._forced(name, args[0]), *args[1:])

    def _attention(self, function: Any, names: dict[int, str]) -> Any:
        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            name = names[id(module)]
            self.attention[name] = kwargs
            query, key = (
                self._forced(f"{name}.{operand}", x.transpose(1, 2)).transpose(1, 2)
                for operand, x in (("query", query), ("key", key))
            )
            out, weights = function(module, query, key, value, *args, **kwargs)
            return self._forced(f"{name}.attention", out), weights

        return attention

    def _forced(self, name: str, value: Tensor) -> Tensor:
        """Record `value` [1, T, ...] or [T, ...]; return it with the engine's rows."""
        theirs = self.record.points.get(name)
        if theirs is None:
            return value
        if name in self.record.heads_first:  # [1, H, T, D]
            value = value.transpose(1, 2)
        shape = value.shape
        rows = value.reshape(-1, theirs[0].numel())
        if name == LOGITS:
            self.points[name] = rows
            return value
        rows = rows.clone()
        own = self._rows.to(rows.device)
        self.points[name] = rows[own].clone()
        rows[own] = theirs.reshape(len(own), -1).to(rows)
        forced = rows.view(shape)
        return forced.transpose(1, 2) if name in self.record.heads_first else forced


def _scaled_embedding(model: nn.Module, record: EngineRecord) -> EngineRecord:
    """Return the record with embeddings that are scaled inside of the trained model's module."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    scale = getattr(embedding, "scalar_embed_scale", 1.0)
    name = next(_module_name(n) for n, module in model.named_modules() if module is embedding)
    if scale == 1.0 or name not in record.points:
        return record
    return replace(record, points=record.points | {name: record.points[name] * scale})


def _module_name(name: str) -> str:
    """Return a module's name without the prefixes of PEFT and of modules that wrap others."""
    name = unwrapped_name(f"{name}.").rstrip(".")
    return name.removeprefix("base_model.model.")
