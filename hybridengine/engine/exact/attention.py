"""The switch that makes vLLM build engines with the trainer's attention.

`exact_attention()` registers `attention_backend` with vLLM in this process: on a CPU in place of
vLLM's own, which its platform always takes, on a GPU under the name that vLLM has for others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ON_CPU = {  # of vLLM: what takes its place
    "CPU_ATTN": "ExactAttentionBackend",
    "CPU_MLA": "RefusedMlaBackend",
    "AMX_MLA": "RefusedMlaBackend",
}
_ON_GPU = {"CUSTOM": "ExactAttentionBackend"}


@contextmanager
def exact_attention() -> Iterator[dict[str, Any]]:
    """While open, vLLM builds engines with the trainer's attention.

    Yields the options of `vllm.LLM` that choose it. What it does not cover raises UserError, or
    vLLM's ValueError, as an engine is built.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    on_cpu = current_platform.is_cpu()
    replacements = _ON_CPU if on_cpu else _ON_GPU
    backends = [AttentionBackendEnum[name] for name in replacements]
    overridden = {b: b.get_path() for b in backends if b.is_overridden()}
    for name, replacement in replacements.items():
        path = f"hybridengine.engine.exact.attention_backend.{replacement}"
        register_backend(AttentionBackendEnum[name], path)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield {} if on_cpu else {"attention_backend": "CUSTOM"}
    finally:
        for backend in backends:
            backend.clear_override()
        for backend, path in overridden.items():
            register_backend(backend, path)
        selector._cached_get_attn_backend.cache_clear()
