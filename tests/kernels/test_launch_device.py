"""Triton kernels are launched on the device of their tensors, whatever the current device is."""

import contextlib
import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.compiler.compiler import LazyDict
from triton.runtime.driver import driver
from triton.runtime.jit import create_function_from_signature

from hybridengine.kernels import policy_loss
from hybridengine.kernels._launch import Forms, launch
from hybridengine.kernels.linear.rescale import rescale_kernel

KERNELS = Path(__file__).parents[2] / "kernels"


class Recorder:
    """In place of a Triton kernel: records the launches and the current device of each."""

    def __init__(self, monkeypatch):
        self.launches, self._device = [], None
        monkeypatch.setattr(torch.cuda, "device", self._enter)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    @contextlib.contextmanager
    def _enter(self, device):
        before, self._device = self._device, device
        yield
        self._device = before

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.launches.append((self._device, grid, arguments, options))

        return run


def test_a_launch_takes_the_device_of_its_first_tensor(monkeypatch):
    kernel = Recorder(monkeypatch)
    with FakeTensorMode():
        first, second = (torch.empty(4, device=f"cuda:{i}") for i in range(2))
    host = torch.empty(4)
    launch(kernel, (2,), None, second, 3, BLOCK=8)
    launch(kernel, (1, 2), host)  # the interpreter
    launch(kernel, (3,), first)  # the current device
    assert kernel.launches == [
        (torch.device("cuda", 1), (2,), (None, second, 3), {"BLOCK": 8}),
        (None, (1, 2), (host,), {}),
        (None, (3,), (first,), {}),
    ]


class Compiler:
    """In place of a Triton kernel: counts how often it is compiled and launched."""

    def __init__(self):
        names = ("x", "varying", "number", "SIZE")
        kinds = ((False, False), (False, True), (False, False), (True, False))
        self.params = [
            SimpleNamespace(name=name, is_constexpr=constant, do_not_specialize=varying)
            for name, (constant, varying) in zip(names, kinds, strict=True)
        ]
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def compile_and_launch(*arguments, **options):
            self.compiled.append((grid, arguments, options))
            return Compiled(self.launched)

        return compile_and_launch


class Compiled:
    def __init__(self, launched):
        self._launched = launched

    def __getitem__(self, grid):
        return lambda *arguments: self._launched.append((grid, arguments))


ALIGNED = torch.empty(64)
CHANGES = {
    "the same": (0, {}),
    "another number of the same kind": (0, {"varying": 16, "number": 5}),
    "alignment": (1, {"x": ALIGNED[1:]}),
    "dtype": (1, {"x": ALIGNED.to(torch.bfloat16)}),
    "no tensor": (1, {"x": None}),
    "divisible by 16": (1, {"number": 32}),
    "one": (1, {"number": 1}),
    "64 bits": (1, {"number": 2**31 + 1}),
    "64 bits, not specialized": (1, {"varying": 2**31}),
    "a float": (1, {"number": 3.0}),
    "another tuple of the same kinds": (0, {"x": (ALIGNED, 9, None)}),
    "the alignment of a tensor in a tuple": (1, {"x": (ALIGNED[1:], 7, None)}),
    "no tensor in a tuple": (1, {"x": (None, 7, None)}),
    "a constant": (1, {"SIZE": 64}),
    "an option": (1, {"num_warps": 8}),
    "the device": (1, {"device": 1}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_compiled_kernel_is_launched_again_for_what_triton_compiles_alike(change):
    kernel = Compiler()
    forms = Forms(kernel)
    compilations, changed = CHANGES[change]
    call = {"device": 0, "x": ALIGNED, "varying": 7, "number": 3, "SIZE": 32, "num_warps": 4}
    if isinstance(changed.get("x"), tuple):
        call["x"] = (ALIGNED, 7, None)
    for given in (call, call | changed):
        x, number, device = given["x"], given["number"], given["device"]
        named = {name: given[name] for name in ("num_warps", "SIZE", "number")}
        forms.launch(device, (5,), (x, given["varying"]), named)
    assert len(kernel.compiled) == 1 + compilations
    if not compilations:
        assert kernel.launched == [((5, 1, 1), (x, given["varying"], number, given["SIZE"]))]


class Gpu:
    """A driver of Triton for a GPU that is not there: records the arguments of launches."""

    def __init__(self):
        self.launches = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda name, *_: (None, name, 32, 0, 1024),
            unload_module=lambda module: None,
        )

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 7

    def launcher_cls(self, source, metadata):
        return lambda *arguments: self.launches.append(arguments)


def test_a_second_launch_gives_triton_the_arguments_of_the_first(monkeypatch):
    """Triton compiles for a GPU and launches on a driver that only records."""
    gpu = Gpu()
    monkeypatch.setattr(driver, "_active", gpu)
    kernel = triton.JITFunction(rescale_kernel.fn)
    first, second = ([torch.ones(n), torch.ones(1), n] for n in (4096, 32))
    for given in (first, second, first):
        launch(kernel, (n := given[2] // 32,), *given, BLOCK=32, num_warps=4)
        assert gpu.launches[-1][0] == n
    launch(kernel, (1,), first[0][1:], *first[1:], BLOCK=32, num_warps=4)
    assert len(next(iter(kernel.device_caches.values()))[0]) == 2, "the unaligned one is compiled"

    def given(launched):
        plain = [x for x in launched if type(x) is not LazyDict]  # of hooks, made for each launch
        return [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in plain]

    one, other, again, unaligned = map(given, gpu.launches)
    assert one == again and len(other) == len(unaligned) == len(one)
    assert one[-4:] == given([*first, 32]) and other[-4:] == given([*second, 32])
    assert one[1:-4] == other[1:-4], "the rest of the grid, stream, function and metadata"


def test_triton_binds_the_arguments_of_every_kernel():
    """It makes a Python function of them, in which some names, as `options`, are taken."""
    target = make_backend(GPUTarget("cuda", 90, 32))
    bound = []
    for file in sorted(KERNELS.rglob("*.py")):
        if "@triton.jit" not in file.read_text():
            continue
        parts = file.relative_to(KERNELS).with_suffix("").parts
        module = importlib.import_module(".".join(("hybridengine.kernels", *parts)))
        for name, kernel in vars(module).items():
            if isinstance(kernel, triton.JITFunction) and name.endswith("kernel"):
                create_function_from_signature(kernel.signature, kernel.params, target)
                bound.append(name)
    assert {"_token_kernel", "forward_kernel", "sample_kernel"} <= {*bound}


def test_every_kernel_is_launched_by_it():
    """`kernel[grid](...)` elsewhere runs on the current device."""
    subscripted = re.compile(r"kernel\[")
    found = [path.name for path in KERNELS.rglob("*.py") if subscripted.search(path.read_text())]
    assert found == ["_launch.py"]


@pytest.mark.gpu
def test_tensors_on_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = [torch.randn(100) for _ in range(3)]
    expected, _ = policy_loss(*inputs)
    loss, _ = policy_loss(*(x.to("cuda:1") for x in inputs), backend="triton")
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(loss.cpu(), expected)
