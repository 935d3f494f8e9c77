"""Fill a cache of Triton with the kernels that tests and benchmarks launch; no GPU is needed.

    python tools/triton_cache.py FOLDER [--capability 90] [--limit-s S] [--workers N] [TEST ...]

Triton compiles a kernel when it is first launched, which takes most of the time of GPU tests. Here
the same GPU tests, the operators of tools/gpu_probe.py, and ours of the part `rows`
(tools/triton_parts.py) run on CPU tensors that say that they are on a GPU. A launch compiles, with
Triton's own `warmup`, and runs nothing: results are arbitrary, so asserts are off and tests may
fail, but what they launch before has the types, alignments, constants and options of a GPU. N
processes (one per core) have a share of the tests each. FOLDER is then a TRITON_CACHE_DIR for the
same version of Triton; a process that finds it elsewhere calls `relocate` first, since Triton
writes absolute paths into it. FOLDER/cache.json has the versions, Triton's key, how many launches
found their form in the cache (`found`) and compiled it (`compiled`), and whether all tests ran in
their time (`complete`). What FOLDER has of an earlier call is not compiled again; a complete run
removes what it did not launch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
FOLDERS = ("tests/kernels", "tests/model")
SUMMARY = "cache.json"
LIMIT_S = 120  # of a test
GPU = "cuda:0"


def relocate(folder: Path) -> None:
    """Write the paths of a cache that was moved to `folder`."""
    for file in folder.glob("*/__grp__*.json"):
        group = json.loads(file.read_text())
        paths = {name: file.parent / name for name in group["child_paths"]}
        group["child_paths"] = {name: str(path) for name, path in paths.items() if path.is_file()}
        file.write_text(json.dumps(group))


def key_of_triton() -> str:
    """What Triton's version adds to the key of each kernel, hashed."""
    from triton.runtime.cache import triton_key

    return hashlib.sha256(triton_key().encode()).hexdigest()


class _Forms:
    """Counts of the compiled forms, and of what could not be compiled."""

    def __init__(self) -> None:
        self.found = self.compiled = 0
        self.errors: dict[str, str] = {}

    def listen(self, *, cache_hit: bool, **_: Any) -> None:
        self.found += cache_hit
        self.compiled += not cache_hit


def record_entries() -> set[str]:
    """Return a set that gets the name of each entry of the cache that is used from now on."""
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    used = set[str]()

    class Recording(FileCacheManager):
        def __init__(self, key: str, *arguments: Any, **options: Any) -> None:
            super().__init__(key, *arguments, **options)
            used.add(key)

    knobs.cache.manager_class = Recording
    return used


def remove_others(folder: Path, used: set[str]) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name not in used:
            shutil.rmtree(entry)


