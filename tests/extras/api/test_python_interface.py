"""`hybridengine.Trainer` on a tiny model, in one process without torchrun, as in a notebook."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

import hybridengine
from tests.extras.api.small_job import TORCHRUN, alone, settings_of, typed
from tests.forked import run_forked
from tests.ports import free_port
from tests.ranks import message_of, run_ranks
from tests.train.in_process import small_job
from tests.train.sft_job import sft_settings, write_sft_job

pytestmark = pytest.mark.multirank  # starts processes

TIMES = ("timing_s", "perf", "reshard/")


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.json").write_text(json.dumps(small_job(folder)))
    source = inspect.getsource(right).replace("right(", "compute_score(data_source, extra_info, ")
    (folder / "right.py").write_text(source)
    (folder / "sft").mkdir()
    write_sft_job(folder / "sft")
    return folder


def right(solution_str, ground_truth):
    words = [int(word[1:]) for word in solution_str.split() if word.startswith("w")]
    low, high = ground_truth
    return sum(low <= word < high for word in words) / max(1, len(words))


def numbers(folder: Path) -> list[dict[str, float]]:
    """What a run logged, without times and what only its reward function's name changes."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {k: v for k, v in row.items() if not k.startswith((*TIMES, "time", "reward/"))}
        for row in rows
    ]


# ---- one process: what the calls do


def _life(rank: int, world_size: int, folder: Path) -> dict:
    alone()
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hybridengine import Trainer
    from hybridengine.run.config import load_config
    from hybridengine.train.start import start_rank

    found: dict = {}
    settings = settings_of(folder, "api", **{"data.val_files": folder / "rows.jsonl"})
    events = []
    with Trainer(
        settings,
        reward=right,
        on_step_end=lambda step, metrics: events.append(("step", step, metrics["actor/lr"] > 0)),
        on_validation=lambda step, metrics: events.append(("val", step, "val/score" in metrics)),
        on_save=lambda step, path: events.append(("save", step, any(path.iterdir()))),
    ) as trainer:
        for step in trainer:
            rollouts = step.collect()
            metrics = step.update(rollouts)
        found["metrics"] = metrics["training/global_step"], trainer.metrics["val/score"]
        found["steps"] = trainer.steps_done, trainer.num_steps, len(rollouts.own)
        trainer.export(folder / "exported")
        found["saved"] = trainer.save().name
    found["events"] = events
    found["torn down"] = not dist.is_initialized() and "RANK" not in os.environ
    found["files"] = sorted(path.name for path in (folder / "api").iterdir())

    # The loop of the command line, with the same reward from a file.
    os.environ.update(
        dict(zip(TORCHRUN, ("0", "0", "1", "1", "127.0.0.1", str(free_port())), strict=True))
    )
    cli = settings_of(folder, "cli", **{"data.val_files": folder / "rows.jsonl"})
    cli["reward.custom_reward_function.path"] = folder / "right.py"
    with agent_store():
        start_rank(load_config(None, cli))
    alone()

    # A loaded model, a configuration object, fit().
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    plain = settings_of(folder, "loaded", **{"data.val_files": folder / "rows.jsonl"})
    config = load_config(None, {k: v for k, v in plain.items() if "reward" not in k})
    with Trainer(config, model=model, tokenizer=tokenizer, reward=right) as trainer:
        found["fit"] = trainer.fit()["training/global_step"]
    return found


@contextmanager
def agent_store():
    """The rendezvous store that torchrun's agent holds."""
    import torch.distributed as dist

    port = int(os.environ["MASTER_PORT"])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    try:
        yield store
    finally:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]


@pytest.fixture(scope="module")
def life(job):
    return SimpleNamespace(folder=job, **run_ranks(_life, 1, job, timeout_s=400.0)[0])


def test_a_loop_trains_and_reports(life):
    assert life.metrics[0] == 2.0 and life.steps == (2, 2, 16)
    assert life.events == [
        ("val", 0, True),
        ("step", 1, True),
        ("step", 2, True),
        ("val", 2, True),
        ("save", 2, True),
    ]


def test_the_folder_is_that_of_a_run(life):
    files = life.__dict__["files"]
    assert {"final", "summary.json", "metrics.jsonl", "rollouts", "global_step_2"} <= {*files}
    assert (
        life.folder / "exported" / "model.safetensors"
    ).is_file() and life.saved == "global_step_2"


