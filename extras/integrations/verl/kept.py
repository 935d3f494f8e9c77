"""Log-probs over the vocabulary entries that sampling kept, in verl's FSDP engine (verl 0.9.1).

    VERL_USE_EXTERNAL_MODULES=hybridengine.integrations.verl.kept

With top-p or top-k vLLM's log-probs are over the entries that are kept; verl's are over the full
vocabulary. With this module, in every process of a job whose rollout truncates, the servers return
the entries of every response in its `extra_fields`, and the engine computes old and reference
log-probs, entropy and the update over them. A response without the column is computed as before,
with a warning where others of its batch have it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridengine.engine.response import pack_kept
from hybridengine.integrations import verl
from hybridengine.integrations._patching import Patches
from hybridengine.integrations.verl.log_probs import KEPT
from hybridengine.integrations.verl.padding import num_padding
from hybridengine.model import KeptIds
from hybridengine.run.config.rl import truncates
from hybridengine.run.errors import ModelError

COLUMN = "kept_ids"  # of a response: {"ids": int32 [K], "counts": int32 [its tokens]}
_ENGINES = "workers.engine.fsdp.transformer_impl"
_FORWARD = f"{_ENGINES}.FSDPEngineWithLMHead.forward_step"
_OUTPUTS = f"{_ENGINES}.FSDPEngineWithLMHead.prepare_model_outputs"
_SERVER = "workers.rollout.vllm_rollout.vllm_async_server.vLLMHttpServer"
_CLIENTS = "workers.rollout.llm_server"
_CLIENT = f"{_CLIENTS}.LLMServerClient.generate"
_RESUMING = f"{_CLIENTS}.FullyAsyncLLMServerClient.generate"  # calls the former for each part
_NOTED = "_hybridengine_noted"  # attribute of a server whose engine leaves outputs in `_LAST`
_WARNED = "_hybridengine_kept_warned"  # attribute of an engine
_LAST: ContextVar[list[Any] | None] = ContextVar("LAST", default=None)
_PARTS: ContextVar[list[Any] | None] = ContextVar("PARTS", default=None)
_NO_TRUNCATION = "set rollout.top_p=1 and rollout.top_k=-1"
_OFF = (
    "or remove hybridengine.integrations.verl.kept from VERL_USE_EXTERNAL_MODULES, and the "
    "log-probs are over the full vocabulary"
)

logger = logging.getLogger(__name__)


def _forward_step(
    self: Any, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool
) -> tuple[Tensor, dict[str, Any]]:
    """Run verl's step over the entries of the micro-batch's responses, where it has the column."""
    from verl.utils import tensordict_utils

    forward = PATCHES.original(_FORWARD)
    column = tensordict_utils.get(micro_batch, COLUMN)
    if column is not None:
        _warn_of_missing(self, column, _response_lengths(micro_batch))
    if column is None or all(entries is None for entries in column):
        result: tuple[Tensor, dict[str, Any]] = forward(
            self, micro_batch, loss_function, forward_only
        )
        return result
    if not tensordict_utils.get_non_tensor_data(micro_batch, "use_remove_padding", True):
        raise ModelError(
            f"model.use_remove_padding: expected True where sampling truncates, {_OFF}"
        )
    if self.use_ulysses_sp:
        raise ModelError(
            "fsdp_config.ulysses_sequence_parallel_size: got "
            f"{self.ulysses_sequence_parallel_size}, expected 1 where sampling truncates, {_OFF}"
        )
    ids = micro_batch["input_ids"]
    padding = num_padding(self, len(ids.values()))
    kept = kept_of_labels(ids, column, _response_lengths(micro_batch), padding)
    token = KEPT.set(kept)
    try:
        return forward(self, micro_batch, loss_function, forward_only)
    finally:
        KEPT.reset(token)


def _warn_of_missing(engine: Any, column: Sequence[Any], response_lengths: Sequence[int]) -> None:
    """Warn once of responses without entries in a batch in which others have them."""
    pairs = zip(column, response_lengths, strict=True)
    missing = sum(entries is None and length > 0 for entries, length in pairs)
    if missing and not hasattr(engine, _WARNED):
        setattr(engine, _WARNED, True)
        logger.warning(
            f"{missing} of {len(column)} responses of a micro-batch come without {COLUMN}, which "
            "other responses of the batch have: their log-probs are over the full vocabulary. If "
            "they were sampled with top_p or top_k, let the agent loop keep the extra_fields that "
            "the server returned"
        )


def _prepare_model_outputs(
    self: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
) -> dict[str, Tensor]:
    """Set logits outside of the kept entries to -inf; with fused kernels there are none."""
    kept, logits = KEPT.get(), getattr(output, "logits", None)
    if kept is not None and logits is not None:
        mask = kept.to(logits.device).vocab_mask(logits.shape[-1])
        output.logits = logits.masked_fill(~mask, -torch.inf)
    original = PATCHES.original(_OUTPUTS)
    outputs: dict[str, Tensor] = original(
        self, output, output_args, micro_batch, logits_processor_func
    )
    return outputs


def kept_of_labels(
    ids: Any, column: Sequence[Any], response_lengths: Sequence[int], padding: int = 0
) -> KeptIds:
    """Return the entries of the next token of each of T packed tokens, and of padding.

    A token that was not sampled has itself alone: verl does not use its log-prob, which is 0.

    Args:
        ids: jagged tensor [B, t], prompts with their responses.
        column: B entries of the column, or None for a response without them.
        padding: number of tokens that follow; the next token of each is 0.
    """
    offsets = ids.offsets()
    labels = torch.cat([ids.values().roll(-1).cpu(), torch.zeros(padding, dtype=torch.int64)])
    parts, counts = [labels.int()], [torch.ones_like(labels)]
    rows, total = torch.arange(len(labels)), len(labels)
    for entries, end, length in zip(column, offsets[1:].tolist(), response_lengths, strict=True):
        own = torch.zeros(length) if entries is None else torch.from_numpy(entries["counts"])
        if len(own) != length:
            raise ModelError(
                f"a response of {length} tokens has the kept vocabulary entries of {len(own)}: "
                f"those of several turns are not joined; {_NO_TRUNCATION}, {_OFF}"
            )
        rows[end - length - 1 : end - 1] = torch.arange(total, total + length)
        total += length
        counts.append(own.long())
        parts += [] if entries is None else [torch.from_numpy(entries["ids"])]
    return KeptIds.from_counts(torch.cat(parts), torch.cat(counts)).take(rows).to(ids.device)


def _response_lengths(micro_batch: Any) -> list[int]:
    prompts, responses = micro_batch["prompts"], micro_batch["responses"]
    if responses.is_nested:
        lengths: list[int] = responses.offsets().diff().tolist()
        return lengths
    lengths = micro_batch["attention_mask"][:, prompts.shape[1] :].sum(1).tolist()
    return lengths


def _preprocess_engine_kwargs(self: Any, engine_kwargs: dict) -> None:
    """Let vLLM return sampling masks; vLLM refuses options with which it has none."""
    PATCHES.original(f"{_SERVER}._preprocess_engine_kwargs")(self, engine_kwargs)
    if truncates(self.config):
        engine_kwargs["return_sampling_mask"] = True


async def _generate(
    self: Any,
    prompt_ids: list[int],
    sampling_params: dict[str, Any],
    request_id: str,
    image_data: list[Any] | None = None,
    video_data: list[Any] | None = None,
    audio_data: list[Any] | None = None,
    mm_processor_kwargs: dict[str, Any] | None = None,
    priority: int = 0,
    kv_transfer_params: dict | None = None,
) -> Any:
    """Generate as verl's server; a response that was truncated has the column."""
    original = PATCHES.original(f"{_SERVER}.generate")
    options = (image_data, video_data, audio_data, mm_processor_kwargs, priority)
    if not truncates(self.config):
        return await original(
            self, prompt_ids, sampling_params, request_id, *options, kv_transfer_params
        )
    if not hasattr(self, _NOTED):
        self.engine.generate = _noting(self.engine.generate)
        setattr(self, _NOTED, True)
    vocab_size = self.engine.model_config.get_vocab_size()
    given = bounded(sampling_params, vocab_size)
    last: list[Any] = []
    token = _LAST.set(last)
    try:
        output = await original(self, prompt_ids, given, request_id, *options, kv_transfer_params)
    finally:
        _LAST.reset(token)
    if last and last[0].outputs and sampling_params.get("temperature", 1.0) > 0:
        output.extra_fields[COLUMN] = column_of(last[0].outputs[0], vocab_size)
    return output