def use_driver(capability: int) -> Any:
    """Let Triton compile for a GPU that is not there; return its driver."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import build
    from triton.runtime.driver import driver

    class Driver(nvidia.CudaDriver):
        def __init__(self) -> None:
            self.launcher_cls = nvidia.CudaLauncher
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda device: 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

    # Launchers are C, linked with the driver's library, and cannot be loaded without it.
    stub = Path(tempfile.mkdtemp(prefix="libcuda-"))
    (stub / "cuda.c").touch()
    library = ["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(stub / "libcuda.so.1")]
    subprocess.run([*library, str(stub / "cuda.c")], check=True)
    knobs.nvidia.libcuda_path = str(stub)
    build._load_module_from_path = lambda *_: SimpleNamespace(launch=None)
    driver.set_active(Driver())
    return nvidia


def compile_launches(forms: _Forms, capability: int) -> None:
    """Let launches of the kernels compile only."""
    from triton import knobs

    from hybridengine.kernels._launch import COMPILE_OPTIONS, Forms

    nvidia = use_driver(capability)
    knobs.compilation.listener = forms.listen

    def warm_up(
        self: Any, device: int | None, grid: tuple[int, ...], arguments: tuple, options: dict
    ) -> None:
        try:
            options = options | COMPILE_OPTIONS
            kernel = self._kernel.warmup(*arguments, grid=grid, **options)
            if hasattr(nvidia, "make_launcher"):  # later versions of Triton compile none
                nvidia.CudaLauncher(kernel.src, kernel.metadata)
        except Exception as error:
            forms.errors.setdefault(self._kernel.__name__, str(error)[-2000:])
            raise

    Forms.launch = warm_up


def pretend_gpu(capability: int) -> Any:
    """Return a mode in which CPU tensors say that they are on a GPU."""
    import torch
    from torch.overrides import TorchFunctionMode

    answers = {
        getter: value
        for name, value in {"device": torch.device(GPU), "is_cuda": True, "is_cpu": False}.items()
        for getter in [getattr(torch.Tensor, name).__get__]
    }

    def flash_forward(query: Any, *_: Any, **__: Any) -> Any:
        lse = torch.zeros(query.shape[-2], query.shape[0], dtype=torch.float32)
        return torch.zeros_like(query), lse

    def flash_backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> Any:
        return tuple(map(torch.zeros_like, (query, key, value)))

    def product(*_: Any, out: Any) -> Any:
        return out

    on_gpu_only = {
        torch.ops.aten._flash_attention_forward: flash_forward,
        torch.ops.aten._flash_attention_backward: flash_backward,
        torch.ops.aten.mm.dtype_out: product,
        torch.ops.aten.addmm.dtype_out: product,
    }
    uninitialized = {torch.empty, torch.empty_like, torch.Tensor.new_empty, torch.empty_strided}

    def on_cpu(value: Any) -> Any:
        is_gpu = isinstance(value, torch.device) and value.type == "cuda"
        return "cpu" if is_gpu or (isinstance(value, str) and value.startswith("cuda")) else value

    class Pretend(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function in answers:
                return answers[function]
            if function is torch.Tensor.cuda:
                return args[0]
            function = on_gpu_only.get(function, function)
            args = tuple(map(on_cpu, args))
            kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
            kwargs.pop("pin_memory", None)
            result = function(*args, **kwargs)
            return result.zero_() if function in uninitialized else result

    class Generator(torch.Generator):
        def __new__(cls, device: Any = None) -> Generator:
            return super().__new__(cls)

    torch.Generator = Generator  # type: ignore[misc]
    torch.testing.assert_close = lambda *_, **__: None
    properties = SimpleNamespace(multi_processor_count=132, L2_cache_size=60 << 20, total_memory=0)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: divmod(capability, 10),
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: GPU,
        "current_stream": lambda *_: MagicMock(stream_id=0, cuda_stream=0),
        "is_current_stream_capturing": lambda: False,
        **{name: MagicMock() for name in ("Stream", "stream", "CUDAGraph", "graph")},
        **{
            name: lambda *_, **__: None
            for name in (
                *("synchronize", "set_device", "empty_cache", "manual_seed"),
                "set_sync_debug_mode",
            )
        },
    }.items():
        setattr(torch.cuda, name, value)
    pretend = Pretend()
    run_backward = torch.autograd._engine_run_backward

    def run_backward_pretending(*args: Any, **kwargs: Any) -> Any:
        with pretend:  # torch calls it without the modes
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = run_backward_pretending
    return pretend


class Plugin:
    """A plugin of pytest: GPU tests compile what they launch, until the time is over."""

    is_complete = True  # neither the time nor that of a test was over

    def __init__(self, capability: int, end: float, share: slice) -> None:
        # With torch._dynamo, before torch.cuda is replaced.
        from tools import gpu_probe, gpu_tests, triton_parts

        self._comes_later = gpu_tests.comes_later
        self._end, self._share = end, share
        self._calls = (triton_parts.calls, gpu_probe.operators)
        self._mode = pretend_gpu(capability)

    def probe(self) -> None:
        """Compile what `rows` and the probe launch."""
        import torch

        with self._mode:
            for _ in chain(*(calls(torch.device(GPU)) for calls in self._calls)):
                if self._is_over():
                    break

    def _is_over(self) -> bool:
        is_over = time.monotonic() > self._end
        self.is_complete = self.is_complete and not is_over
        return is_over

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and "Timeout" in str(report.longrepr):
            self.is_complete = False

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        marked = [item for item in items if item.get_closest_marker("gpu")]
        marked.sort(key=lambda item: self._comes_later(item.nodeid))  # as the GPU runs them
        items[:] = marked[self._share]

    def pytest_runtest_setup(self, item: Any) -> None:
        import pytest

        if self._is_over():
            pytest.exit("the time is over", returncode=0)

    def pytest_runtest_call(self, item: Any) -> None:
        self._mode.__enter__()

    def pytest_runtest_teardown(self, item: Any) -> None:
        import torch

        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()


def run_share(folder: Path, tests: list[str], capability: int, limit_s: float, share: slice) -> int:
    """Compile a share of the tests, the first one also `rows` and the probe; write a summary."""
    import pytest

    forms, used = _Forms(), record_entries()
    end = time.monotonic() + limit_s
    compile_launches(forms, capability)
    options = [
        "-q",
        "-m",
        "gpu",
        "--assert=plain",
        "--tb=line",
        "--durations=5",
        "-p",
        "no:cacheprovider",
    ]
    options += ["--continue-on-collection-errors", f"--timeout={LIMIT_S}"]
    plugin = Plugin(capability, end, share)
    if not tests and share.start == 0:
        plugin.probe()
    code = pytest.main([*options, *(tests or FOLDERS)], plugins=[plugin])
    ended = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    summary = {"found": forms.found, "compiled": forms.compiled, "errors": forms.errors}
    summary |= {"used": sorted(used), "is_complete": plugin.is_complete and code in ended}
    (folder / f"{share.start}.json").write_text(json.dumps(summary))
    return int(bool(forms.errors))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("test", nargs="*", metavar="TEST")
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--limit-s", type=float, default=float("inf"), metavar="S")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args()
    folder, workers = arguments.folder.resolve(), arguments.workers
    if arguments.share is not None:
        share = slice(arguments.share, None, workers)
        return run_share(folder, arguments.test, arguments.capability, arguments.limit_s, share)
    folder.mkdir(parents=True, exist_ok=True)
    variables = {"TRITON_CACHE_DIR": str(folder), "TRITON_STORE_BINARY_ONLY": "1"}
    variables["OMP_NUM_THREADS"] = "1"  # of a process, which has a core
    # Asserts, which -O leaves out, compare results, which nothing computed.
    command = [sys.executable, "-O", __file__, *sys.argv[1:], f"--workers={workers}"]
    running = [
        subprocess.Popen([*command, f"--share={i}"], cwd=ROOT, env=os.environ | variables)
        for i in range(workers)
    ]
    code = max(process.wait() for process in running)
    files = [file for i in range(workers) if (file := folder / f"{i}.json").is_file()]
    shares = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    is_complete = len(shares) == workers and all(share["is_complete"] for share in shares)
    is_complete = is_complete and not arguments.test
    if is_complete:
        remove_others(folder, {entry for share in shares for entry in share["used"]})
    counts: dict[str, Any] = {"complete": is_complete}
    counts |= {name: sum(share[name] for share in shares) for name in ("found", "compiled")}
    counts["errors"] = {name: text for s in shares for name, text in s["errors"].items()}
    versions = {"triton": version("triton"), "torch": version("torch"), "key": key_of_triton()}
    (folder / SUMMARY).write_text(json.dumps(versions | counts, indent=1) + "\n")
    print(f"triton-cache: {folder}: {counts}")
    return code


if __name__ == "__main__":
    sys.exit(main())
