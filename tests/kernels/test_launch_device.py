"""Triton kernels are launched on the device of their tensors, whatever the current device is."""

import contextlib
import re
from pathlib import Path

import pytest
import torch
from hybridengine.kernels import policy_loss
from hybridengine.kernels._launch import launch
from torch._subclasses.fake_tensor import FakeTensorMode

KERNELS = Path(__file__).parents[2] / "kernels"


class Recorder:
    """In place of a Triton kernel: records the launches and the current device of each."""

    def __init__(self, monkeypatch):
        self.launches, self._device = [], None
        monkeypatch.setattr(torch.cuda, "device", self._enter)

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
        second = torch.empty(4, device="cuda:1")
    host = torch.empty(4)
    launch(kernel, (2,), None, second, 3, BLOCK=8)
    launch(kernel, (1, 2), host)  # the interpreter
    assert kernel.launches == [
        (torch.device("cuda", 1), (2,), (None, second, 3), {"BLOCK": 8}),
        (None, (1, 2), (host,), {}),
    ]


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
