"""What an engine computes at the points that it shares with the trained model, token by token.

A point is the result of one operator, by the trained model's name of its module:
`model.layers.3.self_attn.q_proj`. Operators that are no modules have names of their own: `.query`
and `.key` of attention are behind the rotary embedding, `.attention` is before `o_proj`, and
`mlp.activation` is before `down_proj`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hybridengine.engine.response import pack_kept
from hybridengine.engine.vllm.sampling import record_kept_ids
from hybridengine.kernels import block_quantize
from hybridengine.model import KeptIds, adapter_shards, parameter_shards
from hybridengine.sync.layout import Copy, EngineLayout, Region
from hybridengine.sync.shards import full_tensor

LOGITS = "lm_head"


@dataclass
class EngineRecord:
    """One response and what the engine computed for it.

    token_ids: the tokens of prompt and response.
    num_prompt: how many of them are the prompt.
    log_probs: the log-probs of the response's tokens that the engine returned.
    positions: the ascending positions of the tokens that went through the model. A cached prefix
      did not, nor did the last token.
    points: a float tensor [len(positions), ...] by name, in the order of computation; that of
      LOGITS is [tokens of the response, V].
    heads_first: points whose module has [1, H, T, D] in the trained model, such as norms of heads.
    inputs: what each norm received, a tensor of the same rows by name.
    kept: the vocabulary entries that sampling kept for each token of the response, where recorded.
    """

    token_ids: list[int]
    num_prompt: int
    log_probs: list[float]
    positions: list[int]
    points: dict[str, Tensor]
    inputs: dict[str, Tensor]
    kept: KeptIds | None = None
    heads_first: frozenset[str] = frozenset()


@dataclass
class _Rows:
    """Rows in the order of computation, by point; tokens: number of tokens of the newest step."""

    tokens: int = 0
    positions: list[int] = field(default_factory=list)
    points: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    heads_first: set[str] = field(default_factory=set)
    inputs: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, value: Tensor) -> None:
        if value.dim() == 4 and value.shape[1] != self.tokens:
            self.heads_first.add(name)
        self.points[name].append(self.without_batch(value.detach()).clone())

    def without_batch(self, x: Tensor) -> Tensor:
        """Return what is [1, T, ...] in vLLM's models of transformers as [T, ...]."""
        return x[0] if x.dim() == 4 or (x.shape[:2] == (1, self.tokens) and x.dim() > 2) else x

    def joined(self) -> dict[str, Tensor]:
        """Return the rows of all steps by point; none of modules called more than once."""
        joined = dict[str, Tensor]()
        for name, parts in self.points.items():
            is_turned = name in self.heads_first
            rows = torch.cat([x.transpose(0, 1) for x in parts] if is_turned else parts)
            if name == LOGITS or len(rows) == len(self.positions):
                joined[name] = rows
        return joined


def record_engine(
    llm: Any, token_ids: Sequence[int], sampling: Any, *, record_kept: bool = False
) -> EngineRecord:
    """Generate one response to a prompt by `vllm.LLM` in this process, and record every point.

    The engine must run eagerly (`enforce_eager=True`), as a compiled model calls no modules.
    """
    model = engine_model(llm)
    rows = _Rows()
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    recording_kept = record_kept_ids(llm, runner) if record_kept else nullcontext()
    with _recording(model, rows), recording_kept:
        [output] = llm.generate([{"prompt_token_ids": list(token_ids)}], sampling, use_tqdm=False)
    [response] = output.outputs
    log_probs = [
        at[token].logprob for at, token in zip(response.logprobs, response.token_ids, strict=True)
    ]
    kept = None
    if record_kept:
        vocab_size = llm.llm_engine.model_config.get_vocab_size()
        masks = response.sampling_mask.token_ids if response.sampling_mask else []
        columns = pack_kept(response.token_ids, masks, vocab_size)
        ids, counts = (
            torch.tensor(columns[x], dtype=torch.int32) for x in ("kept_ids", "num_kept")
        )
        kept = KeptIds.from_counts(ids, counts)
    return EngineRecord(
        [*token_ids, *response.token_ids],
        len(token_ids),
        log_probs,
        rows.positions,
        rows.joined(),
        {name: torch.cat(parts) for name, parts in rows.inputs.items()},
        kept,
        frozenset(rows.heads_first),
    )


def engine_model(llm: Any) -> nn.Module:
    """Return the model that `llm` runs in this process."""
    executor = getattr(llm.llm_engine, "model_executor", None)
    if executor is None:
        raise ValueError(
            "the engine's model is in another process; set VLLM_ENABLE_V1_MULTIPROCESSING=0 before "
            "vLLM is imported"
        )
    model: nn.Module = executor.driver_worker.worker.model_runner.get_model()
    return model


