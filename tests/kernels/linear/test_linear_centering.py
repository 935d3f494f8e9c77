"""score_centering of linear_policy_loss against the two operators on float64 logits."""

import pytest
import torch
import torch.distributed as dist

from hybridengine.kernels import (
    RolloutSupport,
    linear_policy_loss,
    policy_loss,
    score_centering,
    token_log_probs,
)
from hybridengine.kernels.linear.centering import Centering
from tests.kernels.linear.cases import DEVICES, ROUNDED, assert_all_close, loss_inputs, problem
from tests.ranks import run_ranks

ROWS, WIDTH, VOCAB = 40, 16, 101
BOUNDS = {"rollout_is_threshold": 1.3, "rollout_is_lower": 0.7}


def recorded(tensors, token_ids, seed=2):
    """The six most likely entries of an engine with other weights, and of some rows none."""
    hidden, weight, bias = (t.double() for t in tensors)
    generator = torch.Generator().manual_seed(seed)
    wrong = weight + 0.1 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    log_q = (hidden @ wrong.t() + bias).log_softmax(1)
    keep = log_q >= log_q.topk(6).values[:, -1:]
    keep[::7] = False
    ends = torch.cat([torch.zeros(1), keep.sum(1).cumsum(0)]).int()
    rollout = log_q.gather(1, token_ids[:, None]).squeeze(1).float()
    return RolloutSupport(keep.nonzero()[:, 1].int(), ends, log_q[keep].float()), rollout


def expected(tensors, token_ids, support, arguments, loss_options, bounds, row_options):
    """Loss, C and gradients of three times the loss, from [T, V] logits in float64."""
    leaves = [t.double().requires_grad_() for t in tensors]
    logits = torch.nn.functional.linear(*leaves)
    row_options = {
        k: v.double() if k == "temperature" and isinstance(v, torch.Tensor) else v
        for k, v in row_options.items()
    }
    log_probs, entropy = token_log_probs(logits, token_ids, **row_options)
    rows = torch.repeat_interleave(torch.arange(ROWS), support.cu_kept.diff())
    per_entry = {k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in row_options.items()}
    kept, _ = token_log_probs(logits[rows], support.kept_ids.long(), **per_entry)
    is_options = {k: v for k, v in loss_options.items() if k.startswith("rollout_is_")}
    scores = score_centering(
        kept,
        support.log_probs.double(),
        support.cu_kept,
        response_mask=arguments["response_mask"],
        rollout_is=None if bounds is None else "token",
        **is_options,
    )
    loss, metrics = policy_loss(
        log_probs, entropy=entropy, score_centering=scores, **arguments, **loss_options
    )
    grads = torch.autograd.grad(3.0 * loss, leaves)
    return [loss.detach(), metrics["score_centering"], *grads]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bounds", (None, BOUNDS))
@pytest.mark.parametrize(
    "rows", ("all", "active", "softcap", "per-token temperature", "vocab_mask", "reference")
)
@pytest.mark.parametrize("mode", ("reinforce", "ppo_clip", "dppo_tv"))
def test_against_float64(mode, rows, bounds, device):
    tensors, token_ids, _ = problem(ROWS, WIDTH, VOCAB)
    arguments = loss_inputs(ROWS)
    support, rollout = recorded(tensors, token_ids)
    loss_options = {"loss_mode": mode, "loss_agg_mode": "seq-mean-token-mean"}
    options, row_options = {}, {"temperature": 0.9}
    if bounds is not None:
        arguments["rollout_log_probs"] = rollout
        loss_options |= bounds
    if rows == "active":
        active = (arguments["response_mask"] & (arguments["advantages"] != 0)).nonzero().flatten()
        options["active_rows"] = active
    elif rows == "softcap":
        row_options |= {"softcap": 2.0, "logit_scale": 0.7}
        loss_options |= {"entropy_coeff": 0.01}
    elif rows == "per-token temperature":
        row_options["temperature"] = torch.linspace(0.5, 1.5, ROWS)
    elif rows == "vocab_mask":
        mask = torch.rand(ROWS, VOCAB, generator=torch.Generator().manual_seed(9)) < 0.7
        row_options["vocab_mask"] = mask.scatter(1, token_ids[:, None], True)
    elif rows == "reference":
        options["backend"] = "reference"
    want = expected(tensors, token_ids, support, arguments, loss_options, bounds, row_options)
    for budget_bytes, grad_scale in ((11 * VOCAB * 4, 1.0), (2**20, 3.0)):
        leaves = [t.to(device).requires_grad_() for t in tensors]
        move = lambda given: {  # noqa: E731
            k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items()
        }
        loss, _, _, metrics = linear_policy_loss(
            *leaves[:2],
            token_ids.to(device),
            bias=leaves[2],
            score_centering=RolloutSupport(*(t.to(device) for t in support)),
            budget_bytes=budget_bytes,
            grad_scale=grad_scale,
            **move(arguments),
            **move(options),
            **move(row_options),
            **loss_options,
        )
        grads = torch.autograd.grad(3.0 * loss, leaves)
        got = [loss.detach(), metrics["score_centering"], *grads]
        assert_all_close([t.cpu() for t in got], want)


