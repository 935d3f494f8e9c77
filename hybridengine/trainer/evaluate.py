"""Validate a model alone, with the engine of a run, in one process."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.table import Table
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from hybridengine.config import ConfigError, RLConfig, load_config
from hybridengine.data import PromptDataset, Subset
from hybridengine.model import parameter_shards
from hybridengine.model.validation import auto_class, check_model
from hybridengine.reshard import Resharder
from hybridengine.rewards import build_reward_manager
from hybridengine.rollout import RolloutEngine
from hybridengine.runtime.session import Session, script_session
from hybridengine.trainer.build import (
    build_agents,
    build_engine,
    import_external,
    load_preparer,
    load_tokenizer,
    tool_schemas,
)
from hybridengine.trainer.generation import RolloutGenerator, sampling_of, val_sampling_of
from hybridengine.trainer.plan import resolve_dtypes
from hybridengine.trainer.validation import Problem, gain_interval, problems_of

__all__ = ["evaluate", "load_evaluation", "open_engine", "pass_at_k", "respond", "results_table"]

# In this process, whatever the run had: the weights are merged, and no rank trains.
_ALONE = (
    "rollout.tensor_model_parallel_size=1",
    "rollout.n_gpus_per_node=0",
    "rollout.servers=[]",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "trainer.mode=sync",
    "critic.n_gpus_per_node=0",
    "actor.fsdp_config.expert_parallel_size=1",
    "model.lora_rank=0",
    "model.lora_adapter_path=null",
)


def load_evaluation(source: Path, overrides: Sequence[str]) -> RLConfig:
    """Return the settings to evaluate `source` with.

    source: a YAML file; a run's folder, whose config.yaml and final/ are used; or a Hugging Face
    folder.
    """
    file, model = None, list[str]()
    if source.is_file():
        file = source
    elif (source / "config.yaml").is_file():
        file, model = source / "config.yaml", [f"model.path={source / 'final'}"]
    elif (source / "config.json").is_file():
        model = [f"model.path={source}"]
    else:
        raise ConfigError(
            f"{source} is no YAML file, no folder of a run and no Hugging Face folder; a "
            "checkpoint becomes one by `hybridengine export`"
        )
    given = [
        o.removeprefix("data.val_files=") for o in overrides if o.startswith("data.val_files=")
    ]
    train = [f"data.train_files={files}" for files in given] if file is None else []
    return resolve_dtypes(load_config(file, [*train, *model, *_ALONE, *overrides]))


@contextmanager
def open_engine(
    config: RLConfig,
) -> Iterator[tuple[Session, PreTrainedTokenizerBase, RolloutEngine]]:
    """Start the engine in this process with the weights of `model.path`."""
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, script_session(folder) as session:
        tokenizer = load_tokenizer(config)
        engine = build_engine(config, tokenizer)
        try:
            path, trust = config.model.path, config.model.trust_remote_code
            model: Any = auto_class(check_model(path, trust)).from_pretrained(
                path, dtype=getattr(torch, config.rollout.dtype), trust_remote_code=trust
            )
            model = model.to(session.device)
            engine.sleep()
            Resharder(partial(parameter_shards, model), engine, delta="off").sync(0)
            del model
            yield session, tokenizer, engine
        finally:
            engine.shutdown()


def evaluate(config: RLConfig) -> list[Problem]:
    """Generate and score responses to the validation prompts, as `rollout.val_kwargs` says."""
    if not config.data.val_files:
        raise ConfigError("data.val_files is empty; give the prompts to evaluate on")
    import_external(config)
    with open_engine(config) as (session, tokenizer, engine):
        prompts = PromptDataset(
            config.data.val_files,
            tokenizer,
            config.data,
            tool_schemas(config),
            load_preparer(config),
        )
        reward = build_reward_manager(config.reward, config.data.max_response_length, tokenizer)
        agents = build_agents(config, tokenizer)
        generator = RolloutGenerator(engine, tokenizer, reward, session, None, agents)
        everything = Subset(prompts, range(len(prompts)))
        rollouts = generator.generate(everything, val_sampling_of(config), config.seed)
    return problems_of(rollouts)


def respond(config: RLConfig, prompts: Iterable[str]) -> Iterator[str]:
    """Yield a response to each prompt, sampled as `rollout` says; a prompt is a chat's first turn.

    Without a chat template the model continues the text of the prompt.
    """
    spec = replace(sampling_of(config), n=1, record_kept=False, record_routes=False)
    with open_engine(config) as (_, tokenizer, engine):
        for number, prompt in enumerate(prompts):
            chat = [{"role": "user", "content": prompt}]
            text: Any = prompt
            if tokenizer.chat_template:
                text = tokenizer.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=True
                )
            ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids
            [[completion]] = engine.generate([ids], spec, config.seed + number)
            yield str(tokenizer.decode(list(completion.token_ids), skip_special_tokens=True))


def pass_at_k(values: Sequence[float], k: int) -> float:
    """Estimate the chance that one of k responses passes (value 1), without bias, from n >= k.

    Chen et al. 2021 (arXiv 2107.03374), equation 1.
    """
    n, passed = len(values), sum(value >= 1 for value in values)
    return 1 - math.comb(n - passed, k) / math.comb(n, k)


def results_table(problems: Sequence[Problem]) -> Table:
    """Return means over the problems of each data source, with 95% intervals.

    mean: of all responses to a problem. pass@k: of results that are 0 or 1.
    """
    table = Table("data source", "problems", "result", "value", "95% interval", box=None)
    for source in sorted({source for source, *_ in problems}):
        own = [results for name, results, _ in problems if name == source]
        for variable in own[0]:
            columns = {"mean": [fmean(results[variable]) for results in own]}
            if {x for results in own for x in results[variable]} <= {0.0, 1.0}:
                n = min(len(results[variable]) for results in own)
                ks = [1 << i for i in range(1, n.bit_length())]
                columns |= {f"pass@{k}": [pass_at_k(r[variable], k) for r in own] for k in ks}
            for kind, values in columns.items():
                mean, low, high = gain_interval([0.0] * len(values), values)
                interval = f"{low:.3f} to {high:.3f}"
                name = f"{variable} {kind}"
                table.add_row(source, f"{len(own)}", name, f"{mean:.3f}", interval)
    return table
