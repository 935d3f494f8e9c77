"""Training steps on packed sequences and on padded ones, for three distributions of length.

The model, the step and the measures of `memory`. `uniform`: lengths from 32 to 256. `long-tailed`:
log-normal with a median of 40, and one of 256. `equal`: all 256, which is also what the others
compute when prompts and responses are padded to the longest, so it is the baseline of all three.
The limit is the token ratio: how many times more tokens there are with padding.
"""

from __future__ import annotations

import torch

from benchmarks._bench import OURS, Bench
from benchmarks.memory import MODEL, run_worker

SEQUENCES, SHORTEST, LONGEST = 8, 32, 256


def run(bench: Bench) -> None:
    if bench.quick or not MODEL.exists():
        print("# padding: needs the demo's model: `python examples/demo/prepare.py`", flush=True)
        return
    draw = torch.Generator().manual_seed(0)
    uniform = torch.rand(SEQUENCES - 1, generator=draw) * (LONGEST - SHORTEST) + SHORTEST
    long_tailed = (40 * torch.randn(SEQUENCES - 1, generator=draw).mul(0.6).exp()).clamp(8, LONGEST)
    others = {"equal": [LONGEST] * (SEQUENCES - 1)}
    others |= {"uniform": uniform.int().tolist(), "long-tailed": long_tailed.int().tolist()}
    padded: dict = {}
    for name, lengths in others.items():
        row = run_worker(bench.device.type, {"lengths": [LONGEST, *lengths]})
        tokens = row.pop("tokens")
        padded = padded or row
        speedup = padded["ms_p50"] / row["ms_p50"]
        ratio = SEQUENCES * LONGEST / tokens
        bench.add(
            "padding",
            "step",
            OURS,
            f"{name}, {tokens} tokens",
            note=f"  {row['peak_mib'] / padded['peak_mib']:.2f} of the memory of padded sequences",
            share_of_limit=speedup / ratio,
            ratio_to_best_peer=speedup,
            token_ratio=ratio,
            **row,
        )
