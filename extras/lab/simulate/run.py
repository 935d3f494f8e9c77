"""A simulation from its configuration: read the model, search, plan the best layouts' syncs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from transformers import AutoConfig, PretrainedConfig

from hybridengine.engine.vllm.environment import vllm_available
from hybridengine.lab.simulate.cluster import Cluster
from hybridengine.lab.simulate.config import SimulationConfig
from hybridengine.lab.simulate.layout import Workload
from hybridengine.lab.simulate.model import ModelShape
from hybridengine.lab.simulate.search import Result, search
from hybridengine.lab.simulate.sync import SyncPlanner
from hybridengine.model.checkpoint import checkpoint_layout_from_config
from hybridengine.run.errors import ConfigNote, ModelError, reason_of


@dataclass(frozen=True)
class Simulation:
    """What was simulated, and the result."""

    config: SimulationConfig
    model: ModelShape
    work: Workload
    cluster: Cluster
    result: Result


def simulate(config: SimulationConfig, *, plan_sync: bool = True) -> Simulation:
    """Simulate every layout of the configuration.

    plan_sync: plan the weight sync of the best layout with the reshard planner, which records
    vLLM's loader; else, and where that is impossible (a ConfigNote says why), it is a closed form.
    Raises ModelError for a model that cannot be read, ConfigError if no layout fits.
    """
    trust = config.model.trust_remote_code
    hf_config = _read_config(config.model.path, trust)
    shapes = checkpoint_layout_from_config(hf_config, trust).parameters
    model = ModelShape.of(hf_config, shapes)
    work, cluster = Workload(config.workload), Cluster.of(config.cluster)
    result = search(model, work, cluster, config.layout)
    if plan_sync:
        planner = SyncPlanner(hf_config, trust, work, cluster)
        result = _with_planned_sync(result, planner)
    return Simulation(config, model, work, cluster, result)


def _read_config(path: str, trust_remote_code: bool) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:  # KeyError: an unknown model type
        raise ModelError(
            f"model.path is {path!r}, whose config.json cannot be read ({reason_of(error)}); give "
            "a folder with config.json, or the name of a model in the local cache or the hub"
        ) from error


def _with_planned_sync(result: Result, planner: SyncPlanner) -> Result:
    if not vllm_available():
        reason = "vLLM, whose loader it records, is not installed"
    else:
        try:
            planned = result.best.replace_sync(planner.plan(result.best.layout))
            return replace(result, steps=[planned, *result.steps[1:]])
        except (OSError, ValueError, RuntimeError) as error:
            reason = reason_of(error)
    note = f"the weight sync is estimated by a formula instead of the planner: {reason}"
    warnings.warn(note, ConfigNote, stacklevel=3)
    return result
