"""Run by test_linear_attention_triton.py in Triton's interpreter."""

import pytest
import torch

from tests import tolerances
from tests.kernels import linear_attention_cases as cases
from tests.kernels.interpreter import cut_sums, take_triton_kernels


@pytest.fixture(autouse=True)
def triton_on_the_cpu(monkeypatch):
    take_triton_kernels(monkeypatch)


@pytest.mark.parametrize("case", cases.CONVOLUTIONS, ids=str)
def test_convolution(case):
    cases.check_convolution("cpu", case)


@pytest.mark.parametrize("case", cases.RECURRENCES, ids=str)
def test_recurrence(case):
    cases.check_recurrence("cpu", case)


def test_float32_keeps_the_contract_where_tensor_cores_cut_sums(monkeypatch):
    cut_sums(monkeypatch)
    sizes = {"heads": (1, 1), "dims": (128, 128), "decay": (1e-4, 0.05)}
    problem = cases.make_problem([40, 9], [-1, 0], initial=True, **sizes)
    exact = problem.run("reference", torch.float64)
    ours, plain = problem.run("triton"), problem.run("reference", torch.float32)
    for name, right in exact.items():
        error, of_plain = ((x[name] - right).square().mean().sqrt() for x in (ours, plain))
        assert error <= tolerances.ERROR_FACTOR * of_plain, (name, float(error / of_plain))


@pytest.mark.parametrize("op", ("convolution", "recurrence"))
def test_nan_stays_in_its_tree(op):
    cases.check_nan("cpu", op)
