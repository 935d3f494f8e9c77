"""Write a random Qwen3.5 and the toy language of examples/moe to .cache/hybrid.

Three layers of Gated DeltaNet, one of attention. It learns on a CPU, with Hugging Face's generate:

    python examples/hybrid/prepare.py
    hybridengine sft examples/hybrid/sft.yaml
    hybridengine grpo examples/hybrid/grpo.yaml
"""

from __future__ import annotations

import runpy
from pathlib import Path

from transformers import Qwen3_5TextConfig

FOLDER = Path(".cache/hybrid")

if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    toy = runpy.run_path(str(Path(__file__).parents[1] / "moe" / "prepare.py"))
    config = Qwen3_5TextConfig(
        **toy["SIZES"],
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    )
    toy["write_model"](FOLDER / "model", config)
    toy["write_language"](FOLDER)
    print(f"wrote {FOLDER}/model, {FOLDER}/sft.jsonl and {FOLDER}/rl.jsonl")
