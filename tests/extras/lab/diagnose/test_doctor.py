"""The checks of an installation: this one is right, and faults of each kind are found."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridengine.lab.diagnose import doctor


def states(check, folder: Path) -> dict[str, str]:
    return {result.name: result.state for result in check(folder)}


def test_this_installation_can_run(tmp_path: Path) -> None:
    checks = (doctor.check_versions, doctor.check_native, doctor.check_gpu)
    found = [result for check in checks for result in check(tmp_path)]
    assert [check for check in found if check.state == "problem"] == []
    assert {"python", "torch", "transformers", "extension"} <= {check.name for check in found}
    assert all(check.advice for check in found if check.state != "ok")
    assert doctor.checks_table(found).row_count == len(found)


@pytest.mark.slow
def test_a_process_that_has_imported_nothing(tmp_path: Path) -> None:
    """As the command starts: nobody has loaded torch, whose libraries the extension needs."""
    code = (
        "from pathlib import Path; from hybridengine.lab.diagnose import doctor\n"
        "print([c.text for c in doctor.check_native(Path()) if c.state != 'ok'])"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_vllm_has_every_name_that_we_import() -> None:
    pytest.importorskip("vllm")
    [check] = doctor.check_vllm(Path())
    assert check.state != "problem", check


def test_a_missing_interface_is_named() -> None:
    names = {("json", "loads"), ("json", "nothing"), ("no_such_module", "x"), ("os", "path")}
    assert doctor.missing_names(names) == ["json.nothing", "no_such_module.x"]
    assert ("vllm", "LLM") in doctor.vllm_names()


def test_a_wrong_version_and_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [
        "torch>=99",
        "no-such-package",
        'transformers>=1; extra == "train"',
        'x; extra=="dev"',
    ]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: wanted)
    found = {check.name: check for check in doctor.check_versions(Path())}
    assert found["torch"].state == "problem" and "torch>=99" in found["torch"].advice
    assert found["no-such-package"].state == "problem" and found["transformers"].state == "ok"
    assert "x" not in found


def test_a_full_disk_and_closed_ports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert states(doctor.check_ports, tmp_path)["ports"] == "ok"

    def refuse(*_: object) -> None:
        raise PermissionError("not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert states(doctor.check_ports, tmp_path)["ports"] == "problem"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    found = states(doctor.check_memory_and_disk, tmp_path / "not" / "there")
    assert found["disk"] == found["temporary folder"] == "problem"
