"""What the runs of NeMo RL, SkyRL and AReaL share: an environment, a model, what engines hold."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENGINE = {
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "kv_cache_memory_bytes": 16 << 20,
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
}
FACTORS = (1.25, -0.5, 3.0)  # before each sync: the parameters are multiplied
START_S = 900.0
RUN_S = 1800.0
VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def save_model(folder: Path) -> Path:
    """Write a small Qwen2 of random weights, biases and norms included, in float32."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    sizes: dict[str, Any] = dict(hidden_size=256, intermediate_size=352, num_hidden_layers=4)
    sizes |= dict(num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=512)
    sizes |= dict(vocab_size=1001, bos_token_id=1, eos_token_id=2)
    config = Qwen2Config(**sizes, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder / "model")
    words = WordLevel({str(i): i for i in range(1001)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def shard(model: Any) -> Any:
    """Return a model of transformers, sharded by FSDP2 over the ranks of the default group."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def step(model: Any, factor: float) -> None:
    """Change every parameter, as an optimizer's step does."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def save_trained(path: Path, folder: Path) -> Path:
    """Write the checkpoint that a model has after a step by each of FACTORS."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for factor in FACTORS:  # one after another: a product of factors rounds differently
        step(model, factor)
    model.save_pretrained(folder / "trained")
    return folder / "trained"


def check_digests(url: str, model: Path, trained: Path) -> int:
    """Compare every weight of a server with what vLLM's own loader writes; return their number.

    model, trained: checkpoints before and after the training. The server loads both, so that a
    loader that writes nothing is noticed.
    """
    held = held_digests(url)
    before, after = (_loaded_digests(url, path) for path in (model, trained))
    if held != after or held == before:
        wrong = sorted(name for name in after if held.get(name) != after[name])
        raise RuntimeError(f"weights differ from those of vLLM's loader: {wrong[:5]}")
    return len(held)


def _loaded_digests(url: str, path: Path) -> dict[str, str]:
    post(f"{url}/collective_rpc", {"method": "load_checkpoint", "args": [str(path)]})
    return held_digests(url)


def held_digests(url: str) -> dict[str, str]:
    """Return the SHA-256 of every weight that the workers of a server hold."""
    answer = post(f"{url}/weight_checker", {"action": "checksum"})
    return answer["checksums"]


def post(url: str, body: Any = None) -> Any:
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.loads(response.read() or b"null")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextmanager
def serving(
    python: Path, servers: Mapping[str, Sequence[str]], folder: Path, path: Sequence[Path] = ()
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run servers, URL → `python words…`, until the block ends; enter it once all of them answer.

    They write to folder / server_N.log. path: folders that they import from, after the root of
    this repository.
    """
    processes, logs = [], [folder / f"server_{number}.log" for number in range(len(servers))]
    try:
        for words, log in zip(servers.values(), logs, strict=True):
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        [str(python), *words],
                        cwd=ROOT,
                        env=variables(path),
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
        deadline = time.monotonic() + START_S
        for url, process, log in zip(servers, processes, logs, strict=True):
            while not _answers(f"{url}/health"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{url} did not start: {log.read_text()[-5000:]}")
                time.sleep(0.5)
        yield processes
    finally:
        for process in processes:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and its workers."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def start_ranks(
    python: Path, module: str, words: Sequence[str], path: Sequence[Path] = ()
) -> subprocess.Popen[bytes]:
    """Start two ranks of a module of this package under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [str(python), *launcher, "-m", f"tools.trainers.{module}", *words]
    return subprocess.Popen(command, cwd=ROOT, env=variables(path), start_new_session=True)


def check_runs(
    folder: Path,
    python: Path,
    module: str,
    model: Path,
    servers: Mapping[str, Sequence[str]],
    path: Sequence[Path] = (),
) -> dict[str, object]:
    """Run servers and two ranks of a trainer; compare weights and bytes; lose the last server.

    module: of this package. Its ranks get the model, the servers' URLs and a folder, into which
    they write their results after they have synced once for each of FACTORS, and again after the
    last server has ended and the file `ended` has appeared.
    servers: URL → words of its command.
    """
    trained = save_trained(model, folder)
    with ExitStack() as stack:
        results = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = stack.enter_context(serving(python, servers, folder, path))
        ranks = start_ranks(python, module, [str(model), ",".join(servers), str(results)], path)
        stack.callback(_end, ranks)
        synced = _results(results, ranks)
        compared = [check_digests(url, model, trained) for url in servers]
        stop(processes[-1])
        for file in results.glob("*.json"):
            file.unlink()
        (results / "ended").touch()
        lost = [row["lost"] for row in _results(results, ranks)]
        if ranks.wait(RUN_S):
            raise RuntimeError(f"the trainers ended with {ranks.returncode}")
    for row in lost:
        if "Error" not in row["error"]:
            raise RuntimeError(f"a server was lost, and the sync raised {row['error']!r}")
    sent = [row["sent"] for row in synced]
    expected = model_bytes(model)  # each byte of the model leaves the trainers once
    for of_sync in zip(*sent, strict=True):
        if not expected <= sum(of_sync) <= 1.01 * expected:  # norms go to each TP rank
            raise RuntimeError(f"sent {of_sync}, expected {expected} bytes together")
    return {
        "bytes_sent_per_rank": sent,
        "bytes_received_per_rank": [row["received"] for row in synced],
        "model_bytes_in_engine_dtype": expected,
        "a_float32_gather_receives_per_rank": expected,  # half of the parameters, 4 bytes each
        "weights_equal_by_sha256": compared,
        "syncs": len(FACTORS),
        "error_after_a_server_was_lost": lost,
        "vllm": version("vllm-cpu"),
        "torch": version("torch"),
    }


def _end(ranks: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its ranks."""
    ranks.terminate()
    ranks.wait()


def _results(folder: Path, ranks: subprocess.Popen[bytes]) -> list[Any]:
    """Wait until both ranks have written their results."""
    deadline = time.monotonic() + RUN_S
    files = [folder / f"{rank}.json" for rank in range(2)]
    while not all(file.exists() for file in files):
        if ranks.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the trainers ended with {ranks.poll()} before they had synced")
        time.sleep(0.2)
    return [json.loads(file.read_text()) for file in files]


def model_bytes(model: Path) -> int:
    """Return the bytes of a float32 checkpoint's parameters in bfloat16."""
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as tensors:
        return sum(2 * tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118


def variables(path: Sequence[Path] = ()) -> dict[str, str]:
    if "HYBRIDENGINE_SECRET" not in os.environ:
        os.environ["HYBRIDENGINE_SECRET"] = secrets.token_hex(32)
    return os.environ | VARIABLES | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path)))}


