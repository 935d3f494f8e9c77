"""Forward and backward of one packed micro-batch with and without shared prefixes.

SmolLM2-135M, or a model of its shape with random weights where the demo's is missing; one process,
the same responses, the two forms in turn. `training` is log-probs and their backward, `body` the
same without the head, whose rows are the same in both. Layers are recomputed in the backward. The
limit is the token ratio: how many times fewer tokens there are; `% of peak` is the share of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from benchmarks._bench import OURS, ROOT, Bench
from benchmarks._models import smollm2_135m
from hybridengine.kernels import has_fast_products
from hybridengine.model import PackedBatch, pack_rollouts, packed_log_probs
from hybridengine.model.attention import ATTENTION
from hybridengine.model.head import patch_head
from tests.tiny_models import SIZES

MODEL = ROOT / ".cache/demo/smollm2-135m-instruct"
SHAPES = {  # groups, responses of each, tokens of a prompt and of a response
    "8x(2048+512)": (1, 8, 2048, 512),
    "demo, 12x8x(20+3)": (12, 8, 20, 3),
}
QUICK = {"2x3x(16+4)": (2, 3, 16, 4)}


def run(bench: Bench) -> None:
    model, dtype = load_model(bench)
    for shape, sizes in (QUICK if bench.quick else SHAPES).items():
        pairs = rollouts(model.config.vocab_size, *sizes)
        plain, shared = (
            pack_rollouts(pairs, bench.device, shared_prefix=share) for share in (False, True)
        )
        ratio = plain.input_ids.numel() / shared.input_ids.numel()
        print(
            f"# {shape}: {plain.input_ids.numel()} tokens, {shared.input_ids.numel()} with shared "
            f"prefixes, ratio {ratio:.2f}",
            flush=True,
        )
        for name, function in (("training", training), ("body", body)):
            calls = {
                OURS: lambda f=function, b=shared: f(model, b),
                "plain packing": lambda f=function, b=plain: f(model, b),
            }
            compare(bench, "shared_prefix", name, shape, dtype, calls, ratio)


def load_model(bench: Bench) -> tuple[Any, torch.dtype]:
    """Return (model that recomputes its layers, compute dtype): bfloat16 where it is fast."""
    fast = has_fast_products(torch.bfloat16, bench.device)
    dtype = torch.bfloat16 if fast else torch.float32
    if bench.quick:
        sizes = SIZES | {"vocab_size": 200, "hidden_size": 64, "head_dim": 16}
        config = LlamaConfig(**sizes, tie_word_embeddings=True)
    elif MODEL.exists():
        config = AutoConfig.from_pretrained(MODEL)
    else:
        config = smollm2_135m(max_position_embeddings=8192)
    options = {"dtype": dtype, "attn_implementation": ATTENTION}
    model: Any
    if MODEL.exists() and not bench.quick:
        model = AutoModelForCausalLM.from_pretrained(MODEL, **options)
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, **options)
    patch_head(model)
    model.to(bench.device).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, dtype


def rollouts(
    vocab_size: int, groups: int, responses: int, prompt: int, response: int
) -> list[tuple[list[int], list[int]]]:
    """Random (prompt, response) pairs; only the responses of a group share their prompt."""
    generator = torch.Generator().manual_seed(0)

    def ids(n: int) -> list[int]:
        return torch.randint(vocab_size, (n,), generator=generator).tolist()

    return [
        (p, ids(response)) for p in (ids(prompt) for _ in range(groups)) for _ in range(responses)
    ]


def training(model: Any, batch: PackedBatch) -> None:
    log_probs, _ = packed_log_probs(model, batch)
    log_probs.mean().backward()
    model.zero_grad()  # here, so that the peak of every call has the gradients


def body(model: Any, batch: PackedBatch) -> None:
    """Forward and backward of the layers; the gradient enters at the rows of the head."""
    trees = (
        {}
        if batch.subtree_ends is None
        else {"subtree_ends": batch.subtree_ends, "tree_position_ids": batch.tree_position_ids}
    )
    hidden = model.get_decoder()(
        input_ids=batch.input_ids[None],
        position_ids=batch.position_ids[None],
        cu_seq_lens_q=batch.cu_seqlens,
        cu_seq_lens_k=batch.cu_seqlens,
        max_length_q=batch.max_seqlen,
        max_length_k=batch.max_seqlen,
        use_cache=False,
        **trees,
    ).last_hidden_state[0]
    hidden[batch.logit_positions].float().mean().backward()
    model.zero_grad()


def compare(
    bench: Bench,
    op: str,
    pass_: str,
    shape: str,
    dtype: torch.dtype,
    calls: Mapping[str, Callable[[], None]],
    ratio: float,
) -> None:
    """Time the calls in turn, at least twice each, after one of each for its memory.

    ratio: how many times fewer tokens ours has than "plain packing".
    """
    calls[OURS]()  # what libraries allocate at first is of no row
    peaks = {name: bench._peak_mib(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    done = time.perf_counter() + bench.budget_s * len(calls)
    while len(times[OURS]) < 2 or time.perf_counter() < done:
        for name, call in calls.items():
            times[name].append(bench._time_ms(call))
    quantiles = {
        name: [sorted(values)[round(q * (len(values) - 1))] for q in (0.2, 0.5, 0.8)]
        for name, values in times.items()
    }
    speedup = quantiles["plain packing"][1] / quantiles[OURS][1]
    best = min(p50 for name, (_, p50, _) in quantiles.items() if name != OURS)
    for name, (p20, p50, p80) in quantiles.items():
        ours = name == OURS
        bench.add(
            op,
            pass_,
            name,
            shape,
            dtype=str(dtype).removeprefix("torch."),
            ms_p20=p20,
            ms_p50=p50,
            ms_p80=p80,
            peak_mib=peaks[name],
            share_of_limit=speedup / ratio if ours else None,
            ratio_to_best_peer=best / quantiles[OURS][1] if ours else None,
        )
