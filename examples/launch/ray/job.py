"""The job of `host.sh` on a Ray cluster: Ray Train places the hosts, Ray Serve the vLLM servers.

    ray job submit --working-dir . -- python examples/launch/ray/job.py --nodes 2 CONFIG key=value

--servers 2 --tp 4 adds two servers of four GPUs each, which generate in place of engines on the
trainers' GPUs. Ray Train starts all hosts again when one is lost, and the run resumes from its
newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import ray
from ray import serve, train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

HOST = str(Path(__file__).resolve().parent.parent / "host.sh")
START_S = 1200.0  # a server loads its model and captures its graphs


def run_host(options: dict[str, Any]) -> None:
    """Run one host of the job in a worker of Ray Train, which has all GPUs of the host."""
    context = train.get_context()
    here = {"head": ray.util.get_node_ip_address(), "port": free_port()}
    head = broadcast_from_rank_zero(here)
    variables = {
        "HEAD": head["head"],
        "PORT": str(head["port"]),
        "NODES": str(context.get_world_size()),
        "NODE": str(context.get_world_rank()),
        "GPUS": str(options["ranks"]),
        "RANKS": str(options["ranks"] + options["sends_requests"]),
        "HYBRIDENGINE_SECRET": options["secret"],
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    subprocess.run([HOST, *options["job"]], env=os.environ | variables, check=True)


@serve.deployment
class Server:
    """A vLLM server on this replica's GPUs, for `rollout.servers`."""

    def __init__(self, model: str, tp: int, secret: str, options: list[str]) -> None:
        host, port = ray.util.get_node_ip_address(), free_port()
        self._url = f"http://{host}:{port}"
        entry = "vllm.entrypoints.launchers.api_server.entry"
        command = [
            sys.executable,
            "-m",
            entry,
            "--model",
            model,
            "--host",
            host,
            "--port",
            str(port),
        ]
        command += ["--tensor-parallel-size", str(tp), "--load-format", "dummy"]
        command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
        command += ["--weight-transfer-config", '{"backend": "hybridengine"}', *options]
        variables = {"VLLM_SERVER_DEV_MODE": "1", "HYBRIDENGINE_SECRET": secret}
        self._process = subprocess.Popen(command, env=os.environ | variables)
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError(f"the server {self._url} has not started; see its log")
            time.sleep(1.0)

    def _answers(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self._url}/health", timeout=10).status == 200
        except OSError:
            return False

    def url(self) -> str:
        return self._url

    def check_health(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(f"the server {self._url} has ended")

    def __del__(self) -> None:
        self._process.terminate()


def start_servers(options: argparse.Namespace, secret: str) -> list[str]:
    """Start the servers, each a deployment of one replica; return their URLs."""
    urls = []
    for number in range(options.servers):
        bundle = {"CPU": 1, "GPU": options.tp if options.gpus else 0}
        deployment = Server.options(
            ray_actor_options={"num_cpus": 1, "num_gpus": bundle["GPU"]},
            placement_group_bundles=[bundle],
        )
        app = deployment.bind(options.model, options.tp, secret, options.server_option)
        handle = serve.run(app, name=f"server-{number}", route_prefix=f"/server-{number}")
        urls.append(handle.url.remote().result(timeout_s=START_S))
    return urls


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2, help="hosts that train")
    parser.add_argument("--gpus", type=int, default=8, help="of each; 0: CPUs alone")
    parser.add_argument("--ranks", type=int, help="ranks of each host; default: its GPUs")
    parser.add_argument("--servers", type=int, default=0, help="vLLM servers; 0: engines in ranks")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size of a server")
    parser.add_argument("--model", help="of the servers: the run's model.path")
    parser.add_argument("--server-option", action="append", default=[], help="of vllm serve")
    parser.add_argument("job", nargs="*", help="as of host.sh: [CONFIG] [key=value ...]")
    options = parser.parse_args()
    ray.init()
    secret = os.environ.get("HYBRIDENGINE_SECRET") or secrets.token_hex(32)
    urls = start_servers(options, secret)
    job = [*options.job, *([f"rollout.servers=[{','.join(urls)}]"] if urls else [])]
    ranks = options.ranks or options.gpus
    trainer = DataParallelTrainer(
        run_host,
        train_loop_config={
            "ranks": ranks,
            "sends_requests": bool(urls),
            "secret": secret,
            "job": job,
        },
        scaling_config=train.ScalingConfig(
            num_workers=options.nodes,
            use_gpu=options.gpus > 0,
            resources_per_worker={"GPU": options.gpus} if options.gpus else {"CPU": ranks},
            placement_strategy="STRICT_SPREAD" if options.gpus else "SPREAD",
        ),
        run_config=train.RunConfig(failure_config=train.FailureConfig(max_failures=3)),
    )
    trainer.fit()
    serve.shutdown()


if __name__ == "__main__":
    main()
