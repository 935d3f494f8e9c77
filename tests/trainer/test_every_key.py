"""Every key of the configuration has an effect: each is flipped, and a small job must change.

What is compared: the plan, every metric that is not a time, the rollouts, the files, and what the
models, optimizers, engine and reshard are built with; or the flip is refused. A key without a row
in FLIPS is flipped by its type.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import typing
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from hybridengine.config import GRPOConfig, keys_of
from tests.model.test_value import save_classifier
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny
from tests.trainer.in_process import small_job

pytestmark = pytest.mark.multirank

TWO_STEPS = "trainer.total_training_steps=2"
VALIDATED = ("data.val_files={dir}/rows.jsonl", "trainer.val_before_train=true")
SAMPLED = (
    *VALIDATED,
    "rollout.val_kwargs.do_sample=true",
    "rollout.val_kwargs.temperature=1.0",
)
VLLM = ("rollout.name=vllm",)
REUSED = ("actor.ppo_epochs=3", "actor.optim.lr=0.1")
CRITIC = ("algorithm.adv_estimator=gae", TWO_STEPS)
KL_LOSS = ("actor.use_kl_loss=true", "actor.ppo_epochs=2")
KL_REWARD = ("algorithm.use_kl_in_reward=true", TWO_STEPS)
ADAPTIVE = (*KL_REWARD, "algorithm.kl_ctrl.type=adaptive")
FAR_KL = (  # far above the default target: low_var_kl is never negative, and the step is huge
    *ADAPTIVE,
    "algorithm.kl_penalty=low_var_kl",
    "actor.optim.lr=0.1",
    "trainer.total_training_steps=3",
)
TWO_REWARDS = (
    "reward.custom_reward_function.path=[{dir}/reward.py,{dir}/reward.py]",
    "reward.custom_reward_function.name=[compute_score,shorter]",
)
FILTERED = (
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.max_num_gen_batches=2",
    "reward.custom_reward_function.name=picky",
    "rollout.n=2",
)
REJECTED = (
    "rollout.dtype=bfloat16",
    "algorithm.rollout_correction.rollout_rs=token_k2",
    "algorithm.rollout_correction.rollout_rs_threshold=1e-6",
)
OVERLONG = (
    "reward.reward_manager.name=dapo",
    "reward.overlong_buffer.enable=true",
    "reward.overlong_buffer.len=2",
)
CLASSIFIER = (
    "reward.reward_model.enable=true",
    "reward.reward_model.model_path={dir}/classifier",
)
LONG = ("data.max_prompt_length=2", "data.train_batch_size=2")
LORA = ("model.lora_rank=4",)
SAVED = (TWO_STEPS, "trainer.save_freq=1")

# key: (other value, what must be set beside it for it to matter)
FLIPS: dict[str, tuple[str, Sequence[str]]] = {
    "model.path": ("{dir}/other", ()),
    "model.external_lib": ("{dir}/none.py", ()),
    "model.lora_rank": ("4", ()),
    "model.lora_alpha": ("7", LORA),
    "model.target_modules": ("[q_proj]", LORA),
    "data.train_files": ("{dir}/others.jsonl", ()),
    "data.val_files": ("{dir}/rows.jsonl", ()),
    "data.prompt_key": ("question", ()),
    "data.reward_fn_key": ("source", ()),
    "data.train_batch_size": ("2", ()),
    "data.val_batch_size": ("3", SAMPLED),
    "data.max_prompt_length": ("2", ()),
    "data.max_response_length": ("5", ()),
    "data.truncation": ("left", LONG),
    "data.filter_overlong_prompts": ("true", LONG),
    "data.chat_template": ("{dir}/template.jinja", ()),
    "actor.ppo_mini_batch_size": ("2", ()),
    "actor.ppo_max_token_len_per_gpu": ("48", ()),
    "actor.clip_ratio": ("0.01", REUSED),
    "actor.clip_ratio_low": ("0.01", REUSED),
    "actor.clip_ratio_high": ("0.01", REUSED),
    "actor.clip_ratio_c": ("1.001", ("actor.ppo_epochs=3", "actor.ppo_mini_batch_size=2")),
    "actor.entropy_coeff": ("0.1", ()),
    "actor.kl_loss_coef": ("0.5", KL_LOSS),
    "actor.kl_loss_type": ("abs", KL_LOSS),
    "actor.grad_clip": ("0.01", (TWO_STEPS,)),
    "actor.fsdp_config.fsdp_size": ("2", ()),
    "actor.optim.betas": ("[0.5,0.9]", ()),
    "rollout.top_p": ("0.5", ()),
    "rollout.top_k": ("5", ()),
    "rollout.name": ("vllm", ()),
    "rollout.gpu_memory_utilization": ("0.25", VLLM),
    "rollout.max_num_seqs": ("3", ()),
    "rollout.max_model_len": ("32", VLLM),
    "rollout.dtype": ("bfloat16", ()),
    "rollout.val_kwargs.n": ("2", SAMPLED),
    "rollout.val_kwargs.temperature": ("0.5", SAMPLED),
    "rollout.val_kwargs.top_p": ("0.5", SAMPLED),
    "rollout.val_kwargs.top_k": ("5", SAMPLED),
    "rollout.val_kwargs.do_sample": ("true", (*VALIDATED, "rollout.val_kwargs.temperature=1.0")),
    "critic.model.path": ("{dir}/other", CRITIC),
    "critic.cliprange_value": ("1e-4", (*CRITIC, "actor.ppo_epochs=2")),
    "algorithm.adv_estimator": ("rloo", ()),
    "algorithm.gamma": ("0.5", ("algorithm.adv_estimator=reinforce_plus_plus",)),
    "algorithm.lam": ("0.5", CRITIC),
    "algorithm.kl_penalty": ("abs", KL_REWARD),
    "algorithm.kl_ctrl.type": ("adaptive", KL_REWARD),
    "algorithm.kl_ctrl.kl_coef": ("0.5", KL_REWARD),
    "algorithm.kl_ctrl.horizon": ("100", ADAPTIVE),
    "algorithm.kl_ctrl.target_kl": ("1e9", FAR_KL),
    "algorithm.filter_groups.metric": ("never", FILTERED),
    "algorithm.filter_groups.max_num_gen_batches": ("1", FILTERED),
    "algorithm.rollout_correction.rollout_is": ("null", ("rollout.dtype=bfloat16",)),
    "algorithm.rollout_correction.rollout_is_threshold": ("1.0", ("rollout.dtype=bfloat16",)),
    "algorithm.rollout_correction.rollout_rs": ("seq_max_k2", REJECTED),
    "algorithm.rollout_correction.rollout_rs_threshold": ("1e-3", REJECTED),
    "algorithm.mask_truncated_completions": ("true", ("data.max_response_length=40",)),
    "reward.custom_reward_function.path": ("{dir}/other_reward.py", ()),
    "reward.custom_reward_function.name": ("shorter", ()),
    "reward.weights": ("[1,0.5]", TWO_REWARDS),
    "reward.timeout_s": ("0.001", ("reward.custom_reward_function.path={dir}/slow_reward.py",)),
    "reward.reward_manager.name": (
        "dapo",
        ("reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=2"),
    ),
    "reward.reward_model.enable": ("true", ()),
    "reward.reward_model.model_path": ("{dir}/other_classifier", CLASSIFIER),
    "reward.overlong_buffer.enable": ("false", OVERLONG),
    "reward.overlong_buffer.len": ("30", (*OVERLONG, "data.max_response_length=40")),
    "reward.overlong_buffer.penalty_factor": ("0.5", OVERLONG),
    "reshard.lora": ("", LORA),
    "trainer.total_epochs": ("2", ("trainer.total_training_steps=null",)),
    "trainer.total_training_steps": ("2", ()),
    "trainer.test_freq": ("1", (*VALIDATED, TWO_STEPS)),
    "trainer.val_before_train": ("false", VALIDATED),
    "trainer.save_freq": ("1", (TWO_STEPS,)),
    "trainer.save_hf_model": ("", SAVED),
    "trainer.max_actor_ckpt_to_keep": ("1", SAVED),
    "trainer.resume_mode": ("path", ()),
    "trainer.resume_from_path": ("{dir}/nothing", ("trainer.resume_mode=path",)),
    "trainer.default_local_dir": ("{dir}/elsewhere", ()),
    "trainer.logger": ("[jsonl,tensorboard]", ()),
    "trainer.rollout_data_dir": ("{dir}/run/other_rollouts", ()),
    "trainer.critic_warmup": ("1", CRITIC),
}
# What is set beside these is refused until the flip, or with another path.
REFUSED_WITHOUT = {
    "data.truncation",
    "data.filter_overlong_prompts",
    "trainer.resume_from_path",
}
NEED_VLLM = ("kv_cache_gib", "batched_tokens", "eager", "prefix_caching", "chunked", "free_cache")


def flip(key: str, hint: Any, default: Any) -> tuple[str, tuple[str, ...]]:
    """(another value, what must be set beside it)."""
    if key in FLIPS and FLIPS[key][0]:
        value, beside = FLIPS[key]
        return value, tuple(beside)
    beside = tuple(FLIPS.get(key, ("", ()))[1])
    beside += VLLM if key.startswith("rollout.") and any(n in key for n in NEED_VLLM) else ()
    beside += CRITIC if key.startswith("critic.") else ()
    if typing.get_origin(hint) is Literal:
        return next(c for c in typing.get_args(hint) if c != default), beside
    if hint is bool:
        return str(not default).lower(), beside
    if isinstance(default, int | float):
        return str(default + 1 if isinstance(default, int) else default * 1.5 + 1e-3), beside
    return f"{default}_else", beside


def default_of(key: str) -> Any:
    node: Any = GRPOConfig()
    for part in key.split("."):
        node = getattr(node, part)
    return node


def prepare(folder: Path) -> list[str]:
    base = small_job(folder)
    save_tiny("llama", folder / "other", seed=1)
    for name, seed in (("classifier", 3), ("other_classifier", 4)):
        save_classifier("llama", folder / name)
        shutil.copy(folder / "model" / "tokenizer.json", folder / name)
        shutil.copy(folder / "model" / "tokenizer_config.json", folder / name)
        if seed == 4:
            save_head(folder / name)
    rows = (folder / "rows.jsonl").read_text().splitlines()
    (folder / "others.jsonl").write_text("\n".join(rows[4:] + rows[:3]))
    (folder / "template.jinja").write_text("{% for m in messages %}w50 {% endfor %}")
    reward = (folder / "reward.py").read_text()
    (folder / "other_reward.py").write_text(reward.replace("max(1, len(words))", "7"))
    slow = reward.replace("    words =", "    import time; time.sleep(0.003)\n    words =", 1)
    (folder / "slow_reward.py").write_text(slow)
    return base


def save_head(folder: Path) -> None:
    """Another head in the classifier at `folder`."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["score.weight"] = -weights["score.weight"]
    save_file(weights, file, {"format": "pt"})


