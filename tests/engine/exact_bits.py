"""Log-probs of an exact engine against those of the trained model, on any device.

    run_ranks(compare, 1, path, "bfloat16", "cuda", LARGE, device="cuda")

A `VllmEngine` gets its weights by the sync, generates for batches of several sizes of prompts that
share prefixes, come in chunks and meet the prefix cache, sleeps, and generates again. The model
computes the same tokens, packed in several ways.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from tests.engines import build_engine
from tests.loading import load_sharded
from tests.tensors import part

__all__ = ["KINDS", "LARGE", "SMALL", "Load", "compare", "differing_operators", "save_model"]

KINDS = ("llama", "qwen2", "qwen3")
TEMPERATURE = 0.8


class Load(NamedTuple):
    """What a model has and what it generates.

    sizes: of its configuration. prefix: tokens that prompts share. lengths: of the other tokens of
    prompts. batches: how many prompts there are at a time. budget: tokens of a step.
    """

    sizes: dict[str, int]
    prefix: int
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    responses: int
    max_tokens: int
    budget: int
    cache_bytes: int


LARGE = Load(
    {
        "vocab_size": 10_007,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    prefix=150,
    lengths=(1, 2, 17, 64, 300, 700),
    batches=(1, 2, 5, 16),
    responses=2,
    max_tokens=48,
    budget=640,
    cache_bytes=64 << 20,
)
SMALL = Load(
    {
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    prefix=33,
    lengths=(1, 20),
    batches=(1, 2),
    responses=2,
    max_tokens=3,
    budget=32,
    cache_bytes=2 << 20,
)


def save_model(kind: str, folder: Path, load: Load) -> str:
    """Write a random model, whose biases and norms are random too; return its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        **load.sizes,
        max_position_embeddings=2048,
        initializer_range=0.05,
        tie_word_embeddings=kind != "qwen2",
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return str(folder)


def compare(
    rank: int, world_size: int, path: str, dtype_name: str, device: str, load: Load
) -> dict[str, Any]:
    """Return how many tokens were sampled, how many of the prompts' were in the cache, and counts.

    differing: of the tokens whose log-probs are other bits, by how they were packed.
    operators: where any differ, those that give other bits from the engine's own inputs, in the
        order of computation.
    """

    from hybridengine.engine.interface import SamplingSpec
    from hybridengine.model import (
        pack_rollouts,
        packed_log_probs,
        parameter_shards,
        sharding_mesh,
        use_exact_operators,
    )
    from hybridengine.sync.resharder import Resharder

    dtype = getattr(torch, dtype_name)
    engine = build_engine(
        "vllm",
        path,
        dtype=dtype_name,
        max_model_len=1024,
        kv_cache_gib=load.cache_bytes / 2**30,
        gpu_memory_utilization=0.1,
        exact=True,
        max_num_seqs=32,
        max_num_batched_tokens=load.budget,
    )
    model = load_sharded(
        path,
        mesh=sharding_mesh(device, world_size),
        param_dtype=dtype,
        adapt=partial(use_exact_operators, splits={}),
    )
    resharder = Resharder(lambda: parameter_shards(model), engine, delta="off")
    resharder.sync(0)
    spec = SamplingSpec(n=load.responses, temperature=TEMPERATURE, max_tokens=load.max_tokens)
    draw = random.Random(0)
    tokens = lambda n: [draw.randrange(3, load.sizes["vocab_size"]) for _ in range(n)]  # noqa: E731
    prefix, cached = tokens(load.prefix), [0]
    pairs: list[tuple[list[int], list[int]]] = []
    log_probs: list[float] = []
    own_generate = engine.llm.generate

    def generate(*args: Any, **options: Any) -> Any:
        outputs = own_generate(*args, **options)
        cached[0] += sum(output.num_cached_tokens or 0 for output in outputs)
        return outputs

    def sample(batch: int) -> None:
        prompts = [
            [*(prefix if i % 2 else ()), *tokens(load.lengths[i % len(load.lengths)])]
            for i in range(batch)
        ]
        for prompt, group in zip(prompts, engine.generate(prompts, spec, batch), strict=True):
            for response in group:
                pairs.append((prompt, list(response.token_ids)))
                log_probs.extend(response.log_probs)

    with patch.object(engine.llm, "generate", generate):
        for batch in load.batches:
            sample(batch)
        engine.sleep()
        resharder.sync(1)
        sample(load.batches[-1])
    theirs, differing = torch.tensor(log_probs), dict[str, int]()
    for shared in (False, True):
        batch = pack_rollouts(pairs, device, shared_prefix=shared)
        ours, _ = packed_log_probs(model, batch, TEMPERATURE)
        differing[f"packed, shared_prefix={shared}"] = _count(ours, theirs)
    if device == "cuda":  # minutes in the interpreter
        ours.sum().backward()
        gradients = [p.grad for p in model.parameters()]
        assert all(g is not None and bool(_local(g).isfinite().all()) for g in gradients)
    alone = []
    for pair in pairs[:4]:
        with torch.no_grad():
            ours, _ = packed_log_probs(model, pack_rollouts([pair], device), TEMPERATURE)
        alone.append(ours.cpu())
    together = torch.cat(alone)
    differing["each alone"] = _count(together, theirs[: len(together)])
    wrong = any(differing.values())
    operators = differing_operators(model, engine.llm, pairs[-1][0]) if wrong else []
    engine.shutdown()
    return {
        "tokens": len(theirs),
        "cached": cached[0],
        "differing": differing,
        "operators": operators,
    }


def _count(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    bits = ours.detach().cpu().view(torch.int32)  # 0.0 and -0.0 differ
    return int((bits != theirs.view(torch.int32)).sum())


def _local(gradient: Any) -> torch.Tensor:
    return part(gradient)


def differing_operators(model: Any, llm: Any, prompt: Sequence[int]) -> list[str]:
    """Run the model on the engine's values of one request, operator by operator."""
    from vllm import SamplingParams

    from hybridengine.lab.parity.forced import ForcedForward
    from hybridengine.lab.parity.points import LOGITS, record_engine
    from hybridengine.model import pack_rollouts, packed_logits

    def forward(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
        ids = [*token_ids.tolist(), 0]  # every position predicts one
        return packed_logits(model, pack_rollouts([(ids[:1], ids[1:])], token_ids.device))

    sampling = SamplingParams(max_tokens=8, logprobs=0, ignore_eos=True, detokenize=False)
    record = record_engine(llm, prompt, sampling)
    ours = ForcedForward(model, record, forward).points
    found = []
    for point, theirs in record.points.items():
        if point in ours and point != LOGITS:  # its head is another operator than that of log-probs
            rows = (ours[point].flatten(1) != theirs.flatten(1)).any(1).nonzero().flatten().tolist()
            if rows:
                found.append(f"{point}: {len(rows)} of {len(theirs)} rows, first {rows[0]}")
    return found
