"""AdamW: torch's interface and state dict; what changed for an engine between two syncs."""

import pytest
import torch
from hybridengine.kernels import bit_checksum

from hybridengine.errors import ModelError
from hybridengine.model import Optimizer
from hybridengine.model.adamw import AdamW
from tests.tolerances import ADAMW

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def small_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(40, 33), torch.nn.Linear(33, 5, bias=False))


def train(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(8, 40, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("first", (AdamW, torch.optim.AdamW))
@pytest.mark.parametrize("fused", (True, None))
def test_state_dicts_are_torchs(first, fused):
    """Either class continues what the other began."""
    second = {AdamW: torch.optim.AdamW, torch.optim.AdamW: AdamW}[first]

    def build(kind, model):
        options = OPTIONS if kind is AdamW else {**OPTIONS, "fused": fused}
        return kind(model.parameters(), **options)

    alone, handed_over = small_model(), small_model()
    for model in (alone, handed_over):
        optimizer = build(first, model)
        train(model, optimizer, 3)
        if model is handed_over:
            saved = optimizer.state_dict()
            optimizer = build(second, model)
            optimizer.load_state_dict(saved)
            assert saved.keys() == optimizer.state_dict().keys()
            state = optimizer.state_dict()["state"]
            assert {i: s.keys() for i, s in saved["state"].items()} == {
                i: s.keys() for i, s in state.items()
            }
        train(model, optimizer, 3, seed=1)
    for one, other in zip(alone.parameters(), handed_over.parameters(), strict=True):
        torch.testing.assert_close(one, other, **ADAMW)


def test_options_that_it_does_not_have_are_refused():
    model = small_model()
    other = torch.optim.AdamW(model.parameters(), amsgrad=True, maximize=True)
    with pytest.raises(ModelError, match="saved with amsgrad, maximize, which AdamW here"):
        AdamW(model.parameters()).load_state_dict(other.state_dict())


def test_parameter_groups_a_closure_and_parameters_without_a_gradient():
    model = small_model()
    groups = [
        {"params": [model[0].weight], "lr": 0.0, "weight_decay": 0.5},
        {"params": [model[0].bias, model[1].weight]},
    ]
    optimizer = AdamW(groups, **OPTIONS)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(1, 40)).sum().backward()
    model[0].bias.grad = None
    assert optimizer.step(lambda: 7.0) == 7.0
    same = [torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert same == [True, True, False]
    assert model[0].bias not in optimizer.state


def test_float64_parameters_are_updated_in_float64():
    ours, theirs = small_model().double(), small_model().double()
    for model, kind in ((ours, AdamW), (theirs, torch.optim.AdamW)):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        kind(model.parameters(), **OPTIONS).step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


class Engine:
    """Bits of the last sync, of all parameters of an optimizer."""

    def __init__(self, model, optimizer, dtype):
        self.model, self.optimizer, self.dtype = model, optimizer, dtype
        optimizer.track_changes(dict.fromkeys(dict(model.named_parameters()), dtype))
        self.weights = {n: p.detach().to(dtype, copy=True) for n, p in model.named_parameters()}
        self.states = self.read_states()

    def read_states(self):
        return {n: int(bit_checksum(p.detach())) for n, p in self.model.named_parameters()}

    def sync(self):
        """Apply changes; return how many there were, None if they lead from or to other states."""
        changes = self.optimizer.take_changes(max_share=1)
        before, self.states = self.states, self.read_states()
        if any(
            before[n] != after and (before[n], after) != (changes[n].before, changes[n].after)
            for n, after in self.states.items()
        ):
            return None
        for name, parameter in self.model.named_parameters():
            changed = changes[name]
            self.weights[name].view(-1)[changed.indices.long()] = changed.values
            assert torch.equal(self.weights[name], parameter.detach().to(self.dtype)), name
        return sum(len(changed.indices) for changed in changes.values())


def updates(model, optimizer, steps, scale=1.0):
    for _ in range(steps):
        (model(torch.randn(8, 40)).square().mean() * scale).backward()
        optimizer.step(1.0)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_changes_of_several_updates_bring_an_engine_up_to_date(dtype):
    model = small_model()
    optimizer = Optimizer(model, lr=1e-5, total_steps=99)
    updates(model, optimizer, 2)  # before anything is tracked
    engine = Engine(model, optimizer, dtype)
    assert engine.sync() == 0
    size = sum(p.numel() for p in model.parameters())
    counts = []
    for steps in (1, 3, 1):
        updates(model, optimizer, steps)
        counts.append(engine.sync())
    assert all(0 < count <= size for count in counts)
    if dtype == torch.bfloat16:
        assert max(counts) < size / 4


def test_a_skipped_update_changes_nothing():
    model = small_model()
    optimizer = Optimizer(model, lr=1e-3, total_steps=9)
    engine = Engine(model, optimizer, torch.bfloat16)
    updates(model, optimizer, 1, scale=torch.inf)
    assert engine.sync() == 0
    updates(model, optimizer, 1)
    assert engine.sync() > 0


def test_changes_are_unknown_after_another_write():
    model = small_model()
    optimizer = Optimizer(model, lr=1e-3, total_steps=9)
    engine = Engine(model, optimizer, torch.bfloat16)

    def write():
        model[0].weight.data.mul_(2)

    def update():
        updates(model, optimizer, 1)

    for order in ((write,), (write, update), (update, write), (update, write, update)):
        for one in order:
            one()
        assert engine.sync() is None
        engine = Engine(model, optimizer, torch.bfloat16)
        update()
        assert engine.sync() > 0


def test_updates_after_a_checkpoint_was_loaded_are_known():
    model = small_model()
    optimizer = Optimizer(model, lr=1e-3, total_steps=9)
    engine = Engine(model, optimizer, torch.bfloat16)
    updates(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    updates(model, optimizer, 1)
    assert engine.sync() > 0


def test_many_changes_are_not_collected():
    model = small_model()
    optimizer = Optimizer(model, lr=0.1, total_steps=9)
    Engine(model, optimizer, torch.bfloat16)
    updates(model, optimizer, 1)
    assert optimizer.take_changes() is None
    assert all(len(c.indices) == 0 for c in optimizer.take_changes().values())


def test_only_tracked_parameters_are_named():
    model = small_model()
    optimizer = Optimizer(model, lr=1e-3, total_steps=9)
    assert optimizer.take_changes() == {}
    optimizer.track_changes({"1.weight": torch.bfloat16})
    optimizer.take_changes()
    updates(model, optimizer, 1)
    assert optimizer.take_changes(max_share=1).keys() == {"1.weight"}
