"""Validate a model alone, with the engine of a run, in one process."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.table import Table
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from hybridengine.api.session import script_session
from hybridengine.engine.interface import RolloutEngine
from hybridengine.lab.validation import gain_interval
from hybridengine.model import parameter_shards
from hybridengine.model.validation import config_of, longest_sequence, read_pretrained
from hybridengine.run.config import ConfigError, RLConfig, load_config, load_sft_config
from hybridengine.run.config.common import DatasetConfig
from hybridengine.run.config.loading import read_settings
from hybridengine.run.session import Session
from hybridengine.sync.resharder import Resharder
from hybridengine.train.build import (
    build_agents,
    build_engine,
    import_external,
    load_dataset,
    load_preparer,
    load_tokenizer,
    tool_schemas,
)
from hybridengine.train.choices import Machine, engine_name, resolve_dtypes
from hybridengine.train.data import DataError, Subset
from hybridengine.train.data.chats import ChatTemplate
from hybridengine.train.metrics import Problem, problems_of
from hybridengine.train.rewards.manager import build_reward_manager
from hybridengine.train.rollout_source import RolloutGenerator, sampling_of, val_sampling_of

_PROMPT_LENGTH = 1024  # tokens of a typed prompt, unless data.max_prompt_length is more

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

    source: a YAML file; a run's folder, whose config.yaml and final/ are used, of SFT as far as it
    says how prompts are rendered; or a Hugging Face folder.
    """
    file: Path | dict[str, Any] | None = None
    model = list[str]()
    if source.is_file():
        file = source
    elif (source / "config.yaml").is_file():
        file, model = _settings_of_run(source), [f"model.path={source / 'final'}"]
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
    train = [f"data.train_files={files}" for files in given] if not isinstance(file, Path) else []
    config = load_config(file, [*train, *model, *_ALONE, *overrides])
    return resolve_dtypes(config, Machine.here())


def _settings_of_run(run: Path) -> Path | dict[str, Any]:
    """Return the config.yaml of an RL run, or what that of an SFT run says about prompts."""
    file = run / "config.yaml"
    if "rollout" in read_settings(file):
        return file
    config = load_sft_config(file)
    names = {field.name for field in fields(DatasetConfig)}
    names -= {"train_files", "val_files", "truncation", "shuffle"}
    settings = {f"data.{name}": getattr(config.data, name) for name in names}
    return {
        **settings,
        "model.trust_remote_code": config.model.trust_remote_code,
        "model.override_config": asdict(config.model.override_config),
        "model.keep_vision_tower": config.model.keep_vision_tower,
        "seed": config.seed,
    }


@contextmanager
def open_engine(
    config: RLConfig,
) -> Iterator[tuple[Session, PreTrainedTokenizerBase, RolloutEngine]]:
    """Start the engine in this process with the weights of `model.path`."""
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, script_session(folder) as session:
        tokenizer = load_tokenizer(config)
        engine = build_engine(config, tokenizer, engine_name(config))
        try:
            path, trust = config.model.path, config.model.trust_remote_code
            dtype = getattr(torch, config.rollout.dtype)
            model: Any = read_pretrained(path, config_of(config.model), trust, dtype=dtype)
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
        prompts = load_dataset(config, tokenizer, config.data.val_files)
        reward = build_reward_manager(config.reward, config.data.max_response_length, tokenizer)
        agents = build_agents(config, tokenizer)
        generator = RolloutGenerator(engine, tokenizer, reward, session, None, agents)
        everything = Subset(prompts, range(len(prompts)))
        rollouts = generator.generate(everything, val_sampling_of(config), config.seed)
    return problems_of(rollouts)


@contextmanager
def open_chat(config: RLConfig) -> Iterator[Callable[[str], str]]:
    """Start the engine; return a function from a prompt, a chat's first turn, to its response.

    Prompts are rendered as those of the run, and responses sampled as `rollout` says. Without a
    chat template the model continues the text of the prompt. The function raises DataError for a
    prompt that is too long, or that the template refuses.
    """
    config = _with_room_for_prompts(config)
    import_external(config)
    nothing: dict[str, Any] = {"record_kept": False, "record_routes": False, "record_likely": 0}
    spec = replace(sampling_of(config), n=1, **nothing)
    tools, preparer = tool_schemas(config), load_preparer(config)
    with open_engine(config) as (_, tokenizer, engine):
        template = None
        if tokenizer.chat_template:
            template = ChatTemplate(tokenizer, config.data, tools, preparer)
        numbers = itertools.count()

        def respond(prompt: str) -> str:
            where, ids = "the prompt", tokenizer(prompt).input_ids
            if template is not None:
                chat = template.special.hide(where, [{"role": "user", "content": prompt}])
                text, _ = template.expand(where, template.render(where, chat, True), ())
                [ids] = template.special.encode([text])["input_ids"]
            if len(ids) > (limit := config.data.max_prompt_length):
                raise DataError(
                    f"the prompt is {len(ids)} tokens, more than data.max_prompt_length {limit}; "
                    "raise it, or give a shorter one"
                )
            [[completion]] = engine.generate([ids], spec, config.seed + next(numbers))
            return str(tokenizer.decode(list(completion.token_ids), skip_special_tokens=True))

        yield respond


def _with_room_for_prompts(config: RLConfig) -> RLConfig:
    """Return the configuration with a longer data.max_prompt_length, as far as the model has it."""
    model, rollout, data = config.model, config.rollout, config.data
    limits = [longest_sequence(config_of(model)), rollout.max_model_len]
    if not rollout.enable_chunked_prefill:
        limits.append(rollout.max_num_batched_tokens)
    left = min([limit for limit in limits if limit], default=math.inf) - data.max_response_length
    length = max(data.max_prompt_length, int(min(_PROMPT_LENGTH, left)))
    return replace(config, data=replace(data, max_prompt_length=length))


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
