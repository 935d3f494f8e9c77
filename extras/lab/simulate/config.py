"""Keys of `hybridengine simulate`: a cluster, a step's work, and the fixed parts of the layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import StrictBool

from hybridengine.run.config.common import (
    Fraction,
    InputPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from hybridengine.run.config.loading import JobKind, Settings, load_job

Gpu = Literal["a100", "h100", "h200", "b200", "cpu"]
Precision = Literal["bfloat16", "float16", "float32"]
Mode = Literal["sync", "one_step_off"]


@dataclass(frozen=True)
class SimulatedModelConfig:
    path: InputPath = ""  # a folder with config.json, or a name in the local cache or the hub
    trust_remote_code: StrictBool = False  # run Python code that comes with the model


@dataclass(frozen=True)
class EfficiencyConfig:
    """Shares of the data sheet that real kernels reach, and fixed costs: the fitted constants."""

    gemm: Fraction = 0.6  # matrix products, of the peak FLOP/s
    attention: Fraction = 0.5  # attention kernels, of the peak FLOP/s
    memory: Fraction = 0.8  # streaming kernels, of the memory bandwidth
    network: Fraction = 0.8  # collectives, of the link bandwidth
    elementwise_forward: PositiveFloat = 3.05  # bytes outside of products, eager over fused
    elementwise_backward: PositiveFloat = 4.55  # the same, backward
    layer_host_us: NonNegativeFloat = 230.0  # launching a layer's forward; backward 1.4 times it
    engine_step_ms: NonNegativeFloat = 2.0  # scheduling, sampling and launch of an engine step


@dataclass(frozen=True)
class ClusterConfig:
    gpu: Gpu = "h100"  # data sheet; cpu: measured on this machine. The keys below replace entries
    nodes: PositiveInt = 1  # machines
    gpus_per_node: PositiveInt = 8  # ranks per machine
    tflops: PositiveFloat | None = None  # dense peak in the compute type, 10^12 per second
    memory_gib: PositiveFloat | None = None  # per GPU
    memory_gb_per_s: PositiveFloat | None = None  # bandwidth of the GPU's memory
    intra_gb_per_s: PositiveFloat | None = None  # what a GPU sends, and receives, inside a node
    inter_gb_per_s: PositiveFloat | None = None  # the same across nodes
    host_gb_per_s: PositiveFloat | None = None  # between a GPU and host memory, per direction
    intra_latency_us: NonNegativeFloat | None = None  # of a hop inside a node
    inter_latency_us: NonNegativeFloat | None = None  # of a hop across nodes
    usable_memory: Fraction = 0.9  # of the memory; the rest is context, fragments and workspaces
    efficiency: EfficiencyConfig = EfficiencyConfig()


@dataclass(frozen=True)
class WorkloadConfig:
    prompts: PositiveInt = 512  # prompts of a step
    n: PositiveInt = 8  # responses of a prompt
    prompt_length: PositiveFloat = 256.0  # mean tokens of a prompt
    response_length: PositiveFloat = 1024.0  # mean tokens of a response
    max_response_length: PositiveInt = 4096  # tokens at which a response is cut
    response_lengths: tuple[PositiveInt, ...] = ()  # observed ones; empty: from mean and maximum
    mini_batches: PositiveInt = 1  # optimizer steps of an epoch over the batch
    ppo_epochs: PositiveInt = 1  # passes over the batch
    max_tokens_per_gpu: PositiveInt = 16384  # tokens of a micro-batch on a rank
    max_num_seqs: PositiveInt = 256  # sequences that an engine decodes at once
    shared_prefix: StrictBool = True  # a prompt is computed once for its responses
    reference: StrictBool = False  # a frozen reference model (KL)
    old_log_probs: StrictBool = False  # computed before the update: several steps, or correction
    critic: StrictBool = False  # a value model of the policy's size, trained
    reward_model: StrictBool = False  # a reward model of the policy's size
    fused_head: StrictBool = True  # log-probs without logits (model.use_fused_kernels)
    optimizer: Literal["adamw", "muon"] = "adamw"  # of the policy
    dtype: Precision = "bfloat16"  # compute type of the trainer
    engine_dtype: Precision = "bfloat16"  # weights and KV cache of the engine


@dataclass(frozen=True)
class LayoutConfig:
    """Parts of the layout that the search keeps as given; null: searched."""

    mode: Mode | None = None  # sync: all ranks train and generate; one_step_off: split ranks
    trainer_ranks: PositiveInt | None = None  # ranks that train, with one_step_off
    critic_ranks: NonNegativeInt | None = None  # of these, ranks of the critic alone; 0: all shared
    fsdp_size: PositiveInt | None = None  # ranks that shard one copy of the weights
    sequence_parallel: PositiveInt | None = None  # Ulysses
    tp_size: PositiveInt | None = None  # tensor-parallel size of the engine
    gradient_checkpointing: StrictBool | None = None  # recompute layers in backward
    reshard_after_forward: StrictBool | None = None  # false: keep gathered weights until backward
    expert_parallel: PositiveInt | None = None  # ranks over which the policy's experts are divided
    offload: StrictBool | None = None  # what does not run in host memory (param/optimizer_offload)
    share_engine_weights: StrictBool = False  # the policy is computed with the engine's weights


@dataclass(frozen=True)
class SimulationConfig:
    model: SimulatedModelConfig = SimulatedModelConfig()
    cluster: ClusterConfig = ClusterConfig()
    workload: WorkloadConfig = WorkloadConfig()
    layout: LayoutConfig = LayoutConfig()

    kind = "simulate"


def load_simulation_config(
    path: Settings, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> SimulationConfig:
    """Load the configuration of `hybridengine simulate`, see `load_job`."""
    config: SimulationConfig = load_job("simulate", path, overrides)
    return config


def _find_faults(config: SimulationConfig) -> Iterator[str]:
    workload, layout = config.workload, config.layout
    if not workload.response_lengths and workload.response_length > workload.max_response_length:
        yield (
            f"workload.response_length is {workload.response_length:g}, more than "
            f"workload.max_response_length {workload.max_response_length}; it is the mean"
        )
    if config.cluster.gpu == "cpu" and not config.cluster.memory_gib:
        yield "cluster.gpu is cpu, which has no memory_gib of its own; set cluster.memory_gib"
    if layout.critic_ranks and not workload.critic:
        yield (
            f"layout.critic_ranks is {layout.critic_ranks}, but workload.critic is false; "
            "set it, or remove layout.critic_ranks"
        )


def _find_notes(config: SimulationConfig) -> Iterator[str]:
    return iter(())


SIMULATE = JobKind(
    SimulationConfig,
    required=("model.path",),
    find_faults=_find_faults,
    find_notes=_find_notes,
)