def test_it_is_the_loop_of_the_command_line(life):
    assert numbers(life.folder / "api")[:4] == numbers(life.folder / "cli")[:4]
    assert len(numbers(life.folder / "cli")) == 4  # two validations, two steps


def test_a_loaded_model_and_a_configuration_object(life):
    assert life.fit == 2.0
    assert numbers(life.folder / "loaded") == numbers(life.folder / "cli")


def test_the_process_group_is_torn_down(life):
    assert life.__dict__["torn down"]


# ---- misuse


def _misuse(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    alone()
    import torch.distributed as dist

    from hybridengine import Trainer

    settings = settings_of(folder, "misuse", **{"trainer.resume_mode": "auto"})
    messages = {}

    def note(name, call):
        messages[name] = message_of(call)

    note("no function", lambda: Trainer(settings, reward="reward.py"))
    note("unknown key", lambda: Trainer(settings, overrides={"rollout.nn": 2}))
    note("no override", lambda: Trainer(settings, overrides=["rollout.n"]))
    note("task", lambda: Trainer(settings, task="dpo"))
    note("ranks", lambda: Trainer(settings, overrides={"trainer.n_gpus_per_node": 8}))
    note("bad reward", lambda: Trainer(settings, reward=lambda text: 1.0))
    note("model", lambda: Trainer(settings, model=3))
    trainer = Trainer(settings, reward=right, overrides=["rollout.n=2"])
    note("second trainer", lambda: Trainer(settings))
    note("update before data", lambda: trainer.update_policy(None))
    note("no validation", trainer.validate)
    step = next(iter(trainer))
    note("update before collect", lambda: step.update(None))
    rollouts = step.collect()
    note("collect twice", step.collect)
    note("collect_data twice", trainer.collect_data)
    note("save in a step", trainer.save)
    note("no rollouts", lambda: step.update([1]))
    step.update(rollouts.select([1, 0, 3]))
    note("update twice", lambda: step.update(rollouts))
    again = trainer.collect_data()
    note("other step", lambda: trainer.update_policy(rollouts))
    trainer.update_policy(again)
    note("all done", trainer.collect_data)
    trainer.save()
    trainer.finish()
    trainer.close()
    trainer.close()
    note("closed", trainer.collect_data)
    note("closed step", step.collect)

    def fail(step, metrics):
        raise KeyError("wandb")

    def failing():
        with Trainer(settings_of(folder, "callback"), reward=right, on_step_end=fail) as trainer:
            trainer.fit()

    note("callback", failing)
    failed = settings_of(folder, "reward")
    note("reward", lambda: _fit(Trainer, failed, lambda solution_str: 1 / 0))

    with Trainer(settings, reward=right) as finished:  # resumed: nothing is left
        messages["nothing left"] = str([*finished])
        note("finished before", finished.save)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with Trainer(settings_of(folder, "own_group"), reward=right) as trainer:
        trainer.fit()
    messages["own group"] = str(dist.is_initialized())
    dist.destroy_process_group()
    return messages


def _fit(trainer, settings, reward):
    with trainer(settings, reward=reward) as run:
        run.fit()


@pytest.fixture(scope="module")
def misuse(job):
    return run_ranks(_misuse, 1, job, timeout_s=400.0)[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no function", "ConfigError: reward is 'reward.py', expected a function"),
        ("unknown key", "ConfigError: rollout.nn (in overrides) is not a known key; did you mean"),
        ("no override", "ConfigError: override 'rollout.n' is not `key=value`"),
        ("task", "ConfigError: task is 'dpo', expected grpo, ppo or sft"),
        ("ranks", "is 8, but this process is one rank; set trainer.n_gpus_per_node=1"),
        ("bad reward", "RewardError: reward function lambda requires 'text'"),
        ("model", "ConfigError: model is int, expected a path or a transformers model"),
        ("second trainer", "UsageError: a Trainer is open in this process"),
        ("update before data", "UsageError: there is no data yet; call collect_data() first"),
        ("no validation", "ConfigError: there is nothing to validate on; set data.val_files"),
        ("update before collect", "UsageError: step 1 has no data yet; call step.collect() first"),
        ("collect twice", "UsageError: step 1 has collected its data already"),
        ("collect_data twice", "UsageError: step 1 is not done; call step.update(data) before"),
        ("save in a step", "before you save a checkpoint"),
        ("no rollouts", "UsageError: step.update got list, expected what collect() returns"),
        ("update twice", "UsageError: step 1 is over"),
        ("other step", "UsageError: step 2 got the rollouts of step 1"),
        ("all done", "UsageError: all 2 steps are done"),
        ("closed", "UsageError: this Trainer is closed"),
        ("closed step", "UsageError: this Trainer is closed"),
        ("callback", "CallbackError: the callback on_step_end raised KeyError after step 1: 'wan"),
        ("reward", "RewardError: reward function lambda raised ZeroDivisionError"),
        ("nothing left", "[]"),
        ("finished before", "had finished its 2 steps before; raise trainer.total_training_steps"),
        ("own group", "True"),
    ],
)
def test_misuse_is_named(misuse, name, message):
    assert message in misuse[name]


