"""An optimizer step on gloo ranks: Muon with one owner per matrix, gathered Muon, and AdamW.

SmolLM2-135M's shapes, random weights, FSDP2. The milliseconds are CPU time of the busiest rank, the
last of ROUNDS steps, without waiting. Rows:
  hybridengine     each matrix is orthogonalized on one rank
  gather_bf16      every rank gathers every momentum in bfloat16, orthogonalizes all matrices and
                   keeps its own slices
  gather_float32   the same, gathered in the dtype of the momentum
  adamw            the same optimizer with name=adamw

`work` is that of the busiest rank over the mean. `qwen3-30b-a3b` rows are counted from the plan of
one rank for 16 ranks, without running anything: FSDP2 divides 128 experts by whole ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from benchmarks._bench import OURS, Bench
from hybridengine.sync.shards import local_shard
from tests.ranks import run_ranks

RANKS, ROUNDS = 4, 2
LR = 1e-3
PAPER_RANKS = 16
QWEN3_30B_A3B = {  # the matrices of a layer, of 48
    "q": (4096, 2048), "k": (512, 2048), "v": (512, 2048), "o": (2048, 4096),
    "router": (128, 2048), "gate_up": (128, 1536, 2048), "down": (128, 2048, 768),
}  # fmt: skip


def run(bench: Bench) -> None:
    if bench.device.type == "cuda":
        print("# muon: gloo ranks on a CPU", flush=True)
        return
    layers = 2 if bench.quick else 30
    ways = run_ranks(_rank, RANKS, layers, timeout_s=1500)
    gathered = max(rank["gather_bf16"]["ms"] for rank in ways)
    for name in ways[0]:
        ms = max(rank[name]["ms"] for rank in ways)
        moved = max(rank[name]["bytes"] for rank in ways)
        work = [rank[name]["flops"] for rank in ways]
        balance = f", work {max(work) * RANKS / sum(work):.3f}" if sum(work) else ""
        bench.add(
            "muon",
            "step",
            name,
            f"135M N={RANKS}" if not bench.quick else f"{layers} layers N={RANKS}",
            dtype="bf16",
            isa=bench.isa,
            device=f"{RANKS} gloo ranks, 1 thread each",
            ms_p50=ms,
            ratio_to_best_peer=gathered / ms if name == OURS else None,
            note=f"  {moved / 2**20:.1f} MiB received per rank{balance}",
        )
    on_paper(1 if bench.quick else 48)


def on_paper(layers: int) -> None:
    """Print bytes and work of Qwen3-30B-A3B on PAPER_RANKS ranks."""
    from hybridengine.muon.exchange import OrthogonalExchange
    from hybridengine.sync.shards import ShardSpec

    specs = {
        f"{layer}.{name}": ShardSpec.along(
            shape, torch.float32, 0, tuple((rank,) for rank in range(PAPER_RANKS))
        )
        for layer in range(layers)
        for name, shape in QWEN3_30B_A3B.items()
    }
    exchange = OrthogonalExchange(specs, 0, PAPER_RANKS, torch.device("cpu"), torch.bfloat16)
    work = [5 * sum(matrix.flops for matrix in owned) for owned in exchange.owned]
    elements = sum(torch.Size(spec.shape).numel() for spec in specs.values())
    gathered = elements * 2 * (PAPER_RANKS - 1) / PAPER_RANKS
    print(
        f"# qwen3-30b-a3b, {layers} layers, {PAPER_RANKS} ranks, a step of a rank: "
        f"{exchange.bytes_received / 2**20:.0f} MiB received (gathered in bfloat16 "
        f"{gathered / 2**20:.0f}), {max(work) / 1e12:.1f} TFLOP, "
        f"work {max(work) * PAPER_RANKS / sum(work):.3f} (gathered {PAPER_RANKS})",
        flush=True,
    )


def _model(layers: int) -> nn.Module:
    """Return a sharded model; every rank draws the same weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _rank(rank: int, world_size: int, layers: int) -> dict[str, dict[str, float]]:
    from hybridengine.model import Optimizer

    results, updated = {}, dict[str, list[Tensor]]()
    for name in (OURS, "gather_bf16", "gather_float32", "adamw"):
        model = _model(layers)
        counted = {"bytes": 0.0, "flops": 0.0}
        if name in (OURS, "adamw"):
            kind = "muon" if name == OURS else name
            optimizer = Optimizer(model, lr=LR, weight_decay=0.1, total_steps=9, name=kind)
            step: Callable[[], object] = partial(optimizer.step, 1e9)
        else:
            dtype = torch.bfloat16 if name == "gather_bf16" else torch.float32
            step = _Gathered(model, dtype, counted)
        times = []
        for number in range(ROUNDS):
            for i, parameter in enumerate(model.parameters()):
                draw = torch.Generator().manual_seed(i * ROUNDS + number + 7919 * rank)
                parameter.grad = grad = torch.empty_like(parameter)
                local_shard(grad).normal_(generator=draw)
            dist.barrier()
            start = time.process_time()
            step()
            times.append(time.process_time() - start)
        if name == OURS:
            exchange = optimizer.adamw.exchange()  # type: ignore[attr-defined]
            counted["bytes"] = exchange.bytes_received
            counted["flops"] = sum(matrix.flops for matrix in exchange.owned[rank])
        results[name] = {"ms": times[-1] * 1e3, **counted}
        if name.startswith((OURS, "gather_bf16")):
            updated[name] = [local_shard(p.detach()).clone() for p in _matrices(model).values()]
    for own, theirs in zip(updated[OURS], updated["gather_bf16"], strict=True):
        torch.testing.assert_close(own, theirs, rtol=0, atol=2**-5 * LR)
    return results


def _matrices(model: nn.Module) -> Mapping[str, Any]:
    return {n: p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n}


class _Gathered:
    """Muon as others do it over DTensors, and AdamW for the other parameters."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, counted: dict[str, float]) -> None:
        self._matrices, self._dtype, self._counted = _matrices(model), dtype, counted
        self._buffers = {name: torch.zeros_like(p) for name, p in self._matrices.items()}
        rest = [p for name, p in model.named_parameters() if name not in self._matrices]
        self._rest = rest
        self._local = [nn.Parameter(local_shard(p.detach())) for p in rest]
        self._adamw = torch.optim.AdamW(self._local, LR, weight_decay=0.1, fused=True)

    @torch.no_grad()
    def __call__(self) -> None:
        from hybridengine.model.optim import by_placement, gradient_norm

        gradient_norm(by_placement([*self._matrices.values(), *self._rest]))
        for local, parameter in zip(self._local, self._rest, strict=True):
            assert parameter.grad is not None
            local.grad = local_shard(parameter.grad)
        self._adamw.step()
        self._counted["bytes"] = 0.0
        for name, update in self._gather():
            parameter = self._matrices[name]
            rows, columns = parameter.shape
            update = _zeropower_via_newtonschulz(update, (3.4445, -4.775, 2.0315), 5, 1e-7)
            shard = local_shard(parameter.detach())
            part = update.chunk(dist.get_world_size())[dist.get_rank()]
            shard.mul_(1 - LR * 0.1)
            shard.add_(part, alpha=-LR * 0.2 * max(rows, columns) ** 0.5)
            parameter.grad = None

    def _gather(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._matrices.items():
            assert parameter.grad is not None
            grad, buffer = local_shard(parameter.grad), local_shard(self._buffers[name])
            buffer.lerp_(grad, 0.05)
            own = grad.lerp(buffer, 0.95).to(self._dtype)
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, own)
            self._counted["bytes"] += own.nbytes * (len(parts) - 1)
            yield name, torch.cat(parts)