def test_own_log_probs_and_16_bits():
    """On-policy but for the engine: the trained p cancels, and the samples pull towards y - q."""
    tensors, token_ids, _ = problem(ROWS, WIDTH, VOCAB, dtype=torch.bfloat16)
    arguments = {"advantages": loss_inputs(ROWS)["advantages"]}
    support, _ = recorded(tensors, token_ids)
    mask = torch.ones(ROWS, dtype=torch.bool)
    exact = arguments | {"old_log_probs": None, "response_mask": mask}
    want = expected(tensors, token_ids, support, exact, {}, None, {})
    leaves = [t.requires_grad_() for t in tensors]
    loss, *_ = linear_policy_loss(
        *leaves[:2],
        token_ids,
        bias=leaves[2],
        old_log_probs=None,
        score_centering=support,
        **arguments,
    )
    grads = torch.autograd.grad(3.0 * loss, leaves)
    torch.testing.assert_close(loss.double(), want[0], rtol=1e-5, atol=1e-5)
    for got, one in zip(grads, want[2:], strict=True):
        largest = one.abs().max()
        assert_all_close([got / largest], [one / largest], **ROUNDED)


@pytest.mark.parametrize("with_active_rows", (False, True))
def test_numbers_that_the_host_does_not_read(with_active_rows, monkeypatch):
    """On a device every chunk looks at the entries of all tokens: the same bits."""
    tensors, token_ids, _ = problem(ROWS, WIDTH, VOCAB)
    arguments = loss_inputs(ROWS)
    support, _ = recorded(tensors, token_ids)
    active = (arguments["response_mask"] & (arguments["advantages"] != 0)).nonzero().flatten()

    def run():
        leaves = [t.clone().requires_grad_() for t in tensors]
        loss, *_ = linear_policy_loss(
            *leaves[:2],
            token_ids,
            bias=leaves[2],
            score_centering=support,
            active_rows=active if with_active_rows else None,
            budget_bytes=11 * VOCAB * 4,
            **arguments,
        )
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    expected = run()
    of_all = (slice(0, ROWS), 0, support.kept_ids.numel())
    monkeypatch.setattr(Centering, "entries_of", lambda *_: of_all)
    assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))


def _rank(rank, world_size):
    group = dist.group.WORLD
    tensors, token_ids, _ = problem(ROWS, WIDTH, VOCAB)
    arguments = loss_inputs(ROWS)
    support, _ = recorded(tensors, token_ids)
    part = slice(0, 60) if rank == 0 else slice(60, VOCAB)
    hidden, weight, bias = tensors
    results = []
    for rows, options in ((slice(None), {}), (part, {"group": group})):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight[rows], bias[rows])]
        loss, *_ = linear_policy_loss(
            *leaves[:2],
            token_ids,
            bias=leaves[2],
            score_centering=support,
            softcap=5.0,
            **arguments,
            **options,
        )
        grads = torch.autograd.grad(loss, leaves)
        results.append(
            [loss.detach(), grads[0], *(g[part] if not options else g for g in grads[1:])]
        )
    assert_all_close(results[1], results[0])


def test_vocabulary_parallel_ranks():
    run_ranks(_rank, 2)


def test_arguments_that_do_not_fit():
    tensors, token_ids, _ = problem(ROWS, WIDTH, VOCAB)
    support, rollout = recorded(tensors, token_ids)
    arguments = loss_inputs(ROWS)

    def run(support=support, **options):
        linear_policy_loss(*tensors[:2], token_ids, score_centering=support, **arguments | options)

    with pytest.raises(ValueError, match="loss_mode 'gspo', where the score"):
        run(loss_mode="gspo")
    with pytest.raises(ValueError, match="rollout_is_weights and score_centering are given"):
        run(rollout_is_weights=rollout)
    with pytest.raises(IndexError, match=r"kept_ids\[0\] is 101, outside the vocabulary of 101"):
        run(support._replace(kept_ids=support.kept_ids.index_fill(0, torch.tensor(0), VOCAB)))
    with pytest.raises(ValueError, match="cu_kept has shape"):
        run(support._replace(cu_kept=support.cu_kept[:-1]))
    with pytest.raises(TypeError, match="expected a RolloutSupport"):
        run(rollout)
