"""The advisor: volumes of a real recorded model, groupings, a picture, bad input."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from hybridengine.lab.advisor import advise, draw_advice, print_advice, traffic_matrix
from hybridengine.sync.blocks import contiguous_strides
from hybridengine.sync.layout import Copy, EngineLayout, TensorSpec
from hybridengine.sync.shards import dim1_parameters
from tests.extras.vision.tiny_vision import save_tiny_vision
from tests.forked import run_forked
from tests.sync.brute_force import fused_layout
from tests.tiny_models import tiny_config

SHAPES = {"c": ("column", (64, 32)), "r": ("row", (32, 64))}


def advice_for(world_size: int, tp_size: int, nodes: int):
    layouts = [fused_layout(SHAPES, rank, tp_size) for rank in range(tp_size)]
    return advise({n: s for n, (_, s) in SHAPES.items()}, layouts, world_size, nodes=nodes)


def test_one_node_recommends_what_reaches_hybridflows_volume() -> None:
    advice = advice_for(8, 4, 1)
    best = advice.options[0]
    assert (best.grouping, best.row_dim) == ("strided", 1)
    elements = 64 * 32 * 2
    assert best.received_bytes == advice.hybridflow_bytes == elements * 2 // 4 - elements * 2 // 8
    assert advice.verl_bytes == elements * 4 * 7 // 8
    assert best.inter_bytes == 0
    assert {o.grouping for o in advice.options} == {"strided", "contiguous"}
    assert best.received_bytes < min(o.received_bytes for o in advice.options[1:])


def test_several_nodes_keep_tp_groups_inside_a_node() -> None:
    advice = advice_for(8, 2, 2)
    best = advice.options[0]
    assert best.grouping == "strided in nodes" and best.tp_in_node
    across = next(o for o in advice.options if o.grouping == "strided" and o.row_dim == 1)
    assert not across.tp_in_node and across.received_bytes < best.received_bytes
    for option in advice.options:
        node, traffic = [rank // 4 for rank in range(8)], traffic_matrix(option.plan)
        crossing = [
            sum(int(traffic[s, r]) for s in range(8) if node[s] != node[r]) for r in range(8)
        ]
        assert option.inter_bytes == max(crossing)


def test_time_is_that_of_the_busiest_rank_of_each_bucket_and_of_each_collective() -> None:
    layouts = [fused_layout(SHAPES, rank, 2) for rank in range(2)]
    shapes = {n: s for n, (_, s) in SHAPES.items()}

    def seconds(**options: float) -> list[float]:
        speeds = {"intra_gb_per_s": 4.0, "inter_gb_per_s": 1.0, "latency_us": 0.0, **options}
        return [o.seconds for o in advise(shapes, layouts, 8, nodes=2, **speeds).options]

    advice = advise(shapes, layouts, 8, nodes=2, bucket_bytes=4096)
    for option in advice.options:
        assert len(option.plan.buckets) > 1
        matrix = traffic_matrix(option.plan)
        busiest = np.maximum(matrix.sum(0), matrix.sum(1)).max()
        moved = sum(b.intra_bytes + b.inter_bytes for b in option.plan.buckets)
        assert busiest <= moved, "no bucket takes less than its busiest rank"
    plain, slow = seconds(), seconds(latency_us=1000.0)
    buckets = [len(o.plan.buckets) for o in advise(shapes, layouts, 8, nodes=2).options]
    assert slow == pytest.approx([t + 1e-3 * n for t, n in zip(plain, buckets, strict=True)])


def test_experts_fewer_than_ranks_are_sharded_on_dim_1() -> None:
    """On dim 0 four of sixteen ranks would send all; the trainer decides by the same function."""
    shapes = {"experts": (4, 32, 16), "router": (4, 16), "odd": (4, 9, 16)}
    strides = {n: contiguous_strides(s) for n, s in shapes.items()}
    copies = [Copy(n, n, 0, 0, s, strides[n], strides[n]) for n, s in shapes.items()]
    tensors = {n: TensorSpec(s, strides[n], torch.bfloat16) for n, s in shapes.items()}
    assert dim1_parameters(shapes, {}, 16) == {"experts"}
    assert dim1_parameters(shapes, {}, 4) == set(), "an expert for every rank"
    assert dim1_parameters(shapes, {"router": 1, "experts": 1}, 4) == {"experts", "router"}
    del shapes["odd"], tensors["odd"]
    layout = EngineLayout(tensors, copies[:2])
    best, other = advise(shapes, [layout], 16).options
    assert (best.expert_dim, other.expert_dim) == (1, 0)
    assert max(best.plan.bytes_sent) < 1.2 * best.received_bytes
    assert max(other.plan.bytes_sent) > 3 * other.received_bytes
    assert best.seconds < other.seconds


def test_a_tensor_parallel_trainer_matches_contiguous_groups() -> None:
    """Its TP ranks are adjacent; in strided groups an engine slice lies on other ranks."""
    layouts = [fused_layout(SHAPES, rank, 2) for rank in range(2)]
    shapes = {n: s for n, (_, s) in SHAPES.items()}
    options = advise(shapes, layouts, 8, train_tp=2).options
    best, strided = options[0], next(o for o in options if o.grouping == "strided")
    assert best.grouping == "contiguous" and best.received_bytes < strided.received_bytes
    assert best.received_bytes == best.lower_bound_bytes == 64 * 32 * 2 * 2 * (4 - 1) // 8


def test_what_few_ranks_would_send_is_reported_with_a_remedy() -> None:
    shapes = {"experts": (4, 9, 16)}
    strides = contiguous_strides((4, 9, 16))
    layout = EngineLayout(
        {"experts": TensorSpec((4, 9, 16), strides, torch.bfloat16)},
        [Copy("experts", "experts", 0, 0, (4, 9, 16), strides, strides)],
    )
    console = Console(record=True, width=400, file=io.StringIO())
    print_advice(advise(shapes, [layout], 16), console)
    assert "sends 3.8 times what it receives" in (text := console.export_text()), text
    assert "Replicas of fewer shards (HSDP, fsdp_size)" in text
    spread = advise(shapes, [layout], 16, fsdp_size=4).options[0].plan
    assert max(spread.bytes_sent) == max(spread.bytes_received)


def test_replicas_in_every_node_send_nothing_across() -> None:
    layouts = [fused_layout(SHAPES, rank, 2) for rank in range(2)]
    shapes = {n: s for n, (_, s) in SHAPES.items()}
    best = advise(shapes, layouts, 16, nodes=4, fsdp_size=4).options[0]
    assert best.tp_in_node and best.received_bytes > best.inter_bytes == 0
    assert advise(shapes, layouts, 16, nodes=4).options[0].inter_bytes > 0
    with pytest.raises(ValueError, match="fsdp_size: got 5, expected a divisor of the 16 ranks"):
        advise(shapes, layouts, 16, fsdp_size=5)


def test_impossible_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="tp: got 3, expected a divisor of the 8 ranks"):
        advice_for(8, 3, 1)
    with pytest.raises(ValueError, match="nodes: got 3, expected a divisor of the 8 ranks"):
        advice_for(8, 2, 3)


def test_picture_of_a_sync_that_moves_nothing(tmp_path: Path) -> None:
    layout = EngineLayout({"e": TensorSpec((0,), (1,), torch.bfloat16)}, [])
    draw_advice(advise({"w": (0,)}, [layout], 1), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_terminal_of_80_columns_cuts_nothing() -> None:
    out = io.StringIO()
    print_advice(advice_for(8, 4, 2), Console(file=out, width=80))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for row in ("TP traffic", "received", "lower bound", "across nodes", "staging", "sync time"):
        [line] = [line for line in text.splitlines() if line.startswith(row)]
        assert len(line.split()) > len(advice_for(8, 4, 2).options)
    assert "verl" in text and "Recommended" in text


def save_config(kind: str, folder: Path) -> None:
    """Write what the command reads of a model: no weights."""
    if kind == "qwen2_vl":
        save_tiny_vision(kind, folder)
        (folder / "model.safetensors").unlink()
        return
    config = tiny_config(kind)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2_vl"])
def test_command_records_the_engines_own_loader(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    save_config(kind, tmp_path)
    command = [sys.executable, "-m", "hybridengine", "reshard", "plan"]
    options = ["--ranks", "4", "--tp", "2", "--png", str(tmp_path / "plan.png")]
    run = run_forked([*command, "--model", str(tmp_path), *options], uses_vllm=True)
    assert run.returncode == 0, run.stderr
    assert "4 ranks on 1 node, 2 engines of TP 2" in run.stdout
    assert "Recommended: strided, dim 1" in run.stdout
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    missing = run_forked([*command, "--model", tmp_path / "nowhere", *options], uses_vllm=True)
    assert missing.returncode == 2 and "Traceback" not in missing.stderr
    assert "nowhere" in missing.stderr


@pytest.mark.slow
def test_recorded_layout_of_a_large_model_plans_in_little_memory() -> None:
    """Shapes of a 70B model on 64 ranks: the plan is small, whatever the model."""
    import tracemalloc

    shapes = {f"l{i}.{k}": v for i in range(80) for k, v in SHAPES.items()}
    big = {n: (kind, tuple(128 * d for d in shape)) for n, (kind, shape) in shapes.items()}
    layouts = [fused_layout(big, rank, 8) for rank in range(8)]
    tracemalloc.start()
    advice = advise({n: s for n, (_, s) in big.items()}, layouts, 64, nodes=8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert advice.num_parameters == sum(math.prod(s) for _, s in big.values())
    assert peak < 64 << 20
