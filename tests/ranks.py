"""Run a function on ranks, each a new process, and return the results or the first failure.

    def body(rank: int, world_size: int, hidden: int) -> float: ...
    results = run_ranks(body, 2, 64)          # [result of rank 0, result of rank 1]

The parent holds the rendezvous store, as torchrun's agent does, so that the port is free and tests
can run in parallel. `body` is a module-level function. Ranks are forked from a server that has
done the slow imports and nothing else; those of vLLM only for tests that name it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

__all__ = ["RankFailure", "Ranks", "Server", "message_of", "run_ranks", "server_of"]


class Server(forkserver.ForkServer):
    """A process that imports `modules`, those that are there, and forks ranks.

    environment: variables of the process before it imports anything.
    """

    starting = threading.Lock()  # changes os.environ

    def __init__(self, *modules: str, **environment: str) -> None:
        super().__init__()
        self.set_forkserver_preload([*modules])
        self._environment = environment

    def start(self, process: BaseProcess) -> None:
        """Start `process`, which is of multiprocessing's forkserver context."""
        inherited = os.environ.get("PYTHONPATH")  # `tools.sanitize` names its extension there
        folders = [str(Path(__file__).parents[1]), *([inherited] if inherited else [])]
        environment = {
            "PYTHONPATH": os.pathsep.join(folders),
            "OMP_NUM_THREADS": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else a look for GPUs would spoil its forks
            **self._environment,
        }
        with self.starting:
            with patch.dict(os.environ, environment):
                self.ensure_running()
            with patch.object(forkserver, "connect_to_new_process", self.connect_to_new_process):
                process.start()


# None starts a thread, which a fork would lose. Optimizers and FSDP2 import torch._dynamo.
_IMPORTS = (
    "tests",
    "pytest",
    "hypothesis",
    "torch._dynamo",
    "hybridengine.train.preflight",
    "hybridengine.train.rl",
    "hybridengine.train.sft",
    "hybridengine.hf.engine",
    "hybridengine.lab.flops",
    "hybridengine.lab.validation",
    "hybridengine.rewards.workers",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "rich._emoji_codes",
    "torch.profiler",
    "torch.utils.serialization",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3_moe",
    "tests.engines",
    "tests.loading",
    "tests.tiny_models",
    "tests.train.in_process",
    "tests.first_calls",
)
_SERVERS = {  # by whether their ranks use vLLM
    False: Server(*_IMPORTS),
    True: Server(*_IMPORTS, "tests.vllm_imports"),
}


def server_of(uses_vllm: bool) -> Server:
    """The process that forks ranks, of which some use vLLM or none."""
    return _SERVERS[uses_vllm]


class RankFailure(AssertionError):
    """A rank raised, exited or did not finish in time; the message has its traceback."""


def message_of(call: Callable[[], Any]) -> str:
    """The type and text of the error that `call` raises, "no error" if it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 300.0,
    env: dict[str, str] | None = None,
    device: str = "cpu",
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` on `world_size` ranks and return their results.

    Arguments and results are pickled (tensors by value). `env` is added to the variables that
    torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR, ...); it is set after torch is imported.
    device: "cpu": gloo ranks, which see no GPU; "cuda": one GPU each under NCCL, or, where there
    are fewer, shared GPUs under gloo.

    Raises RankFailure with the traceback of the first rank that failed, or its exit code, or the
    ranks that are late after `timeout_s`, whose stacks go to stderr. All ranks are ended.
    """
    with Ranks(fn, world_size, *args, timeout_s=timeout_s, env=env, device=device) as ranks:
        return ranks.results()


class Ranks:
    """The ranks of `run_ranks` while they run; several may run at a time, each world by itself."""

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout_s: float = 300.0,
        env: dict[str, str] | None = None,
        device: str = "cpu",
    ) -> None:
        self._store = dist.TCPStore(
            "127.0.0.1", 0, None, is_master=True, wait_for_workers=False, use_libuv=True
        )
        payload = pickle.dumps((fn, args))
        server = server_of(_names_vllm(fn, payload))
        self._timeout_s = timeout_s
        self.processes: list[BaseProcess] = []
        self._pipes: dict[Connection, int] = {}
        with Server.starting:
            inherited = dict(os.environ)
        for rank in range(world_size):
            place = _rank_env(rank, world_size, self._store.port)
            environment = {**inherited, **place, **(env or {})}
            if device == "cpu":
                environment["CUDA_VISIBLE_DEVICES"] = ""
            process, pipe = _start_rank(server, rank, environment, payload, timeout_s)
            self.processes.append(process)
            self._pipes[pipe] = rank

    def results(self) -> list[Any]:
        """Wait for the ranks and return their results. Raises RankFailure."""
        return self.results_without()

    def results_without(self, *killed: int) -> list[Any]:
        """As `results` for ranks of which some end by a signal; their result is None."""
        waiting = {pipe: rank for pipe, rank in self._pipes.items() if rank not in killed}
        results = _collect(self.processes, waiting, self._timeout_s)
        for pipe in self._pipes:
            pipe.close()
        for rank, process in enumerate(self.processes):
            if rank not in killed:  # which may be stopped
                process.join(5)
        return results

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _rank_env(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "tests",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def _names_vllm(fn: Callable[..., Any], payload: bytes) -> bool:
    """Whether the module of `fn`, or an argument, contains the word."""
    source = Path(sys.modules[fn.__module__].__file__ or "").read_text()
    return "vllm" in source or b"vllm" in payload


def _start_rank(
    server: Server, rank: int, environment: dict[str, str], payload: bytes, timeout_s: float
) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_rank_main, args=(environment, payload, timeout_s, theirs), name=f"rank{rank}"
    )
    server.start(process)
    theirs.close()  # an exit of the rank is then an end of file
    return process, ours


def _rank_main(
    environment: dict[str, str], payload: bytes, timeout_s: float, parent: Connection
) -> None:
    gc.freeze()  # what the server imported stays
    gc.unfreeze = lambda: None  # as vLLM does when an engine ends: each search would take 0.2 s
    os.environ.clear()
    os.environ.update(environment)
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    faulthandler.enable(all_threads=True)  # a crash prints its stacks
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        torch.set_num_threads(1)
        backend = "gloo"
        if torch.cuda.is_available():
            num_gpus = torch.cuda.device_count()
            os.environ["LOCAL_RANK"] = str(rank % num_gpus)  # of which sessions take their GPU
            torch.cuda.set_device(rank % num_gpus)
            if num_gpus >= world_size:
                backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        fn, args = pickle.loads(payload)
        message = pickle.dumps((True, fn(rank, world_size, *args)))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    parent.send_bytes(message)
    # Ranks exit together: the first one would close connections that others still use.
    with contextlib.suppress(EOFError):
        parent.recv_bytes()


def _collect(
    processes: list[BaseProcess], pipes: dict[Connection, int], timeout_s: float
) -> list[Any]:
    results: list[Any] = [None] * len(processes)
    deadline = time.monotonic() + timeout_s
    while pipes:
        ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in pipes.values():
                os.kill(processes[rank].pid or 0, signal.SIGUSR1)
            time.sleep(0.5)  # let the ranks print their stacks
            late = sorted(pipes.values())
            raise RankFailure(f"ranks {late} did not finish within {timeout_s:g} s; stacks above")
        for pipe in ready:
            rank = pipes.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                raise RankFailure(
                    f"rank {rank} ended without a result, exit code {processes[rank].exitcode}"
                ) from None
            if not ok:
                raise RankFailure(f"rank {rank} of {len(processes)} failed:\n{value}")
            results[rank] = value
    return results
