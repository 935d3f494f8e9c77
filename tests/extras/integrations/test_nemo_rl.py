"""NeMo RL's functions on two ranks of a vocabulary, against log_softmax in float64."""

import pytest
import torch
import torch.distributed as dist

from hybridengine.integrations import nemo_rl
from tests.ranks import run_ranks

B, S, V, H, K = 2, 5, 24, 16, 3


def _inputs():
    torch.manual_seed(0)
    logits = torch.randn(B, S, V, dtype=torch.float64)
    hidden = torch.randn(S + 1, B, H, dtype=torch.float64)
    weight = torch.randn(V, H, dtype=torch.float64)
    target = torch.randint(0, V, (B, S + 1))
    indices = torch.randint(0, V, (B, S, K))
    grads = torch.randn(B, S + 1, K, dtype=torch.float64)
    return logits, hidden, weight, target, indices, grads


def _expected():
    """By name: results and the gradients of logits (of hidden and weight: `linear`)."""
    logits, hidden, weight, target, indices, grads = _inputs()
    results = {}

    def add(name, output, inputs, grad):
        results[name] = (output.detach(), *torch.autograd.grad(output, inputs, grad))

    for tensor in (logits, hidden, weight):
        tensor.requires_grad_()
    log_p = logits.log_softmax(-1)
    of_target = log_p.gather(-1, target[:, :S, None]).squeeze(-1)
    add("log_probs", of_target, [logits], grads[:, :S, 0])
    log_p = logits.log_softmax(-1)
    add("entropy", (log_p.exp() * log_p).sum(-1), [logits], grads[:, :S, 0])
    add("gathered", logits.log_softmax(-1).gather(-1, indices), [logits], grads[:, :S])
    log_p = (hidden @ weight.t()).log_softmax(-1).transpose(0, 1)
    linear = log_p.gather(-1, target[..., None]).squeeze(-1)
    add("linear", linear, [hidden, weight], grads[..., 0])
    return results


def _on_rank(rank, world_size):
    logits, hidden, weight, target, indices, grads = (
        t.float() if t.is_floating_point() else t for t in _inputs()
    )
    size, group = V // world_size, dist.group.WORLD
    bounds = (rank * size, (rank + 1) * size)
    own = logits[..., bounds[0] : bounds[1]].clone().requires_grad_()
    target_S = target[:, :S].contiguous()
    results = {}

    def add(name, output, inputs, grad):
        found = torch.autograd.grad(output, inputs, grad)
        results[name] = (output.detach(), *found)

    add(
        "log_probs",
        nemo_rl.DistributedLogprob.apply(own, target_S, *bounds, group),
        [own],
        grads[:, :S, 0],
    )
    chunked = nemo_rl.ChunkedDistributedLogprob.apply(own, target_S, *bounds, 2, group, True)
    assert not chunked.requires_grad or chunked.grad_fn is not None
    assert torch.equal(chunked.detach(), results["log_probs"][0])
    add("entropy", nemo_rl.ChunkedDistributedEntropy.apply(own, 2, group), [own], grads[:, :S, 0])
    add(
        "gathered",
        nemo_rl.ChunkedDistributedGatherLogprob.apply(own, indices, *bounds, 2, group),
        [own],
        grads[:, :S],
    )
    part = hidden.chunk(world_size)[rank].clone().requires_grad_()
    own_weight = weight[bounds[0] : bounds[1]].clone().requires_grad_()
    linear = nemo_rl.ChunkedDistributedHiddenStatesToLogprobs.apply(
        part, target, own_weight, *bounds, 2, group
    )
    add("linear", linear, [part, own_weight], grads[..., 0])
    return results


@pytest.mark.multirank
def test_vocabulary_on_two_ranks():
    ranks = run_ranks(_on_rank, 2)
    for name, (output, *grads) in _expected().items():
        for result in ranks:
            torch.testing.assert_close(result[name][0].double(), output, rtol=1e-5, atol=1e-5)
        for i, grad in enumerate(grads):
            # logits are split by vocabulary, hidden states by sequence, weights by vocabulary
            parts = torch.cat([r[name][1 + i] for r in ranks], -1 if name != "linear" else 0)
            torch.testing.assert_close(parts.double(), grad, rtol=1e-5, atol=1e-5)


def _loop(prompts, rewards, valid, leave_one_out):
    """Baseline and std of each response, from the others in its group (or all of it)."""
    baseline, std = rewards.clone(), torch.zeros_like(rewards)
    for i in range(len(rewards)):
        group = [
            j
            for j in range(len(rewards))
            if torch.equal(prompts[i], prompts[j]) and valid[j] and not (leave_one_out and i == j)
        ]
        members = sum(
            torch.equal(prompts[i], prompts[j]) and bool(valid[j]) for j in range(len(rewards))
        )
        if members > 1:
            # an invalid response still divides by the number of valid ones less one
            count = members - int(leave_one_out)
            values = rewards[group]
            baseline[i] = values.sum() / count
            if count > 1:
                spread = (values.square().sum() / count - baseline[i].square()) * count
                std[i] = (spread / (count - 1)).clamp(min=0).sqrt()
    return baseline, std


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_baseline_and_std(leave_one_out):
    torch.manual_seed(0)
    prompts = torch.tensor([[1, 2], [1, 2], [3, 4], [1, 2], [3, 4], [5, 6], [1, 2]])
    rewards = torch.rand(7, dtype=torch.float64)
    valid = torch.tensor([1, 1, 1, 1, 1, 1, 0])
    given = nemo_rl.calculate_baseline_and_std_per_prompt(prompts, rewards, valid, leave_one_out)
    for actual, expected in zip(given, _loop(prompts, rewards, valid, leave_one_out), strict=True):
        if not leave_one_out:
            torch.testing.assert_close(actual, expected)
        else:  # that of the invalid response is not the std of a set
            torch.testing.assert_close(actual[:6], expected[:6])


def test_equal_rewards_have_no_spread():
    prompts, rewards = torch.zeros(8, 3, dtype=torch.int64), torch.full((8,), 0.1)
    baseline, std = nemo_rl.calculate_baseline_and_std_per_prompt(prompts, rewards, torch.ones(8))
    torch.testing.assert_close(baseline, rewards)
    assert not std.any()


def test_std_of_other_rewards():
    prompts, rewards = torch.zeros(4, 1), torch.tensor([1.0, 2.0, 3.0, 5.0])
    given = (prompts, rewards, torch.ones(4), False)
    baseline, std = nemo_rl.calculate_baseline_and_std_per_prompt(*given, std_rewards=10 * rewards)
    assert baseline.tolist() == [2.75] * 4
    torch.testing.assert_close(std, torch.full((4,), 10 * rewards.std().item()))


def test_no_responses():
    empty = torch.empty(0)
    baseline, std = nemo_rl.calculate_baseline_and_std_per_prompt(
        torch.empty(0, 3, dtype=torch.int64), empty, empty
    )
    assert baseline.shape == std.shape == (0,)
