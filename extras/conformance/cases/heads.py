"""Output heads and layers: tied weights, row weights, distillation, packing, expert adapters."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from hybridengine.conformance.case import Case, with_gradient

_generator = torch.Generator().manual_seed(2)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_generator, dtype=torch.float64)


def _tied(weight: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """[sum of log-probs, gradient of the tied weight]; hidden states are the embeddings."""

    def total(w: Tensor) -> Tensor:
        return (w[ids] @ w.T).log_softmax(-1).gather(1, labels[:, None])

    return with_gradient(total, weight)


def _head_only(weight: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    def total(w: Tensor) -> Tensor:
        return (weight[ids] @ w.T).log_softmax(-1).gather(1, labels[:, None])

    return with_gradient(total, weight)


def _weighted_rows(hidden: Tensor, weight: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    """Cross-entropy per row times weights of the rows; -100 is no label."""
    return with_gradient(
        lambda h: cross_entropy(h @ weight.T, labels, reduction="none") * rows, hidden
    )


def _scalar_gradient(hidden: Tensor, weight: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    """The gradient of the last row's weight for every row."""
    out = _weighted_rows(hidden, weight, labels, torch.ones_like(rows) * rows[-1])
    out[0] = _weighted_rows(hidden, weight, labels, rows)[0]
    return out


def _of_items(hidden: Tensor, weight: Tensor, labels: Tensor, num_items: int) -> Tensor:
    return with_gradient(
        lambda h: cross_entropy(h @ weight.T, labels, reduction="sum") / num_items, hidden
    )


def _of_own_items(hidden: Tensor, weight: Tensor, labels: Tensor, num_items: int) -> Tensor:
    return with_gradient(lambda h: cross_entropy(h @ weight.T, labels), hidden)


