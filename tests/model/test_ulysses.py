"""Sequence-parallel ranks against one plain process: log-probs, entropy, loss and gradients."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from hybridengine.model.rotary import fix_rotary_length
from tests.model.cases import (
    LOGITS,
    SIZES,
    assert_close_by_scale,
    full_tensors,
    load,
    one_by_one,
    rollouts,
    single_process_model,
    weighted,
)
from tests.model.rotary_configs import LONG_ROPE, tiny
from tests.ranks import run_ranks
from tests.tiny_models import TINY, save_tiny

# 154 tokens: padded over 4 ranks but not over 2; one of 4 ranks sees prompt tokens only.
assert sum(prompt + response for prompt, response in SIZES) == 154
# The longest position of rank 0 of 2 is below this length, and that of rank 1 above it.
BETWEEN_THE_RANKS = LONG_ROPE | {"original_max_position_embeddings": 55}


def expected(path: str, pairs: list) -> tuple[torch.Tensor, torch.Tensor, dict]:
    model = single_process_model(path)
    fix_rotary_length(model)
    logits, targets = one_by_one(model, pairs)
    log_softmax = logits.float().log_softmax(-1)
    log_probs = log_softmax.gather(1, targets[:, None])[:, 0]
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    weighted(log_probs, entropy).backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    return log_probs.detach(), entropy.detach(), gradients


def body(rank: int, world_size: int, paths: list[str], sp_size: int) -> list[int]:
    from torch.distributed.device_mesh import init_device_mesh

    from hybridengine.model import pack_rollouts, packed_log_probs

    mesh = init_device_mesh("cpu", (world_size // sp_size, sp_size), mesh_dim_names=("dp", "sp"))
    group, replica = mesh["sp"].get_group(), mesh["dp"].get_local_rank()
    torch.compile = partial(torch.compile, backend="aot_eager")  # traced, no code generated
    rows = []
    for path in paths:
        pairs = rollouts(SIZES, seed=replica)
        model = load(
            path,
            world_size,
            enable_gradient_checkpointing=True,
            compile=path.endswith("one_kv_head"),
        )
        batch = pack_rollouts(pairs, sequence_parallel=group)
        assert batch.input_ids.shape[0] == -(-154 // sp_size)
        log_probs, entropy = packed_log_probs(model, batch)
        (weighted(log_probs, entropy) * world_size).backward()  # FSDP2 averages
        gradients = full_tensors(model, lambda p: p.grad)
        by_replica = [expected(path, rollouts(SIZES, seed=r)) for r in range(mesh["dp"].size())]
        torch.testing.assert_close(log_probs, by_replica[replica][0], **LOGITS)
        torch.testing.assert_close(entropy, by_replica[replica][1], **LOGITS)
        summed = {n: sum(g[n] for _, _, g in by_replica) for n in gradients}
        assert_close_by_scale(gradients, summed)
        rows.append(batch.target_ids.shape[0])
    return rows


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("world_size", "sp_size"), [(2, 2), pytest.param(4, 4, marks=pytest.mark.exhaustive), (4, 2)]
)
def test_split_sequences_equal_one_process(tmp_path: Path, world_size: int, sp_size: int) -> None:
    """Every kind: query groups split or repeated, windows, soft-caps, biases, sinks, LongRoPE.

    One is compiled.
    """
    kinds = TINY if (world_size, sp_size) != (4, 2) else ["llama"]
    paths = [save_tiny(kind, tmp_path / kind) for kind in kinds]
    if kinds is TINY:
        paths.append(save_tiny(tiny("phi3", BETWEEN_THE_RANKS), tmp_path / "phi3"))
    rows = run_ranks(body, world_size, paths, sp_size)
    assert (sp_size == 4) == any(0 in of_rank for of_rank in rows)


def heads_body(rank: int, world_size: int, dtype: torch.dtype) -> None:
    import torch.distributed as dist

    from hybridengine.model.attention import gather_heads_scatter_seq, gather_seq_scatter_heads
    from hybridengine.run.errors import ModelError

    tokens, heads, kv_heads = 5, 12, 3
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q, k, v = (random(tokens * world_size, n, w) for n, w in ((heads, 4), (kv_heads, 4), (3, 2)))
    mine = slice(rank * tokens, (rank + 1) * tokens)
    group = dist.group.WORLD
    got = gather_seq_scatter_heads(q[mine], k[mine], v[mine], group=group)
    for full, part in zip((q, k, v), got, strict=True):
        one_each = full.repeat_interleave(heads // full.shape[1], dim=1)
        of_rank = one_each.chunk(world_size, dim=1)[rank]
        assert torch.equal(part.repeat_interleave(heads // 4 // part.shape[1], dim=1), of_rank)
    assert torch.equal(gather_heads_scatter_seq(got[0], group), q[mine])
    with pytest.raises(ModelError, match=r"has 6 heads, which 4 ranks"):
        gather_seq_scatter_heads(q[mine, :6], k[mine], v[mine], group=group)


@pytest.mark.multirank
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_key_value_heads_that_neither_divide_nor_are_divided(dtype: torch.dtype) -> None:
    """3 key-value heads over 4 ranks: each rank's query heads find their own."""
    run_ranks(heads_body, 4, dtype)


def test_models_without_sequence_parallelism_are_refused() -> None:
    from transformers import LlamaConfig

    from hybridengine.model import check_sequence_parallel
    from hybridengine.run.errors import ModelError

    config = LlamaConfig(hidden_size=384, num_attention_heads=6)
    check_sequence_parallel(config, 3)
    with pytest.raises(ModelError, match="is 4, which does not divide the model's 6 attention"):
        check_sequence_parallel(config, 4)
