"""The time of a whole step of verl with nothing, with the operators, with the sync, with both.

    python -m tools.trainers.verl_cost [--size tiny] [--json FILE]

GRPO with verl's own `main_ppo`, FSDP2 on two ranks and one vLLM server at TP 1 per rank, on
SmolLM2-135M-Instruct (`examples/demo/prepare.py`, from .cache): prompts of about 90 tokens, 16
responses of up to 64, trained in float32, generated in bfloat16. The step after the first, which
plans, under "verl_cost" of the results; 20 minutes on two cores. Only a machine that does nothing
else gives times that mean anything.

--size tiny: shows that it runs, with the tiny model of `tools.trainers verl`; stores nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from tools.trainers import verl
from tools.trainers.__main__ import CACHE, RESULTS, store

_OPERATORS = "hybridengine.integrations.verl.enabled"
VARIANTS = {
    "nothing": [],
    "operators": [_OPERATORS],
    "sync": [verl.SYNC],
    "operators and sync": [_OPERATORS, verl.SYNC],
}
STEPS = 2
MODEL = verl.ROOT / ".cache" / "demo" / "smollm2-135m-instruct"
_OVERRIDES = (
    f"trainer.total_training_steps={STEPS}",
    f"trainer.total_epochs={STEPS}",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "ray_kwargs.ray_init.object_store_memory=1000000000",
)
_ROLLOUT = "actor_rollout_ref.rollout"
# An update in bfloat16 takes minutes on CPUs without products in it.
_FLOAT32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
_SMOLLM2 = (
    f"actor_rollout_ref.model.path={MODEL}",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    f"+actor_rollout_ref.actor.fsdp_config.mixed_precision={_FLOAT32}",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1536",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "data.train_batch_size=4",
    "data.max_prompt_length=128",
    "data.max_response_length=64",
    f"{_ROLLOUT}.max_model_len=192",
    f"{_ROLLOUT}.max_num_batched_tokens=1024",
    # One bucket: vLLM 0.32 refuses a tied head without the embeddings, and verl's own sync hangs.
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=1024",
    f"++{_ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes={256 << 20}",
)
_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    words = solution_str.split()
    return len(set(words)) / max(len(words), 1)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("smollm2", "tiny"), default="smollm2")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    folder = CACHE / "verl"
    folder.mkdir(parents=True, exist_ok=True)
    python = verl.environment(folder)
    inputs = verl.write_inputs(folder / "cost" / "inputs")
    overrides: tuple[str, ...] = _OVERRIDES
    if options.size == "smollm2":
        prepare_smollm2(inputs)
        overrides += _SMOLLM2
    load_before, rows = os.getloadavg(), []
    for name, modules in VARIANTS.items():
        out = folder / "cost" / name.replace(" ", "_")
        verl.train(python, inputs, out, 1, modules, overrides=overrides)
        rows.append({"variant": name} | cost(out))
        print(json.dumps(rows[-1]), flush=True)
    if options.size == "smollm2":
        found = {"model": MODEL.name, "steps": STEPS, "load_average_before": load_before}
        store(options.json, "verl_cost", found | {"rows": rows, "versions": verl.versions(python)})


def prepare_smollm2(inputs: Path) -> None:
    """Make the model unless it is there; replace problems and reward by some for its tokenizer."""
    import pandas

    if not MODEL.is_dir():
        command = [sys.executable, "examples/demo/prepare.py"]
        subprocess.run(command, cwd=verl.ROOT, check=True)
    (inputs / "reward.py").write_text(_REWARD)
    draw = random.Random(0)
    rows = []
    for index in range(4 * STEPS):
        sums = [(draw.randrange(100), draw.randrange(100)) for _ in range(5)]
        solved = " ".join(f"{one} + {other} = {one + other}." for one, other in sums)
        rows.append(
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"{solved} Explain these sums."}],
                "ability": "sums",
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index},
            }
        )
    for name in ("train", "val"):
        pandas.DataFrame(rows).to_parquet(inputs / f"{name}.parquet")


def cost(run: Path) -> dict[str, Any]:
    """Return medians of the parts of a step in seconds, and what an update of the weights costs."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["data"] for row in rows if "timing_s/step" in row["data"]][1:]
    names = sorted(name for name in steps[0] if name.startswith("timing_s/"))
    seconds = {
        name.removeprefix("timing_s/"): round(median(step[name] for step in steps), 3)
        for name in names
    }
    tokens = median(step["perf/total_num_tokens"] for step in steps)
    return {"seconds": seconds, "tokens": tokens, "sync": verl.moved(run)}


if __name__ == "__main__":
    main()
