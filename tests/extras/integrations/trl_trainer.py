"""A small GRPOTrainer of TRL."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

HEAD = ("log_probs", "head")
SMALL: dict[str, Any] = {  # options of any trainer of TRL that samples
    "use_cpu": True,
    "bf16": False,
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "max_completion_length": 8,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "seed": 0,
    "beta": 0.1,
}
# The ratios of the second iteration are not 1: with this learning rate many are clipped.
OPTIONS = SMALL | {
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "num_iterations": 2,
    "learning_rate": 2e-2,
    "lr_scheduler_type": "constant",
    "delta": 1.5,
}


def even_tokens(completions: list[str], **_: Any) -> list[float]:
    words = [[int(word[1:]) for word in text.split() if word[0] == "w"] for text in completions]
    return [sum(word % 2 == 0 for word in row) / 8 for row in words]


def trainer_of(model: str, folder: str):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    return GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        even_tokens,
        GRPOConfig(output_dir=folder, **OPTIONS),
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 3} w9" for i in range(4, 20)]}),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
    )
