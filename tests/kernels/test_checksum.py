"""bit_checksum: its definition, every flip of one or two bits, exchanged words and messages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hybridengine.kernels import bit_checksum

BACKENDS = [
    *(("cpu", "cpp"), ("cpu", "reference")),
    *(pytest.param("cuda", b, marks=pytest.mark.gpu) for b in ("cuda", "reference")),
]
SIZES = [0, 1, 3, 4, 5, 31, 64, 127, 128, 129, 4096, 4103, 1 << 18, (1 << 24) + (1 << 19) + 77]


def random_bytes(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator)


def oracle(data: torch.Tensor) -> int:
    padded = np.pad(data.numpy(), (0, -data.numel() % 4)).view(np.uint32).astype(np.uint64)
    weights = 2 * np.arange(len(padded), dtype=np.uint64) - np.uint64(1)
    weights[:1] = 2**32 + 1
    return int((padded * weights).sum(dtype=np.uint64).astype(np.int64))


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_weighted_sum_of_the_words(size: int, device: str, backend: str) -> None:
    data = random_bytes(size)
    checksum = bit_checksum(data.to(device), backend=backend)
    assert checksum.dtype == torch.int64 and checksum.shape == ()
    assert checksum == oracle(data)
    ones = torch.full_like(data, 255)  # the largest words
    assert bit_checksum(ones.to(device), backend=backend) == oracle(ones)


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_dtype_shape_address_and_threads_do_not_matter(device: str, backend: str) -> None:
    data = random_bytes(1 << 20).to(device)
    expected = bit_checksum(data, backend=backend)
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn, torch.bool):
        assert bit_checksum(data.view(dtype).view(16, -1), backend=backend) == expected
    for offset in (1, 2, 4, 7):
        moved = torch.cat([data[:offset], data])[offset:]
        assert bit_checksum(moved, backend=backend) == expected
    threads = torch.get_num_threads()
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        same = bit_checksum(data, backend=backend) == expected
        torch.set_num_threads(threads)
        assert same


def test_every_flip_of_one_or_two_bits_in_a_small_message() -> None:
    data = random_bytes(22)  # ends within a word
    expected = int(bit_checksum(data))
    masks = torch.zeros(176, 22, dtype=torch.uint8)
    for bit in range(176):
        masks[bit, bit // 8] = 1 << bit % 8
    for mask in masks:
        assert bit_checksum(data ^ mask) != expected
    for a, b in itertools.combinations(range(176), 2):
        assert bit_checksum(data ^ masks[a] ^ masks[b]) != expected, (a, b)


@pytest.mark.parametrize("bit", [0, 1, 15, 30, 31])
def test_a_bit_that_flips_in_two_words(bit: int) -> None:
    words = random_bytes(1 << 16).view(torch.int32)
    places = [0, 1, 2, 3, *(1 << k for k in range(2, 14)), *((1 << 14) - k for k in (1, 2, 3))]
    expected = bit_checksum(words)
    for i, j in itertools.combinations(sorted(set(places)), 2):
        for low, high in itertools.product((0, 1), repeat=2):  # in either direction
            before = words.clone()
            for place, value in ((i, low), (j, high)):
                before[place] ^= ((int(before[place]) >> bit & 1) ^ value) * int32_bit(bit)
            after = before.clone()
            after[[i, j]] ^= int32_bit(bit)
            assert bit_checksum(after) != bit_checksum(before), (i, j, low, high)
    assert bit_checksum(words) == expected


def int32_bit(bit: int) -> int:
    return 1 << bit if bit < 31 else -(1 << 31)


@pytest.mark.parametrize("shape", [(576,), (3, 5), (2048, 1024), ((1 << 21) + 2,), (3 << 20,)])
def test_writes_that_add_one_number_to_all_words(shape: tuple[int, ...]) -> None:
    """Factors that are powers of two, other signs, one number for another."""
    tensor = torch.full(shape, 0.75)
    for dtype in (torch.float32, torch.bfloat16):
        cast = tensor.to(dtype)
        seen = {int(bit_checksum(cast * factor)) for factor in (0, 1, -1, 2, 0.5, 256, 2.0**-60)}
        assert len(seen) == 7, dtype
    if tensor.dim() == 2:
        expected = bit_checksum(tensor)
        for part in (tensor[: len(tensor) // 2], tensor[len(tensor) // 2 :], tensor[:, ::2]):
            part.mul_(2)
            assert bit_checksum(tensor) != expected
            part.div_(2)


def test_words_and_messages_that_change_places() -> None:
    words = random_bytes(1 << 14).view(torch.int32)
    expected = bit_checksum(words)
    for i, j in [(0, 1), (0, 2), (1, 3), (5, 37), (0, 1024), (7, 7 + 2048), (0, 4095)]:
        swapped = words.clone()
        swapped[[i, j]] = swapped[[j, i]]
        assert bit_checksum(swapped) != expected, (i, j)
    for size in (1, 2, 16, 32, 1024, 2048):
        for at in range(0, 4096 - 2 * size + 1, 512):
            first, second = words[at : at + size], words[at + size : at + 2 * size]
            parts = [words[:at], second, first, words[at + 2 * size :]]
            assert bit_checksum(torch.cat(parts)) != expected, (size, at)
    assert bit_checksum(words.roll(1)) != expected
