"""Write a small random mixture of experts with a word tokenizer, and prompts, to .cache/moe.

python examples/moe/prepare.py
hybridengine grpo examples/moe/config.yaml
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

FOLDER = Path(".cache/moe")
VOCAB = 101


def write_model() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(FOLDER / "model")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}",
    ).save_pretrained(FOLDER / "model")


def write_prompts() -> None:
    """The answer to a prompt is any words of one half of the vocabulary."""
    rows = []
    for k in range(64):
        words = " ".join(f"w{3 + (7 * k + i) % 97}" for i in range(6))
        rows.append(
            {
                "data_source": "words",
                "prompt": [{"role": "user", "content": words}],
                "reward_model": {"ground_truth": [3, 52] if k % 2 else [52, 101]},
            }
        )
    (FOLDER / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_model()
    write_prompts()
    print(f"wrote {FOLDER}/model and {FOLDER}/train.jsonl")
