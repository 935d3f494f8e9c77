"""Run by test_contract.py in Triton's interpreter."""

import pytest

from hybridengine.kernels import _backend
from tests.kernels import contract
from tests.kernels.contract_cases import CASES, operator
from tests.kernels.interpreter import take_triton_kernels

SLOW = {  # in the interpreter, for all their arguments
    "linear_policy_loss",
    "linear_recurrence",
    "linear_recurrence, without the delta rule",
    "sample_tokens",
    "sparse_linear_token_log_probs",
    "tree_attention",
}
NAMES = [
    name
    for name, case in CASES.items()
    if "triton" in _backend.REGISTERED.get(case.registered or operator(name), {}).get("cuda", ())
]


@pytest.fixture(autouse=True)
def triton_on_cpu_tensors(monkeypatch):
    take_triton_kernels(monkeypatch)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in SLOW)) for name in NAMES],
)
def test_strides_change_no_result(name):
    contract.check_strides(name, "triton")


@pytest.mark.parametrize("name", NAMES)
def test_no_rows(name):
    contract.check_no_rows(name, "triton")
