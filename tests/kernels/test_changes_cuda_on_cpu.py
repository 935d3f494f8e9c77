"""The CUDA kernels of mark_changed_ and take_changed, compiled for the CPU."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridengine.kernels import mark_changed_, take_changed
from tests.kernels.changes_cases import drawn, masks_of, out_of_date
from tests.kernels.cuda_on_cpu import compile_for_cpu

# Numbers of dtypes in csrc/common/dtype.h.
pytestmark = pytest.mark.slow

NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
CHUNK = 16384


def compiled(name, tmp_path_factory, domain=None):
    check = Path(__file__).parent / f"{name}_cuda_check.cpp"
    source = f"{domain or name}/{name}_cuda.cu"
    return compile_for_cpu(source, check, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def changes_library(tmp_path_factory):
    library = compiled("changes", tmp_path_factory)
    library.take_on_cpu.restype = library.index_of.restype = ctypes.c_int64
    return library


@pytest.fixture(scope="module")
def compare_library(tmp_path_factory):
    return compiled("compare", tmp_path_factory, "changes")


def address(array):
    return ctypes.c_void_p(array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr())


@pytest.mark.parametrize("wide", (False, True))
@pytest.mark.parametrize("share", (0, 0.01, 1))
def test_take(changes_library, share, wide):
    sizes = [3] * 110 + [0, 1, 33, 3 * CHUNK + 7, 0]
    sources, changed = drawn(sizes, share)
    masks = masks_of(changed)
    expected = take_changed([m.clone() for m in masks], sources)
    arrays = np.array(
        [[t.data_ptr() for t in one] for one in zip(masks, sources, strict=True)], dtype=np.uint64
    )
    ends = np.zeros(sum(-(-n // CHUNK) for n in sizes), dtype=np.int64)
    table = (address(arrays), address(np.array(sizes)), ctypes.c_int64(len(sizes)), address(ends))
    total = changes_library.take_on_cpu(*table, None, None, int(wide))
    assert total == sum(len(indices) for indices, _ in expected)
    indices = torch.zeros(total + 1, dtype=torch.int64 if wide else torch.int32)
    values = torch.zeros(total + 1, dtype=torch.bfloat16)
    changes_library.take_on_cpu(*table, address(indices), address(values), int(wide))
    assert torch.equal(indices[:-1].int(), torch.cat([i for i, _ in expected]))
    assert torch.equal(values[:-1], torch.cat([v for _, v in expected]))
    assert not any(mask.any() for mask in masks)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("sent_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 31, 33, 4096, 9003])
def test_marks_and_updates_what_differs(compare_library, dtype, sent_dtype, size):
    for aligned in (True, False):
        current, sent, _ = out_of_date(size, dtype, sent_dtype, 0.1)
        current = current.nan_to_num()  # vectors of the CPU keep payloads of NaN
        if not aligned:
            current, sent = (torch.cat([t[:1], t])[1:] for t in (current, sent))
        ours = sent.clone()
        expected, mask = masks_of([torch.arange(size) == 0]), masks_of([torch.arange(size) == 0])
        mark_changed_(current, ours, expected[0])
        arguments = address(current), address(sent), address(mask[0]), ctypes.c_int64(size)
        numbers = (ctypes.c_int(NUMBERS[t]) for t in (dtype, sent_dtype))
        assert compare_library.run_on_cpu(*arguments, *numbers) == 0
        assert torch.equal(sent.view(torch.int16), ours.view(torch.int16))
        assert torch.equal(mask[0], expected[0]), "marks are added"


def test_chunks_of_tensors_with_more_than_2_to_the_31_elements(changes_library):
    sizes = np.array([3, 0, 2**40 + 5, 7])
    found = np.zeros(3, dtype=np.int64)

    def located(chunk):
        changes_library.locate(
            address(sizes), ctypes.c_int64(4), ctypes.c_int64(chunk), address(found)
        )
        return found.tolist()

    assert located(0) == [0, 0, 3]
    assert located(1) == [2, 0, CHUNK]
    assert located(1 + 2**31 // CHUNK) == [2, 2**31, 2**31 + CHUNK]
    assert located(1 + 2**40 // CHUNK) == [2, 2**40, 2**40 + 5]
    assert located(2 + 2**40 // CHUNK) == [3, 0, 7]


def test_indices_of_tensors_with_more_than_2_to_the_31_elements(changes_library):
    for first in (0, 2**31 - 32, 2**33):
        assert changes_library.index_of(ctypes.c_int64(first), 31) == first + 31
