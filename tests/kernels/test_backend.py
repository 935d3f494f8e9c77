"""The choice of backends; the type stub of the extension matches the extension."""

import ast
import builtins
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from hybridengine.kernels import _backend, backend_table, choose_backend, token_log_probs
from hybridengine.kernels._backend import native, requested_backend


def test_every_operator_has_a_row_with_a_reason():
    rows = backend_table()
    assert {row.op for row in rows} >= {"token_log_probs", "strided_copy", "linear_policy_loss"}
    for row in rows:
        assert row.why
        if row.device == "cpu" and native() is not None:
            assert row.backend == _backend.REGISTERED[row.op]["cpu"][0], "the best one"


def test_a_backend_is_requested_of_every_operator():
    device = torch.device("cpu")
    with requested_backend("reference"):
        assert choose_backend("token_log_probs", device) == "reference"
        assert choose_backend("token_log_probs", device, "cpp") == "cpp"
    with requested_backend("triton"):
        with pytest.raises(ValueError, match="'triton' cannot run here: it runs on CUDA tensors"):
            choose_backend("token_log_probs", device)
        assert any(row.backend == "none" for row in backend_table())
        with requested_backend(None):
            assert choose_backend("token_log_probs", device) == ("cpp" if native() else "reference")


def test_the_environment_requests_a_backend():
    code = "from hybridengine.kernels import backend_table as t; print({r.backend for r in t()})"
    environment = os.environ | {"HYBRIDENGINE_BACKEND": "reference", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "{'reference'}"


def test_an_extension_that_does_not_load_is_warned_of(monkeypatch):
    real_import = builtins.__import__

    def fail(name, globals=None, locals=None, fromlist=(), level=0):
        if fromlist and "_C" in fromlist:
            raise ImportError("undefined symbol: _ZN3c10")
        return real_import(name, globals, locals, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.warns(RuntimeWarning, match=r"does not load with torch .*undefined symbol: _ZN3"):
        extension, reason = _backend.load_extension()
    assert extension is None and "install hybridengine again" in reason
    monkeypatch.setattr(_backend, "EXTENSION", None)
    monkeypatch.setattr(_backend, "WHY_NO_EXTENSION", reason)
    with pytest.raises(ValueError, match=r"backend 'cpp' cannot run here: .* does not load"):
        choose_backend("token_log_probs", torch.device("cpu"), "cpp")


def test_a_function_that_an_older_extension_lacks_is_named(monkeypatch):
    monkeypatch.delattr(native(), "log_prob_forward")
    with pytest.raises(ImportError, match=r"_C has no log_prob_forward: .*`make setup`"):
        token_log_probs(torch.zeros(1, 4), torch.tensor([2]))
    assert not hasattr(native(), "__path__")  # as Python asks of a module


def test_torch_compile_traces_the_choice_without_warnings():
    @torch.compile(fullgraph=True, backend="eager")
    def double(x):
        assert choose_backend("token_log_probs", x.device)
        return x * 2

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert double(torch.ones(1)) == 2
    assert not [str(warning.message) for warning in caught if "_backend.py" in str(warning.message)]


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
        if callable(getattr(extension, name))
        and not isinstance(getattr(extension, name), type)
        and not name.startswith("__")
    }
    assert declared.keys() == functions.keys()
    for name, signature in functions.items():
        positions = [
            re.search(rf"\b{argument}: ", signature).start() for argument in declared[name]
        ]
        assert positions == sorted(positions), name
