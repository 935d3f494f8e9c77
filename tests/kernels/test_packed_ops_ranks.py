"""Several ranks: whitening statistics and loss denominators are those of all ranks."""

import pytest
import torch
import torch.distributed as dist

from hybridengine.kernels import policy_loss, whiten
from tests.kernels.batches import batch, global_counts, split
from tests.ranks import run_ranks
from tests.tolerances import ADVANTAGE, POLICY_LOSS

pytestmark = pytest.mark.multirank

LENGTHS = [5, 17, 70, 1, 33, 16]
PARTS = ([3, 0], [2, 5, 1, 4])  # sequences of each rank, unequal in number


def rows_of(rank: int) -> torch.Tensor:
    return list(split(batch(LENGTHS), PARTS))[rank][0]


def _whiten_part(rank: int, world_size: int) -> torch.Tensor:
    inputs = batch(LENGTHS)
    rows = rows_of(rank)
    nothing = whiten(torch.zeros(0)) if rank else whiten(torch.tensor([1.0, 3.0]))
    assert nothing.numel() == (0 if rank else 2)
    return whiten(inputs["entropy"][rows] * 5 + 100, inputs["response_mask"][rows])


def test_whitening_is_over_all_ranks():
    inputs = batch(LENGTHS)
    full = whiten(inputs["entropy"] * 5 + 100, inputs["response_mask"])
    for rank, part in enumerate(run_ranks(_whiten_part, 2)):
        torch.testing.assert_close(part, full[rows_of(rank)], **ADVANTAGE)


def _loss_of(inputs: dict, loss_agg_mode: str, **totals: torch.Tensor):
    """Return the loss and its gradient."""
    log_probs = inputs["log_probs"].requires_grad_()
    loss, _ = policy_loss(
        log_probs,
        inputs["old_log_probs"],
        inputs["advantages"],
        response_mask=inputs["response_mask"],
        loss_mode="gspo",
        loss_agg_mode=loss_agg_mode,
        cu_seqlens=inputs["cu_seqlens"],
        **totals,
    )
    loss.backward()
    return loss.detach(), log_probs.grad


def _loss_part(rank: int, world_size: int, loss_agg_mode: str):
    _, inputs = list(split(batch(LENGTHS), PARTS))[rank]
    totals = torch.tensor(list(global_counts(inputs).values())).double()
    dist.all_reduce(totals)
    loss, gradient = _loss_of(
        inputs, loss_agg_mode, global_num_tokens=totals[0], global_num_seqs=totals[1]
    )
    dist.all_reduce(loss)
    return loss, gradient


@pytest.mark.parametrize("loss_agg_mode", ["token-mean", "seq-mean-token-mean"])
def test_the_loss_does_not_depend_on_the_ranks(loss_agg_mode):
    full, expected = _loss_of(batch(LENGTHS), loss_agg_mode)
    for rank, (total, gradient) in enumerate(run_ranks(_loss_part, 2, loss_agg_mode)):
        torch.testing.assert_close(total, full, **POLICY_LOSS)
        torch.testing.assert_close(gradient, expected[rows_of(rank)], **POLICY_LOSS)
