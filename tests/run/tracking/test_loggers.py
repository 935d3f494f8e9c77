"""Loggers besides the files, a resumed run's metrics, and what performance figures count."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from hybridengine.lab.flops import FlopCounter
from hybridengine.model import SavedWork
from hybridengine.run.errors import ConfigError
from hybridengine.run.tracking import MetricsLogger, logger_module
from hybridengine.train.metrics import performance_metrics
from hybridengine.train.performance import pair_cost


def test_wandb_gets_every_metric_under_the_runs_names(tmp_path, monkeypatch):
    calls = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("end")
    )
    fake = SimpleNamespace(init=lambda **kwargs: calls.append(kwargs) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    names = {"project": "sums", "name": "first", "config": {"seed": 1}}
    with MetricsLogger(tmp_path, ["wandb"], Console(), total_steps=2, **names) as metrics:
        metrics.log(1, {"train/loss": 0.5})
    assert calls == [
        {"project": "sums", "name": "first", "dir": str(tmp_path), "config": {"seed": 1}},
        (1, {"train/loss": 0.5}),
        "end",
    ]


def test_mlflow_gets_every_metric(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)  # its artifacts
    names = {"project": "sums", "name": "first", "config": {"optim": {"betas": (0.9, 0.99)}}}
    with MetricsLogger(tmp_path, ["mlflow"], Console(), total_steps=2, **names) as metrics:
        metrics.log(1, {"train/loss": 0.5})
        metrics.log(2, {"train/loss": 0.25, "val-core/sums/mean@4": 1.0, "bad": float("nan")})
    [run] = mlflow.search_runs(experiment_names=["sums"], output_format="list")
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 0.25)]
    assert run.data.metrics["val-core/sums/mean_at_4"] == 1.0
    config = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/config.json")
    assert config == {"optim": {"betas": [0.9, 0.99]}}


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_reported_before_the_run(name, monkeypatch):
    monkeypatch.setattr("hybridengine.loggers.find_spec", lambda name: None)
    assert logger_module("console") is None
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        logger_module(name).check(name)


def test_a_resumed_run_forgets_what_was_logged_after_its_checkpoint(tmp_path):
    with MetricsLogger(tmp_path, ["jsonl"], Console(), total_steps=4) as metrics:
        for step in (1, 2, 3):
            metrics.log(step, {"train/loss": float(step), "bad": float("nan")})
    file = tmp_path / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 4, "train/l')  # killed in the middle of a line
    with MetricsLogger(tmp_path, ["jsonl"], Console(), total_steps=4, first_step=2) as metrics:
        assert metrics.history == [{"step": s, "train/loss": float(s)} for s in (1, 2)]
        metrics.log(3, {"train/loss": 30.0})
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["step"], row["train/loss"]) for row in rows] == [(1, 1.0), (2, 2.0), (3, 30.0)]


_SMALL = dict(
    vocab_size=100,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
)
_ATTENTION = 8 * 8 + 2 * 8 * 4 + 8 * 8  # q, k and v, o


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_a_dense_model(tied):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**_SMALL, tie_word_embeddings=tied))
    weights = 3 * (_ATTENTION + 3 * 8 * 16) + 100 * 8  # the head counts, the look-up does not
    counter = FlopCounter(model, torch.device("cpu"), world_size=2)
    pairs = 15 + 28  # of a token and a key that it attends to
    assert counter.training_flops([5, 7]) == 6 * weights * 12 + 12 * 3 * 8 * pairs
    saved = SavedWork(tokens=2, pairs=3)  # a prefix of two tokens
    assert counter.training_flops([5, 7], saved) == 6 * weights * 10 + 12 * 3 * 8 * (pairs - 3)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert pair_cost(model.config, shapes) == 4 * 3 * 8 / (2 * (weights - 100 * 8))
    model.requires_grad_(False)
    frozen = FlopCounter(model, torch.device("cpu"), 2)
    assert frozen.training_flops([1]) == 4 * weights + 12 * 3 * 8
    assert 0 < counter([5, 7], seconds=1.0)["perf/mfu/actor"] < 1


def test_flops_of_a_mixture_count_the_experts_that_a_token_visits():
    config = Qwen3MoeConfig(
        **_SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=[]
    )
    model = AutoModelForCausalLM.from_config(config)
    weights = 3 * (_ATTENTION + 4 * 8 + 2 * 3 * 8 * 16) + 100 * 8
    counter = FlopCounter(model, torch.device("cpu"), 1)
    assert counter.training_flops([1]) == 6 * weights + 12 * 3 * 8


def test_throughput_is_per_rank():
    found = performance_metrics(1000, 2.0, 4, torch.device("cpu"))
    assert found["perf/throughput"] == 125 and found["perf/cpu_memory_used_gb"] > 0