def merged(base: Sequence[str], more: Sequence[str], folder: Path) -> tuple[str, ...]:
    """One override per key, the later ones winning; `{dir}` is the folder."""
    pairs = dict(o.format(dir=folder).split("=", 1) for o in (*base, *more))
    return tuple(f"{key}={value}" for key, value in pairs.items())


def test_every_key_has_an_effect(tmp_path: Path) -> None:
    keys = [key for key, _ in keys_of(GRPOConfig)]
    assert set(FLIPS) <= set(keys), set(FLIPS) - set(keys)
    with ThreadPoolExecutor(2) as threads:  # two processes, for the sake of time
        halves = threads.map(effects_of, (tmp_path / "a", tmp_path / "b"), (keys[::2], keys[1::2]))
        effects = {key: pair for half in halves for key, pair in half.items()}
    refused = {key: before for key, (before, _) in effects.items() if before.startswith("refused")}
    assert refused.keys() == REFUSED_WITHOUT, refused
    without = [key for key, (before, after) in effects.items() if before == after]
    assert not without, f"accepted and ignored: {without}"


def effects_of(folder: Path, keys: Sequence[str]) -> dict[str, tuple[str, str]]:
    """For each key what a job does before and after its flip."""
    folder.mkdir()
    base, schema = prepare(folder), dict(keys_of(GRPOConfig))
    jobs: list[tuple[str, ...]] = []
    pairs: dict[str, tuple[int, int]] = {}
    for key in keys:
        value, beside = flip(key, schema[key], default_of(key))
        before = merged(base, beside, folder)
        after = merged(base, (*beside, f"{key}={value}"), folder)
        assert before != after, f"{key}: {value} is what it was"
        for job in (before, after):
            if job not in jobs:
                jobs.append(job)
        pairs[key] = (jobs.index(before), jobs.index(after))
    [texts] = run_ranks(effects_body, 1, folder, jobs, timeout_s=500.0)
    return {key: (texts[before], texts[after]) for key, (before, after) in pairs.items()}


