"""A base that is the engine's weights: the same bits as with shards, no copy of the base.

Jobs of adapters and of full parameters; for the latter see also test_shared_parameters.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridengine.run.config import ConfigError, load_config
from hybridengine.train.choices import Machine
from tests.loading import load_sharded
from tests.model.lora_shared import load_adapted
from tests.ranks import run_ranks
from tests.sync.vllm_engines import PROMPTS, build_engine
from tests.tensors import part, whole
from tests.tiny_models import save_tiny
from tests.train.in_process import small_job
from tests.train.toy import metrics_of, toy_job

pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

STEPS = 4
ADAPTERS = (
    "model.lora_rank=3",
    "reshard.lora=adapters",
    "rollout.name=vllm",
    "rollout.kv_cache_gib=0.0625",
    "rollout.enforce_eager=true",
)
GPU = Machine(80 << 30, fast_bfloat16=True, has_vllm=True)


def trained(model: Any, rank: int) -> list[torch.Tensor]:
    """Train adapters; return log-probs, gradients and adapters of every step."""
    from hybridengine.model import Optimizer, pack_rollouts, packed_log_probs

    optimizer = Optimizer(model, lr=1e-2, total_steps=STEPS)
    adapters = [p for p in model.parameters() if p.requires_grad]
    batch = pack_rollouts([(prompt, [4, 5, 6 + rank, 9]) for prompt in PROMPTS])
    values = []
    for _ in range(STEPS):
        log_probs, entropy = packed_log_probs(model, batch)
        (log_probs.mean() + 0.01 * entropy.mean()).backward()
        values += [log_probs.detach(), *(part(p.grad).clone() for p in adapters)]
        optimizer.step(1.0)
        values += [part(p.detach()).clone() for p in adapters]
    return values


def body(
    rank: int,
    world_size: int,
    path: str,
    dtype: torch.dtype,
    tp_size: int,
    checkpointing: bool,
    slot_rank: int = 3,
) -> dict[str, Any]:
    """Train beside shards of the base, then beside the engine's weights."""
    from torch.distributed.tensor import DTensor

    from hybridengine.model import (
        adapters_disabled,
        pack_rollouts,
        packed_log_probs,
        parameter_shards,
    )
    from hybridengine.model.shared_parameters import full_base

    engine, checkpoint = build_engine(path, tp_size, dtype, lora_rank=slot_rank)
    memory = engine.share_weights(dtype)
    for tensor in engine.target.weights().values():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))

    load = partial(load_adapted, path, world_size, dtype, checkpointing)
    sharded, shared = load(), load(base_memory=memory)
    pairs = zip(trained(sharded, rank), trained(shared, rank), strict=True)
    unequal = [i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    with torch.no_grad(), adapters_disabled(sharded), adapters_disabled(shared):
        batch = pack_rollouts([(prompt, [4, 5]) for prompt in PROMPTS])
        references = [packed_log_probs(model, batch)[0] for model in (sharded, shared)]
    own, full = parameter_shards(shared), parameter_shards(sharded)

    def is_equal(name: str) -> bool:
        expected = whole(full[name]).to(dtype)
        with full_base(shared, name):
            return torch.equal(expected, own[name])

    def gradients(model: Any) -> list[torch.Tensor]:
        first, second = (packed_log_probs(model, batch)[0] for _ in range(2))
        (first.sum() + 2 * second.sum()).backward()
        return [part(p.grad) for p in model.parameters() if p.grad is not None]

    of_two = zip(gradients(sharded), gradients(shared), strict=True)
    return {
        "two_forwards": all(torch.equal(a, b) for a, b in of_two),
        "names": set(memory) == set(full) == set(checkpoint.parameters),
        "unequal": unequal,
        "reference": torch.equal(*references),
        "shards": [n for n, x in own.items() if isinstance(x, DTensor)],
        "copies": [n for n, x in own.items() if x.data_ptr() != memory[n].data_ptr()],
        "changed": [name for name in full if not is_equal(name)],
        "synced": sorted(engine.target.layout.destinations),
        "joined": len(getattr(memory, "sliced", ())),
        "left": [n for n in getattr(memory, "sliced", ()) if memory[n].untyped_storage().nbytes()],
    }


def check_bits(
    path: str,
    dtype: torch.dtype,
    world_size: int,
    tp_size: int,
    checkpointing: bool,
    slot_rank: int = 3,
) -> None:
    arguments = (path, dtype, tp_size, checkpointing, slot_rank)
    for result in run_ranks(body, world_size, *arguments, timeout_s=300):
        assert result.pop("names")
        assert result.pop("reference")
        assert result.pop("two_forwards")
        assert (result.pop("joined") > 0) == (tp_size > 1)
        assert all(names == [] for names in result.values()), result


LONG = pytest.mark.exhaustive
F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("kind", "dtype", "world_size"),
    [
        ("llama", BF16, 2),
        ("qwen2", BF16, 2),
        pytest.param("llama", F32, 1, marks=LONG),
        pytest.param("llama", F32, 2, marks=LONG),
        pytest.param("llama", BF16, 1, marks=LONG),
        pytest.param("qwen2", BF16, 1, marks=LONG),
    ],
)
def test_steps_equal_those_beside_shards(
    tmp_path: Path, kind: str, dtype: torch.dtype, world_size: int
) -> None:
    """llama: tied embeddings; qwen2: biases. 101 rows and rank 3 divide unevenly over 2 ranks."""
    check_bits(save_tiny(kind, tmp_path, dtype), dtype, world_size, 1, world_size == 2)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("kind", "dtype", "checkpointing"),
    [
        ("llama", F32, True),
        ("qwen2", BF16, True),
        pytest.param("llama", BF16, True, marks=LONG),
        pytest.param("llama", F32, False, marks=LONG),
        pytest.param("llama", BF16, False, marks=LONG),
        pytest.param("qwen2", BF16, False, marks=LONG),
    ],
)
def test_steps_equal_those_of_shards_under_tensor_parallelism(
    tmp_path: Path, kind: str, dtype: torch.dtype, checkpointing: bool
) -> None:
    check_bits(save_tiny(kind, tmp_path, dtype), dtype, 2, 2, checkpointing)


