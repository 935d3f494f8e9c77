"""The critic's step: PPO's clipped value loss, however the batch is split; values before tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.loading import load_sharded
from tests.ranks import run_ranks
from tests.tensors import part, whole
from tests.tiny_models import save_tiny
from tests.train.rollout_cases import make_rollouts, share

pytestmark = pytest.mark.multirank

CLIP = 0.1


def targets(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(tokens, generator=generator), torch.randn(tokens, generator=generator)


def body(rank: int, world_size: int, path: str, budget: int, sp_size: int, head: torch.Tensor):
    """(values, gradients, metrics) of one update towards random returns from random old values."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, distribute_tensor

    from hybridengine.model import Optimizer
    from hybridengine.run.config import RLConfig
    from hybridengine.run.config import rl as schema
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train.batch import DataParallel
    from hybridengine.train.models import Critic

    actor = schema.ActorConfig(
        ppo_max_token_len_per_gpu=budget, ulysses_sequence_parallel_size=sp_size, grad_clip=1e9
    )
    config = RLConfig(actor=actor, critic=schema.CriticConfig(cliprange_value=CLIP))
    mesh = init_device_mesh("cpu", (world_size,))
    model = load_sharded(path, mesh, torch.float32, value_head=True)
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        part(weight).copy_(part(distribute_tensor(head, mesh)))
    gradients: dict[str, torch.Tensor] = {}

    class Recording(Optimizer):
        def step(self, max_norm: float) -> torch.Tensor:
            gradients.update({n: whole(p.grad) for n, p in model.named_parameters()})
            return super().step(max_norm)

    session = Session(PhaseStatus(Path(path) / "run", rank))
    dp = DataParallel(session, sp_size)
    critic = Critic(config, model, Recording(model, lr=1e-3, total_steps=2), dp)
    prompts, responses, _ = make_rollouts(101)
    batch = dp.build_batch(share(prompts, responses, rank, world_size), 1, budget)
    values = critic.values(batch)
    is_sharded = {isinstance(p, DTensor) for p in model.parameters()}
    assert is_sharded == {world_size > 1}  # nothing stays gathered
    lengths = [len(r.response.token_ids) for r in responses]
    own = [
        torch.cat([x.split(lengths)[i] for i in batch.index.tolist()])
        for x in targets(sum(lengths))
    ]
    metrics = critic.update(replace(batch, values=own[0], returns=own[1]))
    return (
        dict(
            zip(batch.index.tolist(), values.split(batch.cu_seqlens.diff().tolist()), strict=True)
        ),
        gradients,
        metrics,
    )


def test_against_the_formula_however_it_is_split(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path)
    head = torch.randn(1, 128, generator=torch.Generator().manual_seed(1)) / 4
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).get_decoder()
    wanted = []
    prompts, responses, _ = make_rollouts(101)
    for r in responses:
        prompt_ids = prompts[r.group].prompt_ids
        ids = torch.tensor([[*prompt_ids, *r.response.token_ids]])
        first = len(prompt_ids) - 1  # the state before the first response token
        wanted.append((base(ids).last_hidden_state[0] @ head[0])[first:-1])
    values = torch.cat(wanted)
    old, returns = targets(values.numel())
    near = values.clamp(old - CLIP, old + CLIP)
    square = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    loss = 0.5 * square.mean()
    (by_embedding,) = torch.autograd.grad(loss, base.embed_tokens.weight)
    loss = loss.detach()
    explained = 1 - (returns - old).var() / returns.var()
    for world_size, budget, sp_size in ((1, 10_000, 1), (2, 14, 1), (4, 15, 2)):
        for got, gradients, metrics in run_ranks(body, world_size, path, budget, sp_size, head):
            case = f"{world_size} ranks, {budget} tokens, sequences over {sp_size}"
            for i, own in got.items():
                torch.testing.assert_close(own, wanted[i].detach(), rtol=1e-4, atol=1e-4)
            error = gradients["model.embed_tokens.weight"] - by_embedding
            assert error.abs().max() < 2e-5 * by_embedding.abs().max() + 1e-6, case
            assert metrics["critic/vf_loss"] == pytest.approx(float(loss), rel=1e-4), case
            clipped = (near - returns) ** 2 > (values - returns) ** 2
            share = float(clipped.float().mean())
            assert metrics["critic/vf_clipfrac"] == pytest.approx(share, abs=1e-6), case
            assert metrics["critic/vf_explained_var"] == pytest.approx(float(explained), rel=1e-4)
