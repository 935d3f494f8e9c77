"""The plan between trainers and engines that are in different worlds, computed on every rank."""

from __future__ import annotations

from collections.abc import Set

import torch

from hybridengine.reshard.disaggregated.records import PlanInputs, SyncStore
from hybridengine.reshard.plan.coverage import check_casts, check_sources
from hybridengine.reshard.plan.planner import ReshardPlan, build_plan
from hybridengine.sharding.layout import EngineLayout, LayoutError


def make_plan(
    inputs: PlanInputs, store: SyncStore, optional_parameters: Set[str], config_differences: str
) -> ReshardPlan:
    """Plan for the trainers, then one receiving rank for each tensor-parallel rank.

    A trainer's engine layout is empty. The receiving rank is in no trainer's node. The arguments
    except `inputs` and `store` are those of `WeightTarget`. Raises LayoutError as `build_plan`.
    """
    factors = {
        f"{name}.{side}": torch.empty(shape, dtype=dtype, device="meta")
        for name, factor in inputs.factors.items()
        for side, shape, dtype in zip(("left", "right"), factor[:2], factor.dtypes, strict=True)
    }
    layouts = [
        store.get(f"layout/{digest}").with_full_tensors(factors)
        for _, digest in sorted(inputs.layouts.items())
    ]
    try:
        shapes = {name: spec.shape for name, spec in inputs.specs.items()}
        check_sources(shapes, layouts, optional_parameters)
    except LayoutError as error:
        raise LayoutError(f"{error}{config_differences}") from None
    empty = EngineLayout({})
    nodes = [*inputs.nodes, *[max(inputs.nodes) + 1] * len(layouts)]
    plan = build_plan(
        inputs.specs, [empty] * len(inputs.nodes) + layouts, inputs.bucket_bytes, nodes
    )
    check_casts(plan.buckets)
    return plan
