"""Run TRL's SFTTrainer, with ours in place if the job says so; write JSON results."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from benchmarks.end_to_end.trl_trainer import clock, common_arguments, time_method
    from hybridengine.integrations import trl

    if job["adapter"]:
        trl.patch("log_probs", "head")
    rows = datasets.load_dataset("parquet", data_files=job["train"], split="train")
    steps: list[dict[str, float]] = []
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(job["model"], dtype="float32"),
        SFTConfig(**common_arguments(job), bf16=False, max_length=job["max_model_len"]),
        train_dataset=rows.map(_conversation, remove_columns=rows.column_names),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[clock(TrainerCallback)(steps)],
    )
    time_method(steps, trainer, "compute_loss", "forward")
    time_method(steps, trainer.accelerator, "backward", "backward")
    trainer.train()
    for step in steps:
        step["update_actor"] = step.pop("forward") + step.pop("backward")
    logs = [log for log in trainer.state.log_history if "loss" in log]
    result = {
        "phases": steps,
        "losses": [log["loss"] for log in logs],
        "grad_norms": [log["grad_norm"] for log in logs],
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    Path(job["result"]).write_text(json.dumps(result))


def _conversation(row: dict[str, Any]) -> dict[str, Any]:
    answer = {"role": "assistant", "content": row["reward_model"]["ground_truth"]}
    return {"prompt": row["prompt"], "completion": [answer]}


if __name__ == "__main__":
    main()
