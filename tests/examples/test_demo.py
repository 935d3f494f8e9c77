"""The demos' own parts: rewards, problems on one side only, configs that would start, the curve."""

import runpy
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from hybridengine import cli
from hybridengine.rewards.functions import import_reward_function

ROOT = Path(__file__).parents[2]
DEMO, LONG = ROOT / "examples" / "demo", ROOT / "examples" / "demo_long"


@pytest.fixture(scope="module")
def prepare():
    return runpy.run_path(str(DEMO / "prepare.py"))


@pytest.fixture(scope="module")
def model(prepare, tmp_path_factory):
    """What `make demo` does first: the wheel's GGUF becomes a folder anybody can load."""
    folder = tmp_path_factory.mktemp("model")
    prepare["convert_model"](folder)
    return folder


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
    reward = import_reward_function(DEMO / "reward.py")[0]("chain_sum", response, "12", {})
    assert reward == {"score": score, "strict": strict, "lenient": lenient}


@pytest.fixture(scope="module")
def sums(prepare, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sums")
    prepare["write"](folder, seed=1)
    return folder


def questions(path):
    """Question and answer of every row, an addition with its terms in order; answers checked."""
    found = set()
    for row in pq.read_table(path).to_pylist():
        answer = row["response"] if "response" in row else row["reward_model"]["ground_truth"]
        first, sign, second, equals = row["prompt"][-1]["content"].split()
        right = int(first) + int(second) if sign == "+" else int(first) - int(second)
        assert (int(answer), equals) == (right, "=")
        found.add((sign, *(sorted((first, second)) if sign == "+" else (first, second))))
    return found


@pytest.mark.slow
def test_held_out_problems_are_not_trained_on(sums):
    val, train, sft, rl = (
        questions(sums / f"{name}.parquet") for name in ("val", "train", "sft", "rl")
    )
    assert len(val) >= 80 and len(train) >= 200 and len(sft) >= 40
    assert not val & train
    assert sft | rl == train and not sft & rl
    assert ("+", "2", "5") not in val | train  # the solved example


@pytest.mark.slow
def test_long_demo_would_start(sums, model, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    files = {"train": "sft.parquet"}, {"train": "rl.parquet", "val": "val.parquet"}
    for command, names in zip(("sft", "grpo"), files, strict=True):
        paths = [f"data.{name}_files={sums / file}" for name, file in names.items()]
        run = [f"model.path={model}", f"trainer.default_local_dir={tmp_path / command}"]
        arguments = [command, str(LONG / f"{command}.yaml"), *paths, *run, "--dry-run"]
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code == 0, result.output


def test_curve_of_the_long_demo_is_drawn_from_its_scores(tmp_path, monkeypatch, capsys):
    scores, picture = ROOT / "docs" / "demo_long.json", tmp_path / "curve.png"
    monkeypatch.setattr("sys.argv", ["draw.py", str(scores), "--out", str(picture)])
    runpy.run_path(str(LONG / "draw.py"), run_name="__main__")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "after GRPO" in capsys.readouterr().out


@pytest.mark.slow
def test_model_is_a_plain_hugging_face_folder(model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert sum(p.numel() for p in loaded.parameters()) == 134_515_008
    assert not hasattr(loaded.config, "quantization_config")
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    out = loaded.generate(**ids, max_new_tokens=1, do_sample=False)
    assert out[0, -1] == tokenizer(" Paris")["input_ids"][0]
