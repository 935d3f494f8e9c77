"""`hybridengine parity`: the model that a job trains and the engine of the job, in one process."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from typing import cast

from hybridengine.api.session import script_session
from hybridengine.lab.parity import Parity, Report
from hybridengine.model import (
    LoadOptions,
    load_causal_lm,
    parameter_shards,
    sharding_mesh,
    use_exact_operators,
)
from hybridengine.run.config import ConfigError, RLConfig, ShardingConfig
from hybridengine.run.config.common import TrainedModelConfig
from hybridengine.sync.resharder import Resharder
from hybridengine.train.build import (
    build_engine,
    import_external,
    load_tokenizer,
    tool_schemas,
)
from hybridengine.train.choices import decide
from hybridengine.train.data import PromptDataset
from hybridengine.train.start import silence_libraries

_PROMPTS, _MAX_TOKENS = 4, 32  # operators are compared at every token


def compare_job(config: RLConfig) -> Report:
    """Sync the model into the engine, and compare both on responses to the first prompts.

    config: of `load_evaluation`.

    Raises ConfigError if the job's engine is not vLLM.
    """
    import_external(config)
    choices = decide(config)
    if choices.engine != "vllm":
        raise ConfigError("rollout.name is hf, whose model is the trained one; compare vllm")
    from hybridengine.engine.vllm.engine import VllmEngine

    silence_libraries()
    rollout = replace(config.rollout, enforce_eager=True)  # modules are called one by one
    config = replace(config, rollout=rollout)
    with tempfile.TemporaryDirectory() as folder, script_session(folder) as session:
        tokenizer = load_tokenizer(config)
        data = config.data
        prompts = PromptDataset(data.train_files, tokenizer, data, tool_schemas(config))
        engine = build_engine(config, tokenizer, choices.engine, exact=choices.exact)
        engine = cast(VllmEngine, engine)
        try:
            plain = TrainedModelConfig(
                config.model.path,
                config.model.trust_remote_code,
                override_config=config.model.override_config,
                keep_vision_tower=config.model.keep_vision_tower,
            )
            sharding = ShardingConfig(dtype=config.sharding.dtype)
            adapt = partial(use_exact_operators, splits={}) if choices.exact else None
            length = config.max_model_len
            options = LoadOptions(plain, sharding, adapt=adapt, max_model_len=length)
            model = load_causal_lm(options, sharding_mesh(session.device.type, 1))
            Resharder(partial(parameter_shards, model), engine, delta="off").sync(0)
            parity = Parity(
                model, engine.llm, layout=engine.target.layout, tensors=engine.target.weights
            )
            return parity.compare(
                [sample.prompt_ids for sample in prompts[:_PROMPTS]],
                max_tokens=min(_MAX_TOKENS, data.max_response_length),
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                min_p=rollout.min_p,
                seed=config.seed,
            )
        finally:
            engine.shutdown()