@contextmanager
def _recording(model: nn.Module, rows: _Rows) -> Iterator[None]:
    with ExitStack() as stack:

        def note_positions(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            positions = kwargs["positions"] if "positions" in kwargs else args[1]
            rows.tokens = positions.shape[-1]
            rows.positions += positions.reshape(-1, rows.tokens)[0].tolist()

        handle = model.register_forward_pre_hook(note_positions, with_kwargs=True)
        stack.callback(handle.remove)
        for name, module in model.named_modules():
            owner = model.get_submodule(name.rpartition(".")[0])
            for handle in _hooks(_trained_name(model, name), module, owner, rows):
                stack.callback(handle.remove)
        yield


def _trained_name(model: Any, name: str) -> str:
    """Return transformers' name of a module of vLLM, which has others for those of gpt_oss.

    Where vLLM runs transformers' decoder, its name in vLLM is `model`.
    """
    base = getattr(getattr(model, "model", None), "base_model_prefix", None)
    if base is not None and name.startswith("model."):
        name = f"{base}.{name.removeprefix('model.')}"
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    name = f"{name}.weight"
    for old, new in getattr(mapper, "orig_to_new_substr", {}).items():
        name = name.replace(new, old) if new else name
    for old, new in getattr(mapper, "orig_to_new_suffix", {}).items():
        if new and new.endswith(".weight") and name.endswith(new):
            name = name.removesuffix(new) + old
    return name.removesuffix(".weight")


def _hooks(name: str, module: nn.Module, owner: Any, rows: _Rows) -> Iterator[Any]:
    """Register what records `module` of vLLM, in the module `owner`; yield the handles."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

    parent = name.rpartition(".")[0]
    if isinstance(module, Attention):

        def note_operands(module: nn.Module, args: tuple) -> None:
            for operand, value in zip(("query", "key"), args, strict=False):
                rows.add(f"{parent}.{operand}", value.flatten(1))

        yield module.register_forward_pre_hook(note_operands)
        head = module.head_size
        used = getattr(owner, "v_head_dim", head)  # of latent attention, whose values are padded

        def note_result(module: nn.Module, args: tuple, out: Tensor) -> None:
            rows.add(f"{parent}.attention", out.view(len(out), -1, head)[..., :used].flatten(1))

        yield module.register_forward_hook(note_result)
    elif isinstance(module, QKVParallelLinear):
        head, last = module.head_size, getattr(module, "v_head_size", module.head_size)
        sizes = (module.num_heads * head, module.num_kv_heads * head, module.num_kv_heads * last)
        names = [f"{parent}.{part}_proj" for part in "qkv"]
        yield module.register_forward_hook(_split(rows, names, sizes))
    elif isinstance(module, MergedColumnParallelLinear) and name.endswith(".gate_up_proj"):
        half = module.output_size_per_partition // 2
        names = [f"{parent}.gate_proj", f"{parent}.up_proj"]
        yield module.register_forward_hook(_split(rows, names, (half, half)))
    elif name == "logits_processor":
        yield module.register_forward_hook(lambda module, args, out: rows.add(LOGITS, out))
    elif type(module).__name__.endswith("RMSNorm"):

        def note_input(module: nn.Module, args: tuple) -> None:
            given = sum(x.detach().double() for x in args if x is not None)
            rows.inputs[name].append(rows.without_batch(given))

        yield module.register_forward_pre_hook(note_input)
        yield module.register_forward_hook(lambda module, args, out: rows.add(name, _first(out)))
    elif name.endswith(".act_fn"):
        return  # with the product: `mlp.activation`
    elif name.endswith((".experts", ".down_proj")) or not any(True for _ in module.children()):
        if name.endswith(".down_proj"):
            yield module.register_forward_pre_hook(
                lambda module, args: rows.add(f"{parent}.activation", args[0])
            )
        yield module.register_forward_hook(lambda module, args, out: _add_first(rows, name, out))


def _split(rows: _Rows, names: Sequence[str], sizes: Sequence[int]) -> Any:
    def note(module: nn.Module, args: tuple, out: Any) -> None:
        for name, part in zip(names, _first(out).split(list(sizes), -1), strict=True):
            rows.add(name, part)

    return note


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def _add_first(rows: _Rows, name: str, out: Any) -> None:
    if isinstance(value := _first(out), Tensor):
        rows.add(name, value)


@dataclass(frozen=True)
class WeightFault:
    """A part of an engine tensor that is not the trained weight; cause: a clause, in words."""

    parameter: str
    tensor: str
    cause: str

    @property
    def point(self) -> str:
        """The operator that multiplies with it, or adds it."""
        return self.parameter.removesuffix(".weight").removesuffix(".bias")


class TrainedWeights:
    """The full weights of a model, its adapters merged. Collective where it is sharded."""

    def __init__(self, model: nn.Module) -> None:
        self._shards, self._adapters = parameter_shards(model), adapter_shards(model)

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def base(self, name: str) -> Tensor:
        return full_tensor(self._shards[name])

    def merged(self, name: str) -> Tensor:
        adapter = self._adapters.get(name)
        return self.base(name) if adapter is None else adapter.merge_full(self._shards[name])

    def is_adapted(self, name: str) -> bool:
        return name in self._adapters


def find_weight_faults(
    weights: TrainedWeights, layout: EngineLayout, tensors: Mapping[str, Tensor]
) -> Iterator[WeightFault]:
    """Yield the parameters that differ in the engine, in the order of its tensors.

    tensors: of the engine, by the names of `layout.destinations`. One that is empty, because the
    engine keeps it in another form, is not compared.
    """
    by_tensor: dict[str, list[Copy]] = {}
    for copy in layout.copies:
        by_tensor.setdefault(copy.destination, []).append(copy)
    for name, copies in by_tensor.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.numel() == 0:
            continue
        if name in layout.quantized:
            yield from _quantized_faults(weights, layout, tensors, name, copies)
            continue
        regions = [
            (_region(tensor, c.written), _region(weights.merged(c.source), c.read).to(tensor))
            for c in copies
        ]
        for copy, (got, want) in zip(copies, regions, strict=True):
            if torch.equal(got, want):
                continue
            others = [c.source for c, (_, w) in zip(copies, regions, strict=True) if _same(got, w)]
            cause = f"it is {others[0]}" if others else _cause(weights, copy, got, want)
            yield WeightFault(copy.source, name, cause)


def tied_head_faults(
    weights: TrainedWeights, tensors: Mapping[str, Tensor]
) -> Iterator[WeightFault]:
    """Yield the head of an engine that keeps a copy of an embedding that it is tied to."""
    embedding = "model.embed_tokens.weight"
    head = tensors.get("lm_head.weight")
    if head is None or embedding not in weights or "lm_head.weight" in weights:
        return
    want = weights.merged(embedding)
    if not torch.equal(head[: len(want)], want.to(head)):
        yield WeightFault(
            "lm_head.weight",
            "lm_head.weight",
            "the trained model's head is its embedding, and the engine's was not updated with it",
        )


def _quantized_faults(
    weights: TrainedWeights,
    layout: EngineLayout,
    tensors: Mapping[str, Tensor],
    name: str,
    copies: list[Copy],
) -> Iterator[WeightFault]:
    """Of an FP8 tensor, which is quantized from the values of all its parameters."""
    how, tensor = layout.quantized[name], tensors[name]
    values = torch.zeros(tensor.shape, dtype=how.dtype, device=tensor.device)
    for copy in copies:
        full = weights.merged(copy.source)
        _region(values, copy.written).copy_(_region(full, copy.read))
    wanted, scales = block_quantize(values)
    is_scaled = torch.equal(tensors[how.scale], scales)
    if not torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8)):
        state = "as well as their scales" if not is_scaled else "while their scales are"
        yield WeightFault(
            copies[0].source, name, f"its FP8 values are not the trained ones, {state}"
        )
    elif not is_scaled:
        yield WeightFault(
            copies[0].source, how.scale, "its FP8 values are the trained ones, the scales are older"
        )


def _region(tensor: Tensor, region: Region) -> Tensor:
    offset, sizes, strides = region
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _cause(weights: TrainedWeights, copy: Copy, got: Tensor, want: Tensor) -> str:
    if weights.is_adapted(copy.source):
        base = _region(weights.base(copy.source), copy.read).to(got)
        if torch.equal(got, base):
            return "it is the base weight: the adapter (LoRA) was not delivered"
    if got.ndim != 2:
        size = float((got.double() - want.double()).abs().max())
        return f"its values differ by up to {size:.2g}: they are of other weights"
    differ = got != want
    for dim, word in ((0, "rows"), (1, "columns")):
        lines = differ.any(1 - dim).nonzero().flatten()
        first, last = int(lines[0]), int(lines[-1])
        line = got.select(dim, first).unsqueeze(dim)
        found = (want == line).all(1 - dim).nonzero().flatten()
        if len(found):
            return (
                f"its {word} {first} to {last} are the trained weight's from {word[:-1]} "
                f"{int(found[0])} on: the slice of another tensor-parallel rank"
            )
    rows = differ.any(1).nonzero().flatten()
    size = float((got.double() - want.double()).abs().max())
    part = f"rows {int(rows[0])} to {int(rows[-1])} of {got.shape[0]}"
    return f"{part} differ by up to {size:.2g}: they are of other (older) weights"
