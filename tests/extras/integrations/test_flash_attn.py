"""The shims against what flash_attn.bert_padding does, written out with nonzero and indexing."""

import pytest
import torch

from hybridengine.integrations import flash_attn


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


def test_unused_tokens_are_packed_but_not_counted(padded):
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


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        ([0, 3], ValueError, r"indices has shape \[2\] and .* \[3, 5\]; expected \[T\] and"),
        ([0, 3, 1, 2], ValueError, r"indices has shape \[4\]"),
        ([0, 1, -1], IndexError, r"indices\[2\] is -1; expected 0 <= index < 8"),
        ([0, 8, 1], IndexError, r"indices\[1\] is 8; expected 0 <= index < 8"),
        ([4, 1, 4], IndexError, r"indices\[0\] is 4; .* every index once"),
        ([0.0, 1.0, 2.0], ValueError, "indices has dtype float32; expected int64 or int32"),
    ],
)
def test_no_row_is_lost(indices, error, message):
    """Indices that are not distinct rows are refused."""
    x, indices = torch.ones(3, 5), torch.tensor(indices)
    with pytest.raises(error, match=f"pad_input: {message}"):
        flash_attn.pad_input(x, indices, 2, 4)
    with pytest.raises(error, match=f"index_put_first_axis: {message}"):
        flash_attn.index_put_first_axis(x, indices, 8)


def test_distinct_rows():
    x = torch.arange(6.0).view(3, 2)
    for indices in (torch.tensor([4, 0, 2], dtype=torch.int32), torch.tensor([4, 0, 2])):
        out = flash_attn.index_put_first_axis(x, indices, 5)
        assert torch.equal(out[indices.long()], x)
        assert out.sum() == x.sum()
    assert flash_attn.pad_input(x[:0], torch.empty(0, dtype=torch.int64), 2, 0).shape == (2, 0, 2)


def test_masks_and_lengths_that_do_not_fit(padded):
    hidden, mask = padded
    with pytest.raises(ValueError, match=r"unpad_input: attention_mask has shape \[9, 4\] and hid"):
        flash_attn.unpad_input(hidden, mask.T)
    with pytest.raises(ValueError, match="unpad_input: unused_mask is on meta, hidden_states on"):
        flash_attn.unpad_input(hidden, mask, mask.to("meta"))
    with pytest.raises(ValueError, match=r"unpad_input: attention_mask\[0, 0\] is 0.5"):
        flash_attn.unpad_input(hidden, torch.full((4, 9), 0.5))
    for lengths in ([5, 5], [9, -1], [10]):
        in_length = torch.zeros(4, 9, dtype=torch.int64)
        in_length[1, : len(lengths)] = torch.tensor(lengths)
        with pytest.raises(ValueError, match="negative or add up to more than the 9 tokens"):
            flash_attn.unpad_input_for_concatenated_sequences(hidden, in_length)
