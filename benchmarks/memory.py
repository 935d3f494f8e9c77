"""Peak memory of two full training steps with each memory option on and off, one at a time.

SmolLM2-135M, ragged sequences in one micro-batch, forward, backward and AdamW on one rank, every
row in its own process, in bfloat16 where it is fast, else in float32. On a GPU the peak is that of
the allocator; on a CPU it is that of the process less its memory before the model, and offloading
saves nothing: host and device are the same memory. `weights_mib`, `gradients_mib` and
`optimizer_mib` count the bytes of this rank's shards; the first and the last are what
`param_offload` and `optimizer_offload` move to the host.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._bench import OURS, ROOT, Bench, status_kib
from hybridengine.kernels import has_fast_products
from tests.loading import load_sharded

MODEL = ROOT / ".cache/demo/smollm2-135m-instruct"
SEQUENCES, SHORTEST, LONGEST = 12, 32, 384
# glibc maps every tensor of a MiB by itself, so that the peak has no holes of its heap in it.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
ROWS: dict[str, dict] = {  # differences from the first row
    "default": {},
    "gradient checkpointing": {"load": {"enable_gradient_checkpointing": True}},
    "LoRA rank 16": {"lora_rank": 16},
    "param offload": {"load": {"param_offload": True}},
    "optimizer offload": {"offload": True},
    "padded, not packed": {"padded": True},
    "logits, not fused": {"load": {"use_fused_kernels": False}},
}


def run(bench: Bench) -> None:
    if bench.quick or not MODEL.exists():
        print("# memory: needs the demo's model: `python examples/demo/prepare.py`", flush=True)
        return
    first = None
    for name, options in ROWS.items():
        measured = run_worker(bench.device.type, options)
        tokens, peak = measured.pop("tokens"), measured["peak_mib"]
        first = first or peak
        bench.add(
            "memory",
            "step",
            name if options else OURS,
            f"{tokens} tokens",
            note=f"  {peak / first:.2f}x of the default",
            **measured,
        )


def run_worker(device: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run `worker` in a new process and return its result."""
    call = [sys.executable, "-m", "benchmarks.memory", device, json.dumps(options)]
    environment = os.environ | MALLOC
    done = subprocess.run(
        call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"{options}: ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def worker(device: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return values of a row (`ms_p50`: of the second step), and the tokens of the micro-batch.

    options:
        load: options of `load_sharded`.
        lora_rank: train adapters of this rank only.
        offload: offload the optimizer.
        padded: fill every response up to the longest sequence.
        lengths: tokens of the sequences, in place of `ragged_lengths`.
    """
    from hybridengine.model import (
        Optimizer,
        apply_lora,
        on_device,
        pack_rollouts,
        packed_log_probs,
        sharding_mesh,
    )
    from hybridengine.sync.shards import local_shard

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model_options, rank = options.get("load", {}), options.get("lora_rank")
    dtype = torch.bfloat16
    if not has_fast_products(dtype, torch.device(device)):
        dtype = torch.float32
    before = status_kib("VmRSS")
    model = load_sharded(
        str(MODEL),
        mesh=sharding_mesh(device, 1),
        param_dtype=dtype,
        adapt=(lambda plain: apply_lora(plain, rank, rank)) if rank else None,
        **model_options,
    )
    offload = options.get("offload", False)
    optimizer = Optimizer(model, lr=1e-6, total_steps=2, offload=offload)
    rollouts = random_rollouts(model.config.vocab_size, options.get("lengths") or ragged_lengths())
    if options.get("padded"):
        rollouts = [(p, a + [0] * (LONGEST - len(p) - len(a))) for p, a in rollouts]
    batch = pack_rollouts(rollouts, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        start = time.perf_counter()
        with on_device(model):
            log_probs, entropy = packed_log_probs(model, batch)
            (log_probs.mean() + 0.01 * entropy.mean()).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            shards = {"weights": model.parameters(), "gradients": gradients}
            sizes = {name: sum(local_shard(t).nbytes for t in ts) for name, ts in shards.items()}
            del gradients, shards
            optimizer.step(1.0)
        seconds = time.perf_counter() - start
    moments = (x for s in optimizer.adamw.state.values() for x in s.values())
    sizes["optimizer"] = sum(local_shard(x).nbytes for x in moments if isinstance(x, torch.Tensor))
    peak = (status_kib("VmHWM") - before) / 2**10
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "peak_mib": peak,
        "ms_p50": seconds * 1e3,
        "tokens": batch.input_ids.numel(),
        **{f"{name}_mib": size / 2**20 for name, size in sizes.items()},
    }


def ragged_lengths() -> list[int]:
    """Return lengths of sequences, log-uniform."""
    spread = torch.rand(SEQUENCES - 1, generator=torch.Generator().manual_seed(0))
    return [LONGEST, *(SHORTEST * (LONGEST / SHORTEST) ** spread).int().tolist()]


def random_rollouts(vocab_size: int, lengths: list[int]) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, response) pairs of random tokens; a third of each is its prompt."""
    draw = torch.Generator().manual_seed(0)
    tokens = [torch.randint(vocab_size, (n,), generator=draw).tolist() for n in lengths]
    return [(t[: len(t) // 3], t[len(t) // 3 :]) for t in tokens]


if __name__ == "__main__":
    print(json.dumps(worker(sys.argv[1], json.loads(sys.argv[2]))))
