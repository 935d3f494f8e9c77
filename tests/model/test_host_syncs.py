"""Forward and backward of a micro-batch never wait for the device: a CUDA graph could capture them.

On a CPU: see `tests.host_syncs`. Not shown here is what the kernels of a GPU do themselves, which
their own tests capture in a graph.
"""

import dataclasses

import pytest
import torch

from hybridengine.model import (
    forward,
    pack_rollouts,
    packed_cross_entropy,
    packed_log_probs,
    packed_policy_loss,
)
from hybridengine.model.head import patch_head
from tests.host_syncs import HostSync, refuse_host_syncs
from tests.model.cases import SIZES, models, rollouts


def policy_loss(model, batch):
    advantages = torch.ones(batch.target_ids.shape)
    return packed_policy_loss(model, batch, old_log_probs=None, advantages=advantages)[0]


LOSSES = {
    "log_probs": lambda model, batch: packed_log_probs(model, batch)[0].mean(),
    "policy_loss": policy_loss,
    "cross_entropy": lambda model, batch: packed_cross_entropy(model, batch, num_items=32.0),
}


def tensors_of(model, batch):
    fields = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    return [*model.parameters(), *model.buffers(), *(x for x in fields if torch.is_tensor(x))]


@pytest.mark.parametrize("shared_prefix", [False, True], ids=["packed", "shared prefixes"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2"])
def test_a_micro_batch_does_not_wait_for_the_device(kind, loss, shared_prefix, monkeypatch):
    monkeypatch.setattr(forward, "shares_rows", lambda device: False)  # as on a GPU
    model, _ = models(kind)
    patch_head(model)
    pairs = [(prompt, r) for prompt, response in rollouts(SIZES) for r in (response, [3, 5])]
    batch = pack_rollouts(pairs, shared_prefix=shared_prefix)
    expected = LOSSES[loss](model, batch)
    with refuse_host_syncs(tensors_of(model, batch)):
        found = LOSSES[loss](model, batch)
        found.backward()
    assert torch.equal(found, expected)
    assert all(p.grad is not None for p in model.parameters())


X = torch.arange(4.0)
REFUSED = {
    "item": lambda x: x.sum().item(),
    "int": lambda x: int(x.max()),
    "tolist": lambda x: (x + 1).tolist(),
    "bool": lambda x: bool((x > 1).any()),
    "nonzero": lambda x: (x > 1).nonzero(),
    "mask": lambda x: x[x > 1],
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "equal": lambda x: torch.equal(x, x + 1),
    "host values": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "in a backward": lambda x: Reads.apply(x.requires_grad_()).sum().backward(),
}


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.sum().item()


@pytest.mark.parametrize("name", REFUSED)
def test_what_waits_is_named_with_its_line(name):
    x = X.clone()
    with pytest.raises(HostSync, match=r"test_host_syncs\.py:\d+: "), refuse_host_syncs([x]):
        REFUSED[name](x)


def test_what_the_host_has_may_be_read():
    x, lengths = X.clone(), torch.tensor([3, 1])
    with refuse_host_syncs([x]):
        assert [len(part) for part in x.split(lengths.tolist())] == [3, 1]
        assert x.repeat_interleave(2, output_size=8).shape == (8,)
