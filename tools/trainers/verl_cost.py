"""The time of a whole step of verl with nothing, with the operators, with the sync, with both.

    python -m tools.trainers.verl_cost [--size tiny] [--json FILE]

GRPO with verl's own `main_ppo`, FSDP2 on two ranks and one vLLM server at TP 1 per rank, on a Llama
of random weights in the shapes of SmolLM2-135M. Prints one row per variant: medians over the steps
after the first, which plans. Only a machine that does nothing else gives times that mean anything.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from tools.trainers import verl
from tools.trainers.__main__ import CACHE

_OPERATORS = "hybridengine.integrations.verl.enabled"
VARIANTS = {
    "nothing": [],
    "operators": [_OPERATORS],
    "sync": [verl.SYNC],
    "operators and sync": [_OPERATORS, verl.SYNC],
}
STEPS = 3
_OVERRIDES = (
    f"trainer.total_training_steps={STEPS}", f"trainer.total_epochs={STEPS}",
    "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=False",
    "ray_kwargs.ray_init.object_store_memory=1000000000",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("smollm2", "tiny"), default="smollm2")
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_args()
    folder = CACHE / "verl"
    folder.mkdir(parents=True, exist_ok=True)
    python = verl.environment(folder)
    inputs = verl.write_inputs(folder / "cost" / "inputs")
    if options.size == "smollm2":
        write_smollm2(inputs / "model")
    rows = []
    for name, modules in VARIANTS.items():
        out = folder / "cost" / name.replace(" ", "_")
        verl.train(python, inputs, out, 1, modules, overrides=_OVERRIDES)
        rows.append({"variant": name} | cost(out))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows} | verl.versions(python), indent=1) + "\n")


def write_smollm2(folder: Path) -> None:
    """Replace the model of a folder by one of SmolLM2-135M's shapes; its tokenizer stays."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def cost(run: Path) -> dict[str, Any]:
    """Return medians of the parts of a step in seconds, and what an update of the weights costs."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["data"] for row in rows if "timing_s/step" in row["data"]][1:]
    names = sorted(name for name in steps[0] if name.startswith("timing_s/"))
    seconds = {
        name.removeprefix("timing_s/"): round(median(step[name] for step in steps), 3)
        for name in names
    }
    return {"seconds": seconds, "sync": verl.moved(run)}


if __name__ == "__main__":
    main()
