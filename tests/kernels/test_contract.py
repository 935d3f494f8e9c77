"""What every operator of `hybridengine.kernels` does with any of its arguments.

An operator without a row in contract_cases.py, and an argument that its row leaves out, fail here.
"""

import inspect

import pytest

from hybridengine import kernels as he
from hybridengine.kernels._backend import _REGISTERED
from tests.kernels import contract
from tests.kernels.contract_cases import CASES, NOT_OPERATORS, annotated, operator
from tests.kernels.interpreter import run_interpreted

LEFT_OUT = {
    "main_grad",  # the backward adds to it: tests of tests/kernels named test_*main_grad*
    "excluded",  # of clip_cov, which draws at random: test_covariance_losses
}


def backends(name):
    """The backends of an operator on a CPU."""
    case = CASES[name]
    return list(_REGISTERED.get(case.registered or operator(name), {}).get("cpu", ())) or [None]


def operators(names):
    pairs = [(name, backend) for name in names for backend in backends(name)]
    return pytest.mark.parametrize(("name", "backend"), pairs)


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
EVERY = operators(CASES)
DIFFERENTIABLE = operators([name for name, case in CASES.items() if case.gradients])


def test_every_operator_has_a_row():
    functions = {name for name in he.__all__ if inspect.isfunction(getattr(he, name))}
    assert functions == {*map(operator, CASES), *NOT_OPERATORS}


@pytest.mark.parametrize("name", [name for name in CASES if operator(name) == name])
def test_a_row_has_every_argument(name):
    numbers = CASES[name].numbers.keys()
    assert annotated(name, "float", "int") <= numbers
    given = {key for other in CASES if operator(other) == name for key in CASES[other].arguments}
    assert annotated(name, "Tensor") - LEFT_OUT <= given | numbers


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_COMPILED])
def test_one_compiled_graph_changes_no_bit(name, monkeypatch):
    contract.check_compiled(name, backends(name)[0], monkeypatch)


@EVERY
def test_ops_pass_opcheck(name, backend, monkeypatch):
    contract.check_ops(name, backend, monkeypatch)


@EVERY
def test_threads_change_no_bit(name, backend):
    contract.check_threads(name, backend)


@DIFFERENTIABLE
def test_a_single_gradient_has_the_bits_of_all(name, backend):
    contract.check_single_gradients(name, backend)


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_a_row_depends_on_itself_alone(name):
    contract.check_rows(name, backends(name)[0])


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_float64_is_float64(name):
    contract.check_float64(name)


@EVERY
def test_autocast_changes_no_bit(name, backend):
    contract.check_autocast(name, backend)


@operators([name for name, case in CASES.items() if case.numbers])
def test_a_wrong_number_is_named(name, backend):
    contract.check_numbers(name, backend)


@EVERY
def test_strides_change_no_result(name, backend):
    contract.check_strides(name, backend)


@DIFFERENTIABLE
def test_strides_of_other_dtypes(name, backend):
    contract.check_strides_of_other_dtypes(name, backend)


@operators([name for name, case in CASES.items() if case.rows])
def test_no_rows(name, backend):
    contract.check_no_rows(name, backend)


@DIFFERENTIABLE
def test_forward_mode_is_right_or_refused(name, backend):
    contract.check_forward_mode(name, backend)


@DIFFERENTIABLE
def test_torch_func_is_right_or_refused(name, backend):
    contract.check_torch_func(name, backend)


@EVERY
def test_vmap_is_right_or_refused(name, backend):
    contract.check_vmap(name, backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    "marked", ("not exhaustive", pytest.param("exhaustive", marks=pytest.mark.exhaustive))
)
def test_the_triton_kernels_in_the_interpreter(marked):
    pytest.importorskip("triton")
    run_interpreted("interpreted_contract.py", "-m", marked)