def write_results(folder: str, rank: int, results: Mapping[str, Any]) -> None:
    """Write the results of a rank for `check_runs`."""
    file = Path(folder, f"{rank}.json")
    file.with_suffix(".part").write_text(json.dumps(results))
    file.with_suffix(".part").rename(file)


def sync_then_lose(
    folder: str, model: Any, sync: Callable[[], object], report: Callable[[], Any]
) -> None:
    """Sync after a step by each of FACTORS, then lose a server; write what moved, and the errors.

    report: returns the SyncReport of the last sync on this rank.
    """
    import torch.distributed as dist

    results: dict[str, Any] = {"sent": [], "received": []}
    for factor in FACTORS:
        step(model, factor)
        sync()
        results["sent"].append(report().bytes_sent)
        results["received"].append(report().bytes_received)
    write_results(folder, dist.get_rank(), results)
    results["lost"] = lose_a_server(folder, sync)
    write_results(folder, dist.get_rank(), results)
    dist.barrier()


def lose_a_server(folder: str, sync: Callable[[], object]) -> dict[str, Any]:
    """Wait until `check_runs` has ended a server; return the error of a sync and its seconds."""
    from tests.ranks import message_of

    while not Path(folder, "ended").exists():
        time.sleep(0.2)
    started = time.monotonic()
    return {"error": message_of(sync), "seconds": round(time.monotonic() - started, 1)}


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
