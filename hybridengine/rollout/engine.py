"""The one rollout interface: token ids in, token ids and their log-probs out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridengine.sharding.weight_target import StaleWeightsError, WeightTarget

__all__ = ["Completion", "RolloutEngine", "SamplingSpec"]


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
