"""The simulation against measured steps, measured memory and published figures, with its error.

Rows: `published` figures of other systems on GPUs (their sources below), `memory` of a training
step that `benchmarks memory` measured, `demo` a run of the demo's first steps on this machine, and
`planner` the weight sync of 1T parameters (the shape of Kimi-K2) on 4,096 ranks, planned in a
process of its own. The error is predicted / reference - 1: negative means that the simulation
promises more than was reached.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks._bench import KEYS, OURS, ROOT, Bench
from benchmarks._models import smollm2_135m
from hybridengine.lab.simulate.cluster import Cluster
from hybridengine.lab.simulate.config import (
    ClusterConfig,
    EfficiencyConfig,
    Gpu,
    LayoutConfig,
    Mode,
    WorkloadConfig,
)
from hybridengine.lab.simulate.generation import EngineModel
from hybridengine.lab.simulate.model import Layout, ModelShape, Workload
from hybridengine.lab.simulate.search import search
from hybridengine.lab.simulate.step import simulate_step
from hybridengine.lab.simulate.sync import estimate
from hybridengine.lab.simulate.training import memory_of
from hybridengine.model.parameters import checkpoint_layout_from_config

DEMO = ROOT / "examples/demo/config.yaml"
MEMORY = ROOT / "benchmarks/results/memory_cpu.json"
STEPS = 4  # of the demo, after one to warm up
PLANNER_RANKS, PLANNER_TP = 4096, 16

# NeMo-RL 0.4 (docs/about/performance-summary.md at 06beed9) and 0.6 (at 7ea279a): GRPO, one
# colocated or split step on H100, Megatron. model, mode, GPUs (split in halves), TP of the engine,
# mean response, maximum sequence, responses, seconds of a step.
NEMO_RL: tuple[tuple[str, Mode, int, int, int, int, int, float], ...] = (
    ("llama3.1-8b", "sync", 16, 1, 1060, 4096, 2048, 97.7),
    ("llama3.1-8b", "one_step_off", 16, 1, 1129, 4096, 2048, 74.6),
    ("qwen3-32b", "sync", 32, 4, 3206, 4096, 2048, 393.0),
    ("qwen3-32b", "one_step_off", 64, 4, 3207, 4096, 2048, 215.0),
    ("qwen3-30b-a3b", "sync", 32, 2, 3203, 4096, 2048, 192.0),
    ("qwen3-235b-a22b", "sync", 128, 16, 5698, 8192, 512, 395.0),
)
NEMO_PROMPT = 110.0  # their tokens per second count the prompt: 98 to 132 tokens

# vLLM's nightly latency test (buildkite.com/vllm/performance-benchmark/builds/9515): 8 sequences of
# 32 tokens, 128 generated; Qwen2.5 72B: tenstorrent/tt-inference-server issue 143, time per token
# of one sequence. model, GPU, TP, sequences, ms per token.
VLLM: tuple[tuple[str, Gpu, int, int, float], ...] = (
    ("llama3.1-8b", "h200", 1, 8, 833.4 / 128),
    ("llama3-70b", "h200", 4, 8, 2077.5 / 128),
    ("qwen2.5-72b", "h100", 2, 1, 30.9),
)

# HybridFlow (arXiv 2409.19256, section 8.4): the transition of 70B on 128 A100 takes 89.1%, that is
# 78.2 s, less than OpenRLHF's; so 9.6 s. Nodes share 200 Gb/s.
HYBRIDFLOW_S = 78.2 / 0.891 - 78.2


def run(bench: Bench) -> None:
    published(bench)
    memory(bench)
    if bench.quick:
        return
    planner(bench)
    demo(bench)


class _Case(NamedTuple):
    """A predicted number and what was measured or published."""

    part: str
    name: str
    predicted: float
    reference: float
    unit: str


def _add(bench: Bench, case: _Case) -> None:
    error = case.predicted / case.reference - 1
    row: dict[str, Any] = dict.fromkeys(KEYS) | {"op": "simulate", "pass": case.part, "impl": OURS}
    row |= {"shape": case.name, "predicted": case.predicted, "reference": case.reference}
    bench.results.append(row | {"unit": case.unit, "error": error, "device": bench.device_name})
    numbers = f"{case.predicted:9.3g}, reference {case.reference:9.3g} {case.unit}"
    print(f"{'simulate':>20} {case.part:>9} {case.name:>45} {numbers}: {error:+.0%}", flush=True)


def published(bench: Bench) -> None:
    """Compare with figures that others report."""
    for case in itertools.chain(vllm_cases(), [hybridflow_case()], _nemo_rl()):
        _add(bench, case)


def _nemo_rl() -> Iterator[_Case]:
    for name, mode, gpus, tp_size, response, longest, responses, seconds in NEMO_RL:
        work = WorkloadConfig(
            prompts=responses // 32,
            n=32,
            prompt_length=NEMO_PROMPT,
            shared_prefix=False,
            response_length=float(response),
            max_response_length=longest - int(NEMO_PROMPT),
            mini_batches=responses // 512,
            reference=True,
            old_log_probs=True,
            max_num_seqs=1024,
        )
        cluster = Cluster.of(ClusterConfig(gpu="h100", nodes=gpus // 8))
        trainers = gpus if mode == "sync" else gpus // 2
        fixed = LayoutConfig(mode=mode, trainer_ranks=trainers, tp_size=tp_size)
        result = search(_model(name), Workload(work), cluster, fixed)
        case = f"NeMo-RL {name} {mode} {gpus} H100"
        yield _Case("published", case, result.best.seconds, seconds, "s a step")


def vllm_cases() -> Iterator[_Case]:
    for name, gpu, tp_size, batch, reported in VLLM:
        cluster = Cluster.of(ClusterConfig(gpu=gpu))
        engine = EngineModel(_model(name), Workload(WorkloadConfig()), cluster, tp_size)
        predicted = engine.decode_step(batch, batch * 96) * 1e3
        case = f"vLLM {name} TP {tp_size} {gpu}, {batch} sequences"
        yield _Case("published", case, predicted, reported, "ms a token")


def hybridflow_case() -> _Case:
    cluster = Cluster.of(ClusterConfig(gpu="a100", nodes=16, inter_gb_per_s=25 / 8))
    layout = Layout("sync", 128, 128, 64, 8)
    sync = estimate(_model("llama3-70b"), Workload(WorkloadConfig()), layout, cluster)
    name = "HybridFlow transition 70B 128 A100"
    return _Case("published", name, sync.seconds, HYBRIDFLOW_S, "s")


def memory(bench: Bench) -> None:
    """Compare with the peaks of a training step on one rank."""
    measured = {row["impl"]: row for row in json.loads(MEMORY.read_text())["rows"]}
    model = _model("smollm2-135m")
    work = WorkloadConfig(
        prompts=12, n=1, prompt_length=48.5, response_lengths=(97,), max_tokens_per_gpu=4096
    )
    cluster = Cluster.of(ClusterConfig(gpus_per_node=1))
    for name, checkpointing, fused in (
        (OURS, False, True),
        ("gradient checkpointing", True, True),
        ("logits, not fused", False, False),
    ):
        layout = Layout("sync", 1, 1, 1, 1, gradient_checkpointing=checkpointing)
        own = Workload(replace(work, fused_head=fused))
        moments = memory_of(model, own, layout, cluster).moments
        predicted = sum(moments["train"].values()) / 2**20
        _add(bench, _Case("memory", name, predicted, measured[name]["peak_mib"], "MiB"))


def planner(bench: Bench) -> None:
    """Plan the sync of 1T parameters in a process of its own."""
    call = [sys.executable, "-m", "benchmarks.simulate", "planner"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=580)
    if done.returncode:
        raise RuntimeError(f"the planner ended with {done.returncode}:\n{done.stderr[-2000:]}")
    figures = json.loads(done.stdout.splitlines()[-1])
    name = f"{figures['billions']:.0f}B, {PLANNER_RANKS} ranks"
    seconds, peak = figures["plan_s"], figures["peak_mib"]
    bench.add(
        "simulate",
        "planner",
        OURS,
        name,
        isa=None,
        dtype="",
        ms_p50=seconds * 1e3,
        peak_mib=peak,
        record_s=figures["record_s"],
        note=f"  recorded in {figures['record_s']:.1f} s",
    )


def _plan_largest() -> dict[str, float]:
    """Record and plan; return seconds, and the peak MiB of this process."""
    import resource

    import torch

    from hybridengine.lab.layouts import record_engine_layouts
    from hybridengine.reshard import build_plan
    from hybridengine.sync.shards import ShardSpec

    with tempfile.TemporaryDirectory() as folder:
        _config("kimi-k2").save_pretrained(folder)
        started = time.perf_counter()
        shapes, layouts = record_engine_layouts(folder, PLANNER_TP)
    recorded = time.perf_counter()
    ranks = range(PLANNER_RANKS)
    holders = tuple((rank,) for rank in ranks)
    sources = {n: ShardSpec.along(s or (1,), torch.float32, 0, holders) for n, s in shapes.items()}
    of_rank = [layouts[rank * PLANNER_TP // PLANNER_RANKS] for rank in ranks]
    build_plan(sources, of_rank, nodes=[rank // 8 for rank in ranks])
    return {
        "billions": sum(torch.Size(s).numel() for s in shapes.values()) / 1e9,
        "record_s": recorded - started,
        "plan_s": time.perf_counter() - recorded,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }


def demo(bench: Bench) -> None:
    """Run the demo's first steps and compare every phase."""
    if not (ROOT / ".cache/demo/sums").exists():
        print("# simulate: the demo needs its model: `python examples/demo/prepare.py`", flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"trainer.total_training_steps={STEPS + 1}",
            "data.val_files=null",
            f"trainer.default_local_dir={folder}",
            "trainer.logger=[jsonl]",
            "trainer.test_freq=-1",
        ]
        call = [sys.executable, "-m", "hybridengine", "grpo", str(DEMO), *overrides]
        subprocess.run(call, cwd=ROOT, check=True, timeout=580)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "timing_s/step" in row][1:]
    for case in compare_demo(rows, _demo_cluster()):
        _add(bench, case)


