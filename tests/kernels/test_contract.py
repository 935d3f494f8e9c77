"""What every operator of `hybridengine.kernels` does with any of its arguments.

An operator without a row in contract_cases.py, and an argument that its row leaves out, fail here.
"""

import inspect

import pytest

from hybridengine import kernels as he
from hybridengine.kernels._backend import REGISTERED
from tests.kernels import contract, contract_wrong
from tests.kernels.contract_cases import CASES, NOT_OPERATORS, annotated, operator
from tests.kernels.interpreter import run_interpreted

LEFT_OUT = {
    "main_grad",  # the backward adds to it: tests of tests/kernels named test_*main_grad*
    "excluded",  # of clip_cov, which draws at random: test_covariance_losses
}


def backends(name):
    """The backends of an operator on a CPU."""
    case = CASES[name]
    return list(REGISTERED.get(case.registered or operator(name), {}).get("cpu", ())) or [None]


def every(names):
    return [(name, backend) for name in names for backend in backends(name)]


def default(names):
    return [(name, backends(name)[0]) for name in sorted(names)]


# Whose rows are independent, in the order of tokens.
ROW_BY_ROW = (
    "gated_activation",
    "rms_norm",
    "rms_norm, rounded",
    "sample_tokens",
    "token_entropy",
    "token_kl",
    "token_log_probs",
    "token_log_probs, entries",
)
IN_FLOAT64 = [name for name, case in CASES.items() if case.gradients] + [
    "gae",
    "group_advantage",
    "rollout_correction",
    "vespo_weights",
    "whiten",
]
# What the host reads to go on, and what only engines call, which do not compile it.
NOT_COMPILED = {
    "balance",
    "balance_by_tokens",
    "bit_checksum",
    "imbalance",
    "mark_changed_",
    "pack_forest",
    "paged_attention",
    "take_changed",
    "write_kv_cache",
}
_OTHER_ARGUMENTS = ("policy_loss, selected", "policy_loss, weights", "token_log_probs, entries")
DIFFERENTIABLE = [name for name, case in CASES.items() if case.gradients]
OPERATORS = [name for name in CASES if operator(name) == name]
# What is checked of which cases: with every backend, or with the default one.
TABLE = {
    contract.check_autocast: every(CASES),
    contract.check_compiled: default(CASES.keys() - NOT_COMPILED),
    contract.check_float64: [(name, None) for name in IN_FLOAT64],
    contract.check_forward_mode: every(DIFFERENTIABLE),
    contract.check_masked: every(n for n in CASES if CASES[n].masked and n != "whiten, all"),
    contract.check_no_rows: every(name for name in CASES if CASES[name].rows),
    contract.check_ops: every(CASES),
    contract.check_other_dtypes: every(CASES),
    contract.check_rows: default(ROW_BY_ROW),
    contract.check_second_derivatives: every(DIFFERENTIABLE),
    contract.check_single_gradients: every(DIFFERENTIABLE),
    contract.check_strides: every(CASES),
    contract.check_strides_of_other_dtypes: every(DIFFERENTIABLE),
    contract.check_threads: every(CASES),
    contract.check_torch_func: every(DIFFERENTIABLE),
    contract.check_vmap: every(CASES),
    contract_wrong.check_wrong_arguments: every([*OPERATORS, *_OTHER_ARGUMENTS]),
}


def test_every_operator_has_a_row():
    functions = {name for name in he.__all__ if inspect.isfunction(getattr(he, name))}
    assert functions == {*map(operator, CASES), *NOT_OPERATORS}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_row_has_every_argument(name):
    numbers = CASES[name].wrong.keys()
    assert annotated(name, "float", "int") <= numbers
    given = {key for other in CASES if operator(other) == name for key in CASES[other].arguments}
    assert annotated(name, "Tensor") - LEFT_OUT <= given | numbers


@pytest.mark.parametrize(
    ("check", "name", "backend"),
    [(check, *pair) for check, pairs in TABLE.items() for pair in pairs],
    ids=lambda one: one.__name__.removeprefix("check_") if callable(one) else None,
)
def test_contract(check, name, backend):
    check(name, backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    "marked", ("not exhaustive", pytest.param("exhaustive", marks=pytest.mark.exhaustive))
)
def test_the_triton_kernels_in_the_interpreter(marked):
    pytest.importorskip("triton")
    run_interpreted("interpreted_contract.py", "-m", marked)