@pytest.mark.multirank
def test_experts_are_joined(tmp_path: Path) -> None:
    """On a CPU, vLLM has no experts beside LoRA slots, so the engine has no slots."""
    dtype = torch.bfloat16
    check_bits(save_tiny("qwen3_moe", tmp_path, dtype), dtype, 2, 2, True, slot_rank=0)


@pytest.mark.multirank
@LONG
def test_ranks_of_two_tensor_parallel_groups(tmp_path: Path) -> None:
    """Adapters; for full parameters see test_shared_parameters."""
    check_bits(save_tiny("qwen2", tmp_path, torch.bfloat16), torch.bfloat16, 4, 2, True)


def rollout_body(rank: int, world_size: int, path: str, tp_size: int) -> dict[str, Any]:
    """Sync adapters three times, and sleep in between."""
    from hybridengine.engine.interface import SamplingSpec
    from hybridengine.model import (
        adapter_shards,
        apply_lora,
        free_gathered,
        pack_rollouts,
        packed_log_probs,
        sharding_mesh,
    )
    from hybridengine.sync.resharder import Resharder

    engine, _ = build_engine(path, tp_size, torch.float32, lora_rank=3)
    memory = engine.share_weights(torch.float32)
    engine.sleep()
    model = load_sharded(
        path,
        mesh=sharding_mesh("cpu", world_size),
        param_dtype=torch.float32,
        adapt=lambda m: apply_lora(m, 3, 6.0),
        base_memory=memory,
        param_offload=True,
    )
    weights = engine.target.weights()
    base = [tensor.clone() for tensor in weights.values()]
    resharder = Resharder(
        dict, engine, 1 << 20, adapters=lambda: adapter_shards(model), merge=False
    )
    gaps, tokens = [], []
    for version in range(3):
        engine.sleep()
        resharder.sync(version, verify=True)
        rollouts = engine.generate(PROMPTS, SamplingSpec(temperature=0, max_tokens=6), seed=0)
        tokens.append([c[0].token_ids for c in rollouts])
        sampled = torch.tensor([lp for c in rollouts for lp in c[0].log_probs])
        with torch.no_grad():
            batch = pack_rollouts(list(zip(PROMPTS, tokens[-1], strict=True)))
            gaps.append((packed_log_probs(model, batch)[0] - sampled).abs().max().item())
            free_gathered(model)
            for parameter in model.parameters():
                if parameter.requires_grad:  # a step of the adapters
                    parameter.mul_(1.5).add_(0.05)
    kept = all(torch.equal(x, y) for x, y in zip(base, weights.values(), strict=True))
    return {"gaps": gaps, "tokens": tokens, "kept": kept, "received": resharder.plan.bytes_received}


@pytest.mark.multirank
@pytest.mark.parametrize("tp_size", [1, 2])
def test_rollouts_follow_the_adapters_alone(tmp_path: Path, tp_size: int) -> None:
    path = save_tiny("llama", tmp_path)
    for result in run_ranks(rollout_body, 2, path, tp_size, timeout_s=300):
        assert result["kept"], "a sync, sleep or offload changed the engine's weights"
        assert max(result["gaps"]) < 1e-4  # float32 on both sides, sums in another order
        first, second, third = result["tokens"]
        assert first != second != third
        # factors of q, o; k, v; gate, up, down in two layers: what one rank has, the other needs
        sizes = 3 * 2 * (2 * 256 + 2 * (128 + 64) + 3 * (128 + 96)) * 4
        assert sum(result["received"]) == sizes


