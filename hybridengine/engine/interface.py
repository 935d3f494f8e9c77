"""The rollout interface: token ids in, token ids and their log-probs out."""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hybridengine.engine.response import Response
from hybridengine.model.attachments import Attachment, AttachmentPreparer
from hybridengine.run.config.rl import ModelConfig, RLConfig, RolloutConfig, truncates
from hybridengine.run.errors import RolloutError, UserError
from hybridengine.sync.layout import CheckpointLayout
from hybridengine.sync.weight_target import StaleWeightsError, WeightTarget

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is built from; `rollout.dtype` is not auto.

    model: its folder has config and tokenizer; the engine does not read its weights.
    checkpoint: what the trained model's checkpoint is made of (`checkpoint_layout_from_config`).
    stop_token_ids: tokens that end a response (kept as its last token).
    tokenizer: decodes responses, where the engine detects `SamplingSpec.stop` itself.
    seed: of vLLM; a request has its own.
    adapter_rank: adapters of up to this rank can be applied on top of the weights.
    exact: its log-probs are the bits of a model that has `use_exact_operators`; it runs eagerly.
    record_routes: whether `SamplingSpec.record_routes` may be set.
    record_likely: the most that `SamplingSpec.record_likely` may be.
    preparer: of the images that prompts may have; None: they have none.
    """

    model: ModelConfig
    rollout: RolloutConfig
    checkpoint: CheckpointLayout
    stop_token_ids: Sequence[int] = ()
    tokenizer: PreTrainedTokenizerBase | None = None
    seed: int = 0
    adapter_rank: int = 0
    exact: bool = False
    record_routes: bool = False
    record_likely: int = 0
    preparer: AttachmentPreparer | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The type of the engine's weights."""
        dtype: torch.dtype = getattr(torch, self.rollout.dtype)
        return dtype


@dataclass(frozen=True)
class SamplingSpec:
    """How to sample: n responses per prompt, at most max_tokens each.

    temperature 0 is greedy; top_p 1, top_k -1 and min_p 0 disable truncation. stop: texts that end
    a response; the token that completes one is the response's last. record_kept: where sampling
    truncates, return the vocabulary entries that it kept with each completion. record_routes:
    return the experts that the routers selected. record_likely: return the log-probs of so many
    most likely entries with each token.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    record_kept: bool = False
    record_routes: bool = False
    record_likely: int = 0

    @property
    def records(self) -> bool:
        """Whether completions have the column kept_ids: record_kept, where sampling truncates."""
        return self.record_kept and self.temperature > 0 and truncates(self)


@dataclass(frozen=True)
class InFlightUpdate:
    """How an engine takes new weights between the decode steps of running responses.

    is_due: whether new weights wait, the same answer on every rank of a replica; all of them ask
      before the same steps.
    update: takes them.
    keep_kv: running responses go on with their cached keys and values, which are of older weights;
      else these are recomputed with the new weights.
    """

    is_due: Callable[[], bool]
    update: Callable[[], object]
    keep_kv: bool


@dataclass(frozen=True)
class CacheSize:
    """The key-value cache of an engine on one rank: blocks of `block_size` tokens."""

    num_tokens: int
    block_size: int
    num_bytes: int


@dataclass(frozen=True)
class Request:
    """One response that is wanted of a `RequestStream`; id: unique in the stream.

    images: in the order of their tokens in the prompt.
    """

    id: int
    prompt_ids: Sequence[int]
    max_tokens: int
    seed: int
    images: Sequence[Attachment] = ()


class ColumnRecorder(ABC):
    """Adds columns to the responses of vLLM; registered in the group `hybridengine.recorders`."""

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM` under which it records."""

    @abstractmethod
    def attach(self, llm: Any, runner: Any) -> None:
        """Prepare a built `vllm.LLM`; runner: its model runner."""

    @abstractmethod
    def columns(self, output: Any, prompt_length: int) -> dict[str, array[int]]:
        """Return the columns of a `vllm.outputs.CompletionOutput`, see `TokenColumn`."""


class RequestStream(ABC):
    """Requests to an engine that come and finish at different times.

    in_batches: a step runs all requests to their end, so a caller should wait for further requests
    before it steps. Otherwise a step advances each request by about a token.
    """

    in_batches = False

    def __init__(self) -> None:
        self.num_running = 0  # requests that are added and not finished

    def add(self, request: Request) -> None:
        self._add(request)
        self.num_running += 1

    def step(self) -> list[tuple[int, Response]]:
        """Advance the requests; return (id, completion) of those that finished."""
        finished = self._step()
        self.num_running -= len(finished)
        return finished

    @abstractmethod
    def _add(self, request: Request) -> None: ...

    @abstractmethod
    def _step(self) -> list[tuple[int, Response]]: ...