def _divergence(student: Tensor, teacher: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Generalised Jensen-Shannon, arXiv 2306.13649 eq. 1; 0 forward KL, 1 reverse KL."""
    q, p = student.softmax(-1), teacher.softmax(-1)
    mixture = beta * p + (1 - beta) * q
    forward, backward = (p * (p / mixture).log()).sum(-1), (q * (q / mixture).log()).sum(-1)
    terms = beta * forward + (1 - beta) * backward
    if beta == 0:
        terms = (p * (p / q).log()).sum(-1)
    if beta == 1:
        terms = (q * (q / p).log()).sum(-1)
    return (terms.where(mask, 0).sum() / mask.sum()).view(1)


def _swapped(student: Tensor, teacher: Tensor, mask: Tensor, beta: float) -> Tensor:
    return _divergence(student, teacher, mask, 1 - beta)


def _other_mixture(student: Tensor, teacher: Tensor, mask: Tensor, beta: float) -> Tensor:
    q, p = student.softmax(-1), teacher.softmax(-1)
    mixture = beta * q + (1 - beta) * p
    terms = beta * (p * (p / mixture).log()) + (1 - beta) * (q * (q / mixture).log())
    return (terms.sum(-1).where(mask, 0).sum() / mask.sum()).view(1)


def _all_rows(student: Tensor, teacher: Tensor, mask: Tensor, beta: float) -> Tensor:
    return _divergence(student, teacher, mask, beta) * mask.sum() / mask.numel()


def _attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Causal attention of each sequence by itself, [T, H, D]."""
    parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
    out = []
    for q, k, v in parts:
        scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
        future = torch.ones(len(q), len(q)).triu(1).bool()
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        out.append(torch.einsum("hij,jhd->ihd", weights, v))
    return torch.cat(out)


def _leaking(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    return _attention(query, key, value, [sum(lengths)])


def _expert_delta(left: Tensor, right: Tensor, num_experts: int, rank: int) -> Tensor:
    """B_e A_e of every expert; PEFT stores left [out, r * E], the expert fastest."""
    out = []
    for e in range(num_experts):
        a = right[e * rank : (e + 1) * rank]
        out.append(left[:, e::num_experts] @ a)
    return torch.stack(out)


def _expert_slowest(left: Tensor, right: Tensor, num_experts: int, rank: int) -> Tensor:
    parts = zip(left.split(rank, 1), right.split(rank), strict=True)
    return torch.stack([b @ a for b, a in parts])


_HIDDEN, _WEIGHT = _normal(5, 6), _normal(9, 6)
_LABELS = torch.tensor([3, -100, 8, 0, 3])
_STUDENT, _TEACHER = _normal(4, 9), _normal(4, 9)
_ROWS = torch.tensor([1, 1, 0, 1]).bool()
_DISTILL = {"student": _STUDENT, "teacher": _TEACHER, "mask": _ROWS}

CASES = (
    Case(
        "a tied head and embedding add their gradients",
        "tied_gradient",
        {"weight": _WEIGHT, "ids": _LABELS[2:], "labels": torch.tensor([1, 3, 3])},
        _tied,
        _head_only,
        "https://github.com/paiml/entrenar/issues/314",
        "Head and embedding were updated apart from each other.",
    ),
    Case(
        "cross-entropy per row has the gradient of every row's weight",
        "row_cross_entropy",
        {
            "hidden": _HIDDEN,
            "weight": _WEIGHT,
            "labels": _LABELS,
            "rows": torch.tensor([0.5, 2.0, -1.0, 3.0, 0.0], dtype=torch.float64),
        },
        _weighted_rows,
        _scalar_gradient,
        "https://github.com/linkedin/Liger-Kernel/issues/968",
        "The backward of a loss per row took one incoming number for all rows.",
    ),
    Case(
        "cross-entropy of a micro-batch divides by the labels of the batch",
        "cross_entropy",
        {"hidden": _HIDDEN, "weight": _WEIGHT, "labels": _LABELS, "num_items": 11},
        _of_items,
        _of_own_items,
        "https://github.com/huggingface/transformers/issues/34242",
        "Means of micro-batches and ranks with different numbers of labels were averaged.",
    ),
    Case(
        "distillation: beta 0 is the forward KL",
        "distillation",
        {**_DISTILL, "beta": 0.0},
        _divergence,
        _swapped,
        "https://github.com/modelscope/twinkle/pull/112",
        "The order of kl_div's arguments makes forward and reverse KL easy to exchange.",
    ),
    Case(
        "distillation: beta 1 is the reverse KL",
        "distillation",
        {**_DISTILL, "beta": 1.0},
        _divergence,
        _swapped,
        "https://github.com/verl-project/verl-recipe/issues/151",
        "The interior formula at an end of beta is 0, a run without a signal.",
    ),
    Case(
        "distillation: the mixture has beta of the teacher",
        "distillation",
        {**_DISTILL, "beta": 0.3},
        _divergence,
        _other_mixture,
        "https://github.com/huggingface/trl/pull/3043",
        "The mixture had beta of the student.",
    ),
    Case(
        "distillation: the mean is over unmasked tokens",
        "distillation",
        {**_DISTILL, "beta": 0.5},
        _divergence,
        _all_rows,
        "https://github.com/huggingface/trl/issues/4719",
        "The denominator was not the number of trained tokens.",
    ),
    Case(
        "packed sequences do not see each other",
        "packed_attention",
        {
            "query": _normal(9, 2, 8),
            "key": _normal(9, 2, 8),
            "value": _normal(9, 2, 8),
            "lengths": [4, 2, 3],
        },
        _attention,
        _leaking,
        "https://github.com/huggingface/nanoVLM/pull/204",
        "Position ids were reset at the borders of sequences, and attention was not.",
    ),
    Case(
        "an expert's adapter is read as PEFT stores it",
        "expert_delta",
        {"left": _normal(5, 6), "right": _normal(6, 4), "num_experts": 3, "rank": 2},
        _expert_delta,
        _expert_slowest,
        "https://github.com/unslothai/unsloth-zoo/pull/1269",
        "The experts of one factor are stored fastest and those of the other slowest; both were "
        "read alike.",
    ),
)
