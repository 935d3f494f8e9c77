"""The shims against what flash_attn.bert_padding does, written out with nonzero and indexing."""

import pytest
import torch

from hybridengine.integrations import flash_attn, flash_attn_2_6


@pytest.fixture
def padded():
    torch.manual_seed(0)
    mask = (torch.rand(4, 9) < 0.6).int()
    mask[2] = 0
    return torch.randn(4, 9, 3, 5, requires_grad=True), mask


def test_unpad_and_pad(padded):
    hidden, mask = padded
    x, indices, cu_seqlens, max_seqlen, seqused = flash_attn.unpad_input(hidden, mask)
    where = mask.flatten().nonzero().flatten()
    assert torch.equal(indices, where) and indices.dtype == torch.int64
    assert torch.equal(x, hidden.flatten(0, 1)[where])
    assert torch.equal(cu_seqlens.diff(), mask.sum(1).int()) and cu_seqlens.dtype == torch.int32
    assert max_seqlen == int(mask.sum(1).max()) and isinstance(max_seqlen, int)
    assert torch.equal(seqused, mask.sum(1).int()) and seqused.dtype == torch.int32
    back = flash_attn.pad_input(x, indices, 4, 9)
    assert torch.equal(back, hidden * mask[..., None, None])
    back.square().sum().backward()
    assert torch.equal(hidden.grad, 2 * hidden * mask[..., None, None])


def test_four_values_of_2_6(padded):
    four = flash_attn_2_6.unpad_input(*padded)
    five = flash_attn.unpad_input(*padded)
    assert len(four) == 4 and len(five) == 5
    assert torch.equal(four[0], five[0]) and four[3] == five[3]


def test_unused_places_are_kept_but_not_counted(padded):
    hidden, mask = padded
    unused = (1 - mask) * (torch.arange(9) < 4).int()
    x, indices, cu_seqlens, _, seqused = flash_attn.unpad_input(hidden, mask, unused)
    assert torch.equal(indices, (mask + unused).flatten().nonzero().flatten())
    assert torch.equal(cu_seqlens.diff(), (mask + unused).sum(1).int())
    assert torch.equal(seqused, mask.sum(1).int()) and x.size(0) == indices.numel()


def test_concatenated_sequences(padded):
    hidden, _ = padded
    in_length = torch.zeros(4, 9, dtype=torch.int64)
    in_length[0, :2], in_length[1, 0], in_length[3, :3] = torch.tensor([2, 3]), 9, 1
    x, indices, cu_seqlens, max_seqlen = flash_attn.unpad_input_for_concatenated_sequences(
        hidden, in_length
    )
    assert cu_seqlens.tolist() == [0, 2, 5, 14, 15, 16, 17] and max_seqlen == 9
    assert indices.tolist() == [*range(5), *range(9, 18), *range(27, 30)]
    assert torch.equal(x, hidden.flatten(0, 1)[indices])


def test_index_and_put(padded):
    x = torch.randn(7, 2, requires_grad=True)
    indices = torch.tensor([3, 0, 3])
    flash_attn.index_first_axis(x, indices).sum().backward()
    assert x.grad[:, 0].tolist() == [1, 0, 0, 2, 0, 0, 0]
    values = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    where = torch.tensor([4, 1])
    out = flash_attn.index_put_first_axis(values, where, 6)
    assert torch.equal(out[where], values) and out.count_nonzero() == 6
    assert torch.autograd.gradcheck(
        lambda v: flash_attn.index_put_first_axis(v, where, 6), (values,)
    )
    with pytest.raises(IndexError):
        flash_attn.pad_input(values, torch.tensor([0, 9]), 2, 3)
