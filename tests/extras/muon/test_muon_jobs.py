"""Jobs with optim.name=muon: SFT and resuming, experts divided over ranks, refused settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.muon.config_checks import find_faults
from hybridengine.run.config import RLConfig, SFTConfig
from tests.loading import load_sharded
from tests.model.cases import full_tensors
from tests.ranks import run_ranks
from tests.tensors import whole
from tests.tiny_models import save_tiny
from tests.train.sft_job import save_checkpoint, start_run, write_sft_job

MUON = {"optim.name": "muon", "optim.override_optimizer_config.adjust_lr_fn": "match_rms_adamw"}


def sft_body(rank: int, world_size: int, folder: Path) -> list[float]:
    run = start_run(rank, world_size, folder, **MUON)
    losses = [run.step(step)[0]["train/loss"] for step in (1, 2)]
    save_checkpoint(run, 2)
    run.checkpoints.wait()
    losses.append(run.step(3)[0]["train/loss"])
    expected = full_tensors(run.model) | {n: whole(x) for n, x in run.optimizer.moments().items()}
    resumed = start_run(rank, world_size, folder, **MUON, **{"trainer.resume_mode": "auto"})
    resumed.resume()
    assert resumed.step(3)[0]["train/loss"] == losses[-1]
    got = full_tensors(resumed.model)
    got |= {n: whole(x) for n, x in resumed.optimizer.moments().items()}
    assert expected.keys() == got.keys() and any("momentum_buffer" in name for name in got)
    assert all(torch.equal(got[name], x) for name, x in expected.items())
    return losses


@pytest.mark.multirank
@pytest.mark.parametrize("world_size", [1, 2])
def test_sft_learns_and_resumes_bit_for_bit(tmp_path: Path, world_size: int) -> None:
    losses, *others = run_ranks(sft_body, world_size, write_sft_job(tmp_path))
    assert losses[2] < losses[0] and all(other == losses for other in others)


def experts_body(rank: int, world_size: int, path: str) -> list[dict[str, Any]]:
    """Parameters after two updates, with experts on all ranks and divided over 2 and 4."""
    from hybridengine.model import Optimizer, sharding_mesh

    results = []
    for size in (1, 2, 4):
        mesh = sharding_mesh("cpu", world_size)
        model = load_sharded(path, mesh, torch.float32, expert_parallel_size=size)
        options = {"momentum": 0.5, "ns_dtype": "float32"}
        optimizer = Optimizer(model, lr=1e-2, total_steps=9, name="muon", options=options)
        for step in range(2):
            for i, parameter in enumerate(model.parameters()):
                full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
                parameter.grad = placed_like(full * (step + 1), parameter)
            optimizer.step(1e9)
        assert any(".experts." in n for n in optimizer.moments() if "momentum_buffer" in n)
        results.append({n: whole(p.detach()).clone() for n, p in model.named_parameters()})
    return results


def placed_like(full: torch.Tensor, parameter: Any) -> Any:
    from hybridengine.sync.shards import ShardSpec, local_shard, with_shard

    spec = ShardSpec.of("", parameter, 4)
    box = spec.box(spec.shard_of(torch.distributed.get_rank()))
    part = full[tuple(slice(*r) for r in box)].contiguous()
    return with_shard(parameter, part.view(local_shard(parameter).shape))


@pytest.mark.multirank
def test_experts_divided_over_ranks_are_updated_alike(tmp_path: Path) -> None:
    path = save_tiny("qwen3_moe", tmp_path)
    for plain, *divided in run_ranks(experts_body, 4, path):
        for other in divided:
            for name, parameter in plain.items():
                torch.testing.assert_close(other[name], parameter, rtol=1e-6, atol=1e-6, msg=name)


def configured(kind: type, **settings: Any) -> Any:
    from dataclasses import replace

    config = kind()
    group = config.actor.optim if kind is RLConfig else config.optim
    model = replace(config.model, lora_rank=settings.pop("lora_rank", 0))
    if settings.pop("offload_policy", False):
        model = replace(model, fsdp_config=replace(model.fsdp_config, offload_policy=True))
    optim = replace(group, **settings)
    if kind is RLConfig:
        return replace(config, model=model, actor=replace(config.actor, optim=optim))
    return replace(config, model=model, optim=optim)


@pytest.mark.parametrize(("kind", "group"), [(RLConfig, "actor.optim"), (SFTConfig, "optim")])
def test_settings_that_contradict_are_named(kind: type, group: str) -> None:
    def faults(**settings: Any) -> list[str]:
        return list(find_faults(configured(kind, **settings)))

    assert faults() == faults(name="muon") == []
    [unknown] = faults(name="lion")
    assert unknown == f"{group}.name is 'lion'; choose from adamw, muon"
    [options] = faults(override_optimizer_config={"momentum": 0.9})
    assert f"{group}.override_optimizer_config is {{'momentum': 0.9}}, but adamw has no" in options
    [wrong] = faults(name="muon", override_optimizer_config={"momentum": 2})
    assert wrong.startswith(f"{group}.name is muon: optim.override_optimizer_config of muon: ")
    if kind is SFTConfig:
        [offloaded] = faults(name="muon", offload_policy=True)
        assert "model.fsdp_config.offload_policy is true, by which the host would" in offloaded
    [adapters] = faults(name="muon", lora_rank=4)
    assert f"{group}.name is muon and model.lora_rank is 4" in adapters
