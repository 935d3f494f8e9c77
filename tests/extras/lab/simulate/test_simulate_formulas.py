"""Formulas of the simulation against numbers worked out by hand, and their monotonicity."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig, Qwen3MoeConfig

from hybridengine.lab.simulate.cluster import Cluster
from hybridengine.lab.simulate.config import ClusterConfig, EfficiencyConfig, WorkloadConfig
from hybridengine.lab.simulate.generation import EngineModel, generate, prompt_per_response
from hybridengine.lab.simulate.model import Layout, ModelShape, Workload, truncated_exponential
from hybridengine.lab.simulate.training import (
    TrainingModel,
    memory_of,
    moment_bytes,
    muon_exchange,
)
from hybridengine.model.parameters import checkpoint_layout_from_config

IDEAL = EfficiencyConfig(
    gemm=1.0,
    attention=1.0,
    memory=1.0,
    network=1.0,
    elementwise_forward=1e-9,
    elementwise_backward=1e-9,
    layer_host_us=0.0,
    engine_step_ms=0.0,
)
# 10^12 FLOP/s, 1 GiB, 10^9 byte/s of memory, 10^8 inside and 10^7 across nodes; no latency
_RATES = {"memory_gb_per_s": 1.0, "intra_gb_per_s": 0.1, "inter_gb_per_s": 0.01}
_LATENCIES = {"intra_latency_us": 0.0, "inter_latency_us": 0.0}
CLUSTER = ClusterConfig(
    **(_RATES | _LATENCIES),
    host_gb_per_s=0.01,
    tflops=1.0,
    memory_gib=1.0,
    usable_memory=1.0,
    efficiency=IDEAL,
)
COLOCATED = Layout("sync", 8, 8, 8, 1)


def shape_of(config) -> ModelShape:
    return ModelShape.of(config, checkpoint_layout_from_config(config).parameters)


@pytest.fixture(scope="module")
def llama() -> ModelShape:
    sizes = dict(vocab_size=1000, hidden_size=64, intermediate_size=256, num_hidden_layers=4)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    return shape_of(LlamaConfig(**sizes, **heads, tie_word_embeddings=False))


def test_sizes_of_a_dense_model(llama) -> None:
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 256  # query, key, value, output, feed-forward
    assert llama.layer_parameters == 4 * (layer + 2 * 64)
    assert llama.root_parameters == 2 * 64 * 1000 + 64
    assert llama.token_flops == 2 * 4 * layer
    assert llama.head_flops == 2 * 64 * 1000
    assert llama.pair_flops == 4 * 4 * 4 * 16  # score and sum, layers, heads, head size
    assert llama.kv_elements == 2 * 2 * 16 * 4
    assert (llama.attention_width, llama.kv_width, llama.ffn_width) == (64, 32, 256)
    assert llama.saved_elements == 8 * 64 + 2 * 64 + 2 * 32 + 4 * 256
    assert [t for t in range(1, 9) if llama.allows_tp(t)] == [1, 2, 4]
    assert llama.kv_bytes(4, 2) == llama.kv_bytes(2, 2), "two heads are replicated over four ranks"


BOTH = {"vocab_size": 100, "intermediate_size": 64, "num_hidden_layers": 2}
BOTH |= {"moe_intermediate_size": 16, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def moe() -> ModelShape:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    return shape_of(Qwen3MoeConfig(**BOTH, **heads, hidden_size=32, num_experts=8))


def test_sizes_of_experts_and_of_latent_attention(moe) -> None:
    shape = moe
    assert shape.expert_parameters == 2 * 8 * 3 * 32 * 16
    assert shape.ffn_width == 2 * 16
    one = shape.layer_parameters - shape.expert_parameters + shape.expert_parameters / 4 + 32 * 100
    assert shape.active_parameters(1) == pytest.approx(one)
    assert shape.active_parameters(1e6) == shape.layer_parameters + 32 * 100
    mla = DeepseekV3Config(
        **BOTH,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        n_routed_experts=4,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    )
    shape = shape_of(mla)
    assert shape.kv_elements == 2 * (24 + 8), "one latent and its rotary part per layer"
    assert shape.kv_bytes(4, 2) == 2 * shape.kv_elements, "every rank holds the latents"
    assert shape.pair_flops == 2 * 2 * 4 * (24 + 12)
    assert shape.decode_pair_flops == 2 * 2 * 4 * (24 + 8 + 24)


def test_collectives_take_the_time_of_their_slowest_link() -> None:
    cluster = Cluster.of(replace(CLUSTER, nodes=2, gpus_per_node=4))
    assert cluster.all_gather(8e6, 1) == 0.0
    assert cluster.all_gather(8e6, 4) == pytest.approx(8e6 * 3 / 4 / 1e8)
    # Half of the bytes cross into a node, over four ports.
    assert cluster.all_gather(8e6, 8) == pytest.approx(8e6 / 2 / 4e7)
    assert cluster.all_reduce(8e6, 2, across_nodes=True) == pytest.approx(2 * 8e6 / 2 / 1e7)
    assert cluster.all_to_all(3e6, 4) == pytest.approx(3e6 / 1e8)


def test_lengths_have_the_given_mean_and_maximum() -> None:
    for mean in (100.0, 500.5, 900.0):
        lengths = truncated_exponential((np.arange(10000) + 0.5) / 10000, mean, 1000)
        assert lengths.mean() == pytest.approx(mean, rel=2e-3)
        assert lengths.min() >= 1 and lengths.max() <= 1000
    observed = Workload(WorkloadConfig(prompts=2, n=2, response_lengths=(3, 5)))
    assert sorted(observed.lengths) == [3, 3, 5, 5]


def test_update_time_is_that_of_the_products(llama) -> None:
    """One rank, no elementwise operators: 6 FLOPs per weight and token, 8 with checkpointing."""
    cluster = Cluster.of(replace(CLUSTER, gpus_per_node=1, memory_gb_per_s=1e9))
    config = WorkloadConfig(
        prompts=2, n=2, prompt_length=10.0, response_lengths=(20,), shared_prefix=False
    )
    work, layout = Workload(config), replace(COLOCATED, trainer_ranks=1, fsdp_size=1)
    tokens, pairs = 4 * 30, 4 * 30 * 31 / 2
    forward = (tokens * llama.token_flops + pairs * llama.pair_flops) / 1e12
    head = 4 * 20 * llama.head_flops / 1e12
    training = TrainingModel(llama, work, layout, cluster, 1)
    assert training.update()[0] == pytest.approx(3 * forward + 3 * head, rel=1e-3)
    assert training.forward_only() == pytest.approx(forward + head, rel=1e-3)
    again = replace(layout, gradient_checkpointing=True)
    seconds, _ = TrainingModel(llama, work, again, cluster, 1).update()
    assert seconds == pytest.approx(4 * forward + 3 * head, rel=1e-3)
    shared = Workload(replace(config, shared_prefix=True))
    assert shared.trained_tokens == 2 * 10 + 4 * 20
    assert shared.trained_pairs == 2 * 55 + 4 * (20 * 10 + 20 * 21 / 2)


def test_slow_links_are_exposed_and_replicas_gather_less(llama) -> None:
    work = Workload(WorkloadConfig(prompts=8, n=1, response_length=20.0, max_response_length=40))
    cluster = Cluster.of(CLUSTER)
    seconds, exposed = TrainingModel(llama, work, COLOCATED, cluster, 8).update()
    assert 0 < exposed < seconds
    gathered = 2 * llama.num_parameters * 7 / 8 / 1e8
    reduced = 4 * llama.num_parameters * 7 / 8 / 1e8
    # Root: gathered in forward alone. Layers: twice.
    twice = 2 * llama.layer_parameters * 7 / 8 / 1e8
    assert exposed <= (gathered + reduced + twice) * (1 + 1e-9)
    assert exposed > 0.9 * (gathered + reduced + twice)
    kept = replace(COLOCATED, reshard_after_forward=False)
    assert TrainingModel(llama, work, kept, cluster, 8).update()[1] < exposed
    fast = Cluster.of(replace(CLUSTER, intra_gb_per_s=1e6))
    assert TrainingModel(llama, work, COLOCATED, fast, 8).update()[1] < exposed / 1000


def test_the_engines_weights_are_gathered_in_its_group_alone(llama) -> None:
    work = Workload(WorkloadConfig(prompts=8, n=1, response_length=20.0, max_response_length=40))
    slow = Cluster.of(CLUSTER)
    own, alone, halves = (
        replace(COLOCATED, tp_size=tp_size, share_engine_weights=shares)
        for shares, tp_size in ((False, 1), (True, 1), (True, 2))
    )
    exposed = [TrainingModel(llama, work, x, slow, 8).update()[1] for x in (own, alone, halves)]
    reduced = 4 * llama.num_parameters * 7 / 8 / 1e8
    assert 0.9 * reduced < exposed[1] < reduced
    in_pairs = 2 * (llama.num_parameters + llama.layer_parameters) / 2 / 1e8
    assert 0.9 * (reduced + in_pairs) < exposed[2] < min(reduced + in_pairs, exposed[0])
    memory = [memory_of(llama, work, x, slow).moments["train"] for x in (own, alone, halves)]
    assert memory[2]["gathered"] == memory[0]["gathered"]
    assert memory[2]["engine weights"] == llama.num_parameters
    assert "engine weights" not in memory[0] and memory[0]["gathered"] > memory[1]["gathered"] == 0
    assert memory[1]["engine weights"] == 2 * llama.num_parameters


def test_divided_experts_gather_less_and_exchange_tokens(moe) -> None:
    """Memory and times on 8 ranks, of which 4 hold different experts."""
    work = Workload(WorkloadConfig(prompts=8, n=1, prompt_length=2.0, response_lengths=(2,)))
    divided, experts = replace(COLOCATED, expert_parallel=4), moe.expert_parameters / moe.num_layers
    memory = [
        memory_of(moe, work, layout, Cluster.of(CLUSTER)).moments["train"]
        for layout in (COLOCATED, divided)
    ]
    assert memory[0]["gathered"] - memory[1]["gathered"] == pytest.approx(2 * 2 * experts * 3 / 4)
    assert memory[0]["weights"] == memory[1]["weights"]
    # Few tokens: what is gathered counts. Many: the rows that travel do.
    cluster = Cluster.of(replace(CLUSTER, memory_gb_per_s=1e9, tflops=1e6))
    for prompts, is_faster in ((8, True), (80000, False)):
        many = Workload(replace(work.config, prompts=prompts))
        times = [
            TrainingModel(moe, many, layout, cluster, 8).update()[0]
            for layout in (COLOCATED, divided)
        ]
        assert (times[1] < times[0]) == is_faster


def test_decode_reads_weights_once_and_every_cache(llama) -> None:
    cluster = Cluster.of(replace(CLUSTER, tflops=1e6))
    work = Workload(WorkloadConfig())
    engine = EngineModel(llama, work, cluster, 1)
    weights = 2 * (llama.layer_parameters + 64 * 1000)
    cached = 300 * 2 * llama.kv_elements
    assert engine.decode_step(3, 300) == pytest.approx((weights + cached) / 1e9)
    two = EngineModel(llama, work, cluster, 2)
    reductions = 2 * 4 * 2 * (2 * 3 * 64) / 2 / 1e8  # two per layer; half of the bytes, twice
    assert two.decode_step(3, 300) == pytest.approx((weights + cached) / 2 / 1e9 + reductions)


def test_generation_by_hand_and_under_a_full_cache(llama) -> None:
    cluster = Cluster.of(replace(CLUSTER, tflops=1e6))
    work = Workload(WorkloadConfig(prompts=2, n=1, prompt_length=4.0, response_lengths=(2, 6)))
    engine = EngineModel(llama, work, cluster, 1)
    roomy = generate(llama, work, cluster, 1, 1, 10**6)
    # Of the prefill a token each; two sequences for a step, then one for four; the cache is read
    # at its mean length.
    by_hand = engine.decode_step(2, 2 * (4 + 1.5)) + 4 * engine.decode_step(1, 4 + 2 + 2)
    assert roomy.decode == pytest.approx(by_hand)
    prefill = engine.prefill(2 * 4, 2 * 4 * 4 / 2, 2)
    assert roomy.prefill == pytest.approx(prefill)
    cluster_of_products = Cluster.of(replace(CLUSTER, memory_gb_per_s=1e9))
    products = EngineModel(llama, work, cluster_of_products, 1)
    by_token = products.prefill(8, 0, 3) - products.prefill(8, 0, 2)
    assert by_token == pytest.approx(cluster_of_products.products(llama.head_flops))
    of_one_token = replace(work.config, response_lengths=(1,))
    assert generate(llama, Workload(of_one_token), cluster, 1, 1, 10**6).seconds == prefill
    assert roomy.preempted == 0 and roomy.tail == 0
    long = Workload(WorkloadConfig(prompts=64, n=1, prompt_length=4.0, response_lengths=(10, 50)))
    times = [generate(llama, long, cluster, 1, 1, capacity) for capacity in (100, 400, 10**6)]
    assert times[0].decode > times[1].decode > times[2].decode
    assert times[0].preempted > 0 and times[2].preempted == 0
    assert times[0].mean_batch < times[1].mean_batch < times[2].mean_batch
    one_engine, two = (generate(llama, long, cluster, 1, e, 10**6).seconds for e in (1, 2))
    assert two < one_engine


def test_responses_share_the_full_blocks_of_a_prompt() -> None:
    assert prompt_per_response(256, n=8, block=16) == 240 / 8 + 16
    assert prompt_per_response(257, n=8, block=16) == 256 / 8 + 1
    assert prompt_per_response(22, n=8, block=32) == 22
    assert prompt_per_response(0.5, n=8, block=16) == 0.5  # a mean


def test_memory_by_kind(llama) -> None:
    work = Workload(WorkloadConfig(prompts=8, n=1, reference=True))
    cluster, numel = Cluster.of(CLUSTER), llama.num_parameters
    memory = memory_of(llama, work, replace(COLOCATED, tp_size=2), cluster)
    train = memory.moments["train"]
    assert train["weights"] == train["gradients"] == 4 * numel / 8
    assert train["moments"] == 2 * train["weights"]
    assert train["frozen models"] == train["weights"]
    generating = memory.moments["generate"]
    assert generating["engine weights"] == 2 * numel / 2
    assert memory.kv_cache == 2**30 - sum(generating.values())
    offloaded = memory_of(llama, work, replace(COLOCATED, offload=True), cluster)
    assert offloaded.kv_cache > memory.kv_cache
    assert (
        "moments" not in offloaded.moments["train"] and "moments" in offloaded.moments["optimizer"]
    )
    split = Layout("one_step_off", 4, 4, 4, 1)
    assert set(memory_of(llama, work, split, cluster).moments["generate"]) == {"engine weights"}
    logits = replace(work.config, fused_head=False)
    assert memory_of(llama, Workload(logits), COLOCATED, cluster).avoided_logits == 0
    assert memory.avoided_logits > 0


def test_muon_is_what_its_plan_does() -> None:
    """Qwen3-30B-A3B's matrices on 4 ranks: 4 layers, each with an expert for a rank."""
    from hybridengine.muon.exchange import OrthogonalExchange
    from hybridengine.sync.shards import ShardSpec

    sizes = dict(hidden_size=2048, vocab_size=1000, num_hidden_layers=4, intermediate_size=6144)
    heads = dict(num_attention_heads=32, num_key_value_heads=4, head_dim=128)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=768)
    model, ranks = shape_of(Qwen3MoeConfig(**sizes, **heads, **experts)), 4
    holders = tuple((rank,) for rank in range(ranks))
    specs = {
        str(i): ShardSpec.along(shape, torch.float32, 0, holders)
        for i, shape in enumerate(model.matrices)
    }
    plans = [
        OrthogonalExchange(specs, rank, ranks, torch.device("cpu"), torch.bfloat16)
        for rank in range(ranks)
    ]
    flops, received = muon_exchange(model, ranks, ranks)
    assert sum(plan.bytes_received for plan in plans) == ranks * received
    owned = sum(matrix.flops for matrices in plans[0].owned for matrix in matrices)
    assert 5 * owned == ranks * flops
    adamw, muon = (Workload(WorkloadConfig(optimizer=kind)) for kind in ("adamw", "muon"))
    elements = sum(np.prod(shape) for shape in model.matrices)
    assert moment_bytes(model, adamw) == 8 * model.num_parameters
    assert moment_bytes(model, muon) == 8 * model.num_parameters - 4 * elements
    cluster, layout = Cluster.of(CLUSTER), replace(COLOCATED, trainer_ranks=4, fsdp_size=4)
    times = [
        TrainingModel(model, w, layout, cluster, ranks).optimizer_step() for w in (adamw, muon)
    ]
    assert times[1] - times[0] == pytest.approx(
        max(flops / 1e12, cluster.all_to_all(received, ranks)) - 8 * elements / ranks / 1e9
    )
    both = TrainingModel(model, muon, layout, cluster, ranks)
    assert both.optimizer_step(is_policy=False) == times[0], "the critic has AdamW"
    memory = [memory_of(model, w, layout, cluster).moments["optimizer"] for w in (adamw, muon)]
    assert memory[0]["moments"] - memory[1]["moments"] == 4 * elements / ranks
