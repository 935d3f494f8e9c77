"""What the tests of lora share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

EXPERT_WEIGHTS = ("experts.gate_up_proj", "experts.down_proj")


def float64_update(adapter: Any) -> torch.Tensor:
    """What an adapter with full factors adds to its weight, [out, in] or [experts, out, in]."""
    left, right = adapter.left.double(), adapter.right.double()
    if not hasattr(adapter, "num_experts"):
        return adapter.scale * (left @ right)
    left = left.view(left.shape[0], adapter.rank, -1).expand(-1, -1, adapter.num_experts)
    right = right.view(-1, adapter.rank, right.shape[1]).expand(adapter.num_experts, -1, -1)
    return adapter.scale * torch.einsum("ore,eri->eoi", left, right)


def write_adapter(
    model_path: str, folder: Path, dtype: torch.dtype = torch.float32, rank: int = 3, alpha: int = 5
) -> None:
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=["q_proj", "o_proj"], init_lora_weights=False
    )
    get_peft_model(base, config).to(dtype).save_pretrained(str(folder))
