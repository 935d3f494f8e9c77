"""GSM8K for SFT and RL: data/gsm8k/{train,test}.parquet in the row schema of this package.

python examples/gsm8k.py [--out data/gsm8k]        (needs `pip install datasets` and the hub)
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INSTRUCTION = "Let's think step by step and put the final answer within \\boxed{}."


def row(example: Mapping[str, str], split: str, index: int) -> dict[str, Any]:
    """One problem; the part of `answer` behind #### is the number that the rule looks for.

    RL takes the prompt and the ground truth, SFT the prompt and the response.
    """
    solution, _, number = example["answer"].partition("####")
    number = number.strip().replace(",", "")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{example['question']} {INSTRUCTION}"}],
        "ability": "math",
        "response": f"{solution.strip()}\n\\boxed{{{number}}}",
        "reward_model": {"ground_truth": number},
        "extra_info": {"split": split, "index": index},
    }


def main() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import load_dataset

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data/gsm8k"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for split, examples in load_dataset("openai/gsm8k", "main").items():
        rows = [row(example, split, i) for i, example in enumerate(examples)]
        pq.write_table(pa.Table.from_pylist(rows), out / f"{split}.parquet")


if __name__ == "__main__":
    main()