def derive_seed(*numbers: int) -> int:
    """Return a seed below 2**62, the same everywhere, for a stream of its own per `numbers`.

    numbers: signed 64-bit.

    Examples:
        >>> derive_seed(1, 5) == derive_seed(1, 5), derive_seed(1, 5) == derive_seed(5, 1)
        (True, False)
    """
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    digest = hashlib.blake2b(packed, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


@contextmanager
def local_random_state(seed: int) -> Iterator[None]:
    """While open, torch's generators of the CPU and this rank's GPU start from `seed`."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


class Prompt(NamedTuple):
    """Token ids, and the images in them, in the order of their tokens."""

    ids: Sequence[int]
    images: Sequence[Attachment] = ()


def check_prompt(engine: str, read: Sequence[int], ids: Sequence[int]) -> None:
    """Raise RolloutError where the prompt that an engine has `read` is not `ids`.

    engine: its name, for the message.
    """
    if list(read) == list(ids):
        return
    pairs = zip_longest(ids, read)
    first = next(i for i, (ours, other) in enumerate(pairs) if ours != other)
    raise RolloutError(
        f"{engine} has read other tokens than the trainer's prompt of {len(ids)} tokens: the first "
        f"difference is at position {first}, {list(ids[first : first + 3])} in the prompt and "
        f"{list(read[first : first + 3])} in the engine. Both need the same model folder, and "
        "versions of transformers and vLLM whose processors agree"
    )


class RolloutEngine(ABC):
    """An inference engine whose weights the reshard writes in place.

    target: the weights, None if they are in other processes.
    tp_size: tensor-parallel size.
    tp_rank: rank in the tensor-parallel group.
    replica, replicas: index and number of engines over all ranks (ranks of one replica pass the
      same prompts to `generate`).
    dtype: of the weights.
    free_cache: whether `sleep()` frees memory.
    wants_weights: whether it has lost its weights, and waits for new ones.
    in_flight: how `generate` and `stream` take new weights; None: not before all requests have
      finished.
    takes_images: whether prompts may have images.
    drafts: counts the tokens that it has drafted and accepted; None without speculative decoding.
    """

    target: WeightTarget | None = None
    tp_size: int
    tp_rank: int
    replica: int
    replicas: int
    dtype: torch.dtype
    free_cache: bool = True
    wants_weights: bool = False
    in_flight: InFlightUpdate | None = None
    takes_images: bool = False
    drafts: Any = None
    _asleep: tuple[str, ...] = ()  # which of "weights" and "kv_cache" are freed

    @staticmethod
    def find_faults(config: RLConfig) -> Iterator[str]:
        """Yield what such an engine cannot do, or be given, of a job's configuration."""
        yield from ()

    @abstractmethod
    def _generate(
        self, prompts: Sequence[Prompt], spec: SamplingSpec, seed: int
    ) -> list[list[Response]]: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        spec: SamplingSpec,
        seed: int,
        images: Sequence[Sequence[Attachment]] | None = None,
    ) -> list[list[Response]]:
        """Return spec.n completions for each prompt of token ids, reproducible from `seed`.

        images: of each prompt, in the order of their tokens in it, which are all there.

        Every rank of a replica calls it with the same arguments. Replicas given the same seed draw
        different random numbers, prompt i of a replica those of prompt i * replicas + replica of
        a batch that is dealt out in turn. Raises StaleWeightsError before the first sync, after a
        failed sync, and after a `sleep()` that discarded the weights, until the next complete sync.
        """
        self._check_weights()
        if not prompts:
            return []
        images = images or [()] * len(prompts)
        self.check_images(image for own in images for image in own)
        pairs = [Prompt(*pair) for pair in zip(prompts, images, strict=True)]
        self._wake("weights", "kv_cache")
        return self._generate(pairs, spec, seed)

    def check_images(self, images: Iterable[Attachment]) -> None:
        """Raise RolloutError for an image where the engine takes none."""
        if not self.takes_images and (image := next(iter(images), None)) is not None:
            raise RolloutError(
                f"{image.where}: {type(self).__name__} takes no images; set rollout.name to vllm "
                "or hf, without rollout.servers, and take a model with a vision tower"
            )

    def _stream(self, spec: SamplingSpec, seed: int) -> AbstractContextManager[RequestStream]:
        raise UserError(
            f"{type(self).__name__} generates batches only; rollout.multi_turn.enable needs an "
            "engine with a stream of requests, vllm or hf"
        )

    @contextmanager
    def stream(self, spec: SamplingSpec, seed: int) -> Iterator[RequestStream]:
        """Open a stream of requests, one completion each, sampled by `spec`.

        spec.n and spec.max_tokens are not used. Every rank of a replica opens it with the same
        arguments, and adds the same requests before the same steps. Errors are those of `generate`.
        """
        self._check_weights()
        self._wake("weights", "kv_cache")
        with self._stream(spec, seed) as stream:
            yield stream

    def cache_size(self) -> CacheSize | None:
        """Return the size of this rank's key-value cache, None without one of a fixed size."""
        return None

    def take_update(self) -> None:
        """Take new weights if they are due, while this process runs no step.

        Collective over the replica.
        """
        if self.in_flight is not None and self.in_flight.is_due():
            self.in_flight.update()

    def broadcast(self, value: Any, expected: Any) -> Any:
        """Return the `value` of the replica's first rank on each of its ranks. Collective.

        expected: its type, as of `run.messages`.
        """
        return value

    @property
    def weight_version(self) -> int | None:
        """The version of the weights that it generates from, None before the first."""
        return self.target.weight_version if self.target else None

    def _check_weights(self) -> None:
        if self.target is not None:
            self.target.check_complete()
        if self.weight_version is None:
            raise StaleWeightsError("the engine has no weights yet. Run sync() before generate().")

    def sleep(self) -> None:
        """Free device memory for the trainer, on a GPU without a copy of the weights.

        The next sync allocates the weights again, the next `generate` the rest.
        """
        if self.free_cache and not self._asleep:
            self._suspend()
            self._asleep = ("weights", "kv_cache")

    def wake_weights(self) -> None:
        """Bring the weights back into memory, before an update."""
        self._wake("weights")

    def _wake(self, *parts: str) -> None:
        for part in parts:
            if part in self._asleep:
                self._resume(part)
        self._asleep = tuple(part for part in self._asleep if part not in parts)

    def _suspend(self) -> None:  # noqa: B027, optional
        """Free device memory; weights keep their addresses and, unless `discarded`, values."""

    def _resume(self, part: str) -> None:  # noqa: B027, optional
        """Undo `_suspend` for "weights" or "kv_cache"."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release the engine's resources; it cannot generate afterwards."""