# ---- resuming, SFT, ranks, engines


def _resume_and_sft(rank: int, world_size: int, folder: Path) -> dict:
    alone()
    from hybridengine import Trainer

    found: dict = {}
    for run in ("once", "twice"):
        settings = settings_of(folder, run, **{"trainer.resume_mode": "auto"})
        with Trainer(settings, reward=right) as trainer:
            first = next(iter(trainer))
            first.update(first.collect())
            if run == "twice":
                trainer.save()
                trainer.close()
        if run == "twice":
            trainer = Trainer(settings, reward=right)
            found["resumed after"] = trainer.steps_done
            found["metrics"] = trainer.fit()
            trainer.close()
    sft = dict(pair.split("=", 1) for pair in sft_settings(folder / "sft"))
    overrides = {**{k: typed(v) for k, v in sft.items()}, "trainer.total_training_steps": 2}
    with Trainer(overrides=overrides, task="sft") as trainer:
        data = trainer.collect_data()
        found["conversations"] = len(data), type(data[0]).__name__
        losses = [trainer.update_policy(data)["train/loss"]]
        for step in trainer:
            losses.append(step.update(step.collect())["train/loss"])
        found["losses"], found["sync"] = losses, trainer.metrics.get("reshard/ms")
    return found


def test_resume_and_sft(job):
    found = run_ranks(_resume_and_sft, 1, job, timeout_s=300.0)[0]
    assert found["resumed after"] == 1
    assert found["metrics"]["training/global_step"] == 2.0
    assert found["conversations"] == (8, "SFTSample") and len(found["losses"]) == 2
    assert found["sync"] is None


def test_every_rank_of_torchrun_makes_the_same_calls(job):
    settings = settings_of(job, "two", **{"trainer.n_gpus_per_node": 2})
    (job / "two.json").write_text(json.dumps(settings, default=str))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = run_forked([*torchrun, "-m", "tests.extras.api.calls_of_a_rank", job / "two.json"])
    assert ended.returncode == 0, ended.stderr
    (own, total, norm), (other, _, other_norm) = (
        json.loads((job / f"two.json.{rank}").read_text()) for rank in range(2)
    )
    assert own + other == total == 16 and norm == other_norm > 0


def _vllm(rank: int, world_size: int, folder: Path) -> list[float]:
    alone()
    from hybridengine import Trainer

    vllm = {"rollout.name": "vllm", "rollout.enforce_eager": True, "rollout.kv_cache_gib": 0.1}
    with Trainer(settings_of(folder, "vllm", **vllm), reward=right) as trainer:
        return [step.update(step.collect())["training/rollout_probs_diff_max"] for step in trainer]


@pytest.mark.exhaustive
def test_with_vllm(job):
    pytest.importorskip("vllm")
    diffs = run_ranks(_vllm, 1, job, timeout_s=400.0)[0]
    assert len(diffs) == 2 and max(diffs) < 1e-3


def test_importing_the_package_stays_light():
    code = (
        "import sys, hybridengine; assert hasattr(hybridengine, '__version__'); "
        "assert not {'torch', 'transformers', 'vllm'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    assert hybridengine.Trainer.__module__ == "hybridengine.api"
