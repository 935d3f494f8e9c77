"""Tiny random mixtures of experts of many architectures, in memory."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = ["ARCHITECTURES", "NUM_EXPERTS", "assert_close", "run", "tiny_moe"]

NUM_EXPERTS, TOP_K = 8, 2
_COMMON = dict(
    vocab_size=101,
    hidden_size=64,
    intermediate_size=48,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    pad_token_id=0,
    initializer_range=0.3,
)
_ROUTED = dict(num_experts_per_tok=TOP_K)
_LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    layer_types=["linear_attention", "full_attention"],
)
_DEEPSEEK = dict(
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    num_key_value_heads=4,
)
_MAMBA = dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1)
_GROUPED = dict(n_routed_experts=NUM_EXPERTS, first_k_dense_replace=1, n_shared_experts=1)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": _ROUTED | dict(num_experts=NUM_EXPERTS, shared_expert_intermediate_size=32),
    "qwen3_moe": _ROUTED | dict(num_experts=NUM_EXPERTS),
    "qwen3_next": _ROUTED | _LINEAR | dict(num_experts=8, shared_expert_intermediate_size=32),
    "deepseek_v3": _ROUTED | _DEEPSEEK | _GROUPED | dict(n_group=2, topk_group=1),
    "glm4_moe": _ROUTED | _GROUPED | dict(n_group=1, topk_group=1),
    "dots1": _ROUTED | _GROUPED | dict(n_group=1, topk_group=1),
    "gpt_oss": _ROUTED | dict(num_local_experts=NUM_EXPERTS),
    "olmoe": _ROUTED | dict(num_experts=NUM_EXPERTS),
    "mixtral": _ROUTED | dict(num_local_experts=NUM_EXPERTS),
    "minimax": _ROUTED | dict(num_local_experts=NUM_EXPERTS),
    "minimax_m2": _ROUTED | dict(num_local_experts=NUM_EXPERTS),
    "ernie4_5_moe": dict(
        moe_num_experts=NUM_EXPERTS, moe_k=TOP_K, moe_num_shared_experts=1, moe_layer_start_index=0
    ),
    "granitemoe": _ROUTED | dict(num_local_experts=NUM_EXPERTS),
    "qwen3_5_moe_text": _ROUTED | _LINEAR | dict(num_experts=NUM_EXPERTS),
    "lfm2_moe": _ROUTED
    | dict(num_experts=NUM_EXPERTS, num_dense_layers=0, layer_types=["conv", "full_attention"]),
    "granitemoehybrid": _ROUTED
    | _MAMBA
    | dict(num_local_experts=NUM_EXPERTS, layer_types=["mamba", "attention"]),
    "nemotron_h": _ROUTED
    | dict(
        **dict(hybrid_override_pattern="ME*E", mamba_num_heads=4, mamba_head_dim=16, n_groups=2),
        **dict(n_routed_experts=NUM_EXPERTS, n_group=1, topk_group=1, moe_latent_size=48),
        **dict(moe_shared_expert_intermediate_size=32, ssm_state_size=16, num_hidden_layers=4),
    ),
    "kimi_linear": _ROUTED
    | _DEEPSEEK
    | dict(
        **dict(linear_num_heads=2, linear_head_dim=16, num_experts=NUM_EXPERTS, q_lora_rank=None),
        **dict(layer_types=["linear_attention", "full_attention"], n_group=1, topk_group=1),
        **dict(mlp_layer_types=["sparse", "sparse"], num_shared_experts=1),
    ),
}


def tiny_moe(kind: str, **options: Any) -> PreTrainedModel:
    """Return a random float32 model of `kind`, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = CONFIG_MAPPING[kind](**_COMMON | options)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def run(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    logits.logsumexp(-1).sum().backward()
    return logits, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-4)
    assert got[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():  # sums over tokens, in another order
        limit = 1e-4 * float(grad.abs().max())
        torch.testing.assert_close(got[1][name], grad, rtol=1e-4, atol=limit)


def assert_same_when_checkpointed(model: Any, ids: torch.Tensor, expected: Any) -> None:
    """Logits and gradients are `expected`, bit for bit, where layers are computed again."""
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    logits, gradients = run(model, ids)
    assert torch.equal(logits, expected[0])
    assert all(torch.equal(gradients[name], grad) for name, grad in expected[1].items())
