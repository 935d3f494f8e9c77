"""A model on one rank, without FSDP2, against the same under FSDP2: equal bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loading import load_sharded
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.multirank

STEPS, PROMPTS = 3, [[3, 4, 5], [6, 7], [8, 9, 10, 11]]


def load(path: str, dtype: torch.dtype, *, is_sharded: bool, lora: bool, **settings: Any) -> Any:
    from hybridengine.model import apply_lora, sharding_mesh

    adapt = partial(apply_lora, rank=4, alpha=8.0, target_modules="all-linear") if lora else None
    mesh = sharding_mesh("cpu", 1)
    torch.manual_seed(0)  # of the adapters
    return load_sharded(
        path, mesh, dtype, adapt=adapt, offload_policy=is_sharded, **settings
    )  # FSDP2 streams what it offloads, so that one rank has it, too


def trained(model: Any) -> dict[str, torch.Tensor]:
    """Train in two micro-batches per step; return log-probs, norms, gradients and weights."""
    from hybridengine.model import Optimizer, pack_rollouts, packed_log_probs, parameter_shards
    from hybridengine.sync.shards import local_shard

    optimizer = Optimizer(model, lr=1e-2, total_steps=STEPS)
    values = {}
    for step in range(STEPS):
        for k in range(2):
            batch = pack_rollouts([(prompt, [4, 5 + k, 9]) for prompt in PROMPTS])
            with torch.no_grad():  # as of a reference
                packed_log_probs(model, batch)
            log_probs, entropy = packed_log_probs(model, batch)
            values[f"log-probs {step} {k}"] = log_probs.detach()
            (log_probs.mean() + 0.01 * entropy.mean()).backward()
        for name, p in model.named_parameters():
            assert (p.grad is not None) == p.requires_grad and p.dtype == torch.float32
            if p.requires_grad:
                values[f"gradient {step} {name}"] = local_shard(p.grad).clone()
        values[f"norm {step}"] = optimizer.step(1.0)
    weights = parameter_shards(model) | dict(model.named_parameters())
    return values | {name: local_shard(p.detach()).clone() for name, p in weights.items()}


def body(
    rank: int, world_size: int, path: str, dtype: torch.dtype, lora: bool, checkpointing: bool
) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    settings = {"enable_gradient_checkpointing": checkpointing, "lora": lora}
    models = [load(path, dtype, is_sharded=x, **settings) for x in (False, True)]
    kinds = [{isinstance(p, DTensor) for p in m.parameters()} for m in models]
    (own, expected), first = map(trained, models), "log-probs 0 0"
    return {
        "kinds": kinds,
        "unequal": [n for n, x in expected.items() if not torch.equal(x, own[n])],
        "same names": own.keys() == expected.keys(),
        "moves": not torch.equal(own[first], own[first.replace("0 0", f"{STEPS - 1} 0")]),
        "computes in": models[0].replica.copies != {},
    }


@pytest.mark.parametrize(
    ("kind", "dtype", "lora", "checkpointing"),
    [
        ("llama", torch.float32, False, False),  # tied
        ("qwen2", torch.bfloat16, False, True),  # biases
        ("qwen3_moe", torch.bfloat16, False, False),
        ("llama", torch.bfloat16, True, True),
    ],
)
def test_steps_equal_those_of_fsdp2(
    tmp_path: Path, kind: str, dtype: torch.dtype, lora: bool, checkpointing: bool
) -> None:
    path = save_tiny(kind, tmp_path, torch.float32)
    [result] = run_ranks(body, 1, path, dtype, lora, checkpointing, timeout_s=300)
    assert result == {
        "kinds": [{False}, {True}],
        "unequal": [],
        "same names": True,
        "moves": True,
        "computes in": dtype != torch.float32,
    }


def follows_writes(rank: int, world_size: int, path: str) -> list[bool]:
    """Whether a forward reads what each way to write a master has written."""
    from hybridengine.model import pack_rollouts, packed_log_probs

    model = load(path, torch.bfloat16, is_sharded=False, lora=False)
    batch, weight = pack_rollouts([([3], [4, 5])]), model.get_input_embeddings().weight

    def values() -> torch.Tensor:
        with torch.no_grad():
            return packed_log_probs(model, batch)[0]

    def in_place() -> None:
        with torch.no_grad():
            weight.mul_(1.5)

    def of_data() -> None:
        weight.data.mul_(1.5)

    def of_memory() -> None:
        weight.detach().numpy()[:] *= 1.5

    def other_memory() -> None:
        weight.data = weight.detach() * 1.5

    changes = []
    for write in (in_place, of_data, of_memory, other_memory):
        before = values()
        write()
        changes.append(not torch.equal(values(), before))
    return changes


def test_a_forward_follows_every_write_to_the_masters(tmp_path: Path) -> None:
    assert run_ranks(follows_writes, 1, save_tiny("llama", tmp_path)) == [[True] * 4]


def backward_after_two_forwards(rank: int, world_size: int, path: str) -> list[bool]:
    """Whether gradients of two forwards, then two backwards, are those of one after the other."""
    from hybridengine.model import pack_rollouts, packed_log_probs

    model = load(path, torch.bfloat16, is_sharded=False, lora=False)
    batches = [pack_rollouts([([3], [4, k])]) for k in (5, 6)]

    def gradients(losses: Any) -> list[torch.Tensor]:
        for loss in losses:
            loss.backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    forwards = (packed_log_probs(model, batch)[0].mean() for batch in batches)
    expected = gradients(forwards)  # each forward just before its backward
    got = gradients([packed_log_probs(model, batch)[0].mean() for batch in batches])
    return [torch.equal(x, y) and bool(x.any()) for x, y in zip(expected, got, strict=True)]


def test_forwards_before_the_backward_of_an_earlier_one(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path, torch.float32)
    [equal] = run_ranks(backward_after_two_forwards, 1, path)
    assert all(equal)


def replaced(rank: int, world_size: int, path: str) -> str:
    from hybridengine.model import pack_rollouts, packed_log_probs
    from hybridengine.run.errors import ModelError

    model = load(path, torch.bfloat16, is_sharded=False, lora=False)
    copies = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(copies, assign=True)
    with pytest.raises(ModelError) as error:
        packed_log_probs(model, pack_rollouts([([3], [4])]))
    return str(error.value)


def test_replaced_parameters_are_refused(tmp_path: Path) -> None:
    [message] = run_ranks(replaced, 1, save_tiny("llama", tmp_path))
    assert "parameters of the model were replaced" in message
