"""Validation results per data source, with best-of-n and majority votes, by verl's names.

`val-core/<source>/<variable>/mean@N`, `best@N/mean` and `maj@N/mean` of the variable that counts
("acc" if the reward gives it, else "reward"), N responses to a problem; everything else is
`val-aux/…`. As in verl (`process_validation_metrics`), best@n, worst@n and maj@n stand for n draws
with replacement from the N responses. Here best and worst are the exact expectations of that, not
estimates from 1,000 draws; votes are counted over "pred", an answer that the reward may return.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

import numpy as np

__all__ = ["expected_best", "majority", "source_metrics"]

_DRAWS = 1000  # of n responses, for a majority vote

# (data source; by variable, the results of its responses; the answers they give, or None)
Problem = tuple[str, Mapping[str, Sequence[float]], Sequence[float] | None]


def source_metrics(problems: Sequence[Problem]) -> dict[str, float]:
    """Metrics by name."""
    by_source: dict[str, list[Problem]] = {}
    for problem in problems:
        by_source.setdefault(problem[0], []).append(problem)
    metrics: dict[str, float] = {}
    for source, group in by_source.items():
        names = group[0][1]
        core = "acc" if "acc" in names else "reward"
        for name in names:
            found = [_of_problem(results[name], preds) for _, results, preds in group]
            most = max(len(results[name]) for _, results, _ in group)
            for kind in found[0]:
                of_all = fmean(of[kind] for of in found if kind in of)
                metrics[f"{_section(kind, most, name == core)}/{source}/{name}/{kind}"] = of_all
    return metrics


def _section(kind: str, most: int, is_core: bool) -> str:
    """kind: such as best@4/mean; most: the largest n."""
    head, _, n = kind.partition("/")[0].partition("@")
    return (
        "val-core" if is_core and head in ("mean", "best", "maj") and int(n) == most else "val-aux"
    )


def _of_problem(values: Sequence[float], preds: Sequence[float] | None) -> dict[str, float]:
    most = len(values)
    found = {f"mean@{most}": fmean(values)}
    if most > 1:
        found[f"std@{most}"] = pstdev(values)
    for n in _sizes(most):
        found[f"best@{n}/mean"] = expected_best(values, n)
        found[f"worst@{n}/mean"] = -expected_best([-value for value in values], n)
        if preds is not None:
            found[f"maj@{n}/mean"] = majority(values, preds, n)
    return found


def _sizes(most: int) -> list[int]:
    """2, 4, 8, … below `most`, and `most` itself; none of 1."""
    powers = [1 << k for k in range(1, most.bit_length())]
    return [n for n in powers if n < most] + ([most] if most > 1 else [])


def expected_best(values: Sequence[float], n: int) -> float:
    """The expected maximum of n draws with replacement from `values`."""
    share = np.linspace(0, 1, len(values) + 1) ** n
    return float(np.sort(np.asarray(values, np.float64)) @ np.diff(share))


def majority(values: Sequence[float], preds: Sequence[float], n: int) -> float:
    """The expected value of the answer that most of n drawn responses give, the first on a tie.

    values[i]: what response i scores; preds[i]: the answer it gives.
    """
    _, answers = np.unique(np.asarray(preds, np.float64), return_inverse=True)
    seed = zlib.crc32(f"{len(values)} {n}".encode())
    drawn = np.random.default_rng(seed).integers(len(values), size=(_DRAWS, n))
    votes = answers[drawn]
    same = votes[:, :, None] == votes[:, None, :]
    winner = same.sum(2).argmax(1)  # the first of the most frequent
    return float(np.asarray(values, np.float64)[drawn[np.arange(_DRAWS), winner]].mean())