def effects_body(rank: int, world_size: int, folder: Path, jobs: list) -> list[str]:
    from hybridengine.distributed import PeerWatch

    watch = PeerWatch(rank, world_size)
    spy = Spy()
    torch.set_num_threads(1)
    results = [effect(folder, job, watch, spy) for job in jobs]
    watch.close()
    return results


class Stopped(Exception):
    """vLLM would be started now; what it would be started with is known."""


class Spy:
    """Notes what the parts of a run are built with."""

    def __init__(self) -> None:
        from hybridengine.rollout import vllm
        from hybridengine.trainer import job, rl, setup

        self.seen: list[str] = []
        watched = [
            (setup, "Resharder"),
            (setup, "load_causal_lm"),
            (setup, "Optimizer"),
            (setup, "sharding_mesh"),
        ]
        for module, name in watched:
            self._watch(module, name)
        rl.plot_learning_curves = self._instead("plot_learning_curves")
        job.save_pretrained = self._instead("save_pretrained")
        vllm.VllmEngine = self._instead("VllmEngine", Stopped)

    def _watch(self, module: Any, name: str) -> None:
        real = getattr(module, name)

        def noted(*args: Any, **options: Any) -> Any:
            self.note(name, args, options)
            return real(*args, **options)

        setattr(module, name, noted)

    def _instead(self, name: str, error: type[Exception] | None = None) -> Any:
        def noted(*args: Any, **options: Any) -> None:
            self.note(name, args, options)
            if error is not None:
                raise error

        return noted

    def note(self, name: str, args: Any, options: Any) -> None:
        given = {str(i): arg for i, arg in enumerate(args)} | options
        self.seen.append(f"{name} { {k: v for k, v in given.items() if is_plain(v)} }")


