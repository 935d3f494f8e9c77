"""What the tests of lora share."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def write_adapter(
    model_path: str, folder: Path, dtype: torch.dtype = torch.float32, rank: int = 3, alpha: int = 5
) -> None:
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=["q_proj", "o_proj"], init_lora_weights=False
    )
    get_peft_model(base, config).to(dtype).save_pretrained(str(folder))
