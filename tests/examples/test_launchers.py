"""`examples/launch`: two hosts, a stop without loss, and what every launcher sets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from hybridengine.run.config import load_config
from tests.ports import free_port
from tests.train.in_process import small_job

EXAMPLE = Path("examples/launch")
HOST = str(EXAMPLE / "host.sh")
LIMIT_S = 120.0
SRUN = """#!/usr/bin/env bash
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
wait $first && wait $second
"""
SLOW = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.1)
    return -len(solution_str)
"""


@contextmanager
def started(command: Sequence[str], **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command with one thread per process; none of its processes is left at the end."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.Popen(command, env=environment, **pipes)
    try:
        yield run
    finally:
        with suppress(psutil.NoSuchProcess):  # it ended, as it should
            host = psutil.Process(run.pid)
            for process in (*host.children(recursive=True), host):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        run.wait()


def test_the_config_is_valid() -> None:
    config = load_config(EXAMPLE / "grpo.yaml")
    assert config.world_size == 16 and config.data_parallel_size == 8


@pytest.mark.exhaustive
@pytest.mark.multirank
def test_two_hosts_run_one_job(tmp_path: Path) -> None:
    commands = {"srun": SRUN, "scontrol": "#!/usr/bin/env bash\necho 127.0.0.1\necho 127.0.0.2\n"}
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "empty.yaml").write_text("")
    variables = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_JOB_NODELIST": "host[0-1]",
        "SLURM_JOB_ID": str(os.getpid()),
    }
    job = [*small_job(tmp_path), "actor.ulysses_sequence_parallel_size=2"]
    script = str(EXAMPLE / "slurm" / "job.sbatch")
    with started([script, str(tmp_path / "empty.yaml"), *job], **variables) as run:
        output, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == 2 and summary["steps"] == 1
    assert (tmp_path / "run" / "final" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.multirank
def test_sigterm_to_a_host_saves_the_step(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    job = [
        *small_job(tmp_path),
        "trainer.total_training_steps=1000",
        f"reward.custom_reward_function.path={tmp_path / 'slow.py'}",
    ]
    (tmp_path / "slow.py").write_text(SLOW)
    variables = {"HEAD": "127.0.0.1", "NODES": "1", "NODE": "0", "GPUS": "1"}
    variables["PORT"] = str(free_port())
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + LIMIT_S
    with started([HOST, str(tmp_path / "empty.yaml"), *job], **variables) as run:
        while not (metrics.is_file() and metrics.read_text()):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        run.terminate()
        output, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 3, output
    [step] = re.findall(r"stopped by SIGTERM after step (\d+) of 1000", output)
    assert (tmp_path / "run" / f"global_step_{step}").is_dir()


def test_every_launcher_sets_what_a_host_needs() -> None:
    script = Path(HOST).read_text()
    needed = {"HEAD", "NODE", "NODES", "GPUS"}
    assert needed == set(re.findall(r"\$([A-Z]+)", script))  # the others have defaults
    files = ("slurm/job.sbatch", "ray/job.py", "skypilot/job.yaml", "kubernetes/pytorchjob.yaml")
    for file in files:
        text = (EXAMPLE / file).read_text()
        assert "host.sh" in text
        assert {name for name in needed if not re.search(rf"\b{name}\b", text)} == set(), file
    [service, job] = yaml.safe_load_all((EXAMPLE / "kubernetes" / "job.yaml").read_text())
    [host] = job["spec"]["template"]["spec"]["containers"]
    assert needed <= {variable["name"] for variable in host["env"]}
    assert host["command"] == [HOST]
    head = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert head == next(v["value"] for v in host["env"] if v["name"] == "HEAD")
    pods = next(v["value"] for v in host["env"] if v["name"] == "NODES")
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(pods)
