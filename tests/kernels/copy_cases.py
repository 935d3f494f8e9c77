"""Rows of a copy table."""

from __future__ import annotations

from hypothesis import strategies as st


def row(src, dst, src_offset, dst_offset, size, src_stride, dst_stride):
    pad = 4 - len(size)
    return [
        src,
        dst,
        src_offset,
        dst_offset,
        *[1] * pad,
        *size,
        *[0] * pad,
        *src_stride,
        *[0] * pad,
        *dst_stride,
    ]


@st.composite
def slices(draw):
    """One slice of a row-major [a, b, c, d] source, dimensions permuted, into a dense place."""
    size = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    full = [n + draw(st.integers(0, 3)) for n in size]
    strides = [1] * len(full)
    for i in range(len(full) - 2, -1, -1):
        strides[i] = strides[i + 1] * full[i + 1]
    order = draw(st.permutations(range(len(size))))
    dst_strides = [1] * len(size)
    for i in range(len(size) - 2, -1, -1):
        dst_strides[i] = dst_strides[i + 1] * size[order[i + 1]]
    return (
        [size[i] for i in order],
        [strides[i] for i in order],
        dst_strides,
        draw(st.integers(0, 5)),
        draw(st.integers(0, 5)),
    )
