"""verl's vocab-parallel functions on ranks, with a stand-in for Megatron's process groups."""

import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

import hybridengine.integrations.verl as verl
from tests.ranks import run_ranks
from tests.tolerances import LINEAR, LOG_PROB

pytestmark = pytest.mark.multirank

V, H = 37, 8


def vocab_parallel(rank: int, world_size: int) -> None:
    _use_world_as_tensor_parallel_group()
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    ids = torch.randint(1, V, mask.shape, generator=generator) * mask
    logits = torch.randn(6, V, generator=generator)
    mine = logits.chunk(world_size, -1)[rank].clone().requires_grad_()
    whole = logits.double().requires_grad_()
    exact = torch.log_softmax(whole, -1)
    entropy = -(exact.exp() * exact).sum(-1)
    labels = torch.randint(0, V, (6,), generator=generator)
    chosen = exact.gather(-1, labels[:, None])[:, 0]
    (chosen.sum() + entropy.square().sum()).backward()

    log_probs = verl.vocab_parallel_log_probs_from_logits(mine, labels)
    entropies = verl.vocab_parallel_entropy(mine)
    (log_probs.sum() + entropies.square().sum()).backward()
    torch.testing.assert_close(log_probs.double(), chosen.detach(), **LOG_PROB)
    torch.testing.assert_close(entropies.double(), entropy.detach(), **LOG_PROB)
    gradient = whole.grad.chunk(world_size, -1)[rank]
    torch.testing.assert_close(mine.grad.double(), gradient, rtol=1e-5, atol=5e-6)
    shaped = verl.vocab_parallel_entropy_with_chunking(mine.view(2, 3, -1), chunk_size=1)
    assert torch.equal(shaped.flatten(), entropies)
    response = verl.vocab_parallel_log_probs_from_logits_response_rmpad(ids, mask, mine, 2)
    single = verl.log_probs_from_logits_response_rmpad(ids, mask, logits, 2)
    torch.testing.assert_close(response, single, **LOG_PROB)


def linear(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 3, H, generator=generator, requires_grad=True)
    weight = torch.randn(V, H, generator=generator)
    labels = torch.randint(0, V, (2, 3), generator=generator)
    mine = weight.chunk(world_size)[rank].clone().requires_grad_()
    group = dist.group.WORLD
    log_probs, entropy = verl.linear_cross_entropy(hidden, mine, labels, 0.8, "none", group)
    (log_probs.sum() + entropy.sum()).backward()
    dist.all_reduce(hidden.grad)  # the caller of verl's function does

    whole, full = hidden.detach().double().requires_grad_(), weight.double().requires_grad_()
    exact = torch.log_softmax(whole.flatten(0, 1) @ full.T / 0.8, -1)
    chosen = exact.gather(-1, labels.view(-1, 1))[:, 0]
    (chosen.sum() - (exact.exp() * exact).sum()).backward()
    torch.testing.assert_close(log_probs.double(), chosen.detach(), **LINEAR)
    torch.testing.assert_close(hidden.grad.double(), whole.grad, **LINEAR)
    torch.testing.assert_close(mine.grad.double(), full.grad.chunk(world_size)[rank], **LINEAR)


def both(rank: int, world_size: int) -> None:
    vocab_parallel(rank, world_size)
    linear(rank, world_size)


def _use_world_as_tensor_parallel_group() -> None:
    names = ("megatron", "megatron.core", "megatron.core.parallel_state")
    megatron, core, parallel_state = (ModuleType(name) for name in names)
    parallel_state.get_tensor_model_parallel_group = lambda: dist.group.WORLD
    core.parallel_state = parallel_state
    sys.modules |= dict(zip(names, (megatron, core, parallel_state), strict=True))


def test_vocab_parallel_functions_are_those_of_the_full_vocabulary():
    run_ranks(both, 2)
