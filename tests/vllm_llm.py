"""A plain vLLM engine of a tiny model in this process, as the tests of log-probs need it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

__all__ = ["open_llm"]


def open_llm(path: str, dtype: Any, *, exact: bool = False, **options: Any) -> Any:
    """Return an eager `vllm.LLM` with a float32 head, whose log-probs are those of sampling.

    exact: by the engine's part of `rollout.exact`.
    """
    from hybridengine.engine.vllm.environment import (
        CPU_BLOCK_SIZE,
        models_inspected_here,
        own_model_classes,
        prepare_environment,
    )

    prepare_environment()
    from vllm import LLM

    from hybridengine.engine.exact.operators import exact_engine
    from hybridengine.engine.vllm.post_load import writable_weights

    exact_if_wanted = exact_engine() if exact else nullcontext({})
    with (
        models_inspected_here(),
        own_model_classes(),
        writable_weights(),
        exact_if_wanted as required,
    ):
        return LLM(
            path,
            dtype=dtype,
            skip_tokenizer_init=True,
            block_size=CPU_BLOCK_SIZE,
            hf_overrides={"head_dtype": "float32"},
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            **{"enforce_eager": True, **required, **options},
        )
