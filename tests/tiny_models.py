"""Tiny real models on disk: config, random weights and a word tokenizer, as save_pretrained writes.

    save_tiny("llama", folder)      # then AutoModelForCausalLM, vLLM or load_causal_lm read it

Biases and norms are random too, so that a dropped bias or a swapped norm shows. Head size 32 and an
even number of heads suit vLLM at TP 2; the vocabulary divides by neither 2 nor 4. transformers
forces a class of tokenizers on qwen2, which knows no words: give it ids, or `save_characters`.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    GemmaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3MoeConfig,
)

__all__ = [
    "SIZES",
    "TINY",
    "save_characters",
    "save_classifier",
    "save_tiny",
    "tiny_config",
    "word_tokenizer",
]

VOCAB = 101
_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_COMMON = SIZES | dict(initializer_range=0.1, use_cache=True)
TINY = {
    "llama": lambda: LlamaConfig(**_COMMON, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_COMMON, tie_word_embeddings=False),
    "qwen2_one_kv_head": lambda: Qwen2Config(
        **_COMMON | {"num_key_value_heads": 1}, tie_word_embeddings=False
    ),
    "qwen3": lambda: Qwen3Config(**_COMMON, tie_word_embeddings=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_COMMON,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
    "gpt_oss": lambda: GptOssConfig(  # sinks; a window in every other layer
        **_COMMON | {"intermediate_size": 64},
        sliding_window=16,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "gemma": lambda: GemmaConfig(**_COMMON, hidden_activation="gelu_pytorch_tanh"),
    "mistral": lambda: MistralConfig(
        **_COMMON, sliding_window=16, tie_word_embeddings=False, rope_theta=1e6
    ),
    "gemma2": lambda: Gemma2Config(
        **_COMMON,
        sliding_window=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
        query_pre_attn_scalar=48,
    ),
}


def tiny_config(kind: str):
    return TINY[kind]()


def save_tiny(
    kind: str | PretrainedConfig,
    folder: Path | str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
):
    """Write the tiny model of `kind`, or of a configuration, to `folder` and return it as str."""
    config = tiny_config(kind) if isinstance(kind, str) else kind
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("_bias"):
                parameter.data += 0.1 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("_bias"):  # of routers
                buffer += 0.1 * torch.randn_like(buffer)
    model.to(dtype).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return str(folder)


def save_characters(folder: Path | str) -> None:
    """Write a tokenizer of single characters to `folder`, for any type of model."""
    characters = [*map(chr, range(ord("!"), ord("~") + 1)), *"ĠĊ¡¢"]
    words = dict(zip(["<pad>", "<s>", "</s>", *characters], range(VOCAB), strict=True))
    special = {"pad_token": "<pad>", "unk_token": "<pad>", "eos_token": "</s>"}
    tokenizer = Qwen2Tokenizer(vocab=words, merges=[], **special)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=_TEMPLATE,
    )


def save_classifier(kind: str, folder: Path, labels: int = 1) -> str:
    """Write a tiny sequence classifier to `folder` and return `folder` as str."""
    config = tiny_config(kind)
    config.num_labels = labels
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    return str(folder)
