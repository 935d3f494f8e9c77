"""The learning-rate schedules, and updates that are skipped."""

import math

import pytest
import torch

from hybridengine.model import Optimizer
from hybridengine.run.errors import ModelError


@pytest.mark.parametrize(
    ("schedule", "least", "expected"),
    [
        ("constant", 0.0, [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", 0.0, [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", 0.0, [0.0, 0.5, 1.0, 0.853553, 0.5, 0.146447]),
        ("constant", 0.1, [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", 0.2, [0.0, 0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", 0.1, [0.0, 0.5, 1.0, 0.868198, 0.55, 0.231802, 0.1]),  # as verl's schedule
    ],
)
def test_schedules(schedule, least, expected):
    model = torch.nn.Linear(2, 2)
    optimizer = Optimizer(
        model, lr=1.0, schedule=schedule, min_lr_ratio=least, warmup_steps=2, total_steps=6
    )
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


class Training:
    """A linear model with an update that is finite, overflows, or has a loss that is not finite."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = Optimizer(self.model, lr=1.0, total_steps=99, param_dtype=dtype)

    def update(self, loss: float = 1.0, gradient: float = 1.0) -> bool:
        """Return whether the weights have changed."""
        before = self.model.weight.detach().clone()
        outputs = self.model(torch.ones(1, 2))
        for part in (1.0, loss):  # of two micro-batches
            scaled = outputs * (1.0 if math.isfinite(part) else part)
            self.optimizer.observe_loss(torch.tensor(part), scaled)
        (outputs.sum() * gradient).backward()
        self.optimizer.step(1.0)
        return not torch.equal(self.model.weight, before)

    @property
    def counts(self) -> tuple[int, int]:
        return self.optimizer.skipped_in_a_row, self.optimizer.failed_in_a_row


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_an_update_with_a_loss_that_is_not_finite_is_skipped_and_named(loss):
    training = Training(torch.float32)
    assert training.update()
    assert not training.update(loss=loss) and training.counts == (1, 1)
    [skipped] = training.optimizer.pop_skipped()
    assert skipped.loss == loss or (math.isnan(skipped.loss) and math.isnan(loss))
    assert math.isfinite(skipped.norm) and skipped.num_nonfinite == 2 and not skipped.is_overflow
    assert training.update() and training.counts == (0, 0), "what was observed is forgotten"
    assert training.optimizer.pop_skipped() == []


def test_only_an_overflow_of_gradients_lowers_the_loss_scale():
    training = Training(torch.float16)
    scale = training.optimizer.loss_scale
    assert not training.update(loss=math.nan)
    assert training.optimizer.loss_scale == scale and training.counts == (1, 1)
    assert not training.update(gradient=math.inf)
    assert training.optimizer.loss_scale == scale / 2 and training.counts == (2, 1)
    assert [update.is_overflow for update in training.optimizer.pop_skipped()] == [False, True]
    training.optimizer.loss_scale = 1.0
    assert not training.update(gradient=math.inf) and training.counts == (3, 2)
    resumed = Training(torch.float16)
    resumed.optimizer.load_state_dict(training.optimizer.state_dict())
    assert resumed.counts == (3, 2) and resumed.optimizer.num_updates == 3
    assert not Training(torch.float32).update(gradient=math.inf)


def small_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(40, 33), torch.nn.Linear(33, 5, bias=False))


@pytest.mark.parametrize("max_norm", [1e9, 0.01])
def test_updates_are_those_of_torch(max_norm: float) -> None:
    """Bit for bit: fused AdamW of gradients divided by the inverse of the factor that clips."""
    ours, theirs = small_model(), small_model()
    optimizer = Optimizer(ours, lr=1e-2, total_steps=9, weight_decay=0.1)
    torchs = torch.optim.AdamW(theirs.parameters(), 1e-2, weight_decay=0.1, fused=True)
    for _ in range(3):
        inputs = torch.randn(8, 40)
        for model in (ours, theirs):
            model(inputs).square().mean().backward()
        norm = optimizer.step(max_norm)
        gradients = [p.grad for p in theirs.parameters()]
        assert torch.equal(norm, torch.nn.utils.get_total_norm(gradients))
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        assert (factor == 1) == (max_norm > 1)
        torch._foreach_div_(gradients, 1 / factor)
        torchs.step()
        torchs.zero_grad()
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_a_skipped_update_changes_no_moment() -> None:
    model = small_model()
    optimizer = Optimizer(model, lr=1e-3, total_steps=9)
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step(1.0)
    before = {name: moment.clone() for name, moment in optimizer.moments().items()}
    (model(torch.ones(1, 40)).sum() * torch.inf).backward()
    optimizer.step(1.0)
    after = optimizer.moments()
    assert before.keys() == after.keys() and all(torch.equal(after[n], before[n]) for n in before)


def test_moments_before_and_after_the_first_update() -> None:
    """They have the names and shapes of torch's state, whoever makes it."""
    models = small_model(), small_model()
    first, second = (Optimizer(model, lr=1e-3, total_steps=9) for model in models)
    created = second.moments()
    for model, optimizer in zip(models, (first, second), strict=True):
        model(torch.ones(1, 40)).sum().backward()
        optimizer.step(1.0)
    assert created.keys() == first.moments().keys()
    assert all(torch.equal(t, created[n]) for n, t in first.moments().items())
