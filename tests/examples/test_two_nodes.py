"""The SLURM script, and through it the plain one: two torchrun agents with one rank each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hybridengine.config import load_config
from tests.trainer.in_process import small_job

EXAMPLE = Path("examples/two_nodes")
SRUN = """#!/usr/bin/env bash
shift  # --kill-on-bad-exit=1
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
wait $first && wait $second
"""


def test_the_config_is_valid():
    config = load_config(EXAMPLE / "grpo.yaml")
    assert config.world_size == 16 and config.data_parallel_size == 8


@pytest.mark.exhaustive
@pytest.mark.multirank
def test_two_agents_run_one_job(tmp_path: Path) -> None:
    commands = {"srun": SRUN, "scontrol": "#!/usr/bin/env bash\necho 127.0.0.1\necho 127.0.0.2\n"}
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "empty.yaml").write_text("")
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_JOB_NODELIST": "host[0-1]",
        "SLURM_JOB_ID": str(os.getpid()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    job = [*small_job(tmp_path), "actor.ulysses_sequence_parallel_size=2"]
    run = subprocess.Popen(
        [str(EXAMPLE / "slurm.sbatch"), str(tmp_path / "empty.yaml"), *job],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = run.communicate(timeout=120)
    finally:
        with suppress(ProcessLookupError):  # it ended, as it should
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == 2 and summary["steps"] == 1
    assert (tmp_path / "run" / "final" / "config.json").is_file()
