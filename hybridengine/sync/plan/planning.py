"""The plan of a sync, computed on every rank from the same inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from hybridengine.remote.sync.records import PlanInputs, SyncStore
from hybridengine.sync.layout import EngineLayout, LayoutError
from hybridengine.sync.plan.configuration import check_configuration, in_words
from hybridengine.sync.plan.coverage import check_casts, check_sources
from hybridengine.sync.plan.planner import ReshardPlan, build_plan
from hybridengine.sync.shards import ShardSpec


def make_plan(
    inputs: PlanInputs,
    store: SyncStore,
    optional_parameters: Set[str],
    config_differences: Mapping[str, str],
) -> ReshardPlan:
    """Plan for the trainers, then one receiving rank for each tensor-parallel rank.

    A trainer's engine layout is empty. The receiving rank is in no trainer's node. The arguments
    except `inputs` and `store` are those of `WeightTarget`. Raises LayoutError as `build_plan`.
    """
    layouts = [
        store.get(f"layout/{digest}", EngineLayout).with_full_tensors(inputs.factors)
        for _, digest in sorted(inputs.layouts.items())
    ]
    nodes = [*inputs.nodes, *[max(inputs.nodes) + 1] * len(layouts)]
    layouts = [EngineLayout({})] * len(inputs.nodes) + layouts
    rest = inputs.bucket_bytes, nodes, optional_parameters, config_differences
    return plan_sync(inputs.specs, layouts, *rest)


def plan_sync(
    specs: Mapping[str, ShardSpec],
    layouts: Sequence[EngineLayout],
    bucket_bytes: int,
    nodes: Sequence[int],
    optional_parameters: Set[str],
    config_differences: Mapping[str, str],
) -> ReshardPlan:
    """Plan, and check that trained model and engines fit.

    The first arguments are those of `build_plan`, the last those of `WeightTarget`. An empty layout
    is of a rank without an engine. Raises LayoutError.
    """
    try:
        distinct = [x for x in {id(x): x for x in layouts}.values() if x.destinations]
        shapes = {name: spec.shape for name, spec in specs.items()}
        check_sources(shapes, distinct, optional_parameters)
    except LayoutError as error:
        raise LayoutError(f"{error}{in_words(config_differences)}") from None
    check_configuration(config_differences)
    plan = build_plan(specs, layouts, bucket_bytes, nodes)
    check_casts(plan.buckets)
    return plan
