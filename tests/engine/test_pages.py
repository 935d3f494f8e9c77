"""Pages of a cache in host memory: given back, and allocated as huge pages afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridengine.engine.vllm.sleep import DONTNEED, HUGEPAGE, advise_pages


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


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="no transparent huge pages"
)
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
