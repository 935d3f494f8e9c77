"""What layers compute of the same tensors is computed once, and again after a write."""

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hybridengine.kernels import tree_attention
from hybridengine.kernels._once import once


class Computed:
    """Counts the calls of a sum."""

    def __init__(self):
        self.count = 0

    def __call__(self, *tensors):
        self.count += 1
        return sum(t for t in tensors if t is not None)


def test_a_result_is_kept_until_a_tensor_is_written_or_another():
    compute, x, y = Computed(), torch.ones(2), torch.ones(2)
    for _ in range(3):
        assert once("sum", compute, x, y).tolist() == [2.0, 2.0]
    assert compute.count == 1
    y += 1
    assert once("sum", compute, x, y).tolist() == [3.0, 3.0]
    x += 1
    assert once("sum", compute, x, y).tolist() == [4.0, 4.0]
    assert once("sum", compute, x, y.clone()).tolist() == [4.0, 4.0]
    assert once("sum", compute, x, None).tolist() == [2.0, 2.0]
    assert once(("sum", 1), compute, x, None).tolist() == [2.0, 2.0]
    assert compute.count == 6


@pytest.mark.parametrize("of", [lambda x: x, lambda x: (x + 1, None)])
def test_a_result_goes_with_its_tensor(of):
    x = torch.ones(2)
    value = once("value", of, x)
    assert once("value", of, x) is value
    gone = weakref.ref(x)
    del x, value
    gc.collect()
    assert gone() is None


def test_what_is_traced_or_not_counted_is_computed_again():
    compute = Computed()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
    with torch.inference_mode():
        uncounted = torch.ones(2)
        for x in (fake, uncounted):
            once("sum", compute, x)
            once("sum", compute, x)
    assert compute.count == 4
    x = torch.ones(2)
    for count in (5, 6):  # the second graph has no constant of the first
        graph = make_fx(lambda x: once("sum", compute, x) * 2)(x)
        assert compute.count == count
        assert "_tensor_constant" not in graph.code
    assert (
        torch.compile(lambda x: once("sum", torch.neg, x), backend="eager")(x).tolist()
        == [-1.0] * 2
    )


def test_attention_checks_ends_again_after_a_write():
    q, k, v = torch.randn(3, 4, 1, 8)
    ends = torch.tensor([4, 4, 4, 4])
    expected = tree_attention(q, k, v, ends)
    assert torch.equal(tree_attention(q, k, v, ends), expected)
    ends[:2] = 2
    split = tree_attention(q, k, v, ends)
    alone = tree_attention(q[2:], k[2:], v[2:], torch.tensor([2, 2]))
    assert torch.equal(split[2:], alone) and not torch.equal(split[2:], expected[2:])
    ends[0] = 5
    with pytest.raises(ValueError, match=r"subtree_ends\[0\] is 5"):
        tree_attention(q, k, v, ends)