def is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return isinstance(value, int | float | str | bool | tuple | torch.dtype | None)


def effect(folder: Path, overrides: Sequence[str], watch: Any, spy: Spy) -> str:
    """All that can be seen of a job, as text."""
    from hybridengine.config import load_config
    from hybridengine.distributed import Session
    from hybridengine.launch import USER_ERRORS
    from hybridengine.preflight import check_grpo
    from hybridengine.tracking import PhaseStatus
    from hybridengine.trainer import rl
    from hybridengine.trainer.plan import plan_table

    for name in ("run", "elsewhere"):
        shutil.rmtree(folder / name, ignore_errors=True)
    spy.seen.clear()

    def run_rank(main: Any, *settings: Any) -> None:
        spy.note("run_rank", settings, {})
        main(Session(watch, PhaseStatus(folder / "status", 0)))

    rl.run_rank = run_rank
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(Stopped):
            config = load_config(None, overrides)
            plan = plan_table(config, *check_grpo(config))
            spy.seen += [str(list(column.cells)) for column in plan.columns]
            rl.train_grpo(config)
    except USER_ERRORS as error:
        return f"refused: {error}"
    return "\n".join([*spy.seen, *left_behind(folder)])


def left_behind(folder: Path) -> list[str]:
    """Files, and what metrics and rollouts say that is not a time."""
    seen = []
    for top in ("run", "elsewhere"):
        for path in sorted((folder / top).rglob("*")):
            name = path.name if "events" not in path.name else "events"
            seen.append(f"{path.parent.relative_to(folder)}/{name}")
            if path.name.startswith(("step_", "val_")) and path.suffix == ".jsonl":
                seen.append(path.read_text())
            if path.name == "metrics.jsonl":
                rows = [json.loads(row) for row in path.read_text().splitlines()]
                seen += [str({k: v for k, v in row.items() if not is_a_time(k)}) for row in rows]
    return seen


def is_a_time(metric: str) -> bool:
    return metric.startswith(("timing_s/", "perf/")) or metric == "reshard/ms"


def test_nothing_but_the_configuration_changes_the_effects(tmp_path: Path) -> None:
    """The comparison itself: the same job twice is the same."""
    job = merged(prepare(tmp_path), CRITIC, tmp_path)
    [(first, second)] = run_ranks(effects_body, 1, tmp_path, [job, job])
    assert first == second and "critic/vf_loss" in first
    assert os.fspath(tmp_path) in first