@pytest.mark.multirank
@LONG
@pytest.mark.parametrize(("lora_rank", "tp_size"), [(0, 1), (0, 2), (4, 1), (4, 2)])
def test_a_job_and_its_files_are_those_of_shards(
    tmp_path: Path, lora_rank: int, tp_size: int
) -> None:
    """Four steps with shards; two with the engine's weights, resumed for two more.

    Of full parameters, in two optimizer steps per batch; with an engine of two ranks in replicas,
    as shards would be columns of row-parallel weights, whose gradients have another norm in the
    last bit.
    """
    common: dict[str, Any] = {"actor.use_kl_loss": True, "actor.optim.lr": 2e-2}
    common |= dict(override.split("=") for override in ADAPTERS)
    common |= {"model.lora_rank": lora_rank, "rollout.tensor_model_parallel_size": tp_size}
    if not lora_rank:
        common |= {"reshard.lora": "merged", "actor.ppo_mini_batch_size": 8}
        common |= {"actor.fsdp_config.fsdp_size": 1} if tp_size > 1 else {}

    def run(name: str, **settings: object) -> Path:
        folder = tmp_path / name
        command = toy_job(folder, **common, **settings)
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return folder / "run"

    key, steps = "model.share_engine_weights", "trainer.total_training_steps"
    sharded = run("sharded", **{key: "off", steps: 4})
    run("shared", **{key: "true", steps: 2, "trainer.save_freq": 2})
    shared = run("shared", **{key: "true", steps: 4, "trainer.save_freq": 2})
    assert metrics_of(shared) == metrics_of(sharded) and len(metrics_of(shared)) == 4
    files = ("final/model.safetensors", "final_adapter/adapter_model.safetensors")
    for file in files if lora_rank else files[:1]:
        tensors, expected = load_file(shared / file), load_file(sharded / file)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(x, expected[name]) for name, x in tensors.items())
    summary = json.loads((shared / "summary.json").read_text())
    received = summary["reshard_bytes_received_by_dense_sync_per_rank"]
    assert received == summary["reshard_bytes_received_by_last_sync_per_rank"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.lora_rank=0", "reshard.lora=merged", "rollout.name=hf"), "rollout.name is hf"),
        (("reshard.lora=merged",), "reshard.lora is merged"),
        (("rollout.dtype=bfloat16",), "rollout.dtype is bfloat16"),
        (
            ("rollout.dtype=bfloat16", "actor.fsdp_config.dtype=bfloat16"),
            "are torch.float32, of which torch.bfloat16 would lose bits",
        ),
    ],
)
def test_what_cannot_be_shared_is_named(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    from hybridengine.train.choices import decide

    job = [*small_job(tmp_path), *ADAPTERS, *overrides]
    choices = decide(load_config(None, job))
    assert not choices.shares and message in choices.reasons["shares"]
    with pytest.raises(ConfigError, match=f"share_engine_weights is on, but .*{message}"):
        decide(load_config(None, [*job, "model.share_engine_weights=true"]))


def test_auto_shares_what_costs_nothing(tmp_path: Path) -> None:
    """On a GPU the engine's weights must not take more memory in the update than shards."""
    from hybridengine.train.choices import decide

    job = [*small_job(tmp_path), *ADAPTERS]
    assert decide(load_config(None, job)).shares
    assert decide(load_config(None, job), machine=GPU).shares
    four = [*job, "trainer.n_gpus_per_node=4"]
    choices = decide(load_config(None, four), machine=GPU)
    assert not choices.shares
    assert "frees its weights for the update" in choices.reasons["shares"]
    for more in (
        "rollout.free_cache_engine=false",
        "model.share_engine_weights=true",
        "rollout.tensor_model_parallel_size=4",
    ):
        assert decide(load_config(None, [*four, more]), machine=GPU).shares


def test_auto_gathers_where_awake_engine_and_trainer_do_not_fit(tmp_path: Path) -> None:
    from hybridengine.train.choices import decide

    job = [*small_job(tmp_path), *ADAPTERS, "model.lora_rank=0", "reshard.lora=merged"]
    pair = [*job, "trainer.n_gpus_per_node=2", "rollout.tensor_model_parallel_size=2"]
    for devices in (job, [*pair, "trainer.n_gpus_per_node=4"]):
        assert decide(load_config(None, devices)).shares
    assert "as much would be received" in decide(load_config(None, pair)).reasons["shares"]
    assert decide(load_config(None, [*pair, "model.share_engine_weights=true"])).shares
    assert decide(load_config(None, job), machine=GPU).shares
    small = replace(GPU, gpu_bytes=1 << 20)
    choices = decide(load_config(None, job), machine=small)
    assert not choices.shares and "would stay in memory" in choices.reasons["shares"]
    for more in ("rollout.free_cache_engine=false", "model.share_engine_weights=true"):
        assert decide(load_config(None, [*job, more]), machine=small).shares
