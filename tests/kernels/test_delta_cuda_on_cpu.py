"""The CUDA kernel of changed_elements, compiled for the CPU, against the C++ kernel."""

import ctypes
from pathlib import Path

import pytest
import torch
from hybridengine.kernels.changes import change_mask, marks
from hybridengine.kernels.delta import changed_elements

from tests.kernels.cuda_on_cpu import compile_for_cpu
from tests.kernels.test_delta_ops import tensors

# Numbers in csrc/common/dtype.h.
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    check = Path(__file__).parent / "delta_cuda_check.cpp"
    return compile_for_cpu("delta/changed_cuda.cu", check, tmp_path_factory.mktemp("delta"))


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("sent_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 31, 33, 4096, 9003])
def test_marks_and_updates_what_differs(library, dtype, sent_dtype, size) -> None:
    for aligned in (True, False):
        current, sent, _ = tensors(size, dtype, sent_dtype, 0.1)
        current = current.nan_to_num()  # vectors of the CPU keep payloads of NaN
        if not aligned:
            current, sent = (torch.cat([t[:1], t])[1:] for t in (current, sent))
        expected = sent.clone()
        changes = changed_elements(current, expected)
        mask = change_mask(sent)
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (current, sent, mask))
        numbers = (ctypes.c_int(NUMBERS[t]) for t in (dtype, sent_dtype))
        assert library.run_on_cpu(*pointers, ctypes.c_int64(size), *numbers) == 0
        assert torch.equal(sent.view(torch.int16), expected.view(torch.int16))
        assert torch.equal(marks(mask, size).nonzero()[:, 0], changes.indices.long())
