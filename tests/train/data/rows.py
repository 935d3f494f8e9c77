"""Rows in verl's schema, files of them, and a small chat template."""

import json
from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def row(content: str = "1 2 3", truth: str = "6", **extra) -> dict:
    chat = [{"role": "user", "content": content}]
    return {
        "data_source": "sums",
        "prompt": chat,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train"},
        **extra,
    }


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)