def compare_demo(rows: list[dict[str, float]], cluster: Cluster) -> Iterator[_Case]:
    """Compare the medians of measured steps of the demo with a simulation of their mean lengths."""
    means = {key: median(row[f"{key}/mean"] for row in rows) for key in _LENGTHS}
    work = WorkloadConfig(
        prompts=12,
        n=8,
        prompt_length=means["prompt_length"],
        max_response_length=8,
        response_length=means["response_length"],
        max_tokens_per_gpu=1536,
        max_num_seqs=64,
        dtype="float32" if _needs_float32() else "bfloat16",
        engine_dtype="float32" if _needs_float32() else "bfloat16",
    )
    layout = Layout("sync", 2, 2, 2, 1, reshard_after_forward=False)
    step: Any = simulate_step(_model("smollm2-135m"), Workload(work), layout, cluster)
    phases = {"gen": "generate", "update_actor": "update_actor", "update_weights": "update_weights"}
    for measured, simulated in phases.items():
        seconds = median(row[f"timing_s/{measured}"] for row in rows)
        yield _Case("demo", measured, step.seconds_of(simulated), seconds, "s")
    total = median(row["timing_s/step"] for row in rows)
    yield _Case("demo", "step", step.seconds, total, "s")


_LENGTHS = ("prompt_length", "response_length")


