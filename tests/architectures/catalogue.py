"""Tiny configurations of the architectures that both transformers and vLLM know.

    CATALOGUE["qwen3_moe"]            # Entry: model type, config overrides, TP sizes

Sizes are small but not symmetric: four heads and two KV heads (replicated at TP 4), a vocabulary
that no TP size divides. Most have two layers; a dozen have five to eight, because
layers that are equal are recorded once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from tests.tiny_models import SIZES, VOCAB

__all__ = ["CATALOGUE", "Entry"]

_TEXT = SIZES | dict(intermediate_size=192, max_position_embeddings=256)
_MOE = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
_ROUTED = dict(
    n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1
)
_MLA = dict(
    q_lora_rank=48,
    kv_lora_rank=512,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=32,
    num_key_value_heads=4,
    moe_intermediate_size=128,
    num_experts_per_tok=2,
    head_dim=64,
    **_ROUTED,
)
_INDEXER = dict(index_topk=16, index_head_dim=128, index_n_heads=4)
_ENDS = dict(bos_token_id=1, eos_token_id=2)
_GPT = dict(
    vocab_size=VOCAB, n_embd=128, n_layer=2, n_head=4, n_positions=256, n_inner=192, **_ENDS
)
_VISION = dict(
    **dict(depth=2, embed_dim=64, hidden_size=128, num_heads=4, in_channels=3, patch_size=14),
    **dict(spatial_merge_size=2, temporal_patch_size=2, mlp_ratio=2, intermediate_size=96),
    **dict(out_hidden_size=128, fullatt_block_indexes=[1]),
)
_VIT = dict(
    **dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4),
    **dict(image_size=56, patch_size=14),
)
_LINEAR_ATTENTION = dict(
    **dict(linear_num_value_heads=4, linear_num_key_heads=4, linear_key_head_dim=32),
    **dict(linear_value_head_dim=32, layer_types=["linear_attention", "full_attention"]),
)
_DECODER = dict(vocab_size=VOCAB, hidden_size=128, num_hidden_layers=2)
_FALCON = _DECODER | dict(num_attention_heads=4)
_MAMBA = _DECODER | _ENDS | dict(state_size=16)
_HYBRID_MAMBA = dict(mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1)
_MROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}


@dataclass(frozen=True)
class Entry:
    """One architecture: `overrides` of the default config of `model_type`, and of its parts.

    engine: further arguments of vLLM's engine.
    """

    model_type: str
    overrides: dict[str, Any] = field(default_factory=dict)
    sub_configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)

    def config(self) -> PretrainedConfig:
        return AutoConfig.for_model(self.model_type, **self.overrides, **self.sub_configs)


def _text(model_type: str, **overrides: Any) -> Entry:
    return Entry(model_type, _TEXT | overrides)


def _only(model_type: str, **overrides: Any) -> Entry:
    return Entry(model_type, overrides)


CATALOGUE: dict[str, Entry] = {
    "llama": _text("llama", tie_word_embeddings=False, num_hidden_layers=6),
    "llama (tied, biased)": _text(
        "llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "mistral": _text("mistral"),
    "ministral3": _text("ministral3"),
    "qwen2": _text("qwen2"),
    "qwen3": _text("qwen3", num_hidden_layers=5),
    "qwen2_moe": _text("qwen2_moe", **_MOE, shared_expert_intermediate_size=128),
    "qwen3_moe": _text("qwen3_moe", **_MOE, num_hidden_layers=6),
    "qwen3_moe (expert parallel)": Entry(
        "qwen3_moe", _TEXT | _MOE, engine={"enable_expert_parallel": True}
    ),
    "qwen3_next": _text(
        "qwen3_next",
        **_MOE,
        **_LINEAR_ATTENTION | {"layer_types": ["linear_attention", "full_attention"] * 4},
        shared_expert_intermediate_size=128,
        num_hidden_layers=8,
    ),
    "qwen3_5_text": _text("qwen3_5_text", **_LINEAR_ATTENTION),
    "mixtral": _text("mixtral", **_MOE),
    "gemma": _text("gemma"),
    "gemma2": _text("gemma2", num_hidden_layers=6),
    "gemma3_text": _text("gemma3_text"),
    "gemma3n_text": _text(
        "gemma3n_text",
        intermediate_size=[192, 192],
        num_hidden_layers=2,
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=32,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0, 0.0],
        layer_types=["sliding_attention", "full_attention"],
    ),
    "deepseek_v2": _text("deepseek_v2", **_MLA),
    "deepseek_v3": _text("deepseek_v3", **_MLA, topk_method="noaux_tc", num_hidden_layers=6),
    "glm4_moe_lite": _text("glm4_moe_lite", **_MLA),
    "deepseek_v32": _text("deepseek_v32", **_MLA, **_INDEXER),
    "deepseek_v4": _text(
        "deepseek_v4",
        **_INDEXER,
        **dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2),
        **dict(moe_intermediate_size=128, num_key_value_heads=1, num_hidden_layers=4),
        **dict(
            q_lora_rank=48, o_lora_rank=32, o_groups=2, mlp_layer_types=["hash_moe", *["moe"] * 3]
        ),
    ),
    "glm_moe_dsa": _text("glm_moe_dsa", **_MLA, **_INDEXER),
    "phi3": _text("phi3"),
    "phimoe": _text("phimoe", **_MOE | {"moe_intermediate_size": 192}),
    "gpt_oss": _text(
        "gpt_oss", **_MOE, num_key_value_heads=4, intermediate_size=256, num_hidden_layers=6
    ),
    "olmo": _text("olmo"),
    "olmo2": _text("olmo2"),
    "olmo3": _text("olmo3"),
    "olmoe": _text("olmoe", **_MOE),
    "granite": _text("granite"),
    "granitemoe": _text("granitemoe", **_MOE),
    "granitemoeshared": _text("granitemoeshared", **_MOE, shared_intermediate_size=128),
    "granitemoehybrid": _text(
        "granitemoehybrid",
        **_MOE,
        **_HYBRID_MAMBA,
        shared_intermediate_size=128,
        mamba_expand=2,
        layer_types=["mamba", "attention"],
    ),
    "glm": _text("glm"),
    "glm4": _text("glm4"),
    "glm4_moe": _text(
        "glm4_moe", **_MOE, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1
    ),
    "internlm2": _text("internlm2"),
    "starcoder2": _text("starcoder2"),
    "falcon": _only("falcon", **_FALCON, num_kv_heads=2, new_decoder_architecture=True, bias=False),
    "falcon (multi-query)": _only(
        "falcon",
        **_FALCON,
        multi_query=True,
        new_decoder_architecture=False,
        bias=True,
        parallel_attn=True,
    ),
    "gpt_neox": _text("gpt_neox", num_key_value_heads=4, num_hidden_layers=5),
    "gpt2": _only("gpt2", **_GPT),
    "gpt_bigcode": _only("gpt_bigcode", **_GPT, multi_query=True),
    "gptj": _only("gptj", **_GPT, rotary_dim=16),
    "opt": _text("opt", ffn_dim=192, word_embed_proj_dim=128, dropout=0.0),
    "bloom": _only("bloom", vocab_size=VOCAB, hidden_size=128, n_layer=2, n_head=4),
    "mpt": _only("mpt", vocab_size=VOCAB, d_model=128, n_layers=2, n_heads=4, max_seq_len=256),
    "phi": _text("phi", num_key_value_heads=4),
    "stablelm": _text("stablelm"),
    "cohere": _text("cohere"),
    "cohere2": _text("cohere2", layer_types=["sliding_attention", "full_attention"]),
    "nemotron": _text("nemotron"),
    "exaone4": _text("exaone4", layer_types=["sliding_attention", "full_attention"]),
    "ernie4_5": _text("ernie4_5"),
    "ernie4_5_moe": _text(
        "ernie4_5_moe",
        **_MOE,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "smollm3": _text("smollm3", no_rope_layers=[1, 0]),
    "arcee": _text("arcee"),
    "apertus": _text("apertus"),
    "seed_oss": _text("seed_oss"),
    "hunyuan_v1_dense": _text("hunyuan_v1_dense"),
    "dots1": _text("dots1", **_MOE, **_ROUTED),
    "minimax_m2": _text(
        "minimax_m2", **_MOE, rotary_dim=16, scoring_func="sigmoid", use_routing_bias=True
    ),
    "minimax_m3_vl": Entry(
        "minimax_m3_vl",
        sub_configs={
            "text_config": _TEXT
            | _MOE
            | dict(intermediate_size=128, dense_intermediate_size=192, shared_intermediate_size=128)
            | dict(rotary_dim=16, mlp_layer_types=["dense", "sparse"], num_hidden_layers=2)
            | dict(index_n_heads=2, index_head_dim=32, index_block_size=4, index_topk_blocks=2)
            | {"layer_types": ["full_attention", "minimax_m3_sparse"]},
            "vision_config": _VIT | {"img_token_compression_config": {}},
        },
    ),
    "olmo_hybrid": _text("olmo_hybrid", **_LINEAR_ATTENTION),
    "kimi_linear": _text(
        "kimi_linear",
        **_MOE,
        **dict(linear_num_heads=4, linear_head_dim=32, n_routed_experts=4, n_shared_experts=1),
        **dict(layer_types=["linear_attention", "full_attention"], n_group=1, topk_group=1),
        **dict(mlp_layer_types=["dense", "sparse"], q_lora_rank=None, kv_lora_rank=64),
        **dict(qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, num_key_value_heads=4),
    ),
    "minimax": _text(
        "minimax", **_MOE, layer_types=["linear_attention", "full_attention"], block_size=8
    ),
    "lfm2": _text(
        "lfm2",
        conv_dim=128,
        block_dim=128,
        conv_dim_out=128,
        layer_types=["conv", "full_attention"],
    ),
    "lfm2_moe": _text(
        "lfm2_moe", **_MOE, num_dense_layers=1, layer_types=["conv", "full_attention"]
    ),
    "llama4_text": _text(
        "llama4_text",
        **_MOE,
        intermediate_size_mlp=192,
        interleave_moe_layer_step=2,
        num_hidden_layers=8,
    ),
    "dbrx": _only(
        "dbrx",
        vocab_size=VOCAB,
        d_model=128,
        n_layers=2,
        n_heads=4,
        max_seq_len=256,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        ffn_config={"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "jamba": _text(
        "jamba",
        **_MOE,
        mamba_d_state=16,
        mamba_dt_rank=8,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
    ),
    "mamba": _only("mamba", **_MAMBA, time_step_rank=8),
    "mamba2": _only(
        "mamba2",
        **_MAMBA | {"num_hidden_layers": 5},
        num_heads=8,
        head_dim=32,
        n_groups=4,
    ),
    "falcon_mamba": _only("falcon_mamba", **_MAMBA, time_step_rank=8),
    "falcon_h1": _text("falcon_h1", **_HYBRID_MAMBA, mamba_d_ssm=256),
    "bamba": _text("bamba", **_HYBRID_MAMBA, attn_layer_indices=[1]),
    "zamba2": _text(
        "zamba2",
        mamba_d_state=16,
        n_mamba_heads=8,
        mamba_ngroups=1,
        attention_head_dim=64,
        num_hidden_layers=2,
        layers_block_type=["mamba", "hybrid"],
        num_mem_blocks=1,
        num_key_value_heads=4,
    ),
    "nemotron_h": _text(
        "nemotron_h",
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=4,
        hybrid_override_pattern="M*-",
        num_hidden_layers=3,
    ),
    "qwen2_vl": Entry(
        "qwen2_vl",
        sub_configs={"text_config": _TEXT | {"rope_parameters": _MROPE}, "vision_config": _VISION},
    ),
    "qwen2_5_vl": Entry(
        "qwen2_5_vl",
        sub_configs={"text_config": _TEXT | {"rope_parameters": _MROPE}, "vision_config": _VISION},
    ),
    "qwen3_vl": Entry(
        "qwen3_vl",
        sub_configs={
            "text_config": _TEXT | {"rope_parameters": _MROPE},
            "vision_config": _VISION
            | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16, "hidden_size": 64},
        },
    ),
    "qwen3_vl_moe": Entry(
        "qwen3_vl_moe",
        sub_configs={
            "text_config": _TEXT
            | _MOE
            | {"rope_parameters": _MROPE, "num_hidden_layers": 5, "norm_topk_prob": True},
            "vision_config": _VISION
            | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16, "hidden_size": 64},
        },
    ),
    "gemma3": Entry(
        "gemma3",
        sub_configs={
            "text_config": _TEXT | {"num_hidden_layers": 6},
            "vision_config": _VIT | {"vision_use_head": False},
        },
    ),
    "paligemma": Entry(
        "paligemma",
        {"projection_dim": 128},
        sub_configs={
            "text_config": {"model_type": "gemma"} | _TEXT,
            "vision_config": _VIT
            | {
                "model_type": "siglip_vision_model",
                "projection_dim": 128,
                "vision_use_head": False,
            },
        },
    ),
    "gemma4_text": _text(
        "gemma4_text",
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=32,
        num_kv_shared_layers=2,
        global_head_dim=32,
    ),
    "qwen3_5_moe_text": _text(
        "qwen3_5_moe_text", **_MOE, **_LINEAR_ATTENTION, shared_expert_intermediate_size=128
    ),
    "flex_olmo": _text("flex_olmo", **_MOE | {"moe_intermediate_size": 192}),
    "exaone_moe": _text(
        "exaone_moe",
        **_MOE,
        num_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "mistral3": Entry(
        "mistral3",
        sub_configs={
            "text_config": {"model_type": "mistral"} | _TEXT,
            "vision_config": {"model_type": "pixtral", "head_dim": 16} | _VIT,
        },
    ),
    "llava": Entry(
        "llava",
        sub_configs={
            "text_config": {"model_type": "llama"} | _TEXT,
            "vision_config": {"model_type": "clip_vision_model", "projection_dim": 64} | _VIT,
        },
    ),
}
