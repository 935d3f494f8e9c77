"""What the tests of lora share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.loading import load_sharded

IDS = torch.tensor([[5, 9, 33, 2, 7, 7, 61]])
EXPERT_WEIGHTS = ("experts.gate_up_proj", "experts.down_proj")


def float64_update(adapter: Any) -> torch.Tensor:
    """What an adapter with full factors adds to its weight, [out, in] or [experts, out, in]."""
    left, right = adapter.left.double(), adapter.right.double()
    if not hasattr(adapter, "num_experts"):
        return adapter.scale * (left @ right)
    left = left.view(left.shape[0], adapter.rank, -1).expand(-1, -1, adapter.num_experts)
    right = right.view(-1, adapter.rank, right.shape[1]).expand(adapter.num_experts, -1, -1)
    return adapter.scale * torch.einsum("ore,eri->eoi", left, right)


def load_adapted(
    path: str, world_size: int, dtype: torch.dtype, checkpointing: bool, **options: Any
) -> Any:
    """Shard the model in `path` over the ranks, with the same adapters of rank 3 each time."""
    from hybridengine.model import apply_lora, sharding_mesh

    torch.manual_seed(0)
    return load_sharded(
        path,
        mesh=sharding_mesh("cpu", world_size),
        param_dtype=dtype,
        adapt=lambda model: apply_lora(model, 3, 6.0),
        enable_gradient_checkpointing=checkpointing,
        **options,
    )


def write_adapter(
    model_path: str, folder: Path, dtype: torch.dtype = torch.float32, rank: int = 3, alpha: int = 5
) -> None:
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=["q_proj", "o_proj"], init_lora_weights=False
    )
    get_peft_model(base, config).to(dtype).save_pretrained(str(folder))


def reload(path: str, folder: Path, result: dict) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Check the logits of what `train_and_save` saved in `folder`.

    Returns the model at `path` with the adapter in PEFT, the merged model, and the weights before.
    """
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32).eval()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    adapted = PeftModel.from_pretrained(base, str(folder / "adapter")).eval()
    with torch.no_grad():
        for model in (adapted, merged):  # float32, another order of sums
            torch.testing.assert_close(
                model(IDS).logits[0, :-1], result["logits"], atol=1e-4, rtol=0
            )
    assert (result["logits"] - result["of_base"]).abs().max() > 0.05
    return adapted, merged, before


def train_and_save(rank: int, world_size: int, path: str, out: str, targets: tuple) -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoTokenizer

    from hybridengine.model import (
        adapters_disabled,
        apply_lora,
        pack_rollouts,
        packed_log_probs,
        packed_logits,
    )
    from hybridengine.train.checkpoint.pretrained import save_adapter, save_pretrained

    model = load_sharded(
        path,
        mesh=init_device_mesh("cpu", (world_size,)),
        shard_dim1=lambda name: "o_proj" in name or "down_proj" in name,
        param_dtype=torch.float32,
        enable_gradient_checkpointing=True,
        adapt=lambda m: apply_lora(m, 3, 5.0, *targets),
    )
    placed = {n: p.placements[0].dim for n, p in model.named_parameters() if "layers.0" in n}
    batch = pack_rollouts([(IDS[0, :1].tolist(), IDS[0, 1:].tolist())])
    for _ in range(2):  # the first step moves B alone: A's gradient is zero while B is
        (-packed_log_probs(model, batch)[0].sum()).backward()
        with torch.no_grad():
            for p in model.parameters():
                assert (p.grad is not None) == p.requires_grad
                if p.requires_grad:
                    p.sub_(p.grad, alpha=0.05)
                    p.grad = None
    with torch.no_grad():
        logits = packed_logits(model, batch)
        with adapters_disabled(model):
            of_base = packed_logits(model, batch)
    tokenizer = AutoTokenizer.from_pretrained(path)
    save_pretrained(model, tokenizer, f"{out}/merged", torch.float32)
    save_adapter(model, tokenizer, f"{out}/adapter")
    return {"logits": logits, "of_base": of_base, "placed": placed}
