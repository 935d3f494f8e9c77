"""What a run on one machine listens on, and what those sockets answer to others.

docs/security.md has the answers as a table; here they are compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.train.in_process import small_job

pytestmark = pytest.mark.multirank

# The first call, in the middle of the first step, looks at all processes of the run, sends garbage
# to each listener and valid commands to the store. A new process does it: torch takes a while.
REWARD = """
import fcntl, subprocess, sys
from pathlib import Path

HERE = Path(__file__).parent

def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open(HERE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if solution_str and not (HERE / "seen.json").exists():  # "": the check before the run
            subprocess.run([sys.executable, HERE / "intrude.py"], check=True)
    return float(len(solution_str))
"""
INTRUDE = """
import json, os, pickle, socket, struct, sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from pathlib import Path
import psutil
import torch.distributed as dist

HERE = Path(__file__).parent

class Bomb:
    def __reduce__(self):
        return os.mkdir, (str(HERE / "made"),)

def stderr_of(process):
    try:
        return os.readlink(f"/proc/{process}/fd/2")
    except OSError:  # of somebody else, or ended
        return None

# All processes of the run inherit its output.
run = [p for p in psutil.process_iter() if stderr_of(p.pid) == stderr_of("self")]
processes = {*run, *(child for p in run for child in p.children(recursive=True))}
listeners = {}
for process in processes:
    if process.pid != os.getpid():
        for c in process.net_connections("inet"):
            if c.status == psutil.CONN_LISTEN or c.type == socket.SOCK_DGRAM:
                listeners[str(c.laddr)] = (c.laddr.ip, c.laddr.port, " ".join(process.cmdline()))
def answer(to):
    (ip, port, _), sent = to
    with socket.create_connection((ip, port), timeout=10) as connection:
        connection.sendall(sent)
        connection.settimeout(1)
        try:
            return connection.recv(4096).hex()  # "": it closes the connection
        except TimeoutError:
            return "silence"
        except ConnectionError:
            return ""

GARBAGE = (b"GET / HTTP/1.1\\r\\n\\r\\n", bytes(64), b"\\xff" * 64, pickle.dumps(Bomb()))
HELLOS = [struct.pack("<Q", number) for number in range(8)]  # of gloo: the number of a pair
port = int(os.environ["MASTER_PORT"])
answers = {"store": [], "gloo": []}
with ThreadPoolExecutor(32) as pool:
    sent = [(to, x) for to, x in product(listeners.values(), (*GARBAGE, *HELLOS))
            if not (to[1] == port and x in HELLOS)]
    for (to, _), got in zip(sent, pool.map(answer, sent)):
        answers["store" if to[1] == port else "gloo"].append(got)
store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=30))
store.set("nobody/x", b"1")
answers["valid"] = {
    "list": len(store.list_keys()) > 1,
    "set, get": store.get("nobody/x").decode(),
    "add": store.add("nobody/n", 2),
    "compare_set": store.compare_set("nobody/x", "1", "2").decode(),
    "delete": store.delete_key("nobody/x"),
}
written = []
for key in store.list_keys():
    if any(part in key for part in ("heartbeat", "process/", "answer/", "question")):
        store.set(key, pickle.dumps(Bomb()))
        written.append(key)
for key in ("signal", "weights_wanted", "end", "item/99", "finished/99", "received/99"):
    store.set(f"nobody/{key}", pickle.dumps(Bomb()))
store.set("hybridengine/0/0/0/failure/0", pickle.dumps(Bomb()))
store.check(["last"])
seen = {"listeners": list(listeners.values()), "written": written, "processes": len(processes),
        "answers": answers}
(HERE / "seen.json").write_text(json.dumps(seen))
"""

ALL_ROLES = (
    "trainer.mode=one_step_off",
    "rollout.n_gpus_per_node=1",
    "critic.n_gpus_per_node=1",
    "algorithm.adv_estimator=gae",
)
VLLM = (
    "rollout.name=vllm",
    "rollout.tensor_model_parallel_size=2",
    "rollout.kv_cache_gib=0.1",
    "trainer.n_gpus_per_node=2",
)


@pytest.mark.parametrize(
    ("settings", "num_ranks"),
    [
        pytest.param(ALL_ROLES, 3, id="roles"),
        pytest.param((), 2, id="sync", marks=pytest.mark.exhaustive),
        pytest.param(VLLM, 2, id="vllm", marks=pytest.mark.exhaustive),
        pytest.param(
            ("trainer.mode=async", "rollout.n_gpus_per_node=1"),
            2,
            id="async",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
@pytest.mark.parametrize(
    "launcher", ["own", pytest.param("torchrun", marks=pytest.mark.exhaustive)]
)
def test_others_reach_nothing(
    settings: tuple[str, ...], num_ranks: int, launcher: str, tmp_path: Path
) -> None:
    job = [*small_job(tmp_path), *settings, "trainer.total_training_steps=2"]
    if not settings:
        job.append("trainer.n_gpus_per_node=2")
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "intrude.py").write_text(INTRUDE)
    taken_away = ("HYBRIDENGINE_SECRET", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    environment = {k: v for k, v in os.environ.items() if k not in taken_away}
    command = ["-m", "hybridengine", "grpo", *job]
    if launcher == "own":
        uses_vllm = settings == VLLM
        done = run_forked([sys.executable, *command], env=environment, uses_vllm=uses_vllm)
    else:  # a new interpreter, whose command line names the process
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
        command = [sys.executable, *torchrun, *command]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "made").exists(), "a message of somebody else ran code"
    assert (tmp_path / "run" / "summary.json").is_file()
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["written"] and seen["processes"] > num_ranks
    assert "was refused: it is not signed by the HYBRIDENGINE_SECRET" in done.stderr
    answers = seen["answers"]
    assert set(answers["gloo"]) <= {"", "silence"}, "gloo says nothing to others"
    assert set(answers["store"]) <= {"", "silence"}, "nor does torch's store to garbage"
    # It obeys everybody who speaks its protocol: what it has is signed therefore.
    expected = {"list": True, "set, get": "1", "add": 2, "compare_set": "2", "delete": True}
    assert answers["valid"] == expected
    for ip, port, process in seen["listeners"]:
        ours = ip in ("127.0.0.1", "::ffff:127.0.0.1", "::1")
        # torch's own store under torchrun listens on all interfaces; docs/security.md.
        assert ours or (launcher == "torchrun" and "torch.distributed.run" in process), (
            f"{process} listens on {ip}:{port}"
        )
    assert not (tmp_path / "run" / ".secret").exists()
