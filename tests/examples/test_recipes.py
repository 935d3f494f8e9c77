"""Every recipe runs as written, but for the model, the data and the sizes."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path

import pytest

from hybridengine.run.config import load_config
from tests.tiny_models import save_classifier
from tests.train.in_process import Result, run_jobs, small_job

pytestmark = pytest.mark.multirank

EXAMPLES = Path(__file__).parents[2] / "examples"
LARGE = (
    "grpo",
    "lora_grpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "ppo",
    "reward_model",
    "custom_reward",
    "multi_turn/gsm8k",
)
RECIPES = (*LARGE, "multi_turn", "multi_turn/guess")

TINY = (
    "data.val_files=null",
    "data.max_response_length=8",
    "actor.ppo_max_token_len_per_gpu=256",
    "rollout.tensor_model_parallel_size=1",
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=1",
    "trainer.save_freq=-1",
    "reward.num_workers=1",
)
# The tiny tokenizer takes ChatML's marks for words that it does not know.
TURNS = ("data.max_prompt_length=60", "data.max_response_length=40", "actor.ppo_mini_batch_size=4")
TINY_OF = {
    "multi_turn": TURNS,
    "multi_turn/gsm8k": TURNS,
    "multi_turn/guess": TURNS,
    "dapo": ("actor.ppo_mini_batch_size=2", "reward.overlong_buffer.len=4", "rollout.n=2"),
    "grpo": ("actor.ppo_mini_batch_size=2",),
    "lora_grpo": ("actor.ppo_mini_batch_size=2",),
    "gspo": ("actor.ppo_mini_batch_size=2",),
    "ppo": (
        "actor.ppo_mini_batch_size=2",
        "critic.model.path={dir}/model",
        "rollout.n=1",
        "trainer.total_training_steps=2",
        "trainer.critic_warmup=1",
    ),
    "reward_model": (
        "actor.ppo_mini_batch_size=2",
        "reward.reward_model.model_path={dir}/classifier",
    ),
}
KEPT = (
    "reward.",
    "rollout.n=",
    "actor.fsdp_config",
    "critic.",
)  # the recipe's own, not the small job's


def file_of(recipe: str) -> Path:
    return EXAMPLES / (f"{recipe}.yaml" if "/" in recipe else f"{recipe}/config.yaml")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("recipes")
    base = [o for o in small_job(folder) if not o.startswith(KEPT)]
    rows = re.sub(r'"ground_truth": \[[^]]*\]', NUMBER, (folder / "rows.jsonl").read_text())
    (folder / "rows.jsonl").write_text(rows.replace('{"data_source"', GAME))
    save_classifier("llama", folder / "classifier")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "model" / name, folder / "classifier")
    jobs = []
    for recipe in RECIPES:
        tiny = [o.format(dir=folder) for o in (*TINY, *TINY_OF.get(recipe, ()))]
        jobs.append([str(file_of(recipe)), *base, *tiny])
    return dict(zip(RECIPES, run_jobs(folder, jobs, timeout_s=400.0), strict=True))


NUMBER = '"ground_truth": "7"'
GAME = '{"interaction_kwargs": {"number": 7}, "data_source"'
EXPECTED = {  # a metric that the recipe's own settings produce
    "grpo": "actor/kl_loss",
    "lora_grpo": "actor/kl_loss",
    "dapo": "training/num_gen_batches",
    "dr_grpo": "actor/pg_loss",
    "gspo": "actor/pg_clipfrac",
    "ppo": "critic/vf_explained_var",
    "reward_model": "reward/reward_model",
    "custom_reward": "reward/well_formed",
    "multi_turn": "reward/called",
    "multi_turn/gsm8k": "agent_loop/tool_calls",
    "multi_turn/guess": "reward/turn_rewards",
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_runs(results, recipe) -> None:
    assert not results[recipe].refused
    assert len(results[recipe].rows) == 1 + (recipe == "ppo")
    assert EXPECTED[recipe] in results[recipe].last
    assert results[recipe].last["actor/grad_norm"] >= 0


@pytest.mark.parametrize("recipe", LARGE)
def test_recipe_is_valid_at_its_real_size(recipe) -> None:
    config = load_config(file_of(recipe))
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert config.world_size >= 4 and config.actor.ppo_max_token_len_per_gpu >= longest
    own = [config.model.external_lib or "", *(path for path, _ in config.reward.functions)]
    for path in own:
        assert not path.endswith(".py") or (EXAMPLES.parent / path).is_file()


def test_gsm8k_rows() -> None:
    row = runpy.run_path(str(EXAMPLES / "gsm8k.py"))["row"]
    made = row({"question": "How many?", "answer": "First 3.\n#### 1,234"}, "train", 5)
    assert made["reward_model"] == {"ground_truth": "1234"}
    assert made["prompt"][0]["content"].startswith("How many? Let's think")
    assert made["data_source"] == "openai/gsm8k" and made["extra_info"]["index"] == 5
