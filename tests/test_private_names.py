"""Tests use the public names of modules and objects; private ones may change with every commit.

A private module is another matter: its public names are what its package uses, and tested as such.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("hybridengine", "extras", "kernels", "benchmarks", "tools", "examples")
PACKAGES = ("hybridengine", "benchmarks", "tools", "examples", "tests")

PRIVATE = re.compile(r"_[a-zA-Z]\w*")
IN_TEXT = re.compile(r"\.(_[a-zA-Z]\w*)")  # of a script that a test writes
ON_ITSELF = {"self", "cls", "super()"}

# Of other packages, which happen to be private names here as well.
OF_PYTHON_AND_TORCH = {"_replace", "_version", "_buffers", "_schema"}
OF_OTHERS = {
    ("engine/test_sleep.py", "_apply_head"): "vLLM",
    ("engine/test_vllm_head.py", "_apply_head"): "vLLM",
    ("extras/remote/test_vllm_interface.py", "_model"): "vLLM",
    ("extras/remote/test_vllm_interface.py", "_module"): "vLLM",
    ("extras/remote/test_vllm_trainer.py", "_module"): "vLLM",
    ("extras/remote/vllm_interface.py", "_module"): "vLLM",
    ("extras/integrations/test_trainers_sync.py", "_init_weight_update_from_distributed"): "AReaL",
    ("extras/integrations/test_trainers_sync.py", "_update_weights_from_distributed"): "AReaL",
    ("extras/integrations/test_trl_server.py", "_init_vllm"): "TRL",
    ("extras/integrations/test_trl_server.py", "_sync_weight_merged"): "TRL",
    ("kernels/test_against_trl.py", "_compute_loss"): "TRL",
    ("kernels/test_launch_device.py", "_active"): "Triton",
    ("kernels/test_against_trl.py", "_generate"): "TRL",
    ("kernels/test_against_trl.py", "_generate_and_score_completions"): "TRL",
    ("kernels/test_against_trl.py", "_tokenizer"): "TRL",
    ("extras/integrations/test_verl_functions.py", "_flash_attn"): "verl",
    ("extras/integrations/test_trl_kept.py", "_generate_and_score_completions"): "TRL",
    ("extras/integrations/test_verl_kept.py", "_build_fsdp_module"): "verl",
    ("extras/integrations/test_verl_kept.py", "_preprocess_engine_kwargs"): "verl",
    ("extras/integrations/test_verl_linear_attention.py", "_build_fsdp_module"): "verl",
    ("extras/integrations/test_verl_router_replay.py", "_build_fsdp_module"): "verl",
}


def defined(source: str) -> Iterator[str]:
    """Yield the private names that a module gives to functions, classes, values and attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        else:
            continue
        is_other = isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ON_ITSELF
        if PRIVATE.fullmatch(name) and not is_other:
            yield name


def used(source: str, private: set[str], modules: Set[str] = frozenset()) -> Iterator[tuple]:
    """Yield line and name of each private name that a test uses of another module or object.

    private: names that are defined somewhere. modules: names of modules.
    """
    tree = ast.parse(source)
    parts = {id(part) for x in ast.walk(tree) if isinstance(x, ast.JoinedStr) for part in x.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names = [node.attr] if node.attr in private else []
            names *= ast.unparse(node.value) not in ON_ITSELF
        elif isinstance(node, ast.ImportFrom):
            is_ours = str(node.module).partition(".")[0] in PACKAGES
            names = [a.name for a in node.names if is_ours and PRIVATE.fullmatch(a.name)]
            private = private | set(names) - modules
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] * (id(node) not in parts) + IN_TEXT.findall(node.value)
        else:
            continue
        yield from ((node.lineno, name) for name in names if name in private)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("resharder._mover.move()", ["_mover"]),
        ("self._mover.move()", []),
        ("thing._theirs", []),
        ("from hybridengine.sync.mover import _mover", ["_mover"]),
        ("from tests.ranks import _anything", ["_anything"]),
        ("from torch import _anything", []),
        ("monkeypatch.setattr(module, '_mover', None)", ["_mover"]),
        ("f'{name}_mover'", []),
        ("script = 'import x; x._mover = 1'", ["_mover"]),
    ],
)
def test_each_is_found(source: str, found: list[str]) -> None:
    own = set(defined("class A:\n  def f(self): self._mover = 1"))
    assert own == {"_mover"}
    assert [name for _, name in used(source, own)] == found


@pytest.mark.slow
def test_tests_use_no_private_names() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    modules = {file.stem for file in files}
    private = {name for file in files for name in defined(file.read_text())}
    private -= OF_PYTHON_AND_TORCH | modules
    assert len(private) > 1000
    tests = ROOT / "tests"
    found = {
        (str(file.relative_to(tests)), name): f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in tests.rglob("*.py")
        if file != Path(__file__)
        for line, name in used(file.read_text(), private, modules)
    }
    faults = sorted(text for key, text in found.items() if key not in OF_OTHERS)
    assert faults == [], "test what is public, or make a constant or an argument of it"
    assert sorted(OF_OTHERS.keys() - found) == [], "remove exceptions that are not needed any more"
