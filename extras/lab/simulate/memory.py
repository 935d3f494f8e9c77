"""Bytes on a rank, by kind and moment of the step: the formulas of docs/training.md."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridengine.lab.simulate.cluster import Cluster
from hybridengine.lab.simulate.layout import Layout, Workload
from hybridengine.lab.simulate.model import ModelShape

SYNC_BUCKETS = 2 * (64 << 20)  # send and receive, two of each in flight
MASTER, GRADIENT, MOMENTS = 4, 4, 8  # bytes of a trained weight, float32


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank in each moment of a step.

    moments: moment → kind of data → bytes. A trainer rank has the moments "train", "optimizer" and
      "sync", an engine rank "generate" and "sync", a colocated rank all four; a critic's own rank
      has "train critic" and "optimizer critic".
    kv_cache: the bytes that are left for the KV cache.
    avoided_logits: the bytes of the logits that the fused head does not hold.
    """

    moments: dict[str, dict[str, float]]
    kv_cache: float
    avoided_logits: float

    @property
    def peak(self) -> tuple[str, float]:
        """The moment that needs most, and its bytes."""
        totals = {name: sum(kinds.values()) for name, kinds in self.moments.items()}
        name = max(totals, key=lambda n: totals[n])
        return name, totals[name]


def memory_of(model: ModelShape, work: Workload, layout: Layout, cluster: Cluster) -> Memory:
    """Return the memory of a rank; of a split layout, of the trainer's and of the engine's."""
    held = _held_models(model, work, layout)
    critic = 1.0 if work.config.critic and not layout.critic_ranks else 0.0
    shard = model.num_parameters / layout.fsdp_size
    trained = {"weights": MASTER * shard, "gradients": GRADIENT * shard}
    moments = MOMENTS * shard
    train = trained | held | _training_buffers(model, work, layout, cluster, layout.actor_ranks)
    optimizer = trained | {"moments": moments} | held
    if not layout.offload:
        train["moments"] = moments
        if critic:
            train["critic"] = optimizer["critic"] = critic * (MASTER + GRADIENT + MOMENTS) * shard
    engine = work.engine_itemsize * model.num_parameters / layout.tp_size
    generate = {"engine weights": engine}
    sync = {"engine weights": engine, "buckets": float(SYNC_BUCKETS)}
    resident = {"weights": trained["weights"]} | held
    if layout.share_engine_weights:
        train, optimizer = (part | {"engine weights": engine} for part in (train, optimizer))
    if not layout.is_split:
        if not layout.offload:
            generate |= resident | {"moments": moments}
            if critic:
                generate["critic"] = critic * (MASTER + MOMENTS) * shard
        sync |= {"weights": trained["weights"]}
        if not layout.offload:
            sync |= held | {"moments": moments}
    moments_of = {"train": train, "optimizer": optimizer, "sync": sync, "generate": generate}
    if layout.critic_ranks:
        moments_of |= _critic_alone(model, work, layout, cluster)
    tokens, _ = work.tokens_per_micro_batch(layout.actor_ranks, layout.sequence_parallel)
    return Memory(
        moments_of,
        cluster.usable_bytes - sum(generate.values()),
        avoided_logits=4.0
        * _response_share(work)
        * tokens
        * model.head_flops
        / (2 * model.hidden_size)
        if work.config.fused_head
        else 0.0,
    )


def _critic_alone(
    model: ModelShape, work: Workload, layout: Layout, cluster: Cluster
) -> dict[str, dict[str, float]]:
    """Return the moments of a rank that has the critic alone: it computes no logits."""
    layout = replace(layout, expert_parallel=1, share_engine_weights=False)
    shard = model.num_parameters / min(layout.fsdp_size, layout.critic_ranks)
    trained = {"weights": MASTER * shard, "gradients": GRADIENT * shard}
    moments = {"moments": MOMENTS * shard}
    buffers = _training_buffers(model, work, layout, cluster, layout.critic_ranks)
    del buffers["logits"]
    train = trained | buffers | ({} if layout.offload else moments)
    return {"train critic": train, "optimizer critic": trained | moments}


def _held_models(model: ModelShape, work: Workload, layout: Layout) -> dict[str, float]:
    """Frozen models whose shards stay on the device while others run; none with offload."""
    frozen = work.config.reference + work.config.reward_model
    if not frozen or layout.offload:
        return {}
    return {"frozen models": MASTER * frozen * model.num_parameters / layout.fsdp_size}


def _training_buffers(
    model: ModelShape, work: Workload, layout: Layout, cluster: Cluster, ranks: int
) -> dict[str, float]:
    """Unsharded weights and gradients, activations, and the head's work buffer, of one model on
    `ranks` ranks."""
    itemsize, layers = work.train_itemsize, model.num_layers
    held = model.held_parameters(layout.expert_parallel)
    layer = held / layers
    tokens, _ = work.tokens_per_micro_batch(ranks, layout.sequence_parallel)
    gathered = 2 * layer + model.root_parameters  # the next layer is gathered while one runs
    if not layout.reshard_after_forward:
        gathered = held + model.root_parameters
    of_shard = itemsize == 4 and min(layout.fsdp_size, ranks) == 1
    if of_shard or (layout.share_engine_weights and layout.tp_size == 1):
        gathered = 0.0  # the shard, or the engine's tensor, is the weight
    reduced = max(layer, model.root_parameters)
    saved = itemsize * tokens * model.saved_elements
    kept = itemsize * tokens * model.hidden_size
    activations = kept * layers + saved if layout.gradient_checkpointing else saved * layers
    rows = _response_share(work) * tokens
    logits = 4.0 * rows * model.head_flops / (2 * model.hidden_size)
    work_buffer = min(0.05 * cluster.device.memory_bytes, 4 << 30)
    return {
        "gathered": itemsize * gathered,
        "reduced": (itemsize + GRADIENT) * reduced,
        "activations": activations,
        "logits": min(logits, work_buffer) if work.config.fused_head else 2 * logits,
    }


def _response_share(work: Workload) -> float:
    """Share of the trained tokens whose log-prob is computed: those of responses."""
    return work.response_tokens / work.trained_tokens