def _demo_cluster() -> Cluster:
    """This machine as two ranks. Constants of a CPU: products reach what was measured."""
    constants = EfficiencyConfig(
        gemm=0.9, attention=0.5, memory=1.0, network=0.5, layer_host_us=0.0, engine_step_ms=10.0
    )
    config = ClusterConfig(gpu="cpu", gpus_per_node=2, memory_gib=8.0, efficiency=constants)
    return Cluster.of(config)


def _needs_float32() -> bool:
    import torch

    from hybridengine.kernels import has_fast_products

    return not has_fast_products(torch.bfloat16, "cpu")


def _model(name: str) -> ModelShape:
    config = _config(name)
    return ModelShape.of(config, checkpoint_layout_from_config(config).parameters)


def _config(name: str) -> Any:
    """Return the public configuration of a model, in the fields that its size depends on."""
    import transformers

    kinds: Any = transformers  # keywords of the files that its configuration classes do not declare

    def dense(
        kind: Any, vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv: int = 8
    ) -> Any:
        return kind(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            head_dim=128,
            tie_word_embeddings=False,
        )

    def experts(hidden: int, ffn: int, layers: int, heads: int) -> Any:
        return kinds.Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=hidden,
            moe_intermediate_size=ffn,
            num_experts=128,
            num_experts_per_tok=8,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=4,
            head_dim=128,
            tie_word_embeddings=False,
        )

    configs = {
        "llama3.1-8b": lambda: dense(kinds.LlamaConfig, 128256, 4096, 14336, 32, 32),
        "llama3-70b": lambda: dense(kinds.LlamaConfig, 128256, 8192, 28672, 80, 64),
        "qwen2.5-72b": lambda: dense(kinds.Qwen2Config, 152064, 8192, 29568, 80, 64),
        "qwen3-32b": lambda: dense(kinds.Qwen3Config, 151936, 5120, 25600, 64, 64),
        "qwen3-30b-a3b": lambda: experts(2048, 768, 48, 32),
        "qwen3-235b-a22b": lambda: experts(4096, 1536, 94, 64),
        "smollm2-135m": smollm2_135m,
        "kimi-k2": lambda: kinds.DeepseekV3Config(
            vocab_size=163840,
            hidden_size=7168,
            intermediate_size=18432,
            moe_intermediate_size=2048,
            num_hidden_layers=61,
            num_attention_heads=64,
            num_key_value_heads=64,
            n_routed_experts=384,
            n_shared_experts=1,
            num_experts_per_tok=8,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            kv_lora_rank=512,
            q_lora_rank=1536,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            architectures=["DeepseekV3ForCausalLM"],
        ),
    }
    return configs[name]()


if __name__ == "__main__":
    print(json.dumps(_plan_largest()))
