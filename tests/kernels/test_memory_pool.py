"""empty_from_pool: large CPU tensors from the memory of earlier ones."""

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from hybridengine.kernels import empty_from_pool
from hybridengine.kernels._backend import native

LARGE = 5 << 20  # bytes; smaller results are not pooled


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int64, torch.uint8))
@pytest.mark.parametrize("shape", ([], [0], [3, 5], [LARGE, 2]))
def test_shape_and_dtype(shape, dtype):
    tensor = empty_from_pool(shape, dtype)
    assert list(tensor.shape) == shape and tensor.dtype == dtype and tensor.is_contiguous()
    assert tensor.device == torch.device("cpu")
    tensor.fill_(1)


@pytest.mark.skipif(native() is None, reason="no extension")
def test_memory_is_used_again_after_its_tensor_is_freed():
    first, second = (empty_from_pool([LARGE], torch.uint8) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    address = first.data_ptr()
    del first
    assert empty_from_pool([LARGE], torch.uint8).data_ptr() == address


def test_a_fake_tensor_in_fake_mode():
    with FakeTensorMode():
        for size in (3, LARGE):
            assert isinstance(empty_from_pool([size], torch.uint8), FakeTensor)


def test_other_devices_and_unknown_ones():
    assert empty_from_pool([2, 3], torch.float32, "meta").is_meta
    with pytest.raises(RuntimeError, match="nonsense"):
        empty_from_pool([1], torch.float32, "nonsense")
