"""block_quantize against vLLM's own function, a float64 oracle, and torch's casts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import block_quantize
from hybridengine.kernels._backend import requested_backend
from hybridengine.kernels.block_quantize import BlockTable, block_grid, block_scales
from tests.kernels.copy_cases import row
from tests.kernels.quantize_cases import DTYPES, E4M3, matrix, same

BACKENDS = ("cpp", "reference", pytest.param("cuda", marks=pytest.mark.gpu))


def assert_equals_vllm(x: torch.Tensor, backend: str) -> None:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    x = x.to("cuda" if backend == "cuda" else "cpu")
    with torch.compiler.set_stance("force_eager"):  # compiling it takes a minute
        expected = per_block_cast_to_fp8(x, block_size=[128, 128], use_ue8m0=False)
    quantized, scale = block_quantize(x, backend=backend)
    assert quantized.is_contiguous() and same(quantized, expected[0])
    assert same(scale, expected[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "kind", ["normal", "zeros", "denormals", "midpoints", "wide", "infinite", "nan"]
)
@pytest.mark.slow
def test_equals_vllms_function(kind, backend) -> None:
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    for dtype in DTYPES:
        for n, k in ((1, 1), (128, 128), (127, 129), (300, 259), (5, 640)):
            assert_equals_vllm(matrix(kind, n, k, dtype), backend)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(DTYPES), st.booleans())
def test_any_size_and_strides(n, k, dtype, transposed) -> None:
    x = matrix("wide", n, k, dtype)
    x = x.t() if transposed else x
    for ours, reference in zip(
        block_quantize(x, backend="cpp"), block_quantize(x, backend="reference"), strict=True
    ):
        assert same(ours, reference)


@pytest.mark.parametrize("kind", ["normal", "denormals", "midpoints", "wide"])
def test_values_are_the_nearest_of_a_float64_oracle(kind) -> None:
    """Scales within 1 ULP of float64's; every value the nearest to value / scale, ties to even."""
    x = matrix(kind, 200, 300, torch.bfloat16)
    quantized, scale = block_quantize(x)
    largest = torch.nn.functional.max_pool2d(x.double().abs()[None], 128, ceil_mode=True)[0]
    exact = largest.clamp(1e-4) / 448
    assert torch.allclose(scale.double(), exact, rtol=2**-23, atol=0)
    expanded = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    scaled = x.double() * (1 / expanded).double()
    error = (quantized.double() - scaled).abs()
    values = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).double()
    above = torch.searchsorted(values, scaled.abs().clamp(max=448).contiguous()).clamp(1, 0x7E)
    nearest = torch.minimum(
        (values[above] - scaled.abs()).abs(), (values[above - 1] - scaled.abs()).abs()
    )
    rounding = scaled.abs() * 2**-23  # of the product to float32
    assert (error <= nearest + rounding).all()
    ties = (values[above] + values[above - 1]) / 2 == scaled.abs()
    assert (quantized.view(torch.uint8)[ties] % 2 == 0).all()


def test_casts_are_torchs() -> None:
    """Every bfloat16 pattern and its float32 neighbours; lengths that leave a rest.

    Up to 448.01: no value is farther beyond the largest of its own block, divided by its scale.
    (Versions of torch differ in whether larger ones become NaN or 448.)
    """
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    near = [patterns + d for d in (0, 1, 0x7FFF, 0x8000, 0x8001)]
    x = torch.cat(near)[:-3].view(torch.float32)
    x = x[~(x.abs() > 448.01)]
    step = 16381
    rows = [row(0, 0, i, i, [min(step, len(x) - i)], [1], [1]) for i in range(0, len(x), step)]
    table = BlockTable(
        torch.tensor(rows), torch.zeros(len(rows), dtype=torch.int64), torch.device("cpu")
    )
    for dtype in DTYPES:
        out = torch.zeros(len(x)).to(E4M3)
        table.quantize([x], [out], torch.ones(1), dtype)
        assert same(out, x.to(dtype).float().to(E4M3))


