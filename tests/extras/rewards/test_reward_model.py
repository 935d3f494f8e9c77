"""A reward model in the loop: its score is the classifier's own, on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from tests.tiny_models import save_classifier
from tests.train.in_process import run_jobs, small_job

pytestmark = pytest.mark.multirank


def save_tokenizer(folder, policy: str, shift: int) -> None:
    """The policy's tokenizer, or one whose ids are others and whose template has roles."""
    if not shift:
        AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
        return
    words = {"<pad>": 0, "user": 1, "assistant": 2}
    words |= {f"w{i}": 3 + (i + shift) % 98 for i in range(3, 101)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template="{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}",
    ).save_pretrained(folder)


@pytest.mark.parametrize(("shift", "world_size"), [(0, 2), (3, 1)])
def test_scores_are_the_classifiers(tmp_path, shift, world_size) -> None:
    base = small_job(tmp_path)
    path = save_classifier("llama", tmp_path / "classifier")
    save_tokenizer(path, str(tmp_path / "model"), shift)
    job = [
        *base,
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={path}",
        "reward.weights=[1,0.5]",
        f"trainer.n_gpus_per_node={world_size}",
    ]
    [result] = run_jobs(tmp_path, [job], world_size)
    assert not result.refused
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = result.rollouts["step_1"]
    assert len(rows) == 16
    for row in rows:
        ids = [*row["prompt_ids"], *row["response_ids"]]
        if shift:
            text = f"user {row['prompt']} assistant {row['response']}"
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            score = float(model(torch.tensor([ids])).logits)
        assert row["reward_model"] == pytest.approx(score, abs=1e-4)  # sums in another order
        by_function = row["reward"] - 0.5 * row["reward_model"]
        assert min(abs(by_function - k / 12) for k in range(13)) < 1e-6
    assert len({row["reward_model"] for row in rows}) > 8


def test_refused(tmp_path) -> None:
    base = small_job(tmp_path)
    model = tmp_path / "model"
    jobs = [
        [*base, "reward.reward_model.enable=true"],
        [*base, "reward.reward_model.enable=true", f"reward.reward_model.model_path={model}"],
    ]
    missing, no_classifier = (result.refused for result in run_jobs(tmp_path, jobs))
    assert "give both or neither" in missing
    assert "is not a sequence classifier" in no_classifier
