"""Gradients of drop-in losses under DDP and FSDP2 are those of one rank with all data.

A fused loss that reads the head of the unwrapped model makes its gradient where neither wrapper
reduces it: the ranks' weights drift apart without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from hybridengine.integrations import liger, transformers, trl, verl
from hybridengine.kernels import linear_policy_loss
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny, tiny_config

pytestmark = pytest.mark.multirank

ROWS, LENGTH, VOCAB = 4, 7, 90


def batch() -> dict[str, Tensor]:
    """Rows with as many labels, so that means over ranks are means over all rows."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    old = -4.5 + 0.3 * torch.randn(ROWS, LENGTH - 1, generator=generator)
    advantages = torch.randn(ROWS, generator=generator)
    return {"ids": ids, "labels": labels, "old": old, "advantages": advantages}


class WithLoss(torch.nn.Module):
    """A model whose forward is its loss from hidden states, as trainers with a fused head have."""

    def __init__(self, model: torch.nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.head, self.loss = model.model, model.lm_head, loss

    def forward(self, ids: Tensor, **rows: Tensor) -> Tensor:
        hidden = self.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        return self.loss(hidden, self.head.weight, **rows)


def liger_grpo(
    hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, advantages: Tensor
) -> Tensor:
    loss = liger.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="grpo")
    ids, mask = labels[:, 1:].clamp(min=0), (labels[:, 1:] >= 0).long()
    return loss(hidden, weight, ids, mask, advantages, old_per_token_logps=old)[0]


def liger_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    loss = liger.LigerFusedLinearCrossEntropyLoss()
    return loss(weight, hidden.flatten(0, 1), labels[:, 1:].flatten())


def verl_head(
    hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, advantages: Tensor
) -> Tensor:
    head, mask = verl.FusedLinearForPPO(), labels[:, 1:] >= 0
    log_probs, entropy = head(hidden, weight, labels[:, 1:].clamp(min=0), 0.8)
    ratio = (log_probs - old).exp() * advantages[:, None]
    return verl.agg_loss(-ratio - 0.01 * entropy, mask.float(), "token-mean")


def operator(
    hidden: Tensor, weight: Tensor, labels: Tensor, old: Tensor, advantages: Tensor
) -> Tensor:
    mask = labels[:, 1:] >= 0
    loss: Tensor = linear_policy_loss(
        hidden[mask],
        weight,
        labels[:, 1:][mask],
        0.8,
        old_log_probs=old[mask],
        advantages=advantages[:, None].expand_as(old)[mask],
    )[0]
    return loss


LOSSES = {f.__name__: f for f in (liger_grpo, liger_cross_entropy, verl_head, operator)}
WRAPPERS = ("ddp", "fsdp2", "unreduced")


def plain_model() -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(tiny_config("llama")).float().train()


def wrapped(module: Any, layers: Any, wrapper: str) -> torch.nn.Module:
    """Wrap as trainers do; "" is one rank, "unreduced" DDP whose module `called` calls itself."""
    from torch.distributed.fsdp import fully_shard

    if wrapper in ("ddp", "unreduced"):
        return DistributedDataParallel(module)
    if wrapper == "fsdp2":
        for layer in layers:
            fully_shard(layer)
        return fully_shard(module)  # the head is in the root group, as TRL and verl wrap it
    return module


def called(model: Any, wrapper: str) -> Any:
    return model.module if wrapper == "unreduced" else model


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    full = ((n, getattr(p.grad, "full_tensor", lambda p=p: p.grad)) for n, p in named(module))
    return {name: gradient() for name, gradient in full}


def named(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(n.removeprefix("module."), p) for n, p in module.named_parameters()]


def of_heads(rank: int, world_size: int, wrapper: str) -> dict[str, dict[str, Tensor]]:
    part = {name: value[rank::world_size] for name, value in batch().items()}
    ids = part.pop("ids")
    results = {}
    for name, loss in LOSSES.items():
        whole = WithLoss(plain_model(), loss)
        model = wrapped(whole, whole.model.layers, wrapper)
        called(model, wrapper)(ids, **part).backward()
        results[name] = gradients(model)
    return results


