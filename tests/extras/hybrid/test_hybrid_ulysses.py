"""Models with linear attention whose packed batch is divided over ranks, against one process."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridengine.hybrid.segments import Segments
from hybridengine.kernels import causal_conv1d
from hybridengine.model import pack_rollouts, packed_log_probs
from tests.extras.hybrid.hybrid_models import TYPES, hybrid_models
from tests.model.cases import (
    LOGITS,
    assert_close_by_scale,
    full_tensors,
    load,
    one_by_one,
    rollouts,
    single_process_model,
    weighted,
)
from tests.model.forests import group_pairs
from tests.ranks import run_ranks

# Of 69 tokens, which 2 ranks pad: a sequence over both ranks, sequences shorter than a convolution,
# and boundaries in the middle of a rank's share.
PAIRS = rollouts([(1, 1), (20, 34), (3, 4), (1, 1), (3, 1)])
FUNCTIONS = (
    "qwen3_5_text",
    "kimi_linear",
    "lfm2",
    "falcon_h1",
    "jamba",
    "minimax",
)  # of every kind


def body(rank: int, world_size: int, paths: list[str]) -> None:
    torch.compile = partial(torch.compile, backend="aot_eager")  # traced, no code generated
    for path in paths:
        model = load(
            path,
            world_size,
            enable_gradient_checkpointing=True,
            compile=path.endswith("compiled"),
        )
        reference = single_process_model(path)
        for pairs, shared_prefix in ((PAIRS, False), (group_pairs(), True)):
            batch = pack_rollouts(
                pairs, sequence_parallel=dist.group.WORLD, shared_prefix=shared_prefix
            )
            assert (batch.subtree_ends is not None) == shared_prefix
            for x in (model, reference):
                x.zero_grad()
            log_probs, entropy = packed_log_probs(model, batch)
            (weighted(log_probs, entropy) * world_size).backward()  # FSDP2 averages
            logits, targets = one_by_one(reference, pairs)
            every = logits.float().log_softmax(-1)
            expected = every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
            weighted(*expected).backward()
            torch.testing.assert_close(log_probs, expected[0], **LOGITS)
            torch.testing.assert_close(entropy, expected[1], **LOGITS)
            wanted = {n: p.grad for n, p in reference.named_parameters()}
            assert_close_by_scale(full_tensors(model, lambda p: p.grad), wanted)


@pytest.mark.multirank
@pytest.mark.parametrize(
    "kinds", [FUNCTIONS, pytest.param({*TYPES} - {*FUNCTIONS}, marks=pytest.mark.exhaustive)]
)
def test_divided_batches_equal_one_process(tmp_path: Path, kinds: Iterable[str]) -> None:
    """Checkpointed."""
    paths = []
    for kind in sorted(kinds):
        paths.append(str(tmp_path / kind))
        hybrid_models(kind)[1].save_pretrained(paths[-1])
    run_ranks(body, 2, paths)


@pytest.mark.exhaustive
@pytest.mark.multirank
@pytest.mark.parametrize("kind", ["qwen3_5_text", "mamba2"])
def test_compiled_layers(tmp_path: Path, kind: str) -> None:
    hybrid_models(kind)[1].save_pretrained(tmp_path / "compiled")
    run_ranks(body, 2, [str(tmp_path / "compiled")])


def convolution_body(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, 3, 8):  # of a rank's share: also shorter than a convolution
        total = length * world_size
        mine = slice(rank * length, (rank + 1) * length)
        for width in (2, 3, 4):
            for _ in range(10):
                count = int(torch.randint(1, total + 1, (), generator=generator))
                cuts = torch.randperm(total - 1, generator=generator)[: count - 1] + 1
                bounds = torch.tensor([0, *cuts.sort().values, total], dtype=torch.int32)
                # Any earlier segment, or none.
                parents = (torch.rand(count, generator=generator) * (torch.arange(count) + 1)).int()
                parents -= 1
                share = Segments(bounds, parents, dist.group.WORLD).share
                x = torch.randn(total, 5, generator=generator, requires_grad=True)
                weight = torch.randn(5, width, generator=generator)
                grad = torch.randn(total, 5, generator=generator)
                expected = causal_conv1d(x, weight, cu_seqlens=bounds, parents=parents)
                expected.backward(grad)
                own = x.detach()[mine].requires_grad_()
                out = causal_conv1d(own, weight, **share.of_convolution(own, width))
                out.backward(grad[mine])
                assert torch.equal(out, expected[mine])
                torch.testing.assert_close(own.grad, x.grad[mine])


@pytest.mark.multirank
def test_convolutions_read_rows_of_other_ranks() -> None:
    """Random forests over 4 ranks: a path is spread over shares, and a row has many readers."""
    run_ranks(convolution_body, 4)
