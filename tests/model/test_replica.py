"""A model that each rank has all of, without FSDP2, against the same under FSDP2.

On one rank the bits are equal. On several, gradients are summed in another order.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.architectures.catalogue import CATALOGUE
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

    from hybridengine.model.replica import replica_of

    settings = {"enable_gradient_checkpointing": checkpointing, "lora": lora}
    models = [load(path, dtype, is_sharded=x, **settings) for x in (False, True)]
    kinds = [{isinstance(p, DTensor) for p in m.parameters()} for m in models]
    (own, expected), first = map(trained, models), "log-probs 0 0"
    return {
        "kinds": kinds,
        "unequal": [n for n, x in expected.items() if not torch.equal(x, own[n])],
        "same names": own.keys() == expected.keys(),
        "moves": not torch.equal(own[first], own[first.replace("0 0", f"{STEPS - 1} 0")]),
        "computes in": replica_of(models[0]).copies != {},
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


def plain_body(rank: int, world_size: int, path: str) -> bool:
    from transformers import AutoModelForCausalLM

    from hybridengine.model import pack_rollouts, packed_logits, sharding_mesh
    from hybridengine.model.attention import ATTENTION
    from hybridengine.model.head import patch_head

    model = load_sharded(path, sharding_mesh("cpu", world_size), torch.bfloat16)
    plain = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation=ATTENTION
    )
    patch_head(plain)
    batch = pack_rollouts([(prompt, [4, 5, 9]) for prompt in PROMPTS])
    with torch.no_grad():
        return torch.equal(packed_logits(model, batch), packed_logits(plain, batch))


@pytest.mark.parametrize("ranks", [1, 2])  # without FSDP2, and with it
@pytest.mark.parametrize("kind", ["llama", "olmo2"])  # angles in bfloat16, and in float32
def test_logits_have_the_bits_of_a_model_of_that_type(
    tmp_path: Path, kind: str, ranks: int
) -> None:
    path = save_tiny(CATALOGUE[kind].config(), tmp_path, torch.float32)
    assert all(run_ranks(plain_body, ranks, path, timeout_s=200))


def replicas_body(
    rank: int, world_size: int, path: str, dtype: torch.dtype, lora: bool
) -> dict[str, torch.Tensor]:
    """Train replicas and shards, each rank on its own tokens; return the replica's tensors."""
    from hybridengine.model import (
        Optimizer,
        apply_lora,
        pack_rollouts,
        packed_log_probs,
        replica,
        sharding_mesh,
    )
    from hybridengine.model.extensions import hooks_of
    from tests.model.cases import full_tensors

    replica.REDUCED_BYTES = 1 << 14  # several buckets
    adapt = partial(apply_lora, rank=4, alpha=8.0, target_modules="all-linear") if lora else None
    found = []
    for fsdp_size in (1, world_size):
        torch.manual_seed(rank)  # adapters are those of rank 0
        mesh = sharding_mesh("cpu", world_size, fsdp_size)
        model = load_sharded(path, mesh, dtype, adapt=adapt)
        optimizer = Optimizer(model, lr=1e-2, eps=1e-2, total_steps=STEPS)
        trained = [p for p in model.parameters() if p.requires_grad]
        values = full_tensors(model)
        for step in range(STEPS):
            batches = [
                pack_rollouts([(prompt, [4 + rank, 5 + k, 9]) for prompt in PROMPTS])
                for k in range(2)
            ]
            for hook in hooks_of(model):
                hook.begin_step(batches)
            for k, batch in enumerate(batches):
                log_probs, entropy = packed_log_probs(model, batch)
                (log_probs.mean() + 0.01 * entropy.mean()).backward()
                if (step, rank, k) == (1, 0, 0):  # an overflow on one rank: no rank updates
                    trained[0].grad *= torch.inf
            values[f"norm {step}"] = optimizer.step(0.1)
            values |= {f"{name} {step}": x for name, x in full_tensors(model).items()}
        found.append(values)
    own, expected = found
    assert own.keys() == expected.keys() and own["norm 0"] > 0.1
    for name, x in expected.items():
        torch.testing.assert_close(own[name], x, rtol=1e-4, atol=1e-6, msg=name, equal_nan=True)
    return own


@pytest.mark.parametrize(
    ("kind", "world_size", "dtype", "lora"),
    [
        ("llama", 2, torch.float32, False),  # tied
        ("qwen2", 3, torch.bfloat16, False),
        ("llama", 2, torch.bfloat16, True),
    ],
)
def test_replicas_train_as_shards_and_stay_equal(
    tmp_path: Path, kind: str, world_size: int, dtype: torch.dtype, lora: bool
) -> None:
    path = save_tiny(kind, tmp_path, torch.float32)
    first, *others = run_ranks(replicas_body, world_size, path, dtype, lora, timeout_s=300)
    for other in others:
        for name, x in first.items():
            assert torch.equal(x.nan_to_num(), other[name].nan_to_num()), name


class Branches(torch.nn.Module):
    """Three layers, of which a call uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, used: list[int]) -> tuple[torch.Tensor, ...]:
        return tuple(self.layers[i](x) for i in used)


def branches_body(rank: int, world_size: int, dtype: torch.dtype) -> None:
    from hybridengine.model import sharding_mesh
    from hybridengine.model.replica import Replica

    with torch.device("meta"):
        model = Branches()
    replica = Replica(model, [], sharding_mesh("cpu", world_size, 1), dtype)
    torch.manual_seed(rank)
    replica.load(Branches().state_dict(keep_vars=True) if rank == 0 else {})
    first, second, third = (layer.weight for layer in model.layers)
    replica.begin_step([None, None])
    for k in range(2):
        outputs = model(torch.full((1, 2), rank + 1.0), [0, 1] if rank == 0 else [0])
        torch.stack(outputs).sum().backward()
        if k == 0:
            assert first.grad.eq(rank + 1.0).all()
    assert first.grad.eq(3.0).all()  # of two passes, (1 + 2) / 2 each
    assert second.grad.eq(1.0).all()  # rank 1 has none
    assert third.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_without_a_gradient_on_a_rank_or_on_all(dtype: torch.dtype) -> None:
    run_ranks(branches_body, 2, dtype)


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
