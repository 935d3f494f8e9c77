"""The switch that makes vLLM build engines with the trainer's attention on a CPU.

`exact_attention()` registers `attention_backend` with vLLM in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_BACKENDS = {  # of vLLM: what takes its place
    "CPU_ATTN": "ExactAttentionBackend",
    "CPU_MLA": "RefusedMlaBackend",
    "AMX_MLA": "RefusedMlaBackend",
}


@contextmanager
def exact_attention() -> Iterator[None]:
    """While open, vLLM builds engines on a CPU with the trainer's attention.

    What that does not cover raises UserError as an engine is built.
    """
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    backends = [AttentionBackendEnum[name] for name in _BACKENDS]
    overridden = {b: b.get_path() for b in backends if b.is_overridden()}
    for name, replacement in _BACKENDS.items():
        path = f"hybridengine.rollout.vllm.attention_backend.{replacement}"
        register_backend(AttentionBackendEnum[name], path)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        for backend in backends:
            backend.clear_override()
        for backend, path in overridden.items():
            register_backend(backend, path)
        selector._cached_get_attn_backend.cache_clear()
