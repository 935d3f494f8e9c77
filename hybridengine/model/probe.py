"""A small copy of a model, of its own code: random weights, narrow layers, one layer of each kind.

It shows what the code does with its inputs, in milliseconds and without reading weights. Lengths
from which on layers compute otherwise (a sliding window, the number of keys that sparse attention
selects, the length for which a rotary embedding was trained) are short in it.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

from hybridengine.model.attention import attention_of
from hybridengine.model.extensions import experts_implementation, prepare_model
from hybridengine.model.rotary import fix_rotary_length
from hybridengine.model.validation import (
    longest_sequence,
    meta_model,
    rotary_parameters,
    takes_images,
)
from hybridengine.run.errors import ModelError, reason_of

SHORT = 8  # tokens of a window; the length of a rotary embedding is twice that

_HIDDEN, _WIDTH, _ROWS = 64, 16, 256  # the width, that of MLPs, and of embeddings
_MAX_ELEMENTS = 1 << 30
_WIDTH_NAMES = re.compile(r"intermediate_size|ffn_dim|ffn_hidden_size|n_inner")
_WINDOW_NAMES = re.compile(r"(^|_)window(_size)?$")
# Sparse attention: how many keys an indexer selects, or how many blocks of how many keys.
_SELECTION_NAMES = re.compile(r"^index(er)?_(topk|budget|block_size)")
_ORIGINAL = "original_max_position_embeddings"
_INDEX_NAMES = {"layer_idx", "layer_id", "layer_number", "layer_index"}


class Call(NamedTuple):
    """The first tensors that a call of a module got and returned; None: there was none."""

    input: Tensor | None
    output: Tensor | None


class Trace(NamedTuple):
    """A forward pass: its calls of modules in the order of their ends, and its result.

    calls: by the module and the number of earlier calls of it.
    """

    calls: dict[tuple[str, int], Call]
    result: Tensor


class Probe:
    """A small copy of the model of `config`, in float32 on the CPU, without its output head.

    Attributes:
        model: the copy, with our attention.
        token_ids: ids of embeddings that it has, no special tokens.

    Raises:
        ModelError: it cannot run, or does not call its attention through AttentionInterface.
    """

    def __init__(self, config: PretrainedConfig, trust_remote_code: bool) -> None:
        self.token_ids = _plain_tokens(config)
        self._calls: dict[tuple[str, int], Call] = {}
        reasons: list[Exception] = []
        # In a model's own code, sizes may depend on each other in any way.
        for narrow, shorten in itertools.product(("heads", "MLPs", ""), (True, False)):
            try:
                self._build(_shortened(config, narrow), trust_remote_code, shorten)
                return
            except ModelError:
                raise
            except Exception as error:
                reasons.append(error)
        reason = f"{type(reasons[0]).__name__}: {reason_of(reasons[0])}"
        raise ModelError(
            f"its forward fails ({reason}); use a model that runs with transformers "
            f"{transformers.__version__}"
        ) from reasons[0]

    def _build(self, config: PretrainedConfig, trust_remote_code: bool, shorten: bool) -> None:
        self.model, self._eager = (
            _on_meta(copy.deepcopy(config), attention, trust_remote_code)
            for attention in (attention_of(config), "eager")
        )
        for model in (self.model, self._eager):
            if shorten:
                _keep_each_kind(model)
            if (head := model.get_output_embeddings()) is not None:
                head.forward = lambda hidden: hidden
            for name, module in model.named_modules():
                module.register_forward_hook(self._hook(name), with_kwargs=True)
        _place(self.model, self.model.get_decoder() if takes_images(config) else self.model)
        for own, other in zip(self.model.modules(), self._eager.modules(), strict=True):
            other._parameters, other._buffers = own._parameters, own._buffers
        for model in (self.model, self._eager):
            fix_rotary_length(model)
        self.draw(0)
        self.alone(torch.tensor(self.token_ids[:3]))

    def _hook(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            number = next(n for n in itertools.count() if (name, n) not in self._calls)
            given = _first_tensor([*args, *kwargs.values()])
            self._calls[name, number] = Call(given, _first_tensor(output))

        return note

    def draw(self, seed: int) -> None:
        """Draw weights of a scale at which values keep their size from layer to layer."""
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(1 << 20, generator=generator)
        for i, (name, parameter) in enumerate(self.model.named_parameters()):
            if parameter.is_meta:
                continue
            flat, own = parameter.data.view(-1), numbers[i * 1009 % (1 << 19) :]
            for part in flat.split(len(own)):  # repeated, as drawing more would take longer
                part.copy_(own[: len(part)])
            if parameter.ndim > 1:
                flat.mul_(parameter.shape[-1] ** -0.5)
            else:
                flat.mul_(0.1).add_(float(name.endswith("weight")))

    def alone(self, ids: Tensor) -> Trace:
        """Compute a sequence [L] with transformers' own attention and masks."""
        return self.trace(lambda: self._eager(input_ids=ids[None], use_cache=False).logits[0])

    def trace(self, forward: Callable[[], Tensor]) -> Trace:
        """Return the calls of modules in `forward`, and what it returns."""
        self._calls = {}
        result = forward()
        return Trace(self._calls, result)


