"""Every key of the configuration has an effect: each is flipped, and a small job must change."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridengine.run.config import RLConfig, SFTConfig, keys_of
from tests.extras.agents.turns import TURN_LOOP, TURN_TOOLS
from tests.extras.vision.tiny_vision import write_image_rows
from tests.model.lora_shared import write_adapter
from tests.ranks import run_ranks
from tests.tiny_models import save_classifier, save_tiny
from tests.train.effects import JobKind, effects_body, effects_of_flips, merged
from tests.train.flips import CRITIC, FLIPS, GRPO_CONTEXTS, REFUSED_WITHOUT, SFT_FLIPS
from tests.train.in_process import small_job

pytestmark = pytest.mark.multirank

BUSY = """    global active, most
    active += 1
    most = max(most, active)
    sleep(0.05)
    active -= 1
    return"""


def prepare(folder: Path) -> list[str]:
    base = small_job(folder)
    save_tiny("llama", folder / "other", seed=1)
    write_adapter(str(folder / "model"), folder / "adapter", rank=4, alpha=16)
    for name, seed in (("classifier", 3), ("other_classifier", 4)):
        save_classifier("llama", folder / name)
        shutil.copy(folder / "model" / "tokenizer.json", folder / name)
        shutil.copy(folder / "model" / "tokenizer_config.json", folder / name)
        if seed == 4:
            save_head(folder / name)
    rows = (folder / "rows.jsonl").read_text().splitlines()
    (folder / "others.jsonl").write_text("\n".join(rows[4:] + rows[:3]))
    (folder / "special.jsonl").write_text("\n".join(rows).replace("w9", "</s>"))
    (folder / "turn_loop.py").write_text(TURN_LOOP)
    (folder / "turn_tools.py").write_text(TURN_TOOLS)
    (folder / "slow_tools.py").write_text(
        TURN_TOOLS.replace("    return", "    sleep(0.3)\n    return")
    )
    (folder / "busy_tools.py").write_text(TURN_TOOLS.replace("    return", BUSY))
    (folder / "template.jinja").write_text(
        "{% for m in messages %}{{ word or 'w50' }} {{ m.content }} {% endfor %}"
    )
    reward = (folder / "reward.py").read_text()
    (folder / "other_reward.py").write_text(reward.replace("max(1, len(words))", "7"))
    slow = reward.replace("    words =", "    import time; time.sleep(0.003)\n    words =", 1)
    (folder / "slow_reward.py").write_text(slow)
    counted = "import itertools\ncount = itertools.count()\n"  # of the calls in its process
    head = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    (folder / "counted_reward.py").write_text(f"{counted}{head}    return next(count)\n")
    write_image_rows(folder)
    return base


def save_head(folder: Path) -> None:
    """Another head in the classifier at `folder`."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["score.weight"] = -weights["score.weight"]
    save_file(weights, file, {"format": "pt"})


def load_grpo(overrides: Sequence[str]):
    """Return (plan, what trains)."""
    from hybridengine.run.config import load_config
    from hybridengine.train.plan import plan_table
    from hybridengine.train.preflight import check_job
    from hybridengine.train.rl import RLTrainer

    config = load_config(None, overrides)
    return plan_table(*check_job(config)), lambda: RLTrainer.run(config)


def prepare_sft(folder: Path) -> list[str]:
    model = save_tiny("llama", folder / "model")
    save_tiny("llama", folder / "other", seed=1)
    rows = [
        {"prompt": f"w{k + 3} w9", "response": " ".join(["w5", f"w{k + 20}"] * (1 + k % 3))}
        for k in range(8)
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "rows.jsonl").write_text("".join(lines))
    (folder / "others.jsonl").write_text("".join(lines[3:]))
    (folder / "special.jsonl").write_text("".join(lines).replace("w9", "</s>"))
    (folder / "template.jinja").write_text(
        "{% for m in messages %}{{ word or 'w50' }} {{ m.content }} {% endfor %}"
    )
    write_image_rows(folder)
    settings = {
        "model.path": model,
        "model.fsdp_config.dtype": "float32",
        "data.train_files": folder / "rows.jsonl",
        "data.train_batch_size": 4,
        "data.max_length": 16,
        "data.max_token_len_per_gpu": 32,
        "optim.lr": 1e-2,
        "trainer.total_training_steps": 1,
        "trainer.logger": "[jsonl]",
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": folder / "run",
    }
    return [f"{key}={value}" for key, value in settings.items()]


def load_sft(overrides: Sequence[str]):
    from hybridengine.run.config import load_sft_config
    from hybridengine.train.plan import plan_table
    from hybridengine.train.preflight import check_job
    from hybridengine.train.sft import SFTTrainer

    config = load_sft_config(None, overrides)
    return plan_table(*check_job(config)), lambda: SFTTrainer.run(config)


GRPO = JobKind(RLConfig, FLIPS, prepare, load_grpo, GRPO_CONTEXTS)
SFT = JobKind(SFTConfig, SFT_FLIPS, prepare_sft, load_sft)
GRPO_KEYS, SFT_KEYS = ({key for key, _ in keys_of(kind.schema)} for kind in (GRPO, SFT))


@pytest.mark.parametrize(
    ("kind", "keys", "refused"),
    [
        pytest.param(GRPO, GRPO_KEYS, REFUSED_WITHOUT, marks=pytest.mark.exhaustive, id="grpo"),
        pytest.param(SFT, SFT_KEYS - GRPO_KEYS, set(), id="sft"),
        pytest.param(
            SFT,
            SFT_KEYS & GRPO_KEYS,
            {"trainer.resume_from_path"},
            marks=pytest.mark.exhaustive,
            id="sft, keys of GRPO too",
        ),
    ],
)
def test_every_key_has_an_effect(
    tmp_path: Path, kind: JobKind, keys: set[str], refused: set[str]
) -> None:
    effects = effects_of_flips(kind, tmp_path, keys)
    before = {key: texts[0] for key, texts in effects.items() if texts[0].startswith("refused")}
    assert before.keys() == refused, before
    ill_typed = {key: texts[1] for key, texts in effects.items() if ": input should" in texts[1]}
    assert not ill_typed, f"a flip that no type allows shows nothing: {ill_typed}"
    without = [key for key, texts in effects.items() if texts[0] == texts[1]]
    assert not without, f"accepted and ignored: {without}"


def test_nothing_but_the_configuration_changes_the_effects(tmp_path: Path) -> None:
    """The comparison itself: the same job twice is the same."""
    job = merged(prepare(tmp_path), CRITIC, tmp_path)
    [(first, second)] = run_ranks(effects_body, 1, GRPO, tmp_path, [job, job])
    assert first == second and "critic/vf_loss" in first
    assert os.fspath(tmp_path) in first
