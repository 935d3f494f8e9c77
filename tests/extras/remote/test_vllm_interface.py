"""Both halves of our backend against the recorded interfaces of vLLM 0.32 and 0.33."""

from __future__ import annotations

import inspect
import sys
import zipfile
from pathlib import Path

import pytest

from tests.extras.remote.vllm_interface import (
    INTERFACE,
    VERSIONS,
    differences,
    recorded,
    version_of,
)

pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

BASE = "vllm.distributed.weight_transfer.base"


def installed() -> Path:
    import vllm

    return Path(vllm.__file__).parents[1]


def test_the_installed_version_is_as_recorded() -> None:
    assert differences(installed()) == []


def test_every_name_exists_in_a_version() -> None:
    for names in INTERFACE.values():
        for name, signature in names.items():
            assert signature is not None and signature != (None, None), name


@pytest.mark.slow
def test_a_changed_wheel_is_reported(tmp_path: Path) -> None:
    wheel = tmp_path / f"vllm-{version_of(installed())}.0-cp38-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as out:
        for module in INTERFACE:
            file = installed().joinpath(*module.split(".")).with_suffix(".py")
            if not file.exists():
                continue
            text = file.read_text()
            if module == BASE:
                text = text.replace("def receive_weights(self, update_info", "def receive(self, x")
                text = text.replace("self._module = module", "self._model = module")
            out.writestr(f"{module.replace('.', '/')}.py", text)
    assert differences(wheel) == [
        f"{BASE}.ModuleSource._module: recorded (attribute), is nothing",
        f"{BASE}.WeightTransferEngine.receive_weights: recorded (self, update_info), is nothing",
    ]


def test_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got vLLM 0\.34, expected \('0\.32', '0\.33'\)"):
        version_of(Path("vllm-0.34.1-cp38-abi3-linux_x86_64.whl"))


def fits(method: object, signature: str) -> bool:
    """Whether `method`, of an object or a class, takes the recorded parameters."""
    positional, _, named = signature.partition("*, ")
    names = [[n.rstrip("=") for n in x.split(", ") if n] for x in (positional, named)]
    try:
        inspect.signature(method).bind(*names[0][1:], **dict.fromkeys(names[1]))  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("version", VERSIONS)
def test_our_halves_take_the_calls_of_both_versions(version: str) -> None:
    from hybridengine.remote.vllm_transfer.trainer import CALLS, HybridEngineTrainerTransfer
    from hybridengine.remote.vllm_transfer.transfer import HybridEngineTransfer

    halves = {
        "WeightTransferEngine": HybridEngineTransfer.__new__(HybridEngineTransfer),
        "TrainerWeightTransferEngine": HybridEngineTrainerTransfer.__new__(
            HybridEngineTrainerTransfer
        ),
    }
    checked, of_client = set(), set()
    for module, name, signature in recorded(version):
        owner, _, method = name.rpartition(".")
        if owner == "VLLMWeightSyncClient":
            of_client.add(method)
        if module == BASE and owner in halves and method != "__init__" and signature != "value":
            assert signature is not None and fits(getattr(halves[owner], method), signature), name
            checked.add(method)
    assert len(checked) >= 9 and set(CALLS) == of_client


def test_fits_tells_calls_apart() -> None:
    assert fits("".split, "self, sep=, maxsplit=") and not fits("".split, "self, a, b, c")
    assert not fits(sys.exit, "self, *, code=")
