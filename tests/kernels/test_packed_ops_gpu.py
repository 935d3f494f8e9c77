"""Packing, advantages and policy loss on a GPU: as on the CPU, without a wait, inside a graph."""

from itertools import product

import pytest
import torch

from hybridengine import kernels
from tests.kernels.batches import batch, random_mask
from tests.kernels.cuda_graph import capture
from tests.tolerances import ADVANTAGE, POLICY_LOSS

pytestmark = pytest.mark.gpu


@pytest.fixture
def no_waiting():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["prefix", "suffix", "scattered"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (64, 700), (3, 70_000)])
def test_packing_as_on_the_cpu(shape, kind):
    mask = random_mask(*shape, 0, kind)
    tensors = [
        torch.randn(*shape, 7),
        torch.randn(*shape, 16).bfloat16(),
        torch.randint(0, 99, shape),
        torch.rand(shape) < 0.5,
        torch.randn(shape[0], shape[1] + 1, 4)[:, 1:],
        torch.randn(shape[1], shape[0], 40).bfloat16().transpose(0, 1),
    ]
    packed = kernels.pack([*tensors, tensors[2]], mask, shifted=[6])
    on_gpu = kernels.pack([t.cuda() for t in [*tensors, tensors[2]]], mask.cuda(), shifted=[6])
    for name in ("cu_seqlens", "position_ids", "indices", "inverse"):
        assert torch.equal(getattr(on_gpu, name).cpu(), getattr(packed, name)), name
    assert on_gpu.max_seqlen == packed.max_seqlen
    padded = kernels.unpack(on_gpu.values, on_gpu, padding_value=1)
    for i, tensor in enumerate(packed.values):
        assert torch.equal(on_gpu.values[i].cpu(), tensor), i
        assert torch.equal(padded[i].cpu(), kernels.unpack(tensor, packed, padding_value=1)), i


def test_gradients_on_the_gpu():
    mask = random_mask(4, 17, 3, "scattered").cuda()
    hidden = torch.randn(4, 17, 5, dtype=torch.float64, device="cuda", requires_grad=True)

    def through(hidden):
        packed = kernels.pack([hidden], mask)
        return kernels.unpack(packed.values[0] ** 2, packed)

    assert torch.autograd.gradcheck(through, (hidden,))


def test_capacity_counts_what_does_not_fit(no_waiting):
    mask = torch.ones(3, 5, dtype=torch.bool, device="cuda")
    packed = kernels.pack([torch.arange(15, device="cuda").view(3, 5)], mask, capacity=11)
    torch.cuda.set_sync_debug_mode("default")
    assert packed.num_dropped.item() == 4 and packed.cu_seqlens.tolist() == [0, 5, 10, 11]
    assert packed.values[0].tolist() == list(range(11))


@pytest.mark.parametrize("estimator", kernels.GROUP_ESTIMATORS)
def test_advantages_as_on_the_cpu(estimator):
    rewards = (torch.randn(3000) * 4).round()  # ties
    ids = torch.randint(-300, 300, (3000,))
    lengths = torch.randint(0, 9, (3000,))
    want = kernels.group_advantage(rewards, ids, estimator=estimator, lengths=lengths)
    got = kernels.group_advantage(
        rewards.cuda(), ids.cuda(), estimator=estimator, lengths=lengths.cuda()
    )
    torch.testing.assert_close(got.cpu(), want, **ADVANTAGE)


def test_group_advantages_are_the_same_bits_on_every_run():
    rewards, ids = torch.randn(100_000).cuda(), torch.randint(0, 5000, (100_000,)).cuda()
    ids[50_000:] = -1  # and one large group
    first = kernels.group_advantage(rewards, ids)
    want = kernels.group_advantage(rewards.cpu(), ids.cpu())
    torch.testing.assert_close(first.cpu(), want, **ADVANTAGE)
    for _ in range(5):
        assert torch.equal(kernels.group_advantage(rewards, ids), first)
    rewards[0] = torch.nan
    spoiled = kernels.group_advantage(rewards, ids)
    assert torch.equal(spoiled.isnan(), ids == ids[0])


