"""Tokens per second of our vLLM engine and of transformers' `generate`, on the same responses.

A random model of the shapes of SmolLM2-135M, 32 prompts of 64 tokens, sampling at temperature 1, in
bfloat16 where the CPU multiplies it fast, else in float32. The engine is set up as the trainer's,
exact. `equal`: all responses have 48 tokens. `ragged`: 8 to 96, log-uniform. `generate` runs a
batch until its longest response is complete; only the tokens up to each response's length count.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks._bench import OURS, Bench, quantiles, short
from benchmarks._models import smollm2_135m
from benchmarks.generate import build, prepared_dtype, sampler

SEQUENCES, PROMPT_TOKENS, EQUAL_TOKENS = 32, 64, 48
SHORTEST, LONGEST = 8, 96
ROUNDS = 2


def run(bench: Bench) -> None:
    dtype = prepared_dtype(bench, "plain_generate")
    if dtype is None:
        return
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(1000, 40_000, (SEQUENCES, PROMPT_TOKENS), generator=draw)
    spread = torch.rand(SEQUENCES, generator=draw)
    shapes = {
        "equal": [EQUAL_TOKENS] * SEQUENCES,
        "ragged": (SHORTEST * (LONGEST / SHORTEST) ** spread).int().tolist(),
    }
    with tempfile.TemporaryDirectory() as folder:
        llm, _ = build(Path(folder), dtype, exact=True)
    plain = plain_model(dtype)
    with sampler(llm, True):
        calls = {
            "transformers": lambda lengths: generate_plain(plain, prompts, lengths),
            OURS: lambda lengths: generate_vllm(llm, prompts, lengths),
        }
        for shape, lengths in shapes.items():
            times: dict[str, list[float]] = {name: [] for name in calls}
            for number in range(ROUNDS + 1):
                for name, call in calls.items():
                    start = time.perf_counter()
                    call(lengths if number else [2] * SEQUENCES)  # the first one warms up
                    if number:
                        times[name].append((time.perf_counter() - start) * 1e3)
            p50 = {name: median(values) for name, values in times.items()}
            for name, values in times.items():
                rate = sum(lengths) / p50[name] * 1e3
                bench.add(
                    "plain_generate",
                    "generate",
                    name,
                    f"135M {SEQUENCES} {shape}",
                    dtype=short(dtype),
                    ratio_to_best_peer=p50["transformers"] / p50[OURS] if name == OURS else None,
                    note=f"  {rate:.0f} tokens/s",
                    tokens_per_s=rate,
                    **quantiles(values),
                )


def plain_model(dtype: torch.dtype) -> Any:
    """Return the transformers model with random weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        smollm2_135m(max_position_embeddings=2048), dtype=dtype
    )
    return model.eval().requires_grad_(False)


def generate_plain(model: Any, prompts: torch.Tensor, lengths: Sequence[int]) -> None:
    """Generate until the longest response is complete."""
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        min_new_tokens=max(lengths),
        max_new_tokens=max(lengths),
        eos_token_id=None,
        pad_token_id=0,
    )


def generate_vllm(llm: Any, prompts: torch.Tensor, lengths: Sequence[int]) -> None:
    """Generate each response to its length."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0, seed=i)
        for i, n in enumerate(lengths)
    ]
    llm.generate([{"prompt_token_ids": ids} for ids in prompts.tolist()], sampling, use_tqdm=False)
