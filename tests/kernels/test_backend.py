"""Backend choice, and that the stub of the extension says what the extension has."""

import ast
from pathlib import Path

import pytest
import torch
from hybridengine.kernels import backend_table, choose_backend
from hybridengine.kernels._backend import native


def test_every_operator_has_a_row_with_a_reason():
    rows = backend_table()
    assert {row.op for row in rows} >= {"token_log_probs", "strided_copy", "linear_policy_loss"}
    for row in rows:
        assert row.why
        if row.device == "cpu" and native() is not None:
            assert row.backend == "cpp"


def test_the_environment_picks(monkeypatch):
    monkeypatch.setenv("HYBRIDENGINE_BACKEND", "reference")
    assert choose_backend("token_log_probs", torch.device("cpu")) == "reference"
    assert choose_backend("token_log_probs", torch.device("cpu"), "cpp") == "cpp"
    monkeypatch.setenv("HYBRIDENGINE_BACKEND", "triton")
    with pytest.raises(ValueError, match="'triton' cannot run here: it runs on CUDA tensors"):
        choose_backend("token_log_probs", torch.device("cpu"))
    assert any(row.backend == "none" for row in backend_table())


def test_the_stub_matches_the_extension():
    extension = native()
    stub = ast.parse((Path(extension.__file__).parent / "_C.pyi").read_text())
    declared = {
        node.name: [argument.arg for argument in node.args.args]
        for node in stub.body
        if isinstance(node, ast.FunctionDef)
    }
    functions = {
        name: getattr(extension, name).__doc__.splitlines()[0]
        for name in dir(extension)
        if callable(getattr(extension, name)) and not isinstance(getattr(extension, name), type)
    }
    assert declared.keys() == functions.keys()
    for name, signature in functions.items():
        places = [signature.index(f"{argument}: ") for argument in declared[name]]
        assert places == sorted(places), name
