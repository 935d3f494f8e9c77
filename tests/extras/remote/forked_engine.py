"""Lets a vLLM server on a CPU fork the process of its engine, as it does on a GPU."""

from __future__ import annotations

import multiprocessing

__all__ = ["fork_engine"]


def fork_engine() -> None:
    """Spare the engine its imports: on a CPU vLLM would start it anew."""
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
