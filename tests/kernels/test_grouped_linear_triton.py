"""grouped_linear in Triton: in the interpreter, and on a GPU where there is one."""

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hybridengine.kernels import grouped_linear

pytest.importorskip("triton")

from hybridengine.kernels import grouped_linear_triton
from tests.kernels import grouped_cases as cases
from tests.kernels.cuda_graph import capture
from tests.kernels.interpreter import run_interpreted

module = sys.modules["hybridengine.kernels.grouped_linear"]
DTYPES = pytest.mark.parametrize("dtype", cases.DTYPES, ids=("float32", "bfloat16"))


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted("interpreted_grouped_linear.py")


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ("grouped_linear_many_along_n_bf16", "grouped_weight_grad_bf16"))
def test_compiles_for_hopper_without_spills(kernel):
    from tools.triton_builds import builds

    _, shared, spilled = builds(90)[kernel]()
    assert shared <= 227 * 1024
    assert spilled == 0


def test_nothing_is_read_from_the_device(monkeypatch):
    """Meta tensors have no values: a call that read one, and so waited for a GPU, would raise."""
    grids = []
    monkeypatch.setattr(
        grouped_linear_triton, "launch", lambda kernel, grid, *_, **__: grids.append(grid)
    )
    x, weight, cu_counts, grad = cases.operands((70, 0, 3), 40, 33, torch.float32, device="meta")
    assert grouped_linear_triton.product(x, weight, cu_counts).shape == (73, 40)
    assert grouped_linear_triton.weight_grad(grad, x, cu_counts).shape == (3, 40, 33)
    assert grids == [(73 // 64 + 3,), (3,)]


@pytest.mark.parametrize(
    "change, expected",
    (
        ({}, "torch"),
        ({"dtype": torch.float32}, "triton"),
        ({"dtype": torch.float16}, "triton"),
        ({"capability": (8, 0)}, "triton"),
        ({"capability": (10, 0)}, "triton"),
        ({"capability": (12, 0)}, "triton"),
        ({"groups": 1024}, "triton"),
        ({"k": 20}, "triton"),
        ({"n": 20}, "triton"),
        ({"k": 20, "has_triton": False}, "reference"),
    ),
)
def test_what_runs_in_place_of_torchs_product(monkeypatch, change, expected):
    case = {"dtype": torch.bfloat16, "capability": (9, 0), "groups": 2, "n": 16, "k": 24}
    case |= {"has_triton": True} | change
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: case["capability"])
    monkeypatch.setattr(module, "has_triton", lambda: case["has_triton"])
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda tensor: 512)
    weight_shape = torch.Size([case["groups"], case["n"], case["k"]])
    with FakeTensorMode():
        x = torch.empty(5, case["k"], dtype=case["dtype"], device="cuda")
        weight = torch.empty(weight_shape, dtype=case["dtype"], device="cuda")
        assert module.narrow_backend("torch", weight_shape, x, weight) == expected
        assert module.narrow_backend("triton", weight_shape, x, weight) == "triton"


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("backend", (None, "triton", "torch"))
@pytest.mark.parametrize(
    "counts, n, k",
    [
        ((70, 0, 3, 64, 0), 40, 136),
        ((300, 0, 1), 800, 33),
        ((0, 5, 0), 1, 1),
        ((0, 0), 16, 24),
        ([7] * 300, 64, 64),
        ((1500, 0, 700, 1), 768, 1024),
    ],
)
def test_against_float64_on_the_gpu(dtype, backend, counts, n, k):
    for transposed in (False, True):
        cases.check_against_float64("cuda", counts, n, k, dtype, transposed, backend)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("n, k", [(130, 576), (33, 77), (768, 1024)])
def test_rows_alone_on_the_gpu(dtype, n, k):
    parts = (0, 1), (3, 70), (70, 71), (100, 220), (220, 229), (5, 229)
    cases.check_rows_alone("cuda", (70, 150, 9), n, k, dtype, parts)


@pytest.mark.gpu
@DTYPES
def test_strides_on_the_gpu(dtype):
    cases.check_strides("cuda", dtype)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_a_row_that_is_not_finite_on_the_gpu(dtype, value):
    cases.check_row_that_is_not_finite("cuda", dtype, value)


@pytest.mark.gpu
@DTYPES
def test_a_captured_graph_takes_other_groups(dtype):
    x, weight, cu_counts, grad = cases.operands((70, 0, 30), 48, 64, dtype, device="cuda")
    x, weight = x.requires_grad_(), weight.requires_grad_()
    cu_counts = cu_counts.int()

    def step():
        out = grouped_linear(x, weight, cu_counts, backend="triton")
        return out, *torch.autograd.grad(out, (x, weight), grad)

    graph, captured = capture(step)
    cu_counts.copy_(torch.tensor([0, 1, 99, 100]))
    graph.replay()
    for got, expected in zip(captured, step(), strict=True):
        assert torch.equal(got, expected)
