"""One run at a time in a folder; the lock is released when its process ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hybridengine.run.errors import ConfigError
from hybridengine.run.launch import run_lock

HOLDER = """
import sys, time
from hybridengine.run.launch import run_lock
with run_lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert run.stdout is not None and run.stdout.readline() == "held\n"
        with pytest.raises(ConfigError) as error, run_lock(tmp_path / "run"):
            pass
        assert f"process {run.pid} on {socket.gethostname()}, since 20" in str(error.value)
        assert "trainer.default_local_dir" in str(error.value)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    with run_lock(tmp_path / "run"):
        pass
    with run_lock(tmp_path / "run"):  # it was released
        pass


def test_a_folder_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"), run_lock(tmp_path / "file" / "run"):
        pass
