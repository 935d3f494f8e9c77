"""Masks of changed elements: by comparison with what was sent, and to (index, value)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import change_mask, mark_changed_, strided_copy, take_changed
from hybridengine.kernels.changes import mark_, marks
from tests.kernels.changes_cases import HOSTILE, drawn, masks_of, out_of_date
from tests.kernels.copy_cases import row

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.bfloat16, torch.float16)


def assert_taken(sources, changed, backend=None):
    masks = masks_of(changed)
    taken = take_changed(masks, sources, backend=backend)
    for source, one, (indices, values) in zip(sources, changed, taken, strict=True):
        assert torch.equal(indices, one.nonzero().flatten().int())
        assert torch.equal(values, source[one]) and values.dtype == source.dtype
    assert not any(mask.any() for mask in masks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", (0, 0.001, 0.1, 1))
def test_what_is_marked_is_taken_in_order(share, dtype, device):
    sizes = [1, 0, 31, 32, 33, 16384, 16385, 100_001]
    assert_taken(*drawn(sizes, share, device, dtype))
    assert_taken(*drawn(sizes[:4], share, device, dtype), "reference")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("sent_dtype", DTYPES)
def test_marked_are_the_elements_whose_bits_differ(device, dtype, sent_dtype):
    for size in (0, 1, 31, 32, 33, 2047, 40_001):
        for share in (0.0, 0.01, 1.0):
            current, sent, expected = out_of_date(size, dtype, sent_dtype, share)
            now = current.to(sent_dtype)
            number = ~now.isnan()  # payloads of NaN have no meaning, and casts do not keep them
            for backend in (None, "reference"):
                kept = sent.to(device, copy=True)
                mask = change_mask(kept)
                mark_changed_(current.to(device), kept, mask, backend=backend)
                bits = (t.cpu().view(torch.int16)[number] for t in (kept, now))
                assert torch.equal(*bits), "sent is the cast of current"
                marked = marks(mask.cpu(), 32 * len(mask))
                assert torch.equal(marked[:size][number], expected[number])
                assert not marked[size:].any()
                mark_changed_(current.to(device), kept, mask, backend=backend)
                assert torch.equal(marked, marks(mask.cpu(), 32 * len(mask))), "nothing was added"


def test_a_marked_element_equals_that_of_a_dense_copy():
    """Also NaN: the engine must hold the same bits, whichever way they came."""
    patterns = torch.arange(-(1 << 31), 1 << 31, 65_521, dtype=torch.int64).to(torch.int32)
    current = patterns.view(torch.float32)
    for dtype in DTYPES:
        sent, dense = torch.zeros(2, len(current), dtype=dtype).unbind()
        mark_changed_(current, sent, change_mask(sent))
        table = torch.tensor([row(0, 0, 0, 0, [len(current)], [1], [1])])
        strided_copy([current], [dense], table)
        assert torch.equal(sent.view(torch.int16), dense.view(torch.int16))


def test_threads_mark_the_same():
    current, sent, expected = out_of_date(70_001, torch.float32, torch.bfloat16, 0.1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        mask = change_mask(sent)
        mark_changed_(current, sent, mask)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(marks(mask, len(sent))[len(HOSTILE) :], expected[len(HOSTILE) :])


@pytest.mark.parametrize("backend", (None, "reference"))
def test_wrong_tensors_of_a_comparison_are_named(backend):
    values = torch.zeros(4)
    for current, sent in (
        (values, torch.zeros(4)),
        (values, torch.zeros(3).bfloat16()),
        (values.view(2, 2), torch.zeros(2, 2).bfloat16()),
    ):
        with pytest.raises(ValueError, match=r"mark_changed_: (current|sent) (has|is)"):
            mark_changed_(current, sent, change_mask(sent), backend=backend)
    with pytest.raises(ValueError, match=r"mark_changed_: .*mask"):
        mark_changed_(values, values.bfloat16(), change_mask(torch.ones(33)), backend=backend)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 200), max_size=6), st.floats(0, 1), st.sampled_from(DTYPES))
def test_any_sizes(sizes, share, dtype):
    assert_taken(*drawn(sizes, share, dtype=dtype))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.booleans(), max_size=100), st.lists(st.booleans(), max_size=100))
def test_masks_add_up(first, second):
    size = min(len(first), len(second))
    one, other = (torch.tensor(x[:size], dtype=torch.bool) for x in (first, second))
    mask = change_mask(one)
    mark_(mask, one)
    mark_(mask, other)
    assert torch.equal(marks(mask, size), one | other)


@pytest.mark.parametrize("backend", (None, "reference"))
def test_more_than_max_share_is_not_taken(backend):
    sources = [torch.randn(n).bfloat16() for n in (64, 100, 0)]
    changed = [torch.zeros(len(s), dtype=torch.bool) for s in sources]
    changed[0][:41] = True  # a quarter of all
    options = {"max_share": 0.25, "backend": backend}
    taken = take_changed(masks_of(changed), sources, **options)
    assert [len(indices) for indices, _ in taken] == [41, 0, 0]
    changed[1][99] = True
    masks = masks_of(changed)
    assert take_changed(masks, sources, **options) is None
    assert not any(mask.any() for mask in masks)
    assert take_changed([], []) == []


def test_more_than_2_to_the_31_elements():
    """Pages that nothing writes to take no memory."""
    size = 2**31 + 40
    source = torch.empty(size, dtype=torch.bfloat16)
    mask = change_mask(source)
    at = [5, 2**31 - 1, 2**31, size - 1]
    for value, i in enumerate(at):
        source[i] = value
        mask.view(torch.uint8)[i // 8] |= 1 << i % 8
    [(indices, values)] = take_changed([mask], [source])
    assert indices.dtype == torch.int64 and indices.tolist() == at
    assert values.tolist() == [0.0, 1.0, 2.0, 3.0] and not mask[0] and not mask[-1]


@pytest.mark.parametrize("backend", (None, "reference"))
def test_wrong_arguments_are_named(backend):
    def call(mask=None, source=None, **options):
        source = torch.ones(64).bfloat16() if source is None else source
        masks = [change_mask(source) if mask is None else mask]
        take_changed(masks, [source], **options, backend=backend)

    call()
    with pytest.raises(ValueError, match=r"dtype (Float|float32).*expected .*bfloat16.*float16"):
        call(source=torch.ones(64))
    with pytest.raises(ValueError, match=r"max_share is 2\.0; expected"):
        call(max_share=2.0)
    with pytest.raises(ValueError, match=r"(has|of) (1 e|shape \[1\]).*expected .*2"):
        call(mask=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"dtype (Long|int64).*expected .*int32"):
        call(mask=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"strides.*contiguous"):
        call(source=torch.ones(8, 8).half().t())
    with pytest.raises(ValueError, match=r"masks\[0\] is on meta"):
        call(mask=torch.zeros(2, dtype=torch.int32, device="meta"))
    with pytest.raises(ValueError, match="there are 0 masks and 1 sources"):
        take_changed([], [torch.ones(3).half()])