def bounded(sampling: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return sampling parameters of the same distribution, for which vLLM returns masks.

    vLLM needs a temperature and a top-k for that. Greedy decoding is top-k 1, and a top-k of the
    vocabulary's size truncates nothing.
    """
    greedy = sampling.get("temperature", 1.0) == 0
    top_k = sampling.get("top_k", -1)
    limits = {"top_k": 1, "temperature": 1.0} if greedy else {}
    return {**sampling, "top_k": top_k if top_k > 0 else vocab_size, **limits}


def column_of(sample: Any, vocab_size: int) -> dict[str, Any]:
    """Return the column of a vLLM `CompletionOutput`."""
    masks = sample.sampling_mask.token_ids if sample.sampling_mask else []
    ordered = [sorted(mask) for mask in masks]
    columns = pack_kept(sample.token_ids, ordered, vocab_size, f"{_NO_TRUNCATION}, {_OFF}")
    counts, ids = (np.array(columns[name], dtype=np.int32) for name in ("num_kept", "kept_ids"))
    return {"ids": ids, "counts": counts}


def _noting(generate: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """Return a `generate` of an engine that leaves its last output in `_LAST`."""

    async def noting(*args: Any, **options: Any) -> AsyncIterator[Any]:
        async for output in generate(*args, **options):
            if (last := _LAST.get()) is not None:
                last[:] = [output]
            yield output

    return noting


def _client_generate(
    path: str, run: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
) -> Callable[..., Awaitable[Any]]:
    """Return a `generate` of one of verl's clients: `run` of what calls verl's own at `path`."""

    async def generate(
        self: Any,
        request_id: Any,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        media = {"image_data": image_data, "video_data": video_data, "audio_data": audio_data}
        given = {"mm_processor_kwargs": mm_processor_kwargs, **media, **kwargs}
        given |= {"prompt_ids": prompt_ids, "sampling_params": sampling_params}
        return await run(lambda: PATCHES.original(path)(self, request_id, **given))

    return generate


async def _note_part(original: Callable[[], Awaitable[Any]]) -> Any:
    """Generate, and note the output as a part of a response."""
    output = await original()
    if (parts := _PARTS.get()) is not None:
        parts.append(output)
    return output


async def _join_parts(original: Callable[[], Awaitable[Any]]) -> Any:
    """Generate by the client of asynchronous trainers, which drops the columns of the parts."""
    parts: list[Any] = []
    token = _PARTS.set(parts)
    try:
        output = await original()
    finally:
        _PARTS.reset(token)
    columns = [part.extra_fields.get(COLUMN) for part in parts if part.token_ids]
    if columns := [column for column in columns if column is not None]:
        output.extra_fields[COLUMN] = {
            name: np.concatenate([column[name] for column in columns]) for name in ("ids", "counts")
        }
    return output


PATCHES = Patches(
    "verl",
    {
        "engine": {_FORWARD: _forward_step, _OUTPUTS: _prepare_model_outputs},
        "server": {
            f"{_SERVER}._preprocess_engine_kwargs": _preprocess_engine_kwargs,
            f"{_SERVER}.generate": _generate,
        },
        "client": {
            _CLIENT: _client_generate(_CLIENT, _note_part),
            _RESUMING: _client_generate(_RESUMING, _join_parts),
        },
    },
)
verl.patch("log_probs", "fused_head")  # these functions read the entries
PATCHES.patch()
