"""As benchmarks/parity.py, for SmolLM2-135M, which `python examples/demo/prepare.py` makes."""

from __future__ import annotations

from pathlib import Path

from benchmarks._bench import Bench
from benchmarks.parity import Case, add_row

MODEL, VOCAB = Path(".cache/demo/smollm2-135m-instruct"), 49_152
TOKENS = 10_000


def run(bench: Bench) -> None:
    if bench.quick or not MODEL.is_dir():
        print(f"# parity_model: needs {MODEL}, and minutes", flush=True)
        return
    for exact in (True, False):
        add_row(bench, Case("SmolLM2-135M", str, TOKENS, exact=exact), str(MODEL), VOCAB)
