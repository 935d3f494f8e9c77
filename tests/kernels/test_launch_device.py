"""Triton kernels are launched on the device of their tensors, whatever the current device is."""

import contextlib
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.driver import driver
from triton.runtime.jit import create_function_from_signature

from hybridengine.kernels import policy_loss
from hybridengine.kernels._launch import COMPILE_OPTIONS, Forms, launch
from hybridengine.kernels.linear.rescale import rescale_kernel

KERNELS = Path(__file__).parents[2] / "kernels"


class Recorder:
    """In place of a Triton kernel: records the launches and the current device of each."""

    def __init__(self, monkeypatch):
        self.launches, self._device = [], None
        monkeypatch.setattr(torch.cuda, "device", self._enter)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(self._device, "index", 0))

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


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(driver, "_active", gpu)
    return gpu


def arguments_kernel(x, varying, number, SIZE: tl.constexpr):
    pass


def fused_kernel(x, SIZE: tl.constexpr):
    at = x + tl.arange(0, SIZE)
    value = tl.load(at)
    tl.store(at, value * value + value)


class Kernel(triton.JITFunction):
    """Compiles to objects that record launches; counts those that Triton makes itself."""

    def __init__(self):
        super().__init__(arguments_kernel, do_not_specialize=["varying"])
        self.by_triton, self.launched = 0, []

    def run(self, *arguments, **options):
        self.by_triton += 1
        return super().run(*arguments, **options)

    def _do_compile(self, key, signature, device, *_):
        return self.device_caches[device][0].setdefault(key, Compiled(self.launched))


class Compiled:
    function = packed_metadata = None

    def __init__(self, launched):
        self._launched = launched

    def launch_metadata(self, *_):
        return None

    def run(self, *arguments):
        self._launched.append((self, arguments[:3], arguments[9:]))


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
def test_a_compiled_kernel_is_launched_again_for_what_triton_compiles_alike(gpu, change):
    kernel = Kernel()
    forms = Forms(kernel)
    compilations, changed = CHANGES[change]
    call = {"device": 0, "x": ALIGNED, "varying": 7, "number": 3, "SIZE": 32, "num_warps": 4}
    if isinstance(changed.get("x"), tuple):
        call["x"] = (ALIGNED, 7, None)
    for given in (call, call | changed):
        x, number, device = given["x"], given["number"], given["device"]
        named = {name: given[name] for name in ("num_warps", "SIZE", "number")}
        forms.launch(device, (5,), (x, given["varying"]), named)
    assert kernel.by_triton == 1 + compilations
    assert len(kernel.launched) == 2
    assert kernel.launched[1][1:] == ((5, 1, 1), (x, given["varying"], number, given["SIZE"]))


class Pair(NamedTuple):
    first: object
    second: object


INTEGERS = (0, 1, 2, 16, 17, -1, -16, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, -(2**31))
INTEGERS = (*INTEGERS, -(2**31) - 1, 2**63 - 16, 2**63 - 1, 2**63, 2**64 - 1)
TENSORS = (ALIGNED, ALIGNED[1:], ALIGNED[4:], ALIGNED[64:], ALIGNED.bfloat16(), ALIGNED.int())
TENSORS = (*TENSORS, nn.Parameter(ALIGNED), ALIGNED.to(torch.float8_e4m3fn))
SCALARS = (*INTEGERS, True, False, None, 1.0, 1.5)
ANY = (*TENSORS, *SCALARS)
VALUES = {
    "x": (*ANY, *((x,) for x in ANY), *(Pair(x, (x, 16)) for x in ANY), (), ((ALIGNED, 1), 2)),
    "varying": SCALARS,
    "number": SCALARS,
    "SIZE": (32, 64, 1, None, 1.5, "text", (1, 2), Pair(1, 2), Pair(1, None), tl.float32),
    "num_warps": (4, 8),
    "num_stages": (2, 3),
}


@pytest.mark.parametrize("varied", VALUES)
def test_what_is_launched_is_what_triton_would_launch(gpu, varied):
    kernel = Kernel()
    forms = Forms(kernel)
    by_forms = set()
    for value in VALUES[varied] * 2:
        call = {"x": ALIGNED, "varying": 7, "number": 3, "SIZE": 32, "num_warps": 4} | {
            varied: value
        }
        named = {name: call.pop(name) for name in list(call) if name not in ("x", "varying")}
        forms.launch(0, (5,), tuple(call.values()), dict(named))
        kernel[(5,)](*call.values(), **named, **COMPILE_OPTIONS)
        (ours, *given), (by_triton, *expected) = kernel.launched[-2:]
        assert ours is by_triton
        assert [*map(id, given[1])] == [*map(id, expected[1])]
        by_forms.add(ours)
    again = kernel.by_triton - 2 * len(VALUES[varied])
    assert again == len(by_forms) == len(kernel.device_caches[0][0]), "each form is kept once"


def test_a_second_launch_gives_triton_the_arguments_of_the_first(gpu):
    """Triton compiles for a GPU and launches on a driver that only records."""
    kernel = triton.JITFunction(rescale_kernel.fn)
    first, second = ([torch.ones(n), torch.ones(1), n] for n in (4096, 32))
    for given in (first, second, first):
        launch(kernel, (n := given[2] // 32,), *given, BLOCK=32, num_warps=4)
        assert gpu.launches[-1][0] == n
    launch(kernel, (1,), first[0][1:], *first[1:], BLOCK=32, num_warps=4)
    assert len(next(iter(kernel.device_caches.values()))[0]) == 2, "the unaligned one is compiled"

    def given(launched):
        plain = [*launched[:6], *launched[9:]]  # without what is there for hooks
        return [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in plain]

    one, other, again, unaligned = map(given, gpu.launches)
    assert one == again and len(other) == len(unaligned) == len(one)
    assert one[-4:] == given([*gpu.launches[0][:9], *first, 32])[-4:]
    assert other[-4:] == given([*gpu.launches[0][:9], *second, 32])[-4:]
    assert one[1:-4] == other[1:-4], "the rest of the grid, stream, function and metadata"


@pytest.mark.parametrize("default", (False, True))
def test_bits_do_not_depend_on_whether_triton_fuses_by_default(gpu, monkeypatch, default):
    monkeypatch.setattr(knobs.language, "default_fp_fusion", default)
    kernel = triton.JITFunction(fused_kernel)
    launch(kernel, (1,), torch.ones(32), SIZE=32)
    (compiled,) = kernel.device_caches[0][0].values()
    assert compiled.metadata.enable_fp_fusion and "FFMA" in compiled.asm["sass"]


def test_hooks_of_launches_run(gpu, monkeypatch):
    """Triton's profiler sets them, before a kernel is compiled or after."""
    kernel = triton.JITFunction(rescale_kernel.fn)
    arguments = torch.ones(32), torch.ones(1), 32

    def hooks():
        launch(kernel, (1,), *arguments, BLOCK=32, num_warps=4)
        return gpu.launches[-1][6:9]

    for name in ("launch_enter_hook", "launch_exit_hook"):
        monkeypatch.setattr(knobs.runtime, name, knobs.HookChain())
    hooks()
    assert hooks() == (None, None, None)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        hook = getattr(knobs.runtime, name)
        hook.add(print)
        metadata, enter, leave = hooks()
        assert (enter, leave) == (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
        assert metadata.get()["name"] == "rescale_kernel" and metadata.get()["stream"] == 7
        hook.remove(print)
    assert hooks() == (None, None, None)


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
    assert {"forward_kernel", "sample_kernel"} <= {*bound}


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
