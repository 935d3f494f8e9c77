"""The output head's share of the time of an update's forward and backward, by form of the loss.

One micro-batch through a full model with random weights of the shape of SmolLM2-135M (V = 49,152)
and Qwen2.5-0.5B (V = 151,936): `hybridengine_no_head` is the model up to its head, the other rows
add the head in one pass and in two steps, each with all rows active and with half of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks._bench import OURS, Bench
from hybridengine.kernels import has_fast_products, policy_loss

# hidden, intermediate, layers, heads, key-value heads, vocabulary; sequences of a micro-batch
SHAPES = {"135M": ((576, 1536, 30, 9, 3, 49_152), 12), "0.5B": ((896, 4864, 24, 14, 2, 151_936), 4)}
PROMPT, RESPONSE = 32, 96


def run(bench: Bench) -> None:
    shapes = {"tiny": ((64, 96, 2, 4, 2, 2000), 2)} if bench.quick else SHAPES
    dtype = torch.bfloat16 if has_fast_products(torch.bfloat16, bench.device) else torch.float32
    for name, (shape, sequences) in shapes.items():
        compare(bench, name, _model(bench, shape, dtype), sequences, dtype)


def _model(bench: Bench, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from hybridengine.model.attention import ATTENTION
    from hybridengine.model.head import patch_head

    hidden, intermediate, layers, heads, kv_heads, vocab = shape
    sizes: dict[str, Any] = dict(hidden_size=hidden, intermediate_size=intermediate)
    sizes |= dict(num_hidden_layers=layers, num_attention_heads=heads)
    sizes |= dict(num_key_value_heads=kv_heads, vocab_size=vocab)
    config = LlamaConfig(**sizes, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    patch_head(model)
    return model.to(device=bench.device, dtype=dtype)


def compare(bench: Bench, name: str, model: Any, sequences: int, dtype: torch.dtype) -> None:
    from hybridengine.model import pack_rollouts, packed_log_probs, packed_policy_loss
    from hybridengine.model.forward import packed_head

    generator = torch.Generator().manual_seed(0)
    vocab, total = model.config.vocab_size, PROMPT + RESPONSE
    ids = torch.randint(0, vocab, (sequences, total), generator=generator).tolist()
    batch = pack_rollouts([(row[:PROMPT], row[PROMPT:]) for row in ids], bench.device)
    rows = sequences * RESPONSE
    advantages = torch.randn(rows, generator=generator).to(bench.device)
    half = advantages * (torch.arange(rows, device=bench.device) % 2)

    def no_head() -> Tensor:
        return packed_head(model, batch, lambda hidden, weight, **_: (hidden.float().sum(),))[0]

    def one_pass(advantages: Tensor) -> Tensor:
        return packed_policy_loss(model, batch, old_log_probs=None, advantages=advantages)[0]

    def two_steps(advantages: Tensor) -> Tensor:
        log_probs, entropy = packed_log_probs(model, batch)
        return policy_loss(log_probs, None, advantages, entropy=entropy)[0]

    def call(loss_of: Callable[[], Tensor]) -> None:
        loss_of().backward()
        model.zero_grad()

    losses: dict[str, Callable[[], Tensor]] = {
        OURS: partial(one_pass, advantages),
        f"{OURS}_half_inactive": partial(one_pass, half),
        f"{OURS}_two_steps": partial(two_steps, advantages),
        f"{OURS}_two_steps_half_inactive": partial(two_steps, half),
        f"{OURS}_no_head": no_head,
    }
    shape = f"{name} T={sequences * total} R={rows} V={vocab}"
    first = len(bench.rows)
    calls = {key: partial(call, loss_of) for key, loss_of in losses.items()}
    bench.compare("head_share", "both", shape, dtype, calls)
    *results, without = bench.rows[first:]
    for row in results:
        share = 1 - without["ms_p50"] / row["ms_p50"]
        print(f"# {row['impl']}: {share:.0%} of the time is the head's", flush=True)
