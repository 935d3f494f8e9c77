"""Write a random mixture of experts and a toy language to .cache/moe.

The language has 96 words, the even and the odd ones. After each word may come four others, two of
either kind. A sentence starts with `even` or `odd` and a word; of the words that follow, two of
three are of that kind.

    python examples/moe/prepare.py
    hybridengine sft examples/moe/sft.yaml       # learns which words may follow, from nothing
    hybridengine grpo examples/moe/grpo.yaml     # learns to use words of that kind only
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

FOLDER = Path(".cache/moe")
NUM_WORDS, LENGTH = 96, 16  # words of the language, of a response
SPECIAL = ("<pad>", "<s>", "</s>", "even", "odd")

SIZES: dict[str, Any] = (
    {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 4}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    | {"vocab_size": len(SPECIAL) + NUM_WORDS, "max_position_embeddings": 512}
    | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.1}
)


def write_model(folder: Path, config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = {word: i for i, word in enumerate([*SPECIAL, *map(_word, range(NUM_WORDS))])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=(
            "{% for m in messages %}{% if m['role'] == 'user' %}<s> {{ m['content'] }} "
            "{% else %}{% generation %}{{ m['content'] }} </s>{% endgeneration %}{% endif %}"
            "{% endfor %}"
        ),
    ).save_pretrained(folder)


def write_language(folder: Path) -> None:
    draw = random.Random(0)
    kinds = [[n for n in range(NUM_WORDS) if n % 2 == kind] for kind in (0, 1)]
    following = {
        word: [n for kind in kinds for n in draw.sample(kind, 2)] for word in range(NUM_WORDS)
    }
    sentences, prompts = [], []
    for _ in range(2048):
        word, kind = draw.randrange(NUM_WORDS), draw.randrange(2)
        prompt, answer = f"{SPECIAL[3 + kind]} {_word(word)}", []
        for _ in range(LENGTH):
            [word] = draw.choices(
                following[word], [2 if n % 2 == kind else 1 for n in following[word]]
            )
            answer.append(_word(word))
        sentences.append({"prompt": prompt, "response": " ".join(answer)})
    allowed = {_word(n): [_word(m) for m in more] for n, more in following.items()}
    for kind in SPECIAL[3:]:
        for word in range(NUM_WORDS):
            truth = {"kind": SPECIAL.index(kind) - 3, "first": _word(word), "following": allowed}
            prompts.append(
                {
                    "data_source": "words",
                    "prompt": [{"role": "user", "content": f"{kind} {_word(word)}"}],
                    "reward_model": {"ground_truth": truth},
                }
            )
    draw.shuffle(prompts)
    _write(folder / "sft.jsonl", sentences)
    _write(folder / "rl.jsonl", prompts)


def _word(number: int) -> str:
    return f"w{number}"


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    experts = dict(num_experts=16, num_experts_per_tok=2, moe_intermediate_size=64)
    write_model(FOLDER / "model", Qwen3MoeConfig(**SIZES, **experts, norm_topk_prob=True))
    write_language(FOLDER)
    print(f"wrote {FOLDER}/model, {FOLDER}/sft.jsonl and {FOLDER}/rl.jsonl")