def _on_meta(config: PretrainedConfig, attention: Any, trust_remote_code: bool) -> Any:
    model = meta_model(
        config,
        trust_remote_code,
        dtype=torch.float32,
        attn_implementation=attention,
        experts_implementation=experts_implementation(),
    )
    prepare_model(model)
    if not model._supports_attention_backend:
        raise ModelError(
            f"{type(model).__name__} does not call its attention through transformers' "
            "AttentionInterface"
        )
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # may be a row that `_place` drops
    return model.eval()


def _place(model: Any, body: nn.Module) -> None:
    """Allocate the tensors of `body` and of the embedding, and fill computed buffers."""
    modules = {*body.modules(), model.get_input_embeddings()} - {model.get_output_embeddings()}
    placed = {
        (module, name): x[:_ROWS] if isinstance(module, nn.Embedding) else x
        for module in modules
        for name, x in module._parameters.items()
        if x is not None
    }
    if (total := sum(x.numel() for x in placed.values())) > _MAX_ELEMENTS:
        raise MemoryError(f"{total:,} weights in one layer of each kind")
    for (module, name), x in placed.items():
        parameter = nn.Parameter(torch.empty_like(x, device="cpu"), requires_grad=False)
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        module._parameters[name] = parameter
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    model.initialize_weights()


def _shortened(config: PretrainedConfig, narrow: str) -> PretrainedConfig:
    """Return `config` with short lengths.

    narrow: "MLPs": also with narrow ones; "heads": and with fewer of them.
    """
    config = copy.deepcopy(config)
    text, limit = config.get_text_config(), longest_sequence(config)
    changes: dict[str, Any] = {}
    for name, value in text.to_dict().items():
        if _WIDTH_NAMES.search(name) and narrow:
            if isinstance(value, int):
                changes[name] = min(value, _WIDTH)
            elif isinstance(value, list):
                changes[name] = [min(x, _WIDTH) for x in value]
        elif _WINDOW_NAMES.search(name) and type(value) is int and (limit is None or value < limit):
            changes[name] = min(value, SHORT)  # one that no sequence exceeds has no effect
        elif _SELECTION_NAMES.search(name) and isinstance(value, int):
            changes[name] = min(value, 2 if "block" in name else SHORT)
    if narrow == "heads":
        changes |= _fewer_heads(text)
    for rope in rotary_parameters(config):
        if rope.get("rope_type") == "longrope":
            rope[_ORIGINAL] = 2 * SHORT
            if getattr(text, _ORIGINAL, None):
                changes[_ORIGINAL] = 2 * SHORT
    for name, value in changes.items():
        setattr(text, name, value)
    return config


def _fewer_heads(text: PretrainedConfig) -> dict[str, int]:
    """Return a smaller width and fewer heads in the same groups, but not one alone."""
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size")
    sizes = {n: x for n in names if isinstance(x := getattr(text, n, None), int)}
    free = text.to_dict().get("head_dim") is not None  # of the width
    factor = math.gcd(*(x for n, x in sizes.items() if n != "hidden_size" or not free))
    if factor == sizes.get("num_attention_heads") and factor % 2 == 0:
        factor //= 2
    smaller = {name: size // factor for name, size in sizes.items()}
    return smaller | ({"hidden_size": min(_HIDDEN, text.hidden_size)} if free else {})


def _keep_each_kind(model: Any) -> None:
    """Drop layers from the end of `model` that equal others in all but their weights."""
    lists = list(_outermost_lists(model.get_decoder()))
    num_layers = max((len(layers) for _, _, layers in lists), default=0)
    columns = [
        column
        for column in model.config.get_text_config().to_dict().values()
        if isinstance(column, list) and len(column) == num_layers
    ]
    lists = [found for found in lists if len(found[2]) == num_layers]
    kinds = [
        ([column[i] for column in columns], [_kind(layers[i]) for _, _, layers in lists])
        for i in range(num_layers)
    ]
    for parent, name, layers in lists:  # up to the first layer of the kind that comes last
        setattr(parent, name, layers[: 1 + max(map(kinds.index, kinds))])


def _outermost_lists(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.ModuleList]]:
    """Yield (parent, name, list) of the lists of modules that are in no other list."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield module, name, child
        else:
            yield from _outermost_lists(child)


def _kind(layer: nn.Module) -> list[Any]:
    """Return what makes one layer compute something else than another."""
    plain = (bool, int, str, type(None))  # a number such as a scale does not make another kind
    return [
        (
            name,
            type(module),
            {
                k: v
                for k, v in vars(module).items()
                if k not in _INDEX_NAMES and isinstance(v, plain)
            },
            [parameter.shape for parameter in module.parameters(recurse=False)],
        )
        for name, module in layer.named_modules()
    ]


def _plain_tokens(config: PretrainedConfig) -> list[int]:
    """Return ids of rows that embeddings of the copy have, without those of special tokens."""
    text, special = config.get_text_config(), set[Any]()
    for name, value in (config.to_dict() | text.to_dict()).items():
        if "token" in name and isinstance(value, int | list):
            special.update(value if isinstance(value, list) else [value])
    rows = min(_ROWS, getattr(text, "vocab_size", _ROWS))
    return [i for i in range(rows) if i not in special]


def _first_tensor(values: Any) -> Tensor | None:
    if isinstance(values, Tensor):
        return values
    if isinstance(values, dict):
        values = values.values()
    found: Iterator[Tensor] = (x for x in values if isinstance(x, Tensor)) if values else iter(())
    return next(found, None)