def test_a_stack_of_matrices_and_empty_ones() -> None:
    x = torch.randn(3, 130, 70).bfloat16()
    quantized, scale = block_quantize(x)
    assert scale.shape == block_grid(x.shape) == (3, 2, 1)
    for i in range(3):
        one = block_quantize(x[i])
        assert same(quantized[i], one[0]) and same(scale[i], one[1])
    for backend in ("cpp", "reference"):
        quantized, scale = block_quantize(torch.empty(0, 7), backend=backend)
        assert quantized.shape == (0, 7) and scale.shape == (0, 1)


@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("source_dtype", DTYPES)
def test_slices_of_blocks_in_several_tensors(backend, source_dtype) -> None:
    """A block whose parts are in several tensors, one of them transposed, as one tensor."""
    with requested_backend(backend):
        check_slices_of_blocks(source_dtype)


def check_slices_of_blocks(source_dtype) -> None:
    dtype = torch.bfloat16
    top, left, right = (torch.randn(s).to(source_dtype) for s in ((50, 200), (200, 60), (60, 141)))
    full = torch.cat([top, torch.cat([left.t(), right[:, 1:]], 1)[:, :200]]).to(dtype)
    expected, scales = block_quantize(full)
    rows = [
        row(0, 0, 0, 0, [50, 128], [200, 1], [200, 1]),
        row(0, 0, 128, 128, [50, 72], [200, 1], [200, 1]),
        row(1, 0, 0, 50 * 200, [60, 128], [1, 60], [200, 1]),
        row(1, 0, 128 * 60, 50 * 200 + 128, [60, 72], [1, 60], [200, 1]),
    ]
    table = BlockTable(torch.tensor(rows), torch.tensor([0, 1, 0, 1]), torch.device("cpu"))
    assert len(table) == 4
    absmax = torch.zeros(2, dtype=torch.int32)
    sources, out = [top, left], torch.zeros(110 * 200).to(E4M3)
    table.absmax(sources, absmax, dtype)
    assert same(block_scales(absmax), scales.view(-1))
    table.quantize(sources, [out], scales.view(-1), dtype)
    assert same(out.view(110, 200), expected)
    table.absmax([t / 2 for t in sources], absmax, dtype)  # only raises
    assert same(block_scales(absmax), scales.view(-1))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="weight has dtype float64; expected bfloat16"):
        block_quantize(torch.ones(2, 2).double())
    with pytest.raises(ValueError, match=r"weight has shape \[2\]; expected at least two"):
        block_quantize(torch.ones(2))
    one, cpu = torch.tensor([0]), torch.device("cpu")
    with pytest.raises(ValueError, match="block_quantize: row 0 has block 0 and 20000 elements"):
        BlockTable(torch.tensor([row(0, 0, 0, 0, [20_000], [1], [1])]), one, cpu)
    with pytest.raises(ValueError, match="row 0 has block -1"):
        BlockTable(torch.tensor([row(0, 0, 0, 0, [2], [1], [1])]), one - 1, cpu)
    table = BlockTable(torch.tensor([row(0, 0, 0, 0, [2], [1], [1])]), one + 3, cpu)
    x, out = torch.ones(2), torch.zeros(2).to(E4M3)
    with pytest.raises(ValueError, match="numbers of 3 blocks; expected 4"):
        table.absmax([x], torch.zeros(3, dtype=torch.int32), torch.bfloat16)
    with pytest.raises(ValueError, match=r"sources\[0\] has dtype float64"):
        table.quantize([x.double()], [out], torch.ones(4), torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"destinations\[0\] has dtype float32; expected float8_e4m3fn"
    ):
        table.quantize([x], [x], torch.ones(4), torch.bfloat16)
    with pytest.raises(IndexError, match="reaches element 1"):
        table.quantize([x], [out[1:]], torch.ones(4), torch.bfloat16)
