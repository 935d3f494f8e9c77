"""Full parameters that are the engine's weights: the bits of FSDP2, and nothing gathered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loading import load_sharded
from tests.ranks import run_ranks
from tests.sync.vllm_engines import PROMPTS, build_engine
from tests.tiny_models import save_tiny

pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

STEPS = 4


def load(path: str, world_size: int, dtype: torch.dtype, fsdp_size: int = -1) -> Any:
    from hybridengine.model import sharding_mesh

    return load_sharded(
        path,
        mesh=sharding_mesh("cpu", world_size, fsdp_size),
        param_dtype=dtype,
        enable_gradient_checkpointing=world_size == 2,
        forward_prefetch=world_size == 2,
        param_offload=world_size == 2,
        reshard_after_forward="on",
    )


def share(engine: Any, model: Any, dtype: torch.dtype) -> Any:
    """Let `model` compute with the weights of `engine`; return (resharder, these weights)."""
    from hybridengine.model import SharedParameters, parameter_shards
    from hybridengine.sync.resharder import Resharder

    memory = engine.share_weights(dtype, frozen=False)
    SharedParameters(model, memory, engine.target)
    return Resharder(lambda: parameter_shards(model), engine, 1 << 20), memory


def trained(model: Any, rank: int, resharder: Any = None) -> list[torch.Tensor]:
    """Train in two micro-batches per step; return log-probs, norms, gradients and shards."""
    from hybridengine.model import Optimizer, on_device, pack_rollouts, packed_log_probs
    from hybridengine.sync.shards import local_shard

    optimizer = Optimizer(model, lr=1e-2, total_steps=STEPS)
    batches = [
        pack_rollouts([(prompt, [4, 5 + k, 6 + rank, 9]) for prompt in PROMPTS]) for k in range(2)
    ]
    values = []
    for _ in range(STEPS):
        with on_device(model):
            if resharder is not None:
                resharder.sync()
            for batch in batches:
                log_probs, entropy = packed_log_probs(model, batch)
                (log_probs.mean() + 0.01 * entropy.mean()).backward()
                values.append(log_probs.detach())
            values += [local_shard(p.grad).clone() for p in model.parameters()]
            values.append(optimizer.step(1.0))
            values += [local_shard(p.detach()).clone() for p in model.parameters()]
    return values


def body(
    rank: int, world_size: int, path: str, dtype: torch.dtype, fsdp_size: int, tp_size: int
) -> dict[str, Any]:
    plain, shared = (load(path, world_size, dtype, fsdp_size) for _ in range(2))
    engine, _ = build_engine(path, tp_size, dtype)
    resharder, memory = share(engine, shared, dtype)
    joined = getattr(memory, "sliced", ())

    def held() -> list[str]:
        return [name for name in joined if memory[name].untyped_storage().nbytes()]

    after_layers: list[list[str]] = []
    last = f".{len(shared.model.layers) - 1}."  # hooks of a replica hold it until the next layer
    shared.model.layers[-1].register_forward_hook(lambda *_: after_layers.append(held()))
    expected, values = trained(plain, rank), trained(shared, rank, resharder)
    equal = [torch.equal(x, y) for x, y in zip(expected, values, strict=True)]
    return {
        "unequal": equal.count(False),
        "moves": not torch.equal(values[0], values[-1]),
        "joins": len(joined) > 0,
        "layers held": [
            n for n in after_layers[0] if ".layers." in n and (fsdp_size != 1 or last not in n)
        ],
        "held": held(),
    }


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("kind", "dtype", "world_size", "fsdp_size", "tp_size"),
    [
        ("llama", torch.float32, 1, -1, 1),
        ("qwen2", torch.float32, 2, -1, 1),
        ("llama", torch.bfloat16, 2, -1, 2),
        ("qwen2", torch.bfloat16, 2, 1, 2),
        ("qwen3_moe", torch.bfloat16, 2, -1, 2),
        pytest.param("qwen2", torch.float32, 2, -1, 2, marks=pytest.mark.exhaustive),
        pytest.param("llama", torch.bfloat16, 2, -1, 1, marks=pytest.mark.exhaustive),
        pytest.param("qwen2", torch.bfloat16, 2, 1, 1, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_moe", torch.bfloat16, 2, -1, 1, marks=pytest.mark.exhaustive),
        pytest.param("qwen2", torch.bfloat16, 4, 2, 2, marks=pytest.mark.exhaustive),
        pytest.param("llama", torch.bfloat16, 4, -1, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_steps_equal_those_with_gathers(
    tmp_path: Path, kind: str, dtype: torch.dtype, world_size: int, fsdp_size: int, tp_size: int
) -> None:
    """llama: tied embeddings; qwen2: biases; qwen3_moe: experts. fsdp_size 1: replicas."""
    path = save_tiny(kind, tmp_path, torch.float32)
    for result in run_ranks(body, world_size, path, dtype, fsdp_size, tp_size, timeout_s=300):
        joins = tp_size > 1
        assert result == {
            "unequal": 0,
            "moves": True,
            "joins": joins,
            "layers held": [],
            "held": [],
        }


def refusals(rank: int, world_size: int, path: str, tp_size: int) -> dict[str, Any]:
    """Run forwards on weights that are, and are not, those of the last sync."""
    import torch.distributed as dist

    from hybridengine.model import Optimizer, free_gathered, pack_rollouts, packed_log_probs
    from hybridengine.run.errors import ModelError
    from hybridengine.sync.weight_target import StaleWeightsError

    dtype = torch.bfloat16
    model = load(path, world_size, dtype)
    engine, _ = build_engine(path, tp_size, dtype)
    resharder, _ = share(engine, model, dtype)
    batch = pack_rollouts([(prompt, [4, 5]) for prompt in PROMPTS])
    optimizer = Optimizer(model, lr=1e-2, total_steps=STEPS)
    parameters = list(model.parameters())

    def raised() -> str:
        try:
            with torch.no_grad():
                packed_log_probs(model, batch)
        except (StaleWeightsError, ModelError) as error:
            return str(error)
        return ""

    def with_sync(change: Any) -> tuple[str, str]:
        """Return the errors of a forward after `change`, and after a sync."""
        model.offloader.on_device().__enter__()
        change()
        stale = raised()
        resharder.sync()
        return stale, raised()

    def step() -> None:
        packed_log_probs(model, batch)[0].mean().backward()
        optimizer.step(1.0)

    def write() -> None:
        with torch.no_grad():
            parameters[-1].mul_(1.5)

    def interrupt() -> None:
        engine.target.state.updating_to = 9

    errors = {
        change.__name__: with_sync(change)
        for change in (dict, step, write, lambda: None, interrupt)
    }
    step()
    model.model.layers[1].unshard(async_op=True)  # begins to receive weights of before the sync
    resharder.sync()
    prefetched = raised()
    free_gathered(model)
    alone = ""
    if rank == 0 and tp_size == 1:  # of a forward, the other rank has no part
        alone = raised()
    dist.barrier()
    free_gathered(model)
    copies = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(copies, assign=True)
    return {"errors": errors, "prefetched": prefetched, "alone": alone, "replaced": raised()}


@pytest.mark.multirank
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_forward_between_a_change_and_its_sync_is_refused(tmp_path: Path, tp_size: int) -> None:
    path = save_tiny("llama", tmp_path)
    for result in run_ranks(refusals, 2, path, tp_size, timeout_s=300):
        errors = result["errors"]
        assert all(not after for _, after in errors.values())
        assert not result["prefetched"] and not result["alone"]
        for change in ("dict", "step", "write"):
            assert "has changed since the sync to weight version" in errors[change][0]
        assert "partially updated" in errors["interrupt"][0]
        assert errors["<lambda>"][0] == ""
        assert "parameters of the model were replaced" in result["replaced"]
