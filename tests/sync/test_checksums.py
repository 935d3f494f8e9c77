"""Checksums: any write and any exchange shows; strides, NaN payloads and devices do not."""

from __future__ import annotations

import pytest
import torch

from hybridengine.sync.verify import value_checksum
from hybridengine.sync.weight_target import bit_checksums

SIZES = [0, 1, 7, 1024, 8 * 1024 + 3, 300_000]


@pytest.mark.parametrize("size", SIZES)
def test_bit_checksums_detect_writes_and_exchanges(size: int) -> None:
    tensor = torch.randn(size, dtype=torch.bfloat16)
    before, same = bit_checksums([tensor, tensor.clone()])
    assert before == same
    for i in {*range(min(4, size)), size // 2, size - 1} if size else ():
        for bit in (0, 13, 14, 15):
            changed = tensor.clone()
            changed.view(torch.int16)[i] ^= 1 << bit if bit < 15 else -(1 << 15)
            assert bit_checksums([changed]) != [before], (i, bit)
    if size > 8:
        swapped = tensor.clone()
        swapped[[0, size - 1]] = swapped[[size - 1, 0]]
        assert bit_checksums([swapped]) != [before]
    assert bit_checksums([]) == []


@pytest.mark.parametrize("size", SIZES)
def test_value_checksum_depends_on_values_in_order(size: int) -> None:
    values = torch.randn(size)
    checksum = value_checksum(values, torch.bfloat16)
    assert checksum == value_checksum(values.bfloat16(), torch.bfloat16)
    strided = torch.empty(2 * size)[::2].copy_(values)
    assert checksum == value_checksum(strided, torch.bfloat16)
    if size > 1:
        assert checksum != value_checksum(values.flip(0), torch.bfloat16)
        assert checksum != value_checksum(-values, torch.bfloat16)


def test_all_nans_are_one() -> None:
    payload = torch.tensor([0x7F800001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    plain = torch.tensor([-float("nan"), 1.0])
    assert value_checksum(payload, torch.float32) == value_checksum(plain, torch.float32)
    assert value_checksum(payload, torch.float32) != value_checksum(plain.flip(0), torch.float32)
