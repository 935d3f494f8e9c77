"""LoRA on FSDP2 ranks → real vLLM ranks: merged weights bit for bit, the frozen base sent once."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.run.errors import RolloutError
from tests.model.lora_shared import EXPERT_WEIGHTS, float64_update
from tests.ranks import run_ranks
from tests.sync.vllm_engines import PROMPTS, LargestAllocation, build, unequal
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

BUCKET = 1 << 14
EXPERT_BUCKET = 1 << 18  # an expert is merged as a whole


def merged_in_float64(base: dict, adapters: dict) -> dict:
    """The checkpoint the engine should hold: every full weight merged, then cast."""
    full = {name: p.full_tensor() for name, p in base.items()}
    for name, adapter in adapters.items():
        full[name] = (full[name].double() + float64_update(adapter.full())).float()
    return {name: tensor.to(torch.bfloat16) for name, tensor in full.items()}


def sync_body(rank: int, world_size: int, path: str, tp_size: int, experts: tuple = ()) -> dict:
    from hybridengine.model import parameter_shards
    from hybridengine.model.lora import adapter_shards, apply_lora

    engine, model, resharder = build(
        path,
        tp_size,
        torch.bfloat16,
        EXPERT_BUCKET if experts else BUCKET,
        adapt=lambda m: apply_lora(m, 4, 6.0, "all-linear", None, *experts),
    )
    base, adapters = parameter_shards(model), adapter_shards(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    reports, wrong, largest = [], [], LargestAllocation()
    for version in range(1, 5):
        with torch.no_grad():
            for p in trained:
                p.add_(0.1 * version)
            if version == 4:
                model.get_input_embeddings().weight.mul_(0.5)  # a write to the frozen base
        with contextlib.nullcontext() if version == 3 else largest:
            reports.append(resharder.sync(version, verify=version == 3))
        checkpoint = merged_in_float64(base, adapters)
        load = partial(engine.target.load_full, checkpoint.items())
        wrong.append(unequal(engine.target.weights(), load))
    adapted = {c.source for c in engine.target.layout.copies} & adapters.keys()
    return {
        "wrong": wrong,
        "received": [r.bytes_received for r in reports],
        "sent": [r.bytes_sent for r in reports],
        "planned": resharder.plan.bytes_sent[rank],
        "staging": resharder.plan.staging_bytes,
        "largest": largest.bytes,
        "buckets": len(resharder.plan.buckets),
        "adapted": len(adapted),
        "trained": {p.dtype for p in trained},
        "adapters": len(adapters),
    }


def test_merged_weights_and_a_base_that_is_sent_once(tmp_path: Path) -> None:
    """Row- and column-sharded weights into two engines, tied embeddings."""
    path = save_tiny("llama", tmp_path)
    results = run_ranks(sync_body, 4, path, 2, timeout_s=400)
    for result in results:
        assert result["wrong"] == [[], [], [], []]
        assert result["adapted"] == result["adapters"] == 14
        assert result["trained"] == {torch.float32}
        first, second, third, written = result["sent"]
        assert first == written == result["planned"], "a base that was written to is sent again"
        assert second == third <= first
        assert result["staging"] <= BUCKET and result["buckets"] > 2
        assert result["largest"] <= 2 * BUCKET  # the float64 sums of float32 rows
    saved = sum(r["received"][0] - r["received"][1] for r in results)
    assert saved > 0, "embeddings, norms and biases were sent again"


@pytest.mark.parametrize(
    ("tp_size", "shared"),
    [pytest.param(1, "none", marks=pytest.mark.exhaustive), (2, "none"), (2, "outer")],
)
def test_merged_experts_in_fused_weights(tmp_path: Path, tp_size: int, shared: str) -> None:
    """vLLM's w13 and w2 hold the merged weights of all experts, sliced by tensor parallelism."""
    path = save_tiny("qwen3_moe", tmp_path)
    for result in run_ranks(sync_body, 2, path, tp_size, (EXPERT_WEIGHTS, shared), timeout_s=400):
        assert result["wrong"] == [[], [], [], []]
        assert result["adapted"] == result["adapters"] == 12
        first, second, third, written = result["sent"]
        assert first == written == result["planned"] and second == third <= first


