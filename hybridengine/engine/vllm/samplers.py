"""`sample_tokens` in the sampler of a model runner of vLLM, of which there are two kinds."""

from __future__ import annotations

from typing import Any

from hybridengine.engine.vllm.sampling import FusedSampler

__all__ = ["fuse_sampler"]


def fuse_sampler(runner: Any, exact: bool = False, ranks: bool = False) -> None:
    """Let a model runner of vLLM, of either kind, sample by `sample_tokens` where it is covered.

    exact, ranks: of a `FusedSampler`; the second kind always counts ranks.
    """
    from vllm.v1.sample.sampler import Sampler

    if isinstance(getattr(runner, "sampler", None), Sampler):
        FusedSampler(runner, exact, ranks)
    elif hasattr(getattr(runner, "sampler", None), "sampling_states"):
        from hybridengine.engine.vllm.sampling_second import FusedSecondSampler

        FusedSecondSampler.install(runner.sampler, exact)
