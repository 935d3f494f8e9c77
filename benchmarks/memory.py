"""Peak memory of two full training steps with each memory option on and off, one at a time.

SmolLM2-135M, ragged sequences in one micro-batch, forward, backward and AdamW on one rank, every
row in its own process. On a GPU the peak is that of the allocator; on a CPU it is that of the
process less its memory before the model, and offloading changes nothing: host and device are the
same memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from benchmarks._bench import OURS, ROOT, Bench, status_kib

MODEL = ROOT / ".cache/demo/smollm2-135m-instruct"
SEQUENCES, SHORTEST, LONGEST = 12, 32, 384
ROWS: dict[str, dict] = {  # differences from the first row
    "default": {},
    "gradient checkpointing": {"load": {"gradient_checkpointing": True}},
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
        call = [sys.executable, "-m", "benchmarks.memory", bench.device.type, json.dumps(options)]
        done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(f"{name}: ended with {done.returncode}:\n{done.stderr[-2000:]}")
        mib, ms, tokens = json.loads(done.stdout.splitlines()[-1])
        first = first or mib
        bench.add(
            "memory",
            "step",
            name if options else OURS,
            f"{tokens} tokens",
            dtype="bfloat16",
            ms_p50=ms,
            peak_mib=mib,
            note=f"  {mib / first:.2f}x of the default",
        )


def worker(device: str, options: dict) -> tuple[float, float, int]:
    """Return (peak MiB, ms of the second step, tokens per micro-batch)."""
    from hybridengine.model import (
        Optimizer,
        apply_lora,
        load_causal_lm,
        on_device,
        pack_rollouts,
        packed_log_probs,
        sharding_mesh,
    )

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model_options, rank = options.get("load", {}), options.get("lora_rank")
    before = status_kib("VmRSS")
    model = load_causal_lm(
        str(MODEL),
        mesh=sharding_mesh(device, 1),
        shard_dim1=lambda _: False,
        adapt=(lambda plain: apply_lora(plain, rank, rank)) if rank else None,
        **model_options,
    )
    offload = options.get("offload", False)
    optimizer = Optimizer(model, lr=1e-6, total_steps=2, offload=offload)
    rollouts = ragged(model.config.vocab_size)
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
            optimizer.step(1.0)
        seconds = time.perf_counter() - start
    peak = (status_kib("VmHWM") - before) / 2**10
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    return peak, seconds * 1e3, batch.input_ids.numel()


def ragged(vocab_size: int) -> list[tuple[list[int], list[int]]]:
    """Sequences of log-uniform length, a third of each its prompt."""
    draw = torch.Generator().manual_seed(0)
    spread = torch.rand(SEQUENCES - 1, generator=draw)
    lengths = [LONGEST, *(SHORTEST * (LONGEST / SHORTEST) ** spread).int().tolist()]
    tokens = [torch.randint(vocab_size, (n,), generator=draw).tolist() for n in lengths]
    return [(t[: len(t) // 3], t[len(t) // 3 :]) for t in tokens]


if __name__ == "__main__":
    print(json.dumps(worker(sys.argv[1], json.loads(sys.argv[2]))))
