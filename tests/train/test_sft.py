"""SFT: the loss is transformers' own, whatever the split; what is learnt, logged and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hybridengine import cli
from tests.model.rotary_configs import LONG_ROPE, tiny
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny
from tests.train.sft_job import sft_settings, start_run, write_sft_job

pytestmark = pytest.mark.multirank


def one_step(rank: int, world_size: int, folder: Path, overrides: dict):
    """Metrics of the first step, and the mean loss after it."""
    run = start_run(rank, world_size, folder, **overrides)
    metrics, _ = run.step(1)
    return metrics, run.loss_of(run.data)


def first_steps(rank: int, world_size: int, folder: Path, jobs: list[dict]) -> list[tuple]:
    return [one_step(rank, world_size, folder, overrides) for overrides in jobs]


SPLITS: dict[int, list[dict]] = {  # by the number of ranks
    1: [{"data.max_token_len_per_gpu": 10_000}, {"data.micro_batch_size_per_gpu": 1}],
    2: [
        {"data.max_token_len_per_gpu": 32},
        {"data.micro_batch_size_per_gpu": 3, "model.use_fused_kernels": "false"},
        {"ulysses_sequence_parallel_size": 2, "model.use_fused_kernels": "false"},
    ],
    3: [{"model.enable_gradient_checkpointing": "true"}],
    4: [{"ulysses_sequence_parallel_size": 2, "model.fsdp_config.fsdp_size": 2}],
}


def test_splits_and_ranks_change_nothing(tmp_path: Path) -> None:
    folder = write_sft_job(tmp_path)
    by_ranks = {n: run_ranks(first_steps, n, folder, splits) for n, splits in SPLITS.items()}
    want, val = by_ranks[1][0][0]  # in one micro-batch
    for world_size, ranks in by_ranks.items():
        for results in ranks:
            for split, (metrics, val_after) in zip(SPLITS[world_size], results, strict=True):
                for name in ("train/loss", "train/grad_norm"):
                    assert metrics[name] == pytest.approx(want[name], rel=2e-5), (world_size, split)
                # Adam's first step is the sign of the gradient, which rounding can turn near zero.
                assert val_after == pytest.approx(val, rel=2e-4), (world_size, split)


def test_long_rope_takes_the_longest_conversation_of_a_run(tmp_path: Path) -> None:
    """Not that of a micro-batch: one is longer than the original length, the others are not."""
    folder = write_sft_job(tmp_path, rows=7)
    config = tiny("phi3", LONG_ROPE)
    save_tiny(config, folder / "model")
    with (folder / "rows.jsonl").open("a") as file:
        file.write(f"\n{json.dumps({'prompt': 'w3', 'response': 'w4 w5 ' * 20})}")
    long = {"data.max_length": 64}
    jobs = [long | split for split in SPLITS[1]]
    [[together, apart]] = run_ranks(first_steps, 1, folder, jobs)
    assert apart[0]["train/loss"] == pytest.approx(together[0]["train/loss"], rel=2e-5)


@pytest.mark.parametrize("kind", ["phi", "gpt_oss"])
def test_loss_is_transformers_own(tmp_path: Path, kind: str) -> None:
    """Golden for the shift: labels unshifted, -100 outside the response, mean over all labels."""
    folder = write_sft_job(tmp_path)
    path = folder / "model" if kind == "phi" else save_tiny(kind, folder / kind)
    [(metrics, _)] = run_ranks(one_step, 1, folder, {"data.shuffle": "false", "model.path": path})
    model = AutoModelForCausalLM.from_pretrained(path).double()
    if kind == "gpt_oss":
        model.set_experts_implementation("eager")  # its default knows no float64
    tokenizer_ids = {f"w{i}": i for i in range(200)}
    total, count = 0.0, 0
    for line in (folder / "rows.jsonl").read_text().splitlines()[:8]:
        row = json.loads(line)
        prompt = [tokenizer_ids[w] for w in row["prompt"].split()]
        response = [*(tokenizer_ids[w] for w in row["response"].split()), 2]  # EOS
        ids = torch.tensor([prompt + response])
        labels = torch.tensor([[-100] * len(prompt) + response])
        total += model(ids, labels=labels).loss.item() * len(response)
        count += len(response)
    assert metrics["train/num_targets"] == count
    assert metrics["train/loss"] == pytest.approx(total / count, rel=1e-5)


def train(rank: int, world_size: int, folder: Path, overrides: dict) -> None:
    start_run(rank, world_size, folder, **overrides).train()


def test_a_job_learns_and_reports(tmp_path: Path) -> None:
    folder = write_sft_job(tmp_path, dropout=0.1)
    overrides = {
        "trainer.total_epochs": 8,
        "trainer.test_freq": 12,
        "data.val_files": folder / "rows.jsonl",
        "optim.lr_scheduler_type": "linear",
        "optim.lr_warmup_steps_ratio": 0.25,
    }
    run_ranks(train, 2, folder, overrides)
    rows = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows if "val/loss" in row] == [0, 12, 24]
    assert rows[-1]["val/loss"] < rows[0]["val/loss"] - 0.5
    steps = [row for row in rows if "train/lr" in row]
    rates = [row["train/lr"] for row in steps]
    assert rates[0] == 0 and max(rates) == rates[6] == 3e-3 and rates[-1] < 3e-4
    for name in ("timing_s/update_actor", "timing_s/step", "perf/throughput", "perf/mfu/actor"):
        assert steps[-1][name] > 0, name
    model = AutoModelForCausalLM.from_pretrained(folder / "run" / "final")
    assert model.dtype == torch.float32, "final/ follows the run's type"
    assert all(p.isfinite().all() for p in model.parameters())


def test_null_val_files_skip_validation(tmp_path: Path) -> None:
    folder = write_sft_job(tmp_path, rows=8)
    run_ranks(train, 1, folder, {"trainer.test_freq": 1, "data.val_files": "null"})
    text = (folder / "run" / "metrics.jsonl").read_text()
    assert "train/loss" in text and "val/loss" not in text and "testing" not in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.response_key=answer", ["no column 'answer'", "columns there: prompt, response"]),
        ("data.train_batch_size=500", ["train_batch_size is 500", "only 24"]),
        ("data.max_length=128", ["max_token_len_per_gpu is 64", "max_length 128"]),
        ("data.respones_key=x", ["did you mean data.response_key"]),
        ("trainer.resume_mode=path", ["needs a folder in trainer.resume_from_path"]),
        ("trainer.logger=[wandb]", ["wandb, which is not installed"]),
        ("ulysses_sequence_parallel_size=2", ["does not divide the 1 ranks"]),
        ("engine.strategy=megatron", ["training is FSDP2"]),
        ("data.multiturn.messages_key=chat", ["no column 'chat'"]),
    ],
)
def test_refusals(tmp_path: Path, override: str, words: list[str], sft_folder: Path) -> None:
    (tmp_path / "c.yaml").write_text("")
    settings = sft_settings(sft_folder, **{"trainer.default_local_dir": tmp_path / "run"})
    command = ["sft", str(tmp_path / "c.yaml"), *settings, override, "--dry-run"]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 2, result.output
    for word in words:
        assert word in result.stderr
    assert not (tmp_path / "run").exists()


def test_dry_run_prints_the_plan(tmp_path: Path, sft_folder: Path) -> None:
    (tmp_path / "c.yaml").write_text("")
    result = CliRunner().invoke(
        cli.app, ["sft", str(tmp_path / "c.yaml"), *sft_settings(sft_folder), "--dry-run"]
    )
    assert result.exit_code == 0, result.output
    assert "24 conversations" in result.stdout and "3 per epoch, 3 in all" in result.stdout


@pytest.fixture(scope="module")
def sft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sft_job(tmp_path_factory.mktemp("sft"))
