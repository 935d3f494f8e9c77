"""The one rollout interface: token ids in, token ids and their log-probs out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hybridengine.reshard.layout import EngineLayout, LayoutError
from hybridengine.reshard.lora import Adapter

__all__ = [
    "Completion",
    "RolloutEngine",
    "SamplingSpec",
    "StaleWeightsError",
    "WeightTarget",
    "tp_groups",
]


class StaleWeightsError(RuntimeError):
    """The engine's weights are not a whole, committed version."""


@dataclass(frozen=True)
class SamplingSpec:
    """How to sample: n responses per prompt, at most max_tokens each.

    temperature 0 is greedy; top_k -1 and top_p 1 leave the distribution whole. stop: texts that end
    a response; the token that completes one is its last.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 256
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """One response. log_probs are of the sampling distribution (after temperature, top-k, top-p).

    finish_reason: "stop" (end of sequence, or a text of SamplingSpec.stop; its token is the last of
    token_ids) or "length".
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str


def tp_groups(world_size: int, tp_size: int, ranks_per_node: int | None = None) -> list[list[int]]:
    """Tensor-parallel groups over the training ranks, strided: group j is {j, j+N/t, j+2N/t, …}.

    Rank r then is TP rank r // (N/t), so the dim-0 rows FSDP2 gives it lie inside its TP slice
    (HybridFlow's zero-redundancy grouping, arXiv 2409.19256, section 5.3). With several nodes the
    groups are strided inside each node if they fit there: generation reduces over a group twice per
    layer and token, which must not cross nodes.
    """
    if tp_size < 1 or world_size % tp_size:
        raise ValueError(
            f"tensor_model_parallel_size: got {tp_size}, expected a divisor of the {world_size} "
            "ranks. Change it or the number of ranks."
        )
    span = ranks_per_node or world_size
    if span % tp_size or world_size % span:
        span = world_size
    stride = span // tp_size
    return [
        list(range(node + j, node + span, stride))
        for node in range(0, world_size, span)
        for j in range(stride)
    ]


class WeightTarget(ABC):
    """One rank's weights of an engine, which the reshard writes in place.

    tp_rank: place in the tensor-parallel group. layout: how the weights derive from the checkpoint.
    weight_version: the last committed version, None before the first sync. unused: trained
    parameters that the engine need not read (stored buffers). differences: where its configuration
    differs from the trained model's, a sentence for error messages.
    """

    tp_rank: int
    layout: EngineLayout
    unused: Set[str] = frozenset()
    differences: str = ""
    weight_version: int | None = None
    _updating: int | None = None

    @abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """The live weight tensors, by the names of `layout.destinations`."""

    @abstractmethod
    def load_whole(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load whole checkpoint tensors through the engine's own loader (reshard fallback)."""

    def load_adapters(self, adapters: Iterable[tuple[str, Adapter]], version: int) -> None:
        """Use whole adapters, by parameter name, beside the weights from `version` on."""
        raise LayoutError(
            f"{type(self).__name__} holds no adapters beside its weights; merge them "
            "(reshard.lora=merged)"
        )

    def check_ready(self) -> None:  # noqa: B027, most always are
        """Raise LayoutError while the weights cannot be written: requests run, the engine sleeps.

        The resharder calls it before every sync.
        """

    def _take_memory(self) -> None:  # noqa: B027, most never give it away
        """Make sure the weights are in memory."""

    @abstractmethod
    def _forget_cached_prefixes(self) -> None:
        """Drop everything computed from older weights. Raises ReshardError if some remains."""

    def refuse_if_torn(self) -> None:
        """Raise StaleWeightsError after a sync that failed half-way, until the next whole one."""
        if self._updating is not None:
            raise StaleWeightsError(
                f"the sync to weight version {self._updating} did not finish, so the engine's "
                f"weights are a mixture (last whole version: {self.weight_version}). "
                "Run a whole sync() first."
            )

    @contextmanager
    def weight_update(self, version: int) -> Iterator[None]:
        """While it is open, and after it failed, the engine refuses to generate."""
        self._updating = version
        self._take_memory()
        yield
        self._forget_cached_prefixes()
        self.weight_version = version
        self._updating = None


class RolloutEngine(WeightTarget):
    """A generator whose weights the reshard writes in place.

    tp_size: tensor-parallel size. replica, replicas: which of the N/t engines this rank belongs to
    (ranks of one replica pass the same prompts to `generate`). dtype: of the weights. free_cache:
    whether `sleep()` does anything.
    """

    tp_size: int
    replica: int
    replicas: int
    dtype: torch.dtype
    free_cache: bool = True
    _asleep: tuple[str, ...] = ()  # which of weights and kv_cache are not in memory

    @abstractmethod
    def _generate(
        self, prompts: Sequence[Sequence[int]], spec: SamplingSpec, seed: int
    ) -> list[list[Completion]]: ...

    def generate(
        self, prompts: Sequence[Sequence[int]], spec: SamplingSpec, seed: int
    ) -> list[list[Completion]]:
        """spec.n completions for each prompt of token ids, reproducible from `seed`.

        Every rank of a replica calls it with the same arguments. Raises StaleWeightsError before
        the first sync and after a sync that failed half-way, until the next whole one.
        """
        self.refuse_if_torn()
        if self.weight_version is None:
            raise StaleWeightsError("the engine has no weights yet. Run sync() before generate().")
        if not prompts:
            return []
        self._wake("weights", "kv_cache")
        return self._generate(prompts, spec, seed)

    def _take_memory(self) -> None:
        self._wake("weights")

    def sleep(self) -> None:
        """Leave the device's memory to the trainer.

        The next sync takes back what the weights need, the next `generate` the rest.
        """
        if self.free_cache and not self._asleep:
            self._suspend()
            self._asleep = ("weights", "kv_cache")

    def _wake(self, *parts: str) -> None:
        for part in parts:
            if part in self._asleep:
                self._resume(part)
        self._asleep = tuple(part for part in self._asleep if part not in parts)

    def _suspend(self) -> None:
        """Free what can be freed; weights must keep their values and addresses."""

    def _resume(self, part: str) -> None:
        """Undo `_suspend` for "weights" or "kv_cache"."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release what the engine holds; it cannot generate afterwards."""
