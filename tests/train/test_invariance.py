"""The loss and its gradients do not depend on micro-batches, token budget or number of ranks."""

from __future__ import annotations

import typing
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.loading import load_sharded
from tests.ranks import run_ranks
from tests.tensors import whole
from tests.tiny_models import save_tiny
from tests.train.rollout_cases import make_rollouts, share

pytestmark = pytest.mark.multirank


def body(
    rank: int,
    world_size: int,
    path: str,
    token_budget: int,
    loss: tuple[str, str],
    count: int = 11,
    sp_size: int = 1,
):
    """Return (unsharded float32 gradients per optimizer step, metrics) of one update."""
    from torch.distributed.device_mesh import init_device_mesh

    from hybridengine.model import Optimizer
    from hybridengine.run.config import RLConfig
    from hybridengine.run.config import rl as schema
    from hybridengine.run.config.rl import PolicyLossConfig
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train.batch import DataParallel
    from hybridengine.train.metrics import probs_diff
    from hybridengine.train.models import Actor

    actor_config = schema.ActorConfig(
        ppo_max_token_len_per_gpu=token_budget,
        ulysses_sequence_parallel_size=sp_size,
        policy_loss=PolicyLossConfig(loss_mode=loss[0]),
        loss_agg_mode=loss[1],
        use_kl_loss=True,
        kl_loss_coef=0.1,
        entropy_coeff=0.01,
        ppo_epochs=2,  # the second pass has ratios away from 1
        grad_clip=1e9,
    )
    config = RLConfig(actor=actor_config)
    mesh = init_device_mesh("cpu", (world_size,))

    def load(seed_shift: float) -> torch.nn.Module:
        model = load_sharded(path, mesh, torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + seed_shift)
        return model

    model, reference = load(0.0), load(0.05).requires_grad_(False)
    gradients: list[dict[str, torch.Tensor]] = []

    class Recording(Optimizer):
        def step(self, max_norm: float) -> torch.Tensor:
            gradients.append({n: whole(p.grad).clone() for n, p in model.named_parameters()})
            return super().step(max_norm)

    optimizer = Recording(
        model, lr=1.2e-4, total_steps=4
    )  # the second pass clips some tokens, not all
    session = Session(PhaseStatus(Path(path) / "run", rank))
    dp = DataParallel(session, sp_size)
    actor = Actor(config, model, partial(nullcontext, reference), optimizer, dp)
    prompts, responses, advantages = make_rollouts(101, count)
    batch = dp.build_batch(share(prompts, responses, rank, world_size), 1, token_budget)
    batch = replace(
        batch,
        advantages=torch.cat([advantages[i] for i in batch.index.tolist()]),
        ref_log_probs=actor.ref_log_probs(batch),
        old_log_probs=actor.old_log_probs(batch),
    )
    for scored in (model, reference):  # without a backward nothing else frees embedding and head
        assert all(isinstance(p, DTensor) == (world_size > 1) for p in scored.parameters())
    metrics = probs_diff(batch, dp.group)
    is_weights, response_mask, correction_metrics = actor.rollout_correction(batch)
    batch = replace(batch, is_weights=is_weights, response_mask=response_mask)
    metrics |= {name: float(value) for name, value in correction_metrics.items()}
    metrics |= actor.update(batch)[1]
    return gradients, metrics


def bodies(rank: int, world_size: int, path: str, cases: list[tuple]) -> list[tuple]:
    return [body(rank, world_size, path, *case) for case in cases]


LOSSES = [("vanilla", "token-mean"), ("gspo", "seq-mean-token-mean")]
SPLITS = {  # (token budget, sp_size) by the number of ranks; the first one is what is wanted
    1: [(10_000, 1), (20, 1)],
    2: [(10_000, 1), (14, 1)],
    3: [(30, 1)],
    4: [(15, 2)],
}


def test_split_and_world_size_change_nothing(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path)
    wanted = {}
    for world_size, splits in SPLITS.items():
        cases = [(budget, loss, 11, sp_size) for loss in LOSSES for budget, sp_size in splits]
        for results in run_ranks(bodies, world_size, path, cases):
            for (token_budget, loss, _, sp_size), result in zip(cases, results, strict=True):
                want = wanted.setdefault(loss, result)
                assert_same(result, want, (loss, world_size, token_budget, sp_size))


def assert_same(result: tuple, want: tuple, case: tuple) -> None:
    for step, (got, expected) in enumerate(zip(result[0], want[0], strict=True)):
        for name in expected:
            # float32 sums in another order; step 1 also sees weights stepped by Adam, which turns
            # rounding of tiny gradients into relative errors of the update.
            scale = expected[name].abs().max()
            error = (got[name] - expected[name]).abs().max() / scale
            assert error < (2e-5, 2e-3)[step], (case, step, name)
    for name, value in want[1].items():
        assert result[1][name] == pytest.approx(value, rel=1e-3, abs=1e-6), (case, name)


def test_dummy_micro_batches_change_nothing(tmp_path: Path) -> None:
    """More ranks than sequences: some ranks only take part in the collectives."""
    path = save_tiny("llama", tmp_path)
    arguments = (path, 10_000, ("vanilla", "token-mean"), 2)
    want, _ = run_ranks(body, 1, *arguments)[0]
    for gradients, _ in run_ranks(body, 3, *arguments):
        for name, expected in want[0].items():
            error = (gradients[0][name] - expected).abs().max() / expected.abs().max()
            assert error < 2e-5, name  # float32 sums in another order


def modes_body(rank: int, world_size: int, path: str, losses: list[tuple[str, str]]):
    """The gradient of the embedding in the second pass, whose ratios are away from 1."""
    name = "model.embed_tokens.weight"
    return [body(rank, world_size, path, 10_000, loss)[0][1][name] for loss in losses]


def test_every_configured_loss_reaches_the_update(tmp_path: Path) -> None:
    from hybridengine.run.config import rl as schema
    from hybridengine.run.config.rl import PolicyLossConfig

    hints = typing.get_type_hints(schema.ActorConfig)
    modes = typing.get_args(typing.get_type_hints(PolicyLossConfig)["loss_mode"])
    aggregations = typing.get_args(hints["loss_agg_mode"])
    losses = [(mode, "token-mean") for mode in modes]
    losses += [("vanilla", aggregation) for aggregation in aggregations[1:]]
    (gradients,) = run_ranks(modes_body, 1, save_tiny("llama", tmp_path), losses)
    for i, gradient in enumerate(gradients):
        assert gradient.isfinite().all() and gradient.abs().sum() > 0, losses[i]
        if i:  # dppo_tv and dppo_kl, gspo and gmpo agree where nothing is masked or clipped
            assert not torch.allclose(gradient, gradients[0], rtol=1e-3), losses[i]
