"""Faults of an engine are named: the first operator that differs, and the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras.lab.parity.engines import (
    PROMPTS,
    attribute,
    exchange_halves,
    open_parity,
    written,
)
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, save_tiny

pytestmark = [pytest.mark.multirank, pytest.mark.slow]
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

Findings = dict[str, tuple[str, str]]  # fault -> (point, cause)
LAYER = "model.layers.1."

LLAMA = {
    "nothing": ("", "agree at all 29 points"),
    "rotary base": ("model.layers.0.self_attn.query", "rotary base is about 500000"),
    "rotary tables in bfloat16": ("model.layers.0.self_attn.query", "rounded to 16 bits"),
    "positions": ("model.layers.0.self_attn.query", "positions are shifted by 1"),
    "norm epsilon": (f"{LAYER}input_layernorm", "epsilon is about 1.0e-03"),
    "stale slice": (f"{LAYER}self_attn.k_proj", "rows 2 to 11 of 64 differ"),
    "slice of another rank": (f"{LAYER}mlp.down_proj", "from column 48 on"),
    "gate and up exchanged": (f"{LAYER}mlp.gate_proj", f"it is {LAYER}mlp.up_proj.weight"),
    "tied head": ("lm_head", "was not updated"),
    "activation": (f"{LAYER}mlp.activation", "activation is gelu, the trained model's silu"),
    "head in bfloat16": ("lm_head", "in 16 bits"),
    "attention scale": (f"{LAYER}self_attn.attention", "scaled by 0.1,"),
    "temperature": ("sampling", "of temperature 1, not 0.7"),
    "top_p": ("sampling", "not renormalised over what top_p=0.6 keeps"),
    "raw log-probs": ("sampling", "raw logits, before temperature and top_p"),
    "begin of sequence": ("tokens", "only the engine puts a token before"),
    "chat template": ("tokens", "chat templates or tokenizers differ"),
    "cache block": (f"{LAYER}self_attn.attention", "a stale block"),
    "prefix cache": ("model.layers.0.self_attn.attention", "prefix cache must be dropped"),
    "adapter": (f"{LAYER}self_attn.q_proj", "adapter (LoRA) was not delivered"),
}
GEMMA = {
    "nothing": ("", "within rounding"),
    "soft-cap of attention": ("model.layers.0.self_attn.attention", "soft-cap of its scores, 5"),
    "sliding window": ("model.layers.0.self_attn.attention", "window is 17 tokens"),
    "no sliding window": ("model.layers.0.self_attn.attention", "no sliding window"),
    "soft-cap of logits": ("lm_head", "soft-cap of the logits, 8"),
}
MIXTURE = {
    "nothing": ("", "agree at all 29 points"),
    "sum of expert weights": (f"{LAYER}mlp.experts", "not normalised to 1"),
    "router weight": (f"{LAYER}mlp.gate", "rows 1 to 1 of 4 differ"),
    "stale expert": (f"{LAYER}mlp.experts", "tokens of expert 1 differ"),
    "other experts": (f"{LAYER}mlp.experts", "tokens have other experts"),
}


def found(parity: Any, **options: Any) -> tuple[str, str]:
    report = parity.compare(PROMPTS, max_tokens=6, **options)
    finding = report.finding
    return ("", str(report)) if finding is None else (finding.point, finding.cause)


def rotary_tables(table: torch.Tensor, base: float) -> torch.Tensor:
    half = table.shape[1] // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(table), dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], 1).float()


def llama_faults(rank: int, world_size: int, path: str) -> Findings:
    from hybridengine.model import apply_lora

    parity, engine, trained = open_parity(path, prefix_caching=True)
    results = {"nothing": found(parity)}
    runner = parity.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    layer, rotary = engine.model.layers[1], engine.model.layers[0].self_attn.rotary_emb
    table, attention = rotary.cos_sin_cache, layer.self_attn.attn

    def gelu(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.gelu(gate) * up

    def head_in_bfloat16(head: Any, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        return (hidden.bfloat16() @ head.weight.bfloat16().T).float()[..., :VOCAB]

    copied_head = torch.nn.Parameter(engine.lm_head.weight.detach() * 1.01)
    faults = {
        "rotary base": attribute(rotary, "cos_sin_cache", rotary_tables(table, 5e5)),
        "rotary tables in bfloat16": attribute(rotary, "cos_sin_cache", table.bfloat16().float()),
        "positions": attribute(rotary, "cos_sin_cache", table.roll(-1, 0)),
        "norm epsilon": attribute(layer.input_layernorm, "variance_epsilon", 1e-3),
        "stale slice": written(layer.self_attn.qkv_proj.weight, lambda w: w[130:140].mul_(1.01)),
        "slice of another rank": written(
            layer.mlp.down_proj.weight, lambda w: exchange_halves(w, 1)
        ),
        "gate and up exchanged": written(
            layer.mlp.gate_up_proj.weight, lambda w: exchange_halves(w, 0)
        ),
        "tied head": attribute(engine.lm_head, "weight", copied_head),
        "activation": attribute(layer.mlp.act_fn, "forward", gelu),
        "head in bfloat16": attribute(engine.logits_processor, "forward", head_in_bfloat16),
        "attention scale": attribute(attention.impl, "scale", 0.1),
    }
    for name, fault in faults.items():
        parity.llm.reset_prefix_cache()
        with fault:
            results[name] = found(parity)
    parity.llm.reset_prefix_cache()
    sampler = runner.sampler
    with (
        attribute(sampler, "logprobs_mode", "raw_logprobs"),
        attribute(sampler.topk_topp_sampler, "logprobs_mode", "raw_logprobs"),
    ):
        results["temperature"] = found(parity, temperature=0.7)
        results["raw log-probs"] = found(parity, temperature=0.7, top_p=0.6)
    results["top_p"] = of_full_distribution(parity)
    with_bos, other = ([[1, *ids] for ids in PROMPTS], [[3, 4, *ids[4:]] for ids in PROMPTS])
    results["begin of sequence"] = found(parity, engine_prompts=with_bos)
    results["chat template"] = found(parity, engine_prompts=other)

    def spoil(module: Any, args: Any, kwargs: Any) -> None:
        if len(kwargs["positions"]) == 1:  # decoding
            runner.kv_caches[1].mul_(1.01)

    parity.llm.reset_prefix_cache()
    handle = engine.register_forward_pre_hook(spoil, with_kwargs=True)
    results["cache block"] = found(parity)
    handle.remove()
    parity.llm.reset_prefix_cache()
    found(parity)  # fills the prefix cache
    keys = engine.model.layers[0].self_attn.qkv_proj.weight
    with (
        written(keys, lambda w: w[128:192].mul_(1.5)),
        written(trained.model.layers[0].self_attn.k_proj.weight, lambda w: w.mul_(1.5)),
    ):
        results["prefix cache"] = found(parity)
    parity.llm.reset_prefix_cache()
    apply_lora(trained, 2, 4.0, [f"{LAYER}self_attn.q_proj"])
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.5)
    results["adapter"] = found(parity)
    return results


def of_full_distribution(parity: Any) -> tuple[str, str]:
    """Compare with log-probs that the engine has not renormalised."""
    from vllm import SamplingParams

    from hybridengine.lab.parity.causes import Sampling, response_log_probs, sampling_cause
    from hybridengine.lab.parity.points import LOGITS, record_engine

    how = Sampling(0.7, 0.6)
    sampling = SamplingParams(
        max_tokens=8, logprobs=0, seed=1, ignore_eos=True, temperature=0.7, top_p=0.6
    )
    record = record_engine(parity.llm, PROMPTS[0], sampling)
    logits = record.points[LOGITS].double()
    record.log_probs = response_log_probs(record, logits, Sampling(0.7)).tolist()
    return "sampling", str(sampling_cause(record, how))


def gemma_faults(rank: int, world_size: int, path: str) -> Findings:
    parity, engine, _ = open_parity(path)
    attention = engine.model.layers[0].self_attn.attn.impl
    faults = {
        "soft-cap of attention": attribute(attention, "logits_soft_cap", 0.0),
        "sliding window": attribute(attention, "sliding_window", attention.sliding_window + 1),
        "no sliding window": attribute(attention, "sliding_window", -1),
        "soft-cap of logits": attribute(engine.logits_processor, "soft_cap", None),
    }
    results = {"nothing": found(parity)}
    for name, fault in faults.items():
        with fault:
            results[name] = found(parity)
    return results


def mixture_faults(rank: int, world_size: int, path: str) -> Findings:
    parity, engine, _ = open_parity(path)
    experts = engine.model.layers[1].mlp.experts
    router, weights = experts.router, experts.routed_experts.w13_weight
    select = router.select_experts

    def other_experts(*args: Any, **kwargs: Any) -> Any:
        weights, ids = select(*args, **kwargs)
        return weights, ids.flip(-1)

    faults = {
        "sum of expert weights": attribute(router, "renormalize", not router.renormalize),
        "router weight": written(experts.gate.weight, lambda w: w[1].mul_(1.1)),
        "stale expert": written(weights, lambda w: w[1].mul_(1.1)),
        "other experts": attribute(router, "select_experts", other_experts),
    }
    results = {"nothing": found(parity)}
    for name, fault in faults.items():
        with fault:
            results[name] = found(parity)
    return results


@pytest.mark.parametrize(
    ("architecture", "body", "expected"),
    [
        ("llama", llama_faults, LLAMA),
        ("gemma2", gemma_faults, GEMMA),
        ("qwen3_moe", mixture_faults, MIXTURE),
    ],
)
def test_faults_are_named(tmp_path: Path, architecture: str, body: Any, expected: Findings) -> None:
    path = save_tiny(architecture, tmp_path / "model")
    found = run_ranks(body, 1, path, timeout_s=400)[0]
    assert found.keys() == expected.keys()
    wrong = {
        fault: found[fault]
        for fault, (point, words) in expected.items()
        if found[fault][0] != point or words not in found[fault][1]
    }
    assert not wrong
