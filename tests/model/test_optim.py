"""The learning-rate schedules, and updates that are skipped."""

import pytest
import torch

from hybridengine.errors import ModelError
from hybridengine.model import Optimizer


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.0, 0.5, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_schedules(schedule, expected):
    model = torch.nn.Linear(2, 2)
    optimizer = Optimizer(model, lr=1.0, schedule=schedule, warmup_steps=2, total_steps=6)
    rates = []
    for _ in expected:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step(1.0)
        rates.append(optimizer.last_lr)
    assert rates == pytest.approx(expected, abs=1e-6)


def test_unknown_schedule_and_skipped_update():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"'step' is unknown; choose from \['constant', 'cosine'"):
        Optimizer(model, lr=1.0, schedule="step", total_steps=6)
    optimizer = Optimizer(model, lr=1.0, total_steps=6)
    before = model.weight.detach().clone()
    (model(torch.ones(1, 2)).sum() * torch.inf).backward()
    assert not optimizer.step(1.0).isfinite()
    assert torch.equal(model.weight, before) and model.weight.grad is None
