"""Runs whose rollouts come from servers, of which some are killed and started again."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from hybridengine.run.monitor import EXIT_RANK_FAILED
from tests.extras.remote.overlapped import run_overlapped
from tests.extras.remote.stand_in_server import serve
from tests.ports import free_port
from tests.ranks import Ranks
from tests.train.in_process import Result, small_job

pytestmark = pytest.mark.multirank
STEPS = 6
DELAY_S = 0.05  # of a generation


class Servers:
    """Stand-ins on ports that stay theirs when they are started again."""

    def __init__(self, model: str, number: int, stack: ExitStack) -> None:
        self._model, self._stack, self._processes = model, stack, dict[int, Ranks]()
        self.ports = [free_port() for _ in range(number)]
        for index in range(number):
            self.start(index)

    def start(self, index: int) -> None:
        ranks = Ranks(serve, 1, self.ports[index], self._model, DELAY_S)
        self._processes[index] = self._stack.enter_context(ranks)

    def kill(self, index: int) -> None:
        process = self._processes[index].processes[0]
        process.kill()
        process.join()

    def post(self, index: int, route: str, value: int) -> None:
        """Post to a server once it answers."""
        address, deadline = f"{self.url(index)}/{route}", time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(address, json.dumps(value).encode(), timeout=10).close()
                return
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def url(self, index: int) -> str:
        return f"http://127.0.0.1:{self.ports[index]}"

    def versions(self, index: int) -> list[int]:
        """Return the weight version of every request that a server has answered."""
        with urllib.request.urlopen(f"{self.url(index)}/generated", timeout=10) as answer:
            return [int(label.rpartition("/")[2]) for label in json.load(answer)]


@contextmanager
def killing(servers: Servers, index: int, run: Path, step: int) -> Iterator[None]:
    """Kill a server once the rollouts of a step are written, and start it again."""

    def restart() -> None:
        while not (run / "rollouts" / f"step_{step}.jsonl").exists():
            time.sleep(0.01)
        servers.kill(index)
        servers.start(index)

    thread = threading.Thread(target=restart, daemon=True)
    thread.start()
    yield
    thread.join(timeout=60)
    assert not thread.is_alive()


def run_rank(rank: int, world_size: int, folder: Path, overrides: list[str]) -> int:
    from hybridengine.run.config import load_config
    from hybridengine.train import report
    from hybridengine.train.rl import RLTrainer

    report.plugins = lambda group: {}
    dist.barrier()
    dist.destroy_process_group()
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"record_{rank}.json")
    return RLTrainer.run(load_config(None, overrides))


@pytest.mark.parametrize(
    ("route", "message"),
    [
        ("flip_bit", r"the weights of server {url} have changed since the sync to version 1"),
        ("miss_update", r"missed the sync to version 1: it has weights of version 1 with the"),
    ],
)
def test_servers_with_other_weights_end_the_run(tmp_path: Path, route: str, message: str) -> None:
    with ExitStack() as stack:
        pairs = dict(o.split("=", 1) for o in small_job(tmp_path))
        servers = Servers(pairs["model.path"], 2, stack)
        pairs |= {
            "rollout.name": "auto",
            "rollout.max_num_seqs": "8",
            "rollout.servers": f"[{servers.url(0)},{servers.url(1)}]",
            "trainer.mode": "one_step_off",
            "trainer.total_training_steps": "4",
        }
        servers.post(1, route, 1)
        job = [f"{k}={v}" for k, v in pairs.items()]
        with Ranks(run_rank, 2, tmp_path, job, timeout_s=120) as ranks:
            ranks.processes[0].join(100)  # the trainer rank, which names the engine rank's error
            assert ranks.processes[0].exitcode == EXIT_RANK_FAILED
    record = json.loads((tmp_path / "record_0.json").read_text())["message"]["message"]
    assert re.search(message.format(url=re.escape(servers.url(1))), record), record


def versions_of(run: Result) -> list[set[int]]:
    assert not run.refused
    steps = range(1, STEPS + 1)
    return [{row["weight_version"] for row in run.rollouts[f"step_{k}"]} for k in steps]


def test_servers_that_are_killed_come_back(tmp_path: Path) -> None:
    pairs = dict(o.split("=", 1) for o in small_job(tmp_path))
    pairs |= {
        "rollout.name": "auto",
        "rollout.max_num_seqs": "8",
        "trainer.total_training_steps": str(STEPS),
        "trainer.timeout_s": "60",
    }
    with ExitStack() as stack:
        servers = Servers(pairs["model.path"], 2, stack)
        overlapped = {
            "trainer.mode": "one_step_off",
            "trainer.default_local_dir": str(tmp_path / "overlapped"),
            "rollout.servers": f"[{servers.url(0)},{servers.url(1)}]",
        }
        alone = {
            "trainer.default_local_dir": str(tmp_path / "alone"),
            "rollout.servers": f"[{servers.url(0)}]",
        }
        jobs = [[f"{k}={v}" for k, v in (pairs | more).items()] for more in (overlapped, alone)]
        with (
            killing(servers, 1, tmp_path / "overlapped", step=1),
            killing(servers, 0, tmp_path / "alone", step=2),
        ):
            first, second = run_overlapped(tmp_path, jobs, num_ranks=2)
        assert versions_of(first) == [{0}, *({k} for k in range(STEPS - 1))]
        assert versions_of(second) == [{k} for k in range(STEPS)]
        # Both servers have the same weights of a version, which differ from one to the next.
        checksums = [
            {(row["weight_version"], row["weights_checksum"]) for row in rows}
            for rows in (first.rollouts[f"step_{k}"] for k in range(2, STEPS + 1))
        ]
        assert len(set.union(*checksums)) == len({c for _, c in set.union(*checksums)}) == STEPS - 1
        # The log-probs are those of the weights that the version names: on policy, the trainer's.
        diffs = [r["training/rollout_probs_diff_max"] for r in second.rows if "actor/pg_loss" in r]
        assert len(diffs) == STEPS and max(diffs) < 1e-5
        assert servers.versions(0)[-1] == STEPS - 1, "the only server is back at the newest weights"
