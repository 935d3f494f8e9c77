"""What sleep level 2 keeps of an engine's memory: here host memory in the place of a GPU's."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import torch

from hybridengine.engine.vllm.sleep import Allocation, Level2Sleep, unwritten


class Pool:
    """One segment, divided into blocks at multiples of 512 bytes, some of them free."""

    def __init__(self, sizes: list[tuple[int, str]]) -> None:
        self.segment = torch.arange(4096, dtype=torch.int16).view(torch.uint8)
        self.sizes = sizes

    def snapshot(self) -> list[dict]:
        blocks = [
            {"size": -(-n // 512) * 512, "requested_size": n, "state": state}
            for n, state in self.sizes
        ]
        return [{"address": self.segment.data_ptr(), "blocks": blocks}]

    def tensor(self, start: int, nbytes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.segment[start : start + nbytes].view(dtype)


def test_what_a_sync_does_not_write_survives() -> None:
    used = "active_allocated"
    pool = Pool([(512, used), (100, used), (1024, "inactive"), (1000, used), (512, used)])
    weight = pool.tensor(0, 512).view(8, 16).t()  # dense, though transposed
    scale = pool.tensor(512, 100)
    fused = pool.tensor(2048, 1000)
    gate, up = fused[:100], fused[100:]
    table = pool.tensor(3072, 512).view(8, 16)
    part = table[:, :8]  # a sync writes every other 32 bytes of it
    levels: list[int] = []

    def sleep(level: int) -> None:
        levels.append(level)
        pool.segment.fill_(255)

    def wake_up(tags: list[str]) -> None:
        assert tags == ["weights"]

    llm = SimpleNamespace(sleep=sleep, wake_up=wake_up)
    allocator = SimpleNamespace(allocator_and_pools={"weights": [(pool, None)], "kv_cache": [None]})
    level2 = Level2Sleep(llm, allocator, ctypes.memmove)
    before = pool.segment.clone()
    for _ in range(2):
        pool.segment.copy_(before)
        level2.sleep([weight, up, part, gate])
        assert (pool.segment == 255).all() and not before.eq(255).all()
        level2.wake_weights()
        same = (pool.segment == before).view(-1, 4).all(1)
        assert same[128:153].all(), "scale: no sync writes it"
        assert same[768:896].all(), "table: a sync writes parts of it"
        assert not same[:128].any() and not same[512:762].any(), "what a sync writes is not kept"
    assert levels == [2, 2] and scale.numel() == 25


def test_an_engine_with_another_sleep_keeps_its_own() -> None:
    config = SimpleNamespace(sleep_mode_backend="criu")
    assert Level2Sleep.of(SimpleNamespace(model_config=config)) is None


def test_allocations_are_covered_by_several_tensors_or_not_at_all() -> None:
    flat = torch.zeros(64, dtype=torch.uint8)
    address = flat.data_ptr()
    whole, head = Allocation(address, 64), Allocation(address, 32)
    tail = Allocation(address + 32, 32)
    assert unwritten([whole, head, tail], [flat[40:], flat[:40]]) == []
    assert unwritten([whole, head, tail], [flat[41:], flat[:40]]) == [whole, tail]
    assert unwritten([whole, head, tail], [flat[:32], flat[:16], flat[::2]]) == [whole, tail]
    assert unwritten([whole], []) == [whole]
