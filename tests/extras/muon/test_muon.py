"""Muon on one rank: torch's updates, which parameters, skipped updates, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hybridengine.kernels import orthogonalize
from hybridengine.model import Optimizer
from hybridengine.muon import Muon
from hybridengine.run.errors import ModelError
from tests.extras.muon.muon_cases import (
    DECAY,
    LR,
    MATRICES,
    MOMENTUM,
    Small,
    gradients,
    optimizer_of,
    set_gradients,
    small,
    train,
    trained_by_torch,
)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
def test_updates_are_those_of_torch(adjust_lr_fn: str, nesterov: bool) -> None:
    model = small()
    train(model, optimizer_of(model, adjust_lr_fn=adjust_lr_fn, nesterov=nesterov), range(3))
    expected = trained_by_torch(3, adjust_lr_fn, nesterov)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=1e-7, msg=name)


def test_gradients_are_clipped_as_for_adamw() -> None:
    model = small()
    train(model, optimizer_of(model), range(2), max_norm=0.25)
    clip = partial(nn.utils.clip_grad_norm_, max_norm=0.25)
    expected = trained_by_torch(2, "match_rms_adamw", True, clip)
    for name, parameter in model.named_parameters():
        # A gradient may differ by a rounding, and a bfloat16 of the momentum by one then.
        limit = 2**-6 * LR if name in MATRICES else 1e-7
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=limit, msg=name)


def test_float32_is_close_to_float64() -> None:
    model = small()
    before = {n: p.detach().double() for n, p in model.named_parameters()}
    train(model, optimizer_of(model, ns_dtype="float32"), range(1, 2))
    for name in MATRICES:
        gradient = gradients(model, 1)[name].double()
        # The first momentum is half of the gradient, and the update halfway to it.
        update = orthogonalize(0.75 * gradient.view(-1, *gradient.shape[-2:]), backend="reference")
        rate = LR * 0.2 * max(gradient.shape[-2:]) ** 0.5
        expected = before[name] * (1 - LR * DECAY) - rate * update.view_as(gradient)
        got = model.get_parameter(name).double()
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6 * LR, msg=name)


def test_adamw_updates_what_is_no_matrix_or_is_named() -> None:
    model = small()
    optimizer = optimizer_of(model, adamw=["^square", "experts"])
    kinds = {name.rpartition("/")[::2] for name in optimizer.moments()}
    momentum = {name for name, key in kinds if key == "momentum_buffer"}
    assert momentum == {"wide.weight", "tall.weight", "again.weight"}
    rest = {n for n, p in model.named_parameters() if p.requires_grad} - momentum
    assert {name for name, key in kinds if key == "exp_avg"} == rest


def test_the_output_head_is_no_matrix() -> None:
    class Head(Small):
        def get_output_embeddings(self) -> nn.Module:
            return self.square

    model = Head()
    assert "square.weight/exp_avg" in optimizer_of(model).moments()
    assert "again.weight/momentum_buffer" in optimizer_of(model).moments()


def test_adamw_has_a_learning_rate_of_its_own() -> None:
    plain, scaled = small(), small()
    train(plain, optimizer_of(plain), range(1, 2))
    optimizer = optimizer_of(scaled, adamw_lr_ratio=0.5)
    train(scaled, optimizer, range(1, 2))
    before = dict(small().named_parameters())
    for name, parameter in scaled.named_parameters():
        expected = plain.get_parameter(name)
        if name not in MATRICES:
            expected = (before[name] + expected) / 2
        torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-7, msg=name)
    assert optimizer.adamw.param_groups[0]["lr"] == optimizer.last_lr == LR


SPLIT = {"^square": 4, "^again": 2, "experts": 2}
ROWS = {"square.weight": 4, "again.weight": 2, "experts": 2}


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
def test_rows_that_are_a_matrix_are_updated_alone(adjust_lr_fn: str) -> None:
    model = small()
    train(model, optimizer_of(model, adjust_lr_fn=adjust_lr_fn, split=SPLIT), range(3))
    expected = trained_by_torch(3, adjust_lr_fn, True, split=ROWS)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=1e-7, msg=name)
    whole = trained_by_torch(3, adjust_lr_fn, True)
    assert not any(torch.allclose(whole[name], expected[name], atol=1e-4) for name in ROWS)


class NoWait(TorchDispatchMode):
    """Fails where the host reads a number of a tensor: on a GPU it waits there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_the_host_does_not_wait_for_what_an_update_finds(found_inf: float) -> None:
    def updated(found: torch.Tensor | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = small()
        trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
        local = {name: nn.Parameter(p.detach()) for name, p in trained}
        muon = Muon(model, local, lr=LR, betas=(0.9, 0.99), eps=1e-8, weight_decay=DECAY)
        for step in range(2):
            given = gradients(model, step)
            for name, shard in local.items():
                shard.grad = 2 * given[name] if name in given else None
            muon.grad_scale, muon.found_inf = torch.tensor(2.0), found if step else None
            if step == 0:
                muon.step()
        local["square.weight"].data[0, 0] = -0.0
        if found_inf:
            local["square.weight"].grad[0, 1] = float("nan")  # type: ignore[index]
        state = [*local.values(), *(x for s in muon.state.values() for x in s.values())]
        before = [x.detach().clone() for x in state]
        with NoWait():
            muon.step()
        return before, [x.detach() for x in state]

    before, after = updated(torch.tensor(found_inf))
    expected = before if found_inf else updated(None)[1]
    for got, x in zip(after, expected, strict=True):
        assert torch.equal(got.view(torch.int32), x.view(torch.int32))
    assert torch.equal(after[0], before[0]) == bool(found_inf)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_skipped_update_changes_no_bit(bad: float) -> None:
    model = small()
    optimizer = optimizer_of(model)
    train(model, optimizer, range(1))
    state = {**dict(model.named_parameters()), **optimizer.moments()}
    before = {name: x.detach().clone() for name, x in state.items()}
    wrong = gradients(model, 1)
    wrong["wide.weight"][2, 3] = bad
    set_gradients(model, wrong)
    optimizer.step(1.0)
    assert optimizer.skipped_in_a_row == 1
    assert all(torch.equal(x, before[name]) for name, x in state.items())
    set_gradients(model, gradients(model, 1))
    optimizer.step(1.0)
    assert optimizer.skipped_in_a_row == 0
    assert not torch.equal(model.wide.weight, before["wide.weight"])


def test_the_learning_rate_follows_the_schedule() -> None:
    model = small()
    optimizer = Optimizer(
        model, lr=LR, weight_decay=0.0, schedule="linear", warmup_steps=1, total_steps=3,
        name="muon", options={"momentum": MOMENTUM},
    )  # fmt: skip
    steps = []
    for step in range(1, 4):
        before = model.wide.weight.detach().clone()
        train(model, optimizer, range(step, step + 1))
        steps.append(float((model.wide.weight.detach() - before).norm()))
    assert steps[0] == 0 and 0 < steps[2] < steps[1]


def test_offloaded_momentum_changes_no_bit() -> None:
    models = small(), small()
    for model, offload in zip(models, (False, True), strict=True):
        optimizer = Optimizer(model, lr=LR, total_steps=9, offload=offload, name="muon", options={})
        train(model, optimizer, range(2))
        sizes = [x.untyped_storage().nbytes() for x in optimizer.moment_tensors()]
        assert len(sizes) > len(MATRICES) and any(sizes) != offload
    for ours, theirs in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentm": 0.9}, "momentm: Unexpected keyword argument; its keys are momentum, nesterov"),
        ({"momentum": 1.0}, r"momentum is 1.0, expected 0 <= momentum < 1"),
        ({"adjust_lr_fn": "none"}, "adjust_lr_fn: Input should be 'original' or 'match_rms_adamw'"),
        ({"adamw": ["("]}, r"adamw: '\(' is no regular expression"),
        ({"split": {"square": 1}}, "split: 1 rows are no matrix, expected 2 or more"),
        ({"split": {"(": 2}}, r"split: '\(' is no regular expression"),
        ({"split": {"square": 3}}, "'square' divides 'square.weight' into matrices of 3 rows, but"),
        ({"split": {"square": 4, "sq": 2}}, "'sq' divides 'square.weight' into matrices of 2 rows"),
        ({"split": {"embed": 11}}, "no matrix that Muon updates has 'embed' in its name"),
        ({"adamw_lr_ratio": 0}, "adamw_lr_ratio is 0.0, expected a value above 0"),
    ],
)
def test_wrong_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        optimizer_of(small(), **options)


def test_adapters_and_models_without_matrices_are_refused() -> None:
    adapted = nn.ModuleDict({"lora_A": nn.Linear(4, 4), "proj": nn.ModuleDict()})
    adapted["proj"]["lora_A"] = nn.Linear(4, 2)
    with pytest.raises(ModelError, match=r"'proj.lora_A.weight' is a factor of a LoRA adapter"):
        optimizer_of(adapted)
    with pytest.raises(ModelError, match="none of the 2 trained parameters of Linear is a matrix"):
        optimizer_of(nn.Linear(3, 1))
