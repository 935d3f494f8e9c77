"""`WeightsChecksum` of an engine that takes weights while its requests run."""

from __future__ import annotations

import pytest
import torch

from hybridengine.engine.interface import InFlightUpdate
from hybridengine.run.config import load_config
from hybridengine.run.errors import RolloutError
from hybridengine.sync.layout import EngineLayout, TensorSpec
from hybridengine.sync.weight_target import EngineState
from hybridengine.train import rollout_source
from hybridengine.train.rollout_source import WeightsChecksum
from tests.sync.memory_engine import MemoryEngine


@pytest.fixture
def engine() -> MemoryEngine:
    layout = EngineLayout({name: TensorSpec((3, 5), (5, 1), torch.float32) for name in "ab"})
    engine = MemoryEngine(layout, 0, 1)
    engine.in_flight = InFlightUpdate(lambda: False, lambda: None, keep_kv=True)
    return engine


def updated(engine: MemoryEngine, checksum: WeightsChecksum, version: int) -> None:
    checksum.before_sync()
    for number, tensor in enumerate(engine.tensors.values()):
        tensor.fill_(version + number)
    engine.weight_version = version
    checksum.after_sync(EngineState.of(engine))


def test_every_version_of_running_responses_has_a_checksum(engine: MemoryEngine) -> None:
    checksum = WeightsChecksum(load_config(None, ["model.path=m", "data.train_files=f"]), engine)
    for version in (3, 4):
        updated(engine, checksum, version)
    of_both = checksum()
    assert of_both.keys() == {3, 4} and of_both[3] != of_both[4]
    assert checksum() == {4: of_both[4]}, "no response with older weights runs"
    engine.tensors["a"].fill_(9)
    checksum.after_sync(EngineState.of(engine))  # as after each optimizer step of a batch
    assert checksum().keys() == {4} and checksum() != {4: of_both[4]}
    a, b = engine.tensors.values()
    a[:], b[:] = b.clone(), a.clone()
    with pytest.raises(RolloutError, match="changed since the sync to version 4"):
        checksum()


def test_a_bit_that_changed_before_an_update_inside_responses(engine: MemoryEngine) -> None:
    checksum = WeightsChecksum(load_config(None, ["model.path=m", "data.train_files=f"]), engine)
    updated(engine, checksum, 1)
    engine.tensors["a"].view(torch.int32)[1, 2] ^= 1
    with pytest.raises(RolloutError, match="changed since the sync to version 1"):
        updated(engine, checksum, 2)


def test_a_sync_that_knows_what_it_left_costs_no_read(
    engine: MemoryEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    checksum = WeightsChecksum(load_config(None, ["model.path=m", "data.train_files=f"]), engine)
    engine.weight_version = 1
    left = EngineState.of(engine)
    with monkeypatch.context() as patch:
        patch.setattr(rollout_source.EngineState, "of", None)
        checksum.after_sync(left)
    assert checksum() == {1: left.checksum}
