"""All cases, by subject."""

from __future__ import annotations

from hybridengine.conformance.case import Case

from . import advantages, aggregation, heads, losses, rollouts

CASES: tuple[Case, ...] = (
    *advantages.CASES,
    *aggregation.CASES,
    *losses.CASES,
    *rollouts.CASES,
    *heads.CASES,
)