@pytest.mark.parametrize("lengths", [[1], [3, 0, 5000, 17], [70_000]])
def test_gae_as_on_the_cpu(lengths):
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    rewards, values = torch.randn(2, sum(lengths) + 2)
    mask = torch.rand(rewards.shape) < 0.8
    mask[sum(lengths) :] = False  # tokens past the end of cu_seqlens
    options = {"gamma": 0.99, "lam": 0.95}
    want = kernels.gae(rewards, values, ends, response_mask=mask, **options)
    on_gpu = (x.cuda() for x in (rewards, values, ends))
    got = kernels.gae(*on_gpu, response_mask=mask.cuda(), **options)
    for ours, exact in zip(got, want, strict=True):
        torch.testing.assert_close(ours.cpu(), exact, **ADVANTAGE)


@pytest.mark.parametrize("loss_agg_mode", kernels.LOSS_AGG_MODES)
@pytest.mark.parametrize("masked", [True, False])
def test_losses_with_any_counts_as_on_the_cpu(loss_agg_mode, masked):
    inputs = batch([5, 0, 1030, 33, 4000])
    if not masked:
        del inputs["response_mask"]
    for tokens, seqs in product((None, 31, torch.tensor(31)), (None, 7.5, torch.tensor(7.5))):
        counts = {"global_num_tokens": tokens, "global_num_seqs": seqs}
        want, got = (
            losses(
                {name: value.to(device) for name, value in inputs.items()},
                loss_agg_mode,
                {
                    name: count.to(device) if isinstance(count, torch.Tensor) else count
                    for name, count in counts.items()
                },
            )
            for device in ("cpu", "cuda")
        )
        for on_gpu, on_cpu in zip(got, want, strict=True):
            torch.testing.assert_close(on_gpu.cpu(), on_cpu, **POLICY_LOSS)


def losses(inputs, loss_agg_mode, counts):
    """Losses, metrics and gradients of policy_loss and value_loss."""
    results = []
    for function in (kernels.policy_loss, kernels.value_loss):
        leaf = inputs["log_probs"].clone().requires_grad_()
        loss, metrics = function(
            leaf,
            inputs["old_log_probs"],
            inputs["advantages"],
            loss_agg_mode=loss_agg_mode,
            response_mask=inputs.get("response_mask"),
            cu_seqlens=inputs["cu_seqlens"],
            loss_scale_factor=9.0,
            **counts,
        )
        results += [loss.detach(), *metrics.values(), *torch.autograd.grad(loss, leaf)]
    return results


def step(inputs, mask, padded, rewards, ids):
    """All of it once, as a training step would call it."""
    packed = kernels.pack([padded], mask, capacity=mask.numel())
    back = kernels.unpack(packed.values[0], packed)
    per_row = kernels.group_advantage(rewards, ids)
    flat, returns = kernels.gae(
        inputs["entropy"], inputs["entropy"], inputs["cu_seqlens"], gamma=0.9
    )
    correction = kernels.rollout_correction(
        inputs["old_log_probs"], inputs["ref_log_probs"], cu_seqlens=inputs["cu_seqlens"]
    )
    loss, metrics = kernels.policy_loss(
        *(inputs[name] for name in ("log_probs", "old_log_probs", "advantages")),
        loss_mode="gspo",
        loss_agg_mode="seq-mean-token-mean",
        cu_seqlens=inputs["cu_seqlens"],
        global_num_seqs=3,
        rollout_is_weights=correction.weights,
    )
    names = ("log_probs", "old_log_probs", "advantages")
    value, _ = kernels.value_loss(
        *(inputs[name] for name in names), response_mask=inputs["response_mask"]
    )
    return back, per_row, kernels.whiten(flat), returns, loss, metrics["ppo_kl"], value


def test_no_wait_and_capture():
    inputs = {name: value.cuda() for name, value in batch([5, 40, 300]).items()}
    mask = random_mask(8, 50, 0, "prefix").cuda()
    arguments = (
        mask,
        torch.randn(8, 50, 6).cuda(),
        torch.randn(8).cuda(),
        torch.arange(8).cuda() // 4,
    )
    graph, captured = capture(lambda: step(inputs, *arguments))
    eager = step(inputs, *arguments)
    graph.replay()
    for got, want in zip(captured, eager, strict=True):
        assert torch.equal(got, want)
