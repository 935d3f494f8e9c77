"""Pages of tensors in host memory: given back, and requested as huge pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridengine.kernels.pages import DONTNEED, HUGEPAGE, advise_pages
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny
from tests.vllm_llm import open_llm

huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="no transparent huge pages"
)


def flags_of(address: int) -> set[str]:
    """The kernel's flags of the mapping that holds `address`."""
    inside = False
    with open("/proc/self/smaps") as file:
        for line in file:
            name = line.split()[0]
            if "-" in name and not name.endswith(":"):
                begin, end = (int(part, 16) for part in name.split("-"))
                inside = begin <= address < end
            elif inside and name == "VmFlags:":
                return set(line.split()[1:])
    raise AssertionError("no mapping holds the address")


@huge_pages
def test_released_pages_are_zero_and_whole_pages_get_the_advice() -> None:
    x = torch.ones(16 << 20)  # 64 MiB: a mapping of its own
    advise_pages(x.untyped_storage(), DONTNEED)
    assert x[1 << 20 : -(1 << 20)].count_nonzero() == 0
    advise_pages(x.untyped_storage(), HUGEPAGE)
    assert "hg" in flags_of(x.data_ptr() + x.nbytes // 2)
    x.fill_(2.0)
    assert x.min() == 2.0


def test_a_storage_within_a_page_is_left_alone() -> None:
    x = torch.ones(4)
    advise_pages(x.untyped_storage(), DONTNEED)
    assert x.tolist() == [1.0] * 4


def check_weights(rank: int, world_size: int, path: str) -> None:
    llm = open_llm(path, "float32", max_model_len=64, kv_cache_memory_bytes=8 << 20)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    weights = dict(runner.get_model().named_parameters())
    plain = [n for n, weight in weights.items() if "hg" not in flags_of(weight.data_ptr())]
    assert len(weights) > 10 and not plain


@huge_pages
@pytest.mark.multirank
def test_the_weights_of_an_engine_are_on_huge_pages(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    run_ranks(check_weights, 1, save_tiny("llama", tmp_path))
