"""Arguments of Hugging Face's trainers."""

from typing import Any

# Two optimizer steps of two micro-batches each, on the CPU; every loss is logged.
TWO_STEPS: dict[str, Any] = dict(
    use_cpu=True,
    max_steps=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