def of_models(rank: int, world_size: int, wrapper: str) -> dict[str, dict[str, Tensor]]:
    """`fuse_loss`, and TRL's fused head: the loss is part of the model's forward."""
    part = {name: value[rank::world_size] for name, value in batch().items()}
    results = {}
    for name in ("fuse_loss", "trl_head"):
        plain, options = plain_model(), {}
        if name == "fuse_loss":
            transformers.fuse_loss(plain)
        else:
            trl.add_fused_lm_head(plain, 0.8)
            options = {"fused_lm_head": True}
        model = wrapped(plain, plain.model.layers, wrapper)
        output = called(model, wrapper)(input_ids=part["ids"], labels=part["labels"], **options)
        output.loss.backward()
        results[name] = gradients(model)
    return results


def of_trl(rank: int, world_size: int, wrapper: str, path: str) -> dict[str, dict[str, Tensor]]:
    """GRPOTrainer's loss by the group `loss`, from the model as it is wrapped."""
    from tests.extras.integrations.trl_trainer import HEAD, trainer_of

    rows, full = slice(rank, None, world_size), batch()
    ids, mask = full["ids"], torch.ones(ROWS, LENGTH, dtype=torch.long)
    inputs: dict[str, Any] = {
        "prompt_ids": ids[rows, :3],
        "prompt_mask": mask[rows, :3],
        "completion_ids": ids[rows, 3:],
        "completion_mask": mask[rows, 3:],
        "advantages": full["advantages"][rows],
        "num_items_in_batch": torch.tensor(float(mask[:, 3:].sum())),
        "old_per_token_logps": full["old"][rows, 2:],
        "ref_per_token_logps": full["old"][rows, 2:],
    }
    with trl.patched(*HEAD, "loss"):
        trainer = trainer_of(path, f"{path}/{wrapper}{rank}")
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        model = wrapped(trainer.model, trainer.model.model.layers, wrapper)
        trainer.compute_loss(called(model, wrapper), inputs).backward()
    return {"trl_loss": gradients(model)}


def assert_same(found: dict[str, dict[str, Tensor]], whole: dict[str, dict[str, Tensor]]) -> None:
    assert found.keys() == whole.keys()
    for loss, expected in whole.items():
        assert found[loss].keys() == expected.keys()
        for name, e in expected.items():
            assert e.any(), (loss, name)
            close = {"rtol": 1e-4, "atol": 2e-6, "msg": f"{loss}: {name}"}
            torch.testing.assert_close(found[loss][name], e, **close)


def assert_none_is_same(
    found: dict[str, dict[str, Tensor]], whole: dict[str, dict[str, Tensor]]
) -> None:
    """What DDP has not reduced is found out, for every loss."""
    for loss in whole:
        with pytest.raises(AssertionError, match=f"^{loss}: "):
            assert_same({loss: found[loss]}, {loss: whole[loss]})


def of_losses(rank: int, world_size: int, *wrappers: str) -> list[dict[str, dict[str, Tensor]]]:
    return [
        of_heads(rank, world_size, wrapper) | of_models(rank, world_size, wrapper)
        for wrapper in wrappers
    ]


def of_trainers(
    rank: int, world_size: int, path: str, *wrappers: str
) -> list[dict[str, dict[str, Tensor]]]:
    return [of_trl(rank, world_size, wrapper, path) for wrapper in wrappers]


def test_ranks_have_the_gradients_of_all_data():
    (whole,) = of_losses(0, 1, "")
    for *reduced, unreduced in run_ranks(of_losses, 2, *WRAPPERS):
        for found in reduced:
            assert_same(found, whole)
        assert_none_is_same(unreduced, whole)


@pytest.mark.slow
def test_trls_trainer_has_the_gradients_of_all_data(tmp_path):
    pytest.importorskip("trl")
    path = save_tiny("llama", tmp_path / "model")
    (whole,) = of_trainers(0, 1, path, "")
    for *reduced, unreduced in run_ranks(of_trainers, 2, path, *WRAPPERS):
        for found in reduced:
            assert_same(found, whole)
        assert_none_is_same(unreduced, whole)
