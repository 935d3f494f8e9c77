"""Models, batches and comparisons that several tests of this folder share."""

from __future__ import annotations

import copy

import torch
from transformers import AutoModelForCausalLM

from hybridengine.model.attention import ATTENTION
from tests.loading import load_sharded
from tests.tiny_models import VOCAB, tiny_config

# float32, two layers of width 128: sums of at most a few hundred terms in another order, so about
# 1e-6 relative; logits are of order 5. A leak between sequences or a wrong position is above 1e-2.
LOGITS = dict(rtol=1e-4, atol=5e-5)
GRADIENTS = dict(rtol=1e-3, atol=5e-5)

SIZES = [(5, 7), (1, 1), (20, 30), (3, 9), (60, 2), (4, 0), (5, 7)]
COLUMNS = ("o_proj.weight", "down_proj.weight", "embed_tokens.weight")


def models(kind: str):
    """Two models with the same random weights: packed attention, and transformers' eager."""
    torch.manual_seed(0)
    eager = AutoModelForCausalLM.from_config(tiny_config(kind), attn_implementation="eager")
    for parameter in eager.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    config = copy.deepcopy(eager.config)
    packed = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    packed.load_state_dict(eager.state_dict())
    return packed.eval(), eager.eval()


def rollouts(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def ids(n):
        return torch.randint(3, VOCAB, (n,), generator=generator).tolist()

    return [(ids(prompt), ids(response)) for prompt, response in sizes]


def one_by_one(model, pairs):
    """Response logits and targets of unpacked sequences, one forward each."""
    logits, targets = [], []
    for prompt, response in pairs:
        out = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
        logits.append(out[len(prompt) - 1 : len(prompt) + len(response) - 1])
        targets += response
    return torch.cat(logits), torch.tensor(targets)


def loss_of(logits, targets):
    return -(logits.float().log_softmax(-1).gather(1, targets[:, None])).sum()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def load(
    path: str,
    world_size: int,
    dtype=torch.float32,
    fsdp_size: int = -1,
    device: str = "cpu",
    **options,
):
    from hybridengine.model import sharding_mesh

    return load_sharded(
        path,
        mesh=sharding_mesh(device, world_size, fsdp_size),
        shard_dim1=lambda name: name.endswith(COLUMNS),
        param_dtype=dtype,
        **options,
    )


def single_process_model(path: str):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )


def pairs_of_rank(pairs: list, rank: int, world_size: int) -> list:
    """Split unevenly: rank 0 of 4 gets most, the last rank a single sequence."""
    edges = [0, *[len(pairs) - world_size + r + 1 for r in range(world_size)]]
    return pairs[edges[rank] : edges[rank + 1]]


def backward(model, pairs: list, world_size: int) -> torch.Tensor:
    """Gradients of the summed loss; FSDP2 averages over the ranks, so scale by their number."""
    from hybridengine.model import pack_rollouts, packed_logits

    batch = pack_rollouts(pairs)
    logits = packed_logits(model, batch)
    (loss_of(logits, batch.target_ids) * world_size).backward()
    return logits.detach()


def full_tensors(model, attribute=lambda p: p) -> dict[str, torch.Tensor]:
    from hybridengine.sync.shards import full_tensor

    return {n: full_tensor(attribute(p)).clone() for n, p in model.named_parameters()}


def assert_close_by_scale(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        scale = expected.abs().max()
        torch.testing.assert_close(ours[name] / scale, expected / scale, **GRADIENTS, msg=name)


def weighted(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """A loss that weighs every row differently, so that a shifted row shows."""
    weight = torch.linspace(-1, 2, log_probs.shape[0])
    return (weight * log_probs).sum() + 0.1 * (weight.flip(0) * entropy).sum()
