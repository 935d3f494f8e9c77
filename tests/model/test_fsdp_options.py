"""Each FSDP2 option has its effect, and changes neither logits, gradients nor the update."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.model import cases
from tests.ranks import run_ranks
from tests.tensors import part, whole
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.multirank

EPS = 1e-2  # as in test_sharded


class Watcher:
    """Record what FSDP2 has unsharded or prefetched during the forwards of layers 0 and 1."""

    def __init__(self, model) -> None:
        self.next_is_prefetched = self.first_is_unsharded = False
        self.layers = model.model.layers
        self.layers[0].mlp.register_forward_hook(self.in_first)
        self.layers[1].mlp.register_forward_hook(self.in_second)

    def in_first(self, *_: Any) -> None:
        gathered = self.layers[1]._get_fsdp_state()._fsdp_param_group
        self.next_is_prefetched = gathered._all_gather_result is not None

    def in_second(self, *_: Any) -> None:
        weight = self.layers[0].mlp.down_proj.weight
        self.first_is_unsharded = not hasattr(weight, "placements")


def groups_of(model) -> list[str]:
    """The first module of each group."""
    from torch.distributed.fsdp import FSDPModule

    names: dict[Any, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            names.setdefault(module._get_fsdp_state(), name)
    return list(names.values())


def local_fraction(model) -> float:
    """The fraction of the weights on this rank."""
    parameters = list(model.parameters())
    held = sum(part(p).numel() for p in parameters)
    return held / sum(p.numel() for p in parameters)


LAYERS = ["", "model.layers.0", "model.layers.1"]
VARIANTS: dict[str, dict[str, Any]] = {
    "hsdp": {"fsdp_size": 2},
    "keep": {"reshard_after_forward": "off"},
    "keep a small model": {"reshard_after_forward": "auto"},
    "prefetch": {"forward_prefetch": True},
    "cpu_offload": {"offload_policy": True},
    "attention_alone": {"min_num_params": 40_000, "enable_gradient_checkpointing": True},
    "together": {"enable_gradient_checkpointing": True},
}
# Other tests run on ranks without options, and with compiled layers; the others have siblings.
MORE_VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "replicated": {"fsdp_size": 1},
    "attention_and_mlp": {"min_num_params": 30_000, "fsdp_size": 2},
    "compiled": {"compile": True, "enable_gradient_checkpointing": True},
}
GROUPS = {
    "replicated": [],  # no FSDP2
    "together": LAYERS[:2],
    "attention_alone": ["", *(f"{layer}.self_attn" for layer in LAYERS[1:])],
    "attention_and_mlp": [
        "",
        *(f"{layer}.{part}" for layer in LAYERS[1:] for part in ("self_attn", "mlp")),
    ],
}


def variants_body(
    rank: int, world_size: int, path: str, variants: dict[str, dict[str, Any]]
) -> None:
    from hybridengine.model import Optimizer, fsdp

    joined_bytes = fsdp.GROUP_BYTES
    reference, pairs = cases.single_process_model(path), cases.rollouts(cases.SIZES)
    expected, _ = cases.one_by_one(reference, cases.pairs_of_rank(pairs, rank, world_size))
    cases.loss_of(*cases.one_by_one(reference, pairs)).backward()
    gradients = {n: p.grad.clone() for n, p in reference.named_parameters()}
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=EPS, weight_decay=0.1).step()
    torch.compile = partial(torch.compile, backend="aot_eager")  # traced, no code generated
    for name, options in variants.items():
        fsdp.GROUP_BYTES = joined_bytes if name == "together" else 0
        model = cases.load(path, world_size, **{"reshard_after_forward": "on"} | options)
        seen = Watcher(model) if name not in (*GROUPS, "compiled") else None
        logits = cases.backward(model, cases.pairs_of_rank(pairs, rank, world_size), world_size)
        torch.testing.assert_close(logits, expected, **cases.LOGITS, msg=name)
        # Without a synchronisation over the replicas each would have its own ranks' part.
        cases.assert_close_by_scale(cases.full_tensors(model, lambda p: p.grad), gradients)
        optimizer = Optimizer(model, lr=1e-2, eps=EPS, weight_decay=0.1, total_steps=5)
        torch.testing.assert_close(optimizer.step(0.5), norm, rtol=1e-5, atol=0, msg=name)
        for parameter, weight in cases.full_tensors(model).items():
            target = reference.get_parameter(parameter)
            torch.testing.assert_close(weight, target, rtol=1e-5, atol=1e-6, msg=parameter)
        size = options.get("fsdp_size", world_size)
        assert abs(local_fraction(model) - 1 / size) < 0.02, name
        assert groups_of(model) == GROUPS.get(name, LAYERS), name
        if seen is not None:
            assert seen.first_is_unsharded == name.startswith("keep"), name
            assert seen.next_is_prefetched == (name == "prefetch"), name


@pytest.mark.parametrize(
    "variants",
    [
        pytest.param(VARIANTS, id="one of each kind"),
        pytest.param(MORE_VARIANTS, id="others", marks=pytest.mark.exhaustive),
    ],
)
def test_options_change_memory_and_traffic_but_no_result(
    tmp_path: Path, variants: dict[str, dict[str, Any]]
) -> None:
    run_ranks(variants_body, 4, save_tiny("llama", tmp_path), variants)


def test_small_neighbours_are_gathered_together() -> None:
    from hybridengine.model.fsdp import join_small

    sizes = [[2, 2, 2, 9, 1, 3], [1]]  # of the layers of two stacks
    stacks = [nn.ModuleList(nn.Linear(n, 1, bias=False) for n in stack) for stack in sizes]
    layers = [layer for stack in stacks for layer in stack]
    alone = [[layer.in_features] for layer in layers]
    for limit, joined in ((4, [[2, 2], [2], [9], [1, 3], [1]]), (0, alone)):
        found = join_small(nn.ModuleList(stacks), layers, limit)
        assert [[layer.in_features for layer in group] for group in found] == joined


def offload_policy_body(rank: int, world_size: int, folder: Path) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    from tests.train.sft_job import start_run

    def steps(offload: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        run = start_run(rank, world_size, folder, **{"model.fsdp_config.offload_policy": offload})
        policy = run.model._get_fsdp_state()._fsdp_param_group.offload_policy
        assert isinstance(policy, CPUOffloadPolicy) == offload
        losses = [run.step(step)[0]["train/loss"] for step in (1, 2)]
        assert all(parameter.is_cpu for parameter in run.model.parameters())
        return losses, cases.full_tensors(run.model)

    (kept, expected), (offloaded, weights) = steps(False), steps(True)
    assert kept == offloaded and kept[0] != kept[1]
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name


def test_sft_with_offload_policy_loads_and_steps(tmp_path: Path) -> None:
    from tests.train.sft_job import write_sft_job

    run_ranks(offload_policy_body, 2, write_sft_job(tmp_path))


def offload_body(rank: int, world_size: int, path: str) -> None:
    from hybridengine.model import Optimizer, parameter_shards
    from hybridengine.model.fsdp import Offloader

    pairs = cases.pairs_of_rank(cases.rollouts(cases.SIZES), rank, world_size)

    def steps(offload: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = cases.load(path, world_size, fsdp_size=1 if world_size == 1 else 2)
        shards = parameter_shards(model)  # as the reshard holds them: taken before any offload
        offloader = Offloader(lambda: parameter_shards(model).values(), offload)
        optimizer = Optimizer(model, lr=1e-2, eps=EPS, total_steps=5, offload=offload)

        def sizes(tensors: Any) -> int:
            local = map(part, tensors)
            return sum(t.untyped_storage().nbytes() for t in local)

        norms = []
        for _ in range(3):
            assert (sizes(model.parameters()) == 0) == offload
            with offloader.on_device():
                assert sizes(model.parameters()) > 0
                cases.backward(model, pairs, world_size)
                norms.append(optimizer.step(0.5).item())
                assert (sizes(optimizer.moment_tensors()) == 0) == offload
            assert (sizes(shards.values()) == 0) == offload
        with offloader.on_device(), offloader.on_device(), optimizer.offloader.on_device():
            assert sizes(optimizer.moment_tensors()) > 0
            return norms, {n: whole(t) for n, t in shards.items()}

    kept, offloaded = steps(False), steps(True)
    assert kept[0] == offloaded[0]
    for name, weight in kept[1].items():
        assert torch.equal(weight, offloaded[1][name]), name


def test_offloading_empties_the_device_and_changes_no_bit(tmp_path: Path) -> None:
    run_ranks(offload_body, 2, save_tiny("qwen2", tmp_path))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_views_of_offloaded_tensors_are_restored(device: str) -> None:
    from hybridengine.model.fsdp import Offloader

    flat = torch.arange(1 << 20, dtype=torch.float32, device=device)
    view, expected = flat[7:].view(-1)[::2], flat[7:].clone()[::2]
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    offloader = Offloader(lambda: [view, flat])
    assert flat.untyped_storage().nbytes() == 0
    if device == "cuda":
        assert torch.cuda.memory_allocated() <= before - (1 << 22)
    with offloader.on_device():
        assert torch.equal(view, expected)
        flat += 1
    assert flat.untyped_storage().nbytes() == 0
    with offloader.on_device():
        assert torch.equal(view, expected + 1)


def float16_body(rank: int, world_size: int, path: str) -> None:
    from hybridengine.model import Optimizer

    reference, pairs = cases.single_process_model(path), cases.rollouts(cases.SIZES)
    tiny = 2.0**-22  # the loss of one token among millions: gradients below float16's range
    (cases.loss_of(*cases.one_by_one(reference, pairs)) * tiny).backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}
    reference_norm = torch.nn.utils.get_total_norm(expected.values())
    model = cases.load(path, world_size, dtype=torch.float16)
    computed = []
    model.model.norm.register_forward_hook(lambda m, i, out: computed.append(out.dtype))
    optimizer = Optimizer(model, lr=1e-2, total_steps=9, param_dtype=torch.float16)
    errors, norms = [], []
    for scale in (1.0, optimizer.loss_scale):
        own = cases.pairs_of_rank(pairs, rank, world_size)
        backward_scaled(model, own, world_size * scale * tiny)
        got = {n: g / scale for n, g in cases.full_tensors(model, lambda p: p.grad).items()}
        errors.append(max((got[n] - e).norm() / e.norm() for n, e in expected.items()))
        if scale > 1:
            norms.append(optimizer.step(1e9))
        else:
            model.zero_grad()
    assert computed == [torch.float16] * 2
    assert errors[0] > 0.5 > 0.02 > errors[1], errors
    torch.testing.assert_close(norms[0], reference_norm, rtol=1e-2, atol=0)

    before = cases.full_tensors(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    assert not optimizer.step(1.0).isfinite() and optimizer.loss_scale == 2.0**15
    assert all(torch.equal(w, before[n]) for n, w in cases.full_tensors(model).items())


def backward_scaled(model, pairs: list, scale: float) -> None:
    from hybridengine.model import pack_rollouts, packed_logits

    batch = pack_rollouts(pairs)
    (cases.loss_of(packed_logits(model, batch), batch.target_ids) * scale).backward()


def test_float16_needs_its_loss_scale_and_survives_an_overflow(tmp_path: Path) -> None:
    run_ranks(float16_body, 2, save_tiny("llama", tmp_path))
