"""sparse_linear_policy_loss against its definition in float64, and the memory that it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hybridengine.kernels import RolloutSupport
from hybridengine.kernels.sparse_linear import op as module
from hybridengine.kernels.sparse_linear import sparse_linear_policy_loss
from tests import tolerances
from tests.kernels.sparse_linear.cases import Case, problem

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BOUNDS = {"rollout_is_threshold": 1.3, "rollout_is_lower": 0.7}
LIKELY = 4


def recorded(case: Case, seed: int) -> tuple[RolloutSupport, torch.Tensor]:
    """Up to LIKELY kept entries of an engine with other weights, none of every seventh row.

    One entry is not kept. Also the engine's log-probs of the tokens.
    """
    hidden, weight, bias = (t.double() for t in case.tensors)
    generator = torch.Generator().manual_seed(seed)
    wrong = weight + 0.1 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    logits = (hidden @ wrong.t() + bias).masked_fill(~case.kept.mask, -torch.inf)
    log_q = logits.log_softmax(1)
    likely = case.kept.mask & (log_q >= log_q.topk(LIKELY).values[:, -1:])
    likely[::7] = False
    stray = int((~case.kept.mask[1]).nonzero()[0])
    likely[1, stray], log_q[1, stray] = True, -3.0
    ends = torch.cat([torch.zeros(1), likely.sum(1).cumsum(0)]).int()
    rollout = log_q.gather(1, case.token_ids[:, None]).squeeze(1)
    return RolloutSupport(likely.nonzero()[:, 1].int(), ends, log_q[likely].float()), rollout


def definition(
    leaves: list[torch.Tensor],
    case: Case,
    support: RolloutSupport | None,
    rollout: torch.Tensor | None,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """The loss of an on-policy step, token by token; equations 7 to 14 of arXiv 2609.20807."""
    hidden, weight, bias = leaves
    logits = ((hidden @ weight.t() + bias) / temperature).masked_fill(~case.kept.mask, -torch.inf)
    log_p, losses = logits.log_softmax(1), []
    for t in response_mask.nonzero().flatten().tolist():
        own = log_p[t, case.token_ids[t]]
        w = torch.tensor(1.0, dtype=torch.float64)
        if rollout is not None:
            w = weight_of((own.detach() - rollout[t]).exp())
        term = -advantages[t] * w * (own - own.detach()).exp()
        if support is not None:
            part = slice(int(support.cu_kept[t]), int(support.cu_kept[t + 1]))
            ids, q = support.kept_ids[part].long(), support.log_probs[part].double().exp()
            of_ids = log_p[t, ids]
            p, inside = of_ids.detach().exp(), ~of_ids.detach().isneginf()
            tail = (1 - q.sum()).clamp(min=0) / (1 - p.sum()).clamp(min=1e-6)
            if rollout is not None:
                q, tail = q * weight_of(p / q), tail * weight_of(1 / tail)
            factors = (q - tail * p)[inside]
            value = (q[inside] * of_ids.detach()[inside]).sum()  # tail p has a gradient alone
            centered = (factors * of_ids[inside]).sum()
            term = term + advantages[t] * (value + centered - centered.detach())
        losses.append(term)
    return torch.stack(losses).mean()


def weight_of(ratio: torch.Tensor) -> torch.Tensor:
    lower, upper = BOUNDS["rollout_is_lower"], BOUNDS["rollout_is_threshold"]
    return torch.where(ratio < lower, 0.0, torch.where(ratio > upper, 0.0, ratio))


def compare(
    device: str, backend: str | None, centered: bool, weighted: bool, **options: Any
) -> None:
    case = problem(23, 65, 3000, 9, seed=1)
    support, rollout = recorded(case, seed=2)
    generator = torch.Generator().manual_seed(3)
    advantages = torch.randn(23, generator=generator)
    mask = torch.rand(23, generator=generator) < 0.8
    mask[1] = True
    leaves = [t.double().requires_grad_() for t in case.tensors]
    want = definition(
        leaves, case, support if centered else None, rollout if weighted else None,
        advantages.double(), mask, 0.9,
    )  # fmt: skip
    expected = [want.detach(), *torch.autograd.grad(3.0 * want, leaves)]

    found = [t.to(device).requires_grad_() for t in case.tensors]
    loss, *_, metrics = sparse_linear_policy_loss(
        *found[:2],
        case.token_ids.to(device),
        case.kept.ids.to(device),
        case.kept.cu.to(device),
        0.9,
        bias=found[2],
        score_centering=RolloutSupport(*(x.to(device) for x in support)) if centered else None,
        rollout_log_probs=rollout.float().to(device) if weighted else None,
        old_log_probs=None,
        advantages=advantages.to(device),
        response_mask=mask.to(device),
        backend=backend,
        **BOUNDS,
        **options,
    )
    assert ("score_centering" in metrics) == centered
    got = [loss.detach(), *torch.autograd.grad(3.0 * loss, found)]
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, **tolerances.LINEAR)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("form", ["sparse", "reference", "dense", "deterministic"])
def test_the_definition_in_float64(
    form: str, weighted: bool, centered: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form in ("dense", "deterministic"):
        monkeypatch.setattr(module, "DENSE_PART", 0)
    backend = "reference" if form == "reference" else None
    options = {"deterministic": True} if form == "deterministic" else {}
    compare(device, backend, centered, weighted, **options)


def test_memory_is_that_of_the_kept_entries() -> None:
    """Both passes; the mask of T * V bytes, which a dense form has at least, is never there."""
    rows, vocab = 400, 40_000
    case = problem(rows, 8, vocab, 9, seed=4)
    support, _ = recorded(case, seed=5)
    tensors = [t.requires_grad_() for t in case.tensors]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        loss, *_ = sparse_linear_policy_loss(
            *tensors[:2],
            case.token_ids,
            case.kept.ids,
            case.kept.cu,
            bias=tensors[2],
            score_centering=support,
            old_log_probs=None,
            advantages=torch.ones(rows),
        )
        loss.backward()
    assert recording.profiler is not None
    results = recording.profiler.kineto_results
    assert results is not None
    sizes = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
    allocated = sum(size for size in sizes if size > 0)  # freed or not
    gradients = sum(t.numel() * t.element_size() for t in tensors)
    entries = case.kept.ids.numel() + support.kept_ids.numel()
    assert entries * 8 < allocated < 4 * gradients + 400 * entries < rows * vocab


def test_arguments_that_do_not_fit() -> None:
    case = problem(23, 65, 3000, 9, seed=1)
    support, rollout = recorded(case, seed=2)
    given = *case.tensors[:2], case.token_ids, case.kept.ids, case.kept.cu
    loss = {"old_log_probs": None, "advantages": torch.ones(23)}
    with pytest.raises(ValueError, match="rollout_is_weights and score_centering are given"):
        sparse_linear_policy_loss(
            *given, score_centering=support, rollout_is_weights=rollout.float(), **loss
        )
    outside = support._replace(kept_ids=support.kept_ids.index_fill(0, torch.tensor(0), 3000))
    with pytest.raises(IndexError, match=r"kept_ids\[0\] is 3000, outside the vocabulary of 3000"):
        sparse_linear_policy_loss(*given, score_centering=outside, **loss)


WRONG = {
    "negative": ({"kept_ids": [0, 3, -1, 3]}, r"kept_ids\[2\] is -1, outside the vocabulary of 5"),
    "repeated": ({"kept_ids": [0, 3, 3, 3]}, r"kept_ids\[3\] is 3, after 3 in row 1"),
    "ends": ({"cu_kept": [0, 2, 3]}, "cu_kept ends at 3, but there are 4"),
    "rows": ({"cu_kept": [0, 4]}, r"cu_kept has shape \[2\]; expected \[N\] with N = 3"),
    "empty": ({"cu_kept": [0, 4, 4], "kept_ids": [0, 1, 2, 3]}, "row 1 has no kept_ids"),
    "floats": ({"kept_ids": [0.0, 3.0, 0.0, 3.0]}, "kept_ids has dtype float32"),
    "token": ({"token_ids": [3, 5]}, r"token_ids\[1\] is 5, outside the vocabulary of 5"),
}


@pytest.mark.parametrize("part", [0, 1], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", WRONG)
def test_entries_that_do_not_fit(name: str, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same errors, however many entries are kept."""
    monkeypatch.setattr(module, "DENSE_PART", part)
    change, message = WRONG[name]
    good = {"token_ids": [3, 0], "kept_ids": [0, 3, 0, 3], "cu_kept": [0, 2, 4]}
    given = {key: torch.tensor(value) for key, value in (good | change).items()}
    loss = {"old_log_probs": None, "advantages": torch.ones(2)}
    with pytest.raises((ValueError, IndexError), match=message):
        sparse_linear_policy_loss(torch.ones(2, 4), torch.ones(5, 4), **given, **loss)