def rollout_body(
    rank: int,
    world_size: int,
    path: str,
    as_adapters: bool,
    fsdp_size: int,
    target_parameters: tuple[str, ...] = (),
) -> dict:
    from hybridengine.engine.interface import SamplingSpec
    from hybridengine.model import pack_rollouts, packed_log_probs
    from hybridengine.model.lora import adapters_disabled, apply_lora

    engine, model, resharder = build(
        path,
        2,
        torch.float32,
        EXPERT_BUCKET if target_parameters else BUCKET,
        lambda m: apply_lora(m, 3, 6.0, target_parameters=target_parameters),
        lora_rank=3 if as_adapters else 0,
        fsdp_size=fsdp_size,
        param_dtype=torch.float32,
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    greedy, gaps, received = [], [], []
    for version in range(3):
        received.append(resharder.sync(version).bytes_received)
        rollouts = engine.generate(PROMPTS, SamplingSpec(temperature=0, max_tokens=6), seed=0)
        tokens = [c[0].token_ids for c in rollouts]
        sampled = torch.tensor([lp for c in rollouts for lp in c[0].log_probs])
        batch = pack_rollouts(list(zip(PROMPTS, tokens, strict=True)))
        with torch.no_grad():
            ours = packed_log_probs(model, batch)[0]
            with adapters_disabled(model):
                of_base = packed_log_probs(model, batch)[0]
            for p in trained:  # a step of the adapters
                p.mul_(1.5).add_(0.05)
        gaps.append([(x - sampled).abs().max().item() for x in (ours, of_base)])
        greedy.append(tokens)
    if as_adapters:
        check_flipped_bit(engine, resharder)
    return {"greedy": greedy, "gaps": gaps, "received": received}


def check_flipped_bit(engine: Any, resharder: Any) -> None:
    """A bit of an adapter in the engine changes, which the checksum of its responses shows."""
    from hybridengine.run.config import load_config
    from hybridengine.train.rollout_source import WeightsChecksum

    config = load_config(None, ["model.path=m", "data.train_files=f"])
    checksum = WeightsChecksum(config, engine)
    checksum.after_sync(resharder.engine_state)
    before = checksum()[2]
    resharder.sync(3)
    checksum.after_sync(resharder.engine_state)
    assert checksum()[3] != before, "another adapter on the same base"
    adapters = engine.target.adapter_weights()
    assert len({name.split(".")[-2] for name in adapters}) == 2, "both factors"
    next(t for t in adapters.values() if t.any()).view(torch.int32).view(-1)[3] ^= 1
    with pytest.raises(RolloutError, match="the weights of the engine have changed since"):
        checksum()


@pytest.mark.parametrize("as_adapters", [False, True], ids=["merged", "adapters"])
def test_rollouts_follow_every_step_of_the_adapters(tmp_path: Path, as_adapters: bool) -> None:
    """The same prompts each time: a stale adapter or a cached prefix would repeat itself."""
    path = save_tiny("qwen2", tmp_path)
    assert_follows(run_ranks(rollout_body, 2, path, as_adapters, -1, timeout_s=400))


@pytest.mark.exhaustive
def test_experts_and_replicated_shards(tmp_path: Path) -> None:
    """Adapters of attention and experts on two replicas of two shards each (HSDP)."""
    path = save_tiny("qwen3_moe", tmp_path)
    assert_follows(run_ranks(rollout_body, 4, path, False, 2, EXPERT_WEIGHTS, timeout_s=400))


def test_ranks_and_experts_without_slots_are_refused() -> None:
    from hybridengine.engine.vllm.weights import slot_options
    from hybridengine.sync.layout import LayoutError

    experts = {"model.layers.0.mlp.experts.gate_up_proj": (4, 128, 128)}
    assert slot_options(0, experts) == {}
    with pytest.raises(LayoutError, match="rank 512, got 513; merge"):
        slot_options(513, {})
    if not torch.cuda.is_available():
        with pytest.raises(LayoutError, match="no CPU kernel for experts in an engine"):
            slot_options(4, experts)


def test_adapters_of_experts_are_not_sent_alone() -> None:
    from hybridengine.moe.adapters import ExpertAdapter
    from hybridengine.sync.layout import LayoutError
    from hybridengine.sync.trainers import TrainedTensors

    adapter = ExpertAdapter(torch.zeros(4, 6), torch.zeros(6, 5), 1.0, 2, 3, False)
    trained = TrainedTensors(
        lambda: {"experts": torch.zeros(3, 4, 5)}, lambda: {"experts": adapter}, merge=False
    )
    with pytest.raises(LayoutError, match=r"'experts' is of experts.*reshard.lora=merged"):
        trained.read_specs(1)


def assert_follows(results: list[dict]) -> None:
    for result in results:
        for version, (gap, gap_of_base) in enumerate(result["gaps"]):
            assert gap < 1e-4  # float32 on both sides, sums in another order
            assert (gap_of_base > 1e-2) == (version > 0), "adapters begin at zero, then count"
        first, second, third = result["greedy"]
        assert first != second != third
        assert result["received"][0] > result["received"][1] == result["received"][2] > 0
