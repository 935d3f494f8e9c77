"""The suite of arithmetic faults: ours is right, the faults are found, other libraries run."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hybridengine.conformance import CASES, Case, NotThere, load, run, run_all, to_json, to_text
from hybridengine.conformance import __main__ as command

NAMES = [case.name for case in CASES]
# What the documentation states about these versions.
WRONG = {
    "trl 1.16.0": {"a masked token with a ratio that overflows does not matter"},
    "verl 0.9.1": {
        "grpo: a group of equal rewards has advantages of 0",
        "rloo, vectorised: a single response of a group keeps its reward",
    },
    "liger 0.8.5": {
        "a masked token with a ratio that overflows does not matter",
        "luspo with a KL term sums over unmasked tokens",
    },
    "openrlhf 0.11.2": {
        "rewards to go are discounted per token of the model",
        "penalties at tool tokens are not in the returns",
        "gae skips the output of a tool",
    },
}


@pytest.fixture(scope="module")
def ours():
    return load(["hybridengine"])["hybridengine"][1]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_ours_is_right(case, ours):
    outcome = run(case, "hybridengine", ours)
    assert outcome.state == "right", outcome


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_reported_fault_is_rejected(case):
    expected = case.expected(**case.inputs)
    faulty = case.faulty(**case.inputs)
    assert expected.dtype == torch.float64
    assert torch.isfinite(expected).all()
    assert faulty.shape == expected.shape
    assert case.accepts(expected)
    assert not case.accepts(faulty)
    assert not case.accepts(expected * torch.nan)


def perturbed(inputs):
    """The first tensor of floating point with other numbers in it."""
    name = next(
        name for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()
    )
    noise = torch.rand(inputs[name].shape, generator=torch.Generator().manual_seed(0))
    return {**inputs, name: inputs[name] + 0.5 + noise.double()}


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_another_input_is_rejected(case, ours):
    value = getattr(ours, case.operation)(**perturbed(case.inputs))
    assert not case.accepts(value)


def test_cases_are_documented():
    assert len(set(NAMES)) == len(NAMES) >= 40
    for case in CASES:
        assert case.report.startswith("https://github.com/"), case.name
        assert case.fault.endswith("."), case.name


@pytest.mark.parametrize("name", ["trl", "verl", "liger", "openrlhf"])
def test_installed_libraries_run(name):
    if name not in (libraries := load()):
        pytest.skip(f"{name} is not installed")
    version, module = libraries[name]
    outcomes = {case.name: run(case, name, module) for case in CASES}
    errors = {case: x.note for case, x in outcomes.items() if x.state == "error"}
    assert not errors
    assert sum(outcome.state == "right" for outcome in outcomes.values()) >= 20
    found = {case for case, outcome in outcomes.items() if outcome.state == "wrong"}
    assert found == WRONG.get(f"{name} {version}", found)


def one(**options) -> Case:
    return Case(
        "a case",
        "double",
        {"x": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        lambda x: 2 * x,
        lambda x: x,
        "https://github.com/owner/name/issues/1",
        "A fault.",
        **options,
    )


def test_outcomes():
    case, right = one(), SimpleNamespace(double=lambda x: 2 * x.float())
    wrong = SimpleNamespace(double=lambda x: torch.tensor([2.0, 5.0]))
    undefined = SimpleNamespace(double=lambda x: torch.tensor([torch.nan, 4.0]))

    def absent(x):
        raise NotThere("no doubles")

    assert run(case, "a", right).state == "right"
    outcome = run(case, "a", wrong)
    assert (outcome.state, outcome.given, outcome.expected, outcome.position) == ("wrong", 5, 4, 1)
    assert run(case, "a", undefined).position == 0
    documented = replace(case, conventions={"a": "it triples"})
    assert run(documented, "a", wrong).state == "convention"
    assert run(documented, "b", wrong).state == "wrong"
    assert run(case, "a", SimpleNamespace()).state == "not there"
    assert run(case, "a", SimpleNamespace(double=absent)).note == "no doubles"
    shape = run(case, "a", SimpleNamespace(double=lambda x: x[:1]))
    assert (shape.state, shape.note) == ("error", "shape [1], expected [2]")
    broken = run(case, "a", SimpleNamespace(double=lambda x: x.missing))
    assert broken.state == "error"


def test_a_library_cannot_change_the_inputs():
    case = one()
    run(case, "a", SimpleNamespace(double=lambda x: x.mul_(2)))
    assert case.inputs["x"].tolist() == [1, 2]


def test_table(ours):
    libraries = {"ours": ("1", ours), "none": ("2", SimpleNamespace())}
    cases = CASES[:3]
    results = run_all(cases, libraries)
    text = to_text(cases, libraries, results)
    assert text.splitlines()[0].split()[-4:] == ["ours", "1", "none", "2"]
    assert text.splitlines()[-2:] == ["ours: 3 right", "none: 3 not there"]
    row = json.loads(to_json(cases, libraries, results))["cases"][0]
    assert row["case"] == cases[0].name
    assert row["outcomes"]["ours"]["state"] == "right"


def test_command(monkeypatch, capsys, tmp_path):
    file = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["x", "hybridengine", "--cases", "gae", "--json", str(file)])
    assert command.main() == 0
    assert "hybridengine: 1 right" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["cases"]) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [(["--cases", "nothing"], "no name of"), (["sglang"], "no operations for sglang")],
)
def test_wrong_arguments(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("sys.argv", ["x", *arguments])
    with pytest.raises(SystemExit):
        command.main()
    assert message in capsys.readouterr().err
