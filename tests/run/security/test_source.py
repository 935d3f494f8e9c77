"""No code is read as data: what could do it is listed here, each with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("hybridengine", "extras", "kernels", "benchmarks", "tools", "examples")

PICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
_OWN_PIPE = "an unnamed pair of sockets between a rank and the reward process that it has started"
# Everything that `risks` finds in the tree, and nothing else.
EXCEPTIONS = {
    ("extras/rewards/worker_main.py", "multiprocessing.connection"): _OWN_PIPE,
    ("extras/rewards/workers.py", "multiprocessing.connection"): _OWN_PIPE,
    ("extras/rewards/workers.py", "pickle"): "the type of an error of that pipe",
    ("extras/lab/export.py", "pickle"): "the type of an error of torch.load",
    (
        "hybridengine/train/checkpoint/tensors.py",
        "pickle",
    ): "an unpickler that admits DCP's types only",
    ("examples/multi_turn/prepare.py", "eval"): "of sums that the script has generated",
    ("benchmarks/dropins_verl_sync.py", "broadcast_object_list"): "between ranks of a benchmark",
    ("benchmarks/rollouts.py", "all_gather_object"): "between ranks of a benchmark",
    ("tools/dropins_plugin.py", "multiprocessing"): "shared counters, nothing is pickled",
}


def risks(source: str) -> Iterator[str]:
    """Yield the name of each thing in a module that reads, or runs, code from data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name for alias in node.names if (name := _module(alias.name)))
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = (_module(f"{node.module}.{alias.name}") for alias in node.names)
            yield from {name for name in names if name}
        elif isinstance(node, ast.Call):
            yield from _of_call(node)


def _module(name: str) -> str | None:
    """Return the module that unpickles, of an imported name."""
    first = name.partition(".")[0]
    if first in PICKLING:
        return first
    if first == "multiprocessing":
        return ".".join(name.split(".")[: 1 + name.startswith("multiprocessing.connection")])
    return None


def _of_call(node: ast.Call) -> Iterator[str]:
    function, options = ast.unparse(node.func), {k.arg: k.value for k in node.keywords}
    last = function.rpartition(".")[2]

    def is_set(name: str) -> bool:
        value = options.get(name)
        return value is not None and not (isinstance(value, ast.Constant) and not value.value)

    if function in ("eval", "exec", "builtins.eval", "builtins.exec", "os.system", "os.popen"):
        yield function
    if last.endswith(("_object", "_object_list")) and not last.startswith(("_", "import_")):
        yield last  # torch.distributed's and vLLM's collectives pickle
    if is_set("shell"):
        yield "shell=True"
    if is_set("allow_pickle"):
        yield "allow_pickle"
    if function == "torch.load" and not is_set("weights_only"):
        yield "torch.load"
    if function in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
        yield function


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["pickle"]),
        ("import dill as json", ["dill"]),
        ("from pickle import loads", ["pickle"]),
        ("from multiprocessing import connection", ["multiprocessing.connection"]),
        ("from multiprocessing.connection import Client", ["multiprocessing.connection"]),
        ("eval('1')", ["eval"]),
        ("model.eval()", []),
        ("exec(x)", ["exec"]),
        ("subprocess.run(x, shell=True)", ["shell=True"]),
        ("subprocess.run(x, shell=False)", []),
        ("torch.load(x)", ["torch.load"]),
        ("torch.load(x, weights_only=False)", ["torch.load"]),
        ("torch.load(x, weights_only=True)", []),
        ("yaml.load(x)", ["yaml.load"]),
        ("yaml.safe_load(x)", []),
        ("np.load(x, allow_pickle=True)", ["allow_pickle"]),
        ("dist.all_gather_object(x, y)", ["all_gather_object"]),
        ("group.broadcast_object_list(x)", ["broadcast_object_list"]),
        ("import_object(x)", []),
    ],
)
def test_each_is_found(source: str, found: list[str]) -> None:
    assert list(risks(source)) == found


@pytest.mark.slow
def test_the_tree_has_the_named_exceptions_only() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    found = {
        (str(file.relative_to(ROOT)), risk) for file in files for risk in risks(file.read_text())
    }
    assert sorted(found - EXCEPTIONS.keys()) == [], "code is read as data: use run/messages.py"
    assert sorted(EXCEPTIONS.keys() - found) == [], "remove exceptions that are not needed any more"
