"""TRL's GRPOTrainer with its loss by linear_policy_loss: the same losses, gradients and metrics."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from hybridengine.integrations import trl as adapter
from hybridengine.integrations.trl import loss
from tests.extras.integrations.trl_trainer import HEAD, trainer_of
from tests.tiny_models import save_tiny

pytest.importorskip("trl", reason="pip install --no-deps trl==1.16.0")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny("llama", tmp_path_factory.mktemp("trl_loss") / "model")


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, Any]]:
    """The keyword arguments of every linear_policy_loss of a trainer."""
    seen, ours = [], loss.linear_policy_loss

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return ours(*args, **kwargs)

    monkeypatch.setattr(loss, "linear_policy_loss", counted)
    return seen


@pytest.mark.slow
def test_a_run_has_the_same_losses(model, tmp_path, calls):
    names = ("loss", "grad_norm", "entropy", "kl", "clip_ratio/region_mean")
    logs = []
    for groups in (HEAD, (*HEAD, "loss")):
        with adapter.patched(*groups):
            trainer = trainer_of(model, str(tmp_path))
            trainer.train()
        logs.append([{n: log[n] for n in names} for log in trainer.state.log_history[:-1]])
    assert len(calls) == 4
    assert [call["old_log_probs"] is None for call in calls].count(False) > 0
    expected, got = logs
    assert len(got) == len(expected) == 2
    assert expected[1]["clip_ratio/region_mean"] > 0.05
    for ours, theirs in zip(got, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=2e-5)


@pytest.fixture(scope="module")
def trainer(model, tmp_path_factory):
    """A trainer whose model has our head."""
    with adapter.patched(*HEAD):
        made = trainer_of(model, str(tmp_path_factory.mktemp("trl_loss_run")))
    made.current_gradient_accumulation_steps = 2
    made.model.train()
    return made


def batch() -> dict[str, torch.Tensor]:
    """Two left-padded prompts and completions; what a rollout engine and tools add to them."""
    generator = torch.Generator().manual_seed(0)
    completion = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return {
        "prompt_ids": torch.tensor([[0, 5, 6], [7, 8, 9]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "completion_ids": torch.randint(3, 90, (2, 5), generator=generator) * completion,
        "completion_mask": completion,
        "tool_mask": torch.tensor([[1, 0, 0, 1, 1], [1, 1, 1, 1, 1]]),
        "advantages": torch.tensor([1.0, -0.7]),
        "num_items_in_batch": torch.tensor(8.0),
        "old_per_token_logps": -4.6 + torch.randn(2, 5, generator=generator),
        "ref_per_token_logps": -4.6 + torch.randn(2, 5, generator=generator),
        "importance_sampling_ratio": torch.rand(2, 5, generator=generator) + 0.5,
    }


def assert_same(trainer, inputs: dict[str, torch.Tensor], calls: list) -> None:
    """Loss, gradients and metrics of one batch are those of TRL's own code."""
    results = []
    for patched in (nullcontext(), adapter.patched("loss")):
        with patched:
            value = trainer.compute_loss(trainer.model, inputs)
        value.backward()
        gradients = {name: p.grad for name, p in trainer.model.named_parameters()}
        trainer.model.zero_grad()
        metrics = {name: logged for name, (logged,) in trainer._metrics["train"].items()}
        trainer._metrics["train"].clear()
        results.append((value.detach(), gradients, metrics))
    (expected, expected_gradients, metrics), (got, gradients, own_metrics) = results
    assert len(calls) == 1
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert own_metrics == pytest.approx(metrics, rel=1e-5, nan_ok=True)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"])
def test_every_loss_type(trainer, calls, monkeypatch, loss_type):
    monkeypatch.setattr(trainer, "loss_type", loss_type)
    monkeypatch.setattr(trainer, "epsilon_high", 1.3 if loss_type == "cispo" else 0.3)
    assert_same(trainer, batch(), calls)


@pytest.mark.parametrize("per_token", (False, True))
def test_weights_of_a_rollout_engine(trainer, calls, monkeypatch, per_token):
    monkeypatch.setattr(trainer, "use_vllm", True)
    monkeypatch.setattr(trainer, "beta", 0.0)
    inputs = batch()
    if per_token:
        inputs["advantages"] = torch.linspace(-1, 1, 10).view(2, 5)
    else:  # one weight for a sequence
        inputs["importance_sampling_ratio"] = torch.tensor([[0.5], [1.5]])
    del inputs["old_per_token_logps"]
    assert_same(trainer, inputs, calls)


def test_kl_times_the_ratio(trainer, calls, monkeypatch):
    monkeypatch.setattr(trainer.args, "use_bias_correction_kl", True)
    assert_same(trainer, batch(), calls)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss_type", "vespo"),
        ("importance_sampling_level", "sequence"),
        ("top_entropy_quantile", 0.5),
        ("off_policy_mask_threshold", 0.1),
        ("delta", 1.1),
    ],
)
def test_other_losses_are_trls(trainer, calls, caplog, monkeypatch, name, value):
    monkeypatch.setattr(trainer.args if name == "delta" else trainer, name, value)
    monkeypatch.setattr(trainer, loss.WARNED, False, raising=False)
    with adapter.patched("loss"):
        for _ in range(2):
            trainer.compute_loss(trainer.model, batch()).backward()
    assert calls == []
    assert caplog.text.count("computed by TRL's own code") == 1
    assert name in caplog.text


def test_evaluation_and_a_model_without_our_head_are_trls(model, tmp_path, calls, caplog):
    with adapter.patched("loss"):
        trainer = trainer_of(model, str(tmp_path))
        trainer.current_gradient_accumulation_steps = 1
        with torch.no_grad():
            trainer.compute_loss(trainer.model.eval(), batch())
        assert caplog.text == ""
        trainer.compute_loss(trainer.model.train(), batch()).backward()
    assert calls == []
    assert "no fused head of ours" in caplog.text
