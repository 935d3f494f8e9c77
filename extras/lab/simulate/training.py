"""A trainer's rank: time of forward, backward, optimizer step and offloads, and its memory.

A decoder layer's time is that of its matrix products, its attention and what it moves in other
operators, or that of launching it, if longer. FSDP2's collectives run beside it: a layer's
all-gather beside the layer before it, in backward also the reduce-scatter of the layer after it.
All layers are taken as equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from hybridengine.lab.simulate.cluster import Cluster
from hybridengine.lab.simulate.model import Layout, ModelShape, Workload

_BACKWARD_LAUNCH = 1.4  # of the forward's: 79 kernels at 4 µs to 38 at 6 µs (docs/notes.md)
_ADAMW_BYTES = 32  # read and write master, gradient and moments, read the gradient for its norm
_MUON_STEPS, _MUON_ITEMSIZE = 5, 2  # of Newton-Schulz, in bfloat16


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass over a micro-batch; exposed: the part spent waiting for collectives."""

    seconds: float
    exposed: float


class TrainingModel:
    """Times of one model (policy or critic) on `ranks` ranks of a layout."""

    def __init__(
        self, model: ModelShape, work: Workload, layout: Layout, cluster: Cluster, ranks: int
    ) -> None:
        self.model, self.work, self.layout, self.cluster = model, work, layout, cluster
        self.ranks, self.fsdp_size = ranks, min(layout.fsdp_size, ranks)
        self.tokens, self.num_micro_batches = work.tokens_per_micro_batch(
            ranks, layout.sequence_parallel
        )
        share = self.tokens / work.trained_tokens
        self.pairs = work.trained_pairs * share
        self.rows = work.response_tokens * share

    def forward_only(self, *, head: bool = True) -> float:
        """Log-probs (head) or values of the whole batch without gradients."""
        passes = self.work.config.mini_batches * self.num_micro_batches
        return passes * self._forward(head_passes=1 if head else 0).seconds

    def update(self, *, head: bool = True) -> tuple[float, float]:
        """Return (seconds of all optimizer steps on the batch, the part waiting for collectives).

        The fused head computes loss and gradients in its forward: 6 T H V operations
        (docs/operators.md); the rest of the backward takes twice the forward's.
        """
        forward = self._forward(head_passes=3 if head else 0)
        backward = self._backward()
        passes = self.work.optimizer_steps * self.num_micro_batches
        seconds = passes * (forward.seconds + backward.seconds)
        steps = self.work.optimizer_steps * self.optimizer_step(is_policy=head)
        return seconds + steps, passes * (forward.exposed + backward.exposed)

    def optimizer_step(self, *, is_policy: bool = True) -> float:
        """Return the time of AdamW on the rank's shard, with the transfers of offloaded moments.

        Muon also computes, and exchanges momentum and updates; both at the same time.
        """
        cluster, shard = self.cluster, self.model.num_parameters / self.fsdp_size
        moments, muon = MOMENTS * shard, 0.0
        if is_policy and self.work.config.optimizer == "muon":
            moments = moment_bytes(self.model, self.work) / self.fsdp_size
            flops, received = muon_exchange(self.model, self.fsdp_size, self.ranks)
            exchanged = cluster.all_to_all(received, self.ranks)
            muon = max(cluster.products(flops), exchanged)
        touched = (_ADAMW_BYTES - 2 * MOMENTS) * shard + 2 * moments
        offloaded = 2 * cluster.to_host(moments) if self.layout.offload else 0.0
        return cluster.stream(touched) + muon + offloaded

    def offload(self) -> float:
        """Return the time to move the master weights to host memory and back, once a step."""
        shard = self.model.num_parameters / self.fsdp_size
        return 2 * self.cluster.to_host(MASTER * shard) if self.layout.offload else 0.0

    def flops(self) -> float:
        """Model FLOPs of the update of the whole batch on all ranks, as MFU counts them."""
        work, model = self.work, self.model
        per_pass = (
            work.trained_tokens * model.token_flops
            + work.trained_pairs * model.pair_flops
            + work.response_tokens * model.head_flops
        )
        return 3 * work.config.ppo_epochs * per_pass

    def _forward(self, *, head_passes: int) -> Pass:
        layers = self.model.num_layers
        compute = self._layer_forward() + self._all_to_alls()
        gather = self._of_layer(self._gather)
        root = self._gather(self.model.root_parameters, self.fsdp_size)
        ideal = layers * compute + self._head(head_passes)
        seconds = root + gather + (layers - 1) * max(compute, gather) + compute
        seconds += self._head(head_passes)
        return Pass(seconds, seconds - ideal)

    def _backward(self) -> Pass:
        layers = self.model.num_layers
        compute = self._layer_backward() + self._all_to_alls()
        if self.layout.gradient_checkpointing:
            compute += self._layer_forward() + self._all_to_alls()
        gather = self._of_layer(self._gather)
        gather = gather if self.layout.reshard_after_forward else 0.0
        reduce = self._of_layer(self._reduce)
        root = self._reduce(self.model.root_parameters, self.fsdp_size)
        seconds = gather + (layers - 1) * max(compute, gather + reduce) + compute + reduce + root
        return Pass(seconds, seconds - layers * compute)

    def _layer_forward(self) -> float:
        return self._layer(1.0, self.model.elementwise_elements[0], "forward")

    def _layer_backward(self) -> float:
        return self._layer(2.0, self.model.elementwise_elements[1], "backward")

    def _layer(self, products: float, elements: float, direction: str) -> float:
        """Time of one layer; products: its FLOPs, in forwards."""
        cluster, layers = self.cluster, self.model.num_layers
        own, constants = self.work.train_itemsize, cluster.efficiency
        moved = own * self.tokens * elements
        if direction == "forward":
            moved, launch = moved * constants.elementwise_forward, 1.0
        else:
            moved, launch = moved * constants.elementwise_backward, _BACKWARD_LAUNCH
        flops = self.tokens * self.model.token_flops / layers
        pair_flops = self.pairs * self.model.pair_flops / layers
        seconds = cluster.products(products * flops) + cluster.attention(products * pair_flops)
        # Few tokens: the products are bound by reading the weights.
        active = self.model.active_parameters(self.tokens) - self.model.head_flops / 2
        weights = cluster.stream(products * own * active / layers)
        seconds = max(seconds, weights) + cluster.stream(moved)
        return max(seconds, launch * constants.layer_host_us * 1e-6)

    def _head(self, passes: int) -> float:
        return self.cluster.products(passes * self.rows * self.model.head_flops)

    def _all_to_alls(self) -> float:
        return self._ulysses() + self._token_exchange()

    def _token_exchange(self) -> float:
        """Two all-to-alls of a layer: rows to the ranks of their experts, and back."""
        size = self.layout.expert_parallel
        if size == 1:
            return 0.0
        rows = self.tokens * self.model.experts_per_token
        sent = (size - 1) / size * rows * self.model.hidden_size * self.work.train_itemsize
        return 2 * (self.cluster.all_to_all(sent, size) + self.cluster.latency(size))

    def _ulysses(self) -> float:
        """Two all-to-alls of a layer: query, key and value, then the output (docs/training.md)."""
        size = self.layout.sequence_parallel
        if size == 1:
            return 0.0
        width = 2 * self.model.attention_width + 2 * self.model.kv_width
        sent = (size - 1) / size * self.tokens * width * self.work.train_itemsize
        return self.cluster.all_to_all(sent, size) + self.cluster.latency(size)

    def _of_layer(self, collective: Callable[[float, int], float]) -> float:
        """Time of a collective over a layer; its experts, if divided, have one of their own."""
        layers, size = self.model.num_layers, self.layout.expert_parallel
        layer, experts = self.model.layer_parameters / layers, self.model.expert_parameters / layers
        if size == 1:
            return collective(layer, self.fsdp_size)
        others = collective(layer - experts, self.fsdp_size)
        return others + collective(experts / size, self.fsdp_size // size)

    def _gather(self, parameters: float, ranks: int) -> float:
        if self.layout.share_engine_weights:
            ranks = self.layout.tp_size  # of the engine, in the node
        num_bytes = self.work.train_itemsize * parameters
        return self.cluster.all_gather(num_bytes, ranks)

    def _reduce(self, parameters: float, ranks: int) -> float:
        """Reduce-scatter in float32 within a replica, all-reduce of the shards over replicas."""
        num_bytes, replicas = GRADIENT * parameters, self.ranks // self.fsdp_size
        seconds = self.cluster.all_gather(num_bytes, ranks)
        across = self.fsdp_size >= self.cluster.gpus_per_node
        return seconds + self.cluster.all_reduce(
            num_bytes / self.fsdp_size, replicas, across_nodes=across
        )


SYNC_BUCKETS = 2 * (64 << 20)  # send and receive, two of each in flight
MASTER, GRADIENT, MOMENTS = 4, 4, 8  # bytes of a trained weight, float32


def moment_bytes(model: ModelShape, work: Workload) -> float:
    """Return the bytes of the optimizer's moments: Muon has one of a matrix, AdamW two."""
    matrices = sum(map(math.prod, model.matrices)) if work.config.optimizer == "muon" else 0
    return MOMENTS * model.num_parameters - MOMENTS / 2 * matrices


def muon_exchange(model: ModelShape, shards: int, ranks: int) -> tuple[float, float]:
    """Return a rank's FLOPs of Newton-Schulz, and the bytes that it receives, in an update.

    shards: ranks that hold one copy of the weights; each holds its experts in full.
    Of another matrix all slices but one come to its owner, and the result to all other holders.
    """
    flops = elements = 0
    for shape in model.matrices:
        count, (short, long) = math.prod(shape[:-2]), sorted(shape[-2:])
        flops += count * short * short * (3 * long + short)
        elements += math.prod(shape) if len(shape) == 2 else 0
    slices = (shards - 1) / shards + (ranks - 1) / shards
    return _MUON_STEPS * flops / ranks, _MUON_ITEMSIZE * slices * elements / ranks


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
    moments = moment_bytes(model, work) / layout.fsdp_size
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
    is_replica = min(layout.fsdp_size, ranks) == 1
    if is_replica or not layout.reshard_after_forward:
        gathered = held + model.root_parameters
    if (is_replica and itemsize == 4) or (layout.share_engine_weights and layout.tp_size == 1):
        gathered = 0.0  # the master, or the engine's tensor, is the weight
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
