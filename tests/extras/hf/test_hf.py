"""The Hugging Face engine, written by the reshard, and any engine after a failed sync."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.engines import build_engine
from tests.loading import load_sharded
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.multirank

PROMPTS = [[5, 9, 33], [7, 8, 9, 10, 11, 12, 13], [3] * 12]


def build(path: str, world_size: int, stop_token_ids: list[int]):
    from torch.distributed.device_mesh import init_device_mesh

    from hybridengine.model import parameter_shards
    from hybridengine.sync.resharder import Resharder

    engine = build_engine("hf", path, stop_token_ids=stop_token_ids, max_num_seqs=2)
    model = load_sharded(
        path, mesh=init_device_mesh("cpu", (world_size,)), shard_dim1=lambda name: False
    )
    return engine, Resharder(lambda: parameter_shards(model), engine, bucket_bytes=1 << 16)


def generate_body(rank: int, world_size: int, path: str):
    from transformers import AutoModelForCausalLM

    from hybridengine.engine.interface import SamplingSpec

    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = []
    for prompt in PROMPTS:
        out = hf.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None
        )
        expected.append(out[0, len(prompt) :].tolist())
    stop = expected[0][3]  # a token that greedy decoding is known to reach
    engine, resharder = build(path, world_size, [stop])
    resharder.sync(1)
    weights = dict(hf.named_parameters())
    unequal = [n for n, t in engine.target.weights().items() if not torch.equal(t, weights[n])]
    greedy = engine.generate(PROMPTS, SamplingSpec(temperature=0, max_tokens=8), seed=0)
    sampled = engine.generate(PROMPTS, SamplingSpec(n=3, temperature=0.7, max_tokens=5), seed=1)
    gap = 0.0
    for prompt, completions in zip(PROMPTS, sampled, strict=True):
        assert len(completions) == 3
        for c in completions:
            logits = hf(torch.tensor([prompt + c.token_ids])).logits[0, len(prompt) - 1 : -1]
            chosen = torch.tensor(c.token_ids)[:, None]
            want = torch.log_softmax(logits / 0.7, -1).gather(-1, chosen)[:, 0]
            gap = max(gap, (want - torch.tensor(c.log_probs)).abs().max().item())
    return unequal, expected, stop, [c[0] for c in greedy], gap


def test_fallback_generates_as_hugging_face_does(tmp_path: Path) -> None:
    path = save_tiny("qwen2", tmp_path)
    for unequal, expected, stop, greedy, gap in run_ranks(generate_body, 2, path):
        assert unequal == []
        for want, got in zip(expected, greedy, strict=True):
            ends = stop in want
            assert got.token_ids == (want[: want.index(stop) + 1] if ends else want)
            assert got.finish_reason == ("stop" if ends else "length")
        assert greedy[0].finish_reason == "stop"
        assert gap < 1e-4  # float32; left padding changes the order of the attention sums


def logits_body(rank: int, world_size: int, path: str) -> list[int]:
    """Return the number of [B, V] tensors that are alive after every step."""
    from hybridengine.engine.interface import InFlightUpdate, SamplingSpec
    from tests.tiny_models import VOCAB

    engine, resharder = build(path, world_size, [])
    resharder.sync(1)
    alive = []

    def count() -> bool:
        shapes = [x.shape for x in gc.get_objects() if type(x) is torch.Tensor]
        alive.append(shapes.count((2, VOCAB)))
        return False

    engine.in_flight = InFlightUpdate(is_due=count, update=lambda: None, keep_kv=True)
    spec = SamplingSpec(max_tokens=12, temperature=0.9, top_p=0.8, record_kept=True)
    engine.generate(PROMPTS[:2], spec, seed=0)
    return alive


def test_logits_do_not_add_up_over_steps(tmp_path: Path) -> None:
    [alive] = run_ranks(logits_body, 1, save_tiny("qwen2", tmp_path))
    assert len(alive) == 12
    assert 1 <= max(alive[2:]) == alive[2] <= 4, "logits of one step, whatever the length"


def partial_update_body(rank: int, world_size: int, path: str) -> list[str]:
    from hybridengine.engine.interface import SamplingSpec
    from hybridengine.sync.weight_target import StaleWeightsError

    engine, resharder = build(path, world_size, [])
    spec = SamplingSpec(max_tokens=2)
    messages = []
    with pytest.raises(StaleWeightsError) as before:
        engine.generate(PROMPTS, spec, seed=0)
    messages.append(str(before.value))
    resharder.sync(1)
    engine.generate(PROMPTS, spec, seed=0)
    signal, calls = dist.all_reduce, 0

    def breaks_at_the_second_bucket(*args, async_op=False, **kwargs):
        nonlocal calls
        calls += async_op
        if calls == 2:
            raise RuntimeError("the wire is cut")
        return signal(*args, async_op=async_op, **kwargs)

    dist.all_reduce = breaks_at_the_second_bucket
    with pytest.raises(RuntimeError, match="the wire is cut"):
        resharder.sync(2)
    dist.all_reduce = signal
    with pytest.raises(StaleWeightsError) as partial:
        engine.generate(PROMPTS, spec, seed=0)
    messages.append(str(partial.value))
    assert engine.weight_version == 1
    resharder.sync(3)
    engine.generate(PROMPTS, spec, seed=0)
    assert engine.weight_version == 3
    return messages


def test_partially_updated_weights_refuse_to_generate(tmp_path: Path) -> None:
    for before, partial in run_ranks(partial_update_body, 2, save_tiny("llama", tmp_path)):
        assert "no weights yet" in before
        assert "partially updated" in partial and "version 2 did not finish" in partial
        assert "last complete version: 1" in partial


def damaged_body(rank: int, world_size: int, path: str) -> list[str]:
    from hybridengine.engine.interface import SamplingSpec
    from hybridengine.sync.weight_target import ReshardError, StaleWeightsError

    engine, resharder = build(path, world_size, [])
    resharder.sync(1, verify=True)
    unpack = resharder.mover.exchanges[0].unpack

    class Damaging(type(unpack)):
        def copy(self, sources, destinations):
            damaged = [source.clone() for source in sources]
            damaged[0].view(torch.uint8)[0] ^= 1
            super().copy(damaged, destinations)

    intact = unpack.__class__
    if rank == 1:  # reads the buffer of rank 0
        unpack.__class__ = Damaging
    with pytest.raises(ReshardError) as refused:
        resharder.sync(2, verify=True)
    unpack.__class__ = intact
    with pytest.raises(StaleWeightsError):
        engine.generate(PROMPTS, SamplingSpec(max_tokens=2), seed=0)
    resharder.sync(3, verify=True)
    weight = engine.target.weights()["model.norm.weight"]
    weight[[0, 1]] = weight[[1, 0]]  # the same values in other places
    with pytest.raises(ReshardError, match=r"'model\.norm\.weight' on rank 0"):
        resharder.verify(3)
    return [str(refused.value)]


def test_damaged_bytes_are_found_and_named(tmp_path: Path) -> None:
    messages = run_ranks(damaged_body, 2, save_tiny("llama", tmp_path))
    assert messages[0] == messages[1], "every rank must refuse"
    assert "on rank 1 differs from its source" in messages[0][0]


def other_plan_body(rank: int, world_size: int, path: str) -> str:
    from hybridengine.sync.layout import LayoutError
    from hybridengine.sync.resharder import Resharder

    engine, resharder = build(path, world_size, [])
    with pytest.raises(LayoutError) as refused:
        Resharder(lambda: resharder.trained.parameters, engine, bucket_bytes=(1 << 16) + rank)
    return str(refused.value)


def test_ranks_with_different_plans_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(other_plan_body, 2, save_tiny("llama", tmp_path)):
        assert "ranks [1] made another reshard plan than rank 0" in message
