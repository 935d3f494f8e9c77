"""Each FSDP2 option does what it says, and changes neither logits nor gradients nor the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.test_packed import LOGITS, SIZES, alone, loss_of, rollouts
from tests.model.test_sharded import COLUMNS, assert_close_by_scale, backward, plain, share, whole
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.multirank

EPS = 1e-2  # as in test_sharded


def load(path: str, world_size: int, fsdp_size: int = -1, **options: Any):
    from hybridengine.model import load_causal_lm, sharding_mesh

    return load_causal_lm(
        path,
        mesh=sharding_mesh("cpu", world_size, fsdp_size),
        shard_dim1=lambda name: name.endswith(COLUMNS),
        **{"param_dtype": torch.float32, **options},
    )


class Watcher:
    """What FSDP2 holds while layer 0 runs, and after its forward, while layer 1 runs."""

    def __init__(self, model) -> None:
        self.next_is_under_way = self.first_is_whole = False
        self.layers = model.model.layers
        self.layers[0].mlp.register_forward_hook(self.in_first)
        self.layers[1].mlp.register_forward_hook(self.in_second)

    def in_first(self, *_: Any) -> None:
        gathered = self.layers[1]._get_fsdp_state()._fsdp_param_group
        self.next_is_under_way = gathered._all_gather_result is not None

    def in_second(self, *_: Any) -> None:
        weight = self.layers[0].mlp.down_proj.weight
        self.first_is_whole = not hasattr(weight, "placements")


def groups_of(model) -> list[str]:
    from torch.distributed.fsdp import FSDPModule

    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def local_share(model) -> float:
    """Which part of the weights this rank holds."""
    parameters = list(model.parameters())
    held = sum(p.to_local().numel() for p in parameters)
    return held / sum(p.numel() for p in parameters)


LAYERS = ["", "model.layers.0", "model.layers.1"]
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "hsdp": {"fsdp_size": 2},
    "replicated": {"fsdp_size": 1},
    "keep": {"reshard_after_forward": False},
    "prefetch": {"forward_prefetch": True},
    "attention_alone": {"min_num_params": 40_000, "gradient_checkpointing": True},
    "attention_and_mlp": {"min_num_params": 30_000, "fsdp_size": 2},
}
GROUPS = {
    "attention_alone": ["", *(f"{layer}.self_attn" for layer in LAYERS[1:])],
    "attention_and_mlp": [
        "", *(f"{layer}.{part}" for layer in LAYERS[1:] for part in ("self_attn", "mlp"))
    ],
}  # fmt: skip


def variants_body(rank: int, world_size: int, path: str) -> None:
    from hybridengine.model import Optimizer

    reference, pairs = plain(path), rollouts(SIZES)
    expected, _ = alone(reference, share(pairs, rank, world_size))
    loss_of(*alone(reference, pairs)).backward()
    gradients = {n: p.grad.clone() for n, p in reference.named_parameters()}
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=EPS, weight_decay=0.1).step()
    for name, options in VARIANTS.items():
        model = load(path, world_size, **options)
        seen = Watcher(model) if name not in GROUPS else None
        logits = backward(model, share(pairs, rank, world_size), world_size)
        torch.testing.assert_close(logits, expected, **LOGITS, msg=name)
        # Without a synchronisation over the replicas each would have its own ranks' part.
        assert_close_by_scale(whole(model, lambda p: p.grad), gradients)
        optimizer = Optimizer(model, lr=1e-2, eps=EPS, weight_decay=0.1, total_steps=5)
        torch.testing.assert_close(optimizer.step(0.5), norm, rtol=1e-5, atol=0, msg=name)
        for parameter, weight in whole(model).items():
            target = reference.get_parameter(parameter)
            torch.testing.assert_close(weight, target, rtol=1e-5, atol=1e-6, msg=parameter)
        size = options.get("fsdp_size", world_size)
        assert abs(local_share(model) - 1 / size) < 0.02, name
        assert groups_of(model) == GROUPS.get(name, LAYERS), name
        if seen is not None:
            assert seen.first_is_whole == (name == "keep"), name
            assert seen.next_is_under_way == (name == "prefetch"), name


def test_options_change_memory_and_traffic_but_no_result(tmp_path: Path) -> None:
    run_ranks(variants_body, 4, save_tiny("llama", tmp_path))


def offload_body(rank: int, world_size: int, path: str) -> None:
    from hybridengine.model import Optimizer, parameter_shards
    from hybridengine.model.offload import Parking

    pairs = share(rollouts(SIZES), rank, world_size)

    def steps(offload: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = load(path, world_size, fsdp_size=1 if world_size == 1 else 2)
        shards = parameter_shards(model)  # as the reshard holds them: taken before any parking
        parked = Parking(lambda: parameter_shards(model).values(), offload)
        optimizer = Optimizer(model, lr=1e-2, eps=EPS, total_steps=5, offload=offload)

        def sizes(tensors: Any) -> int:
            local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
            return sum(t.untyped_storage().nbytes() for t in local)

        norms = []
        for _ in range(3):
            assert (sizes(model.parameters()) == 0) == offload
            with parked.present():
                assert sizes(model.parameters()) > 0
                backward(model, pairs, world_size)
                norms.append(optimizer.step(0.5).item())
                assert (sizes(optimizer._moments()) == 0) == offload
            assert (sizes(shards.values()) == 0) == offload
        with parked.present(), parked.present(), optimizer.state.present():
            assert sizes(optimizer._moments()) > 0
            return norms, {n: t.full_tensor() for n, t in shards.items()}

    kept, parked = steps(False), steps(True)
    assert kept[0] == parked[0]
    for name, weight in kept[1].items():
        assert torch.equal(weight, parked[1][name]), name


def test_offloading_empties_the_device_and_changes_no_bit(tmp_path: Path) -> None:
    run_ranks(offload_body, 2, save_tiny("qwen2", tmp_path))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_views_of_parked_tensors_come_back(device: str) -> None:
    from hybridengine.model.offload import Parking

    flat = torch.arange(1 << 20, dtype=torch.float32, device=device)
    view, expected = flat[7:].view(-1)[::2], flat[7:].clone()[::2]
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    parking = Parking(lambda: [view, flat])
    assert flat.untyped_storage().nbytes() == 0
    if device == "cuda":
        assert torch.cuda.memory_allocated() <= before - (1 << 22)
    with parking.present():
        assert torch.equal(view, expected)
        flat += 1
    assert flat.untyped_storage().nbytes() == 0
    with parking.present():
        assert torch.equal(view, expected + 1)


def float16_body(rank: int, world_size: int, path: str) -> None:
    from hybridengine.model import Optimizer

    reference, pairs = plain(path), rollouts(SIZES)
    tiny = 2.0**-22  # the loss of one token among millions: gradients below float16's range
    (loss_of(*alone(reference, pairs)) * tiny).backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}
    reference_norm = torch.nn.utils.get_total_norm(expected.values())
    model = load(path, world_size, param_dtype=torch.float16)
    computed = []
    model.model.norm.register_forward_hook(lambda m, i, out: computed.append(out.dtype))
    optimizer = Optimizer(model, lr=1e-2, total_steps=9, param_dtype=torch.float16)
    errors, norms = [], []
    for scale in (1.0, optimizer.loss_scale):
        backward_scaled(model, share(pairs, rank, world_size), world_size * scale * tiny)
        got = {n: g / scale for n, g in whole(model, lambda p: p.grad).items()}
        errors.append(max((got[n] - e).norm() / e.norm() for n, e in expected.items()))
        if scale > 1:
            norms.append(optimizer.step(1e9))
        else:
            optimizer.adamw.zero_grad()
    assert computed == [torch.float16] * 2
    assert errors[0] > 0.5 > 0.02 > errors[1], errors
    torch.testing.assert_close(norms[0], reference_norm, rtol=1e-2, atol=0)

    before = whole(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    assert not optimizer.step(1.0).isfinite() and optimizer.loss_scale == 2.0**15
    assert all(torch.equal(w, before[n]) for n, w in whole(model).items())


def backward_scaled(model, pairs: list, scale: float) -> None:
    from hybridengine.model import pack_rollouts, packed_logits

    batch = pack_rollouts(pairs)
    (loss_of(packed_logits(model, batch), batch.target_ids) * scale).backward()


def test_float16_needs_its_loss_scale_and_survives_an_overflow(tmp_path: Path) -> None:
    run_ranks(float16_body, 2, save_tiny("llama", tmp_path))
