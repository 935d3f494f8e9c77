"""verl's names for our keys. The longest matching prefix wins; the rest of the path is kept."""

__all__ = ["ALIASES", "REPLACED", "SFT_ALIASES", "SFT_REPLACED"]

ALIASES = {
    "actor_rollout_ref.model": "model",
    "actor_rollout_ref.actor": "actor",
    "actor_rollout_ref.rollout": "rollout",
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.overlong_buffer": "reward.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg": "reward.overlong_buffer",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "actor_rollout_ref.rollout.seed": "seed",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": (
        "actor.ulysses_sequence_parallel_size"
    ),
    "data.seed": "seed",
}

# Of the trainer's old form (partial_pretrain, …) and its new one (engine, …).
SFT_ALIASES = {
    "model.partial_pretrain": "model.path",
    "engine": "model.fsdp_config",
    "model.fsdp_config.cpu_offload": "model.fsdp_config.offload_policy",
    "engine.ulysses_sequence_parallel_size": "ulysses_sequence_parallel_size",
    "data.multiturn.messages_key": "data.messages_key",
    "data.micro_batch_size": "data.micro_batch_size_per_gpu",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    "trainer.seed": "seed",
    "data.seed": "seed",
}

# verl's keys that mean nothing here, with what to do instead (shown in the error).
_TOKENS = "set actor.ppo_max_token_len_per_gpu, in tokens"
_PACKED = "sequences are always packed; remove this key"
_SHARED = "the actor's is the critic's too; remove this key"
REPLACED = {
    "model.use_remove_padding": _PACKED,
    "actor.use_dynamic_bsz": "micro-batches are always filled by tokens; remove this key",
    "actor.ppo_micro_batch_size_per_gpu": _TOKENS,
    "actor.ppo_micro_batch_size": _TOKENS,
    "actor.strategy": "it is FSDP2; remove this key",
    "actor.fsdp_config.offload_policy": "set actor.fsdp_config.param_offload",
    "actor.loss_scale_factor": "it is data.max_response_length; remove this key",
    "rollout.log_prob_micro_batch_size_per_gpu": _TOKENS,
    "critic.ppo_micro_batch_size_per_gpu": _TOKENS,
    "critic.ppo_max_token_len_per_gpu": _TOKENS,
    "critic.ppo_mini_batch_size": _SHARED,
    "critic.ppo_epochs": _SHARED,
    "critic.grad_clip": _SHARED,
    "critic.optim.weight_decay": _SHARED,
    "critic.optim.betas": _SHARED,
    "critic.optim.lr_scheduler_type": _SHARED,
    "critic.model.enable_gradient_checkpointing": "model.enable_gradient_checkpointing is for both",
    "actor_rollout_ref.hybrid_engine": "engine and trainer always share ranks; remove this key",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": _TOKENS,
    "actor_rollout_ref.ref.fsdp_config.param_offload": "set actor.fsdp_config.param_offload",
}
SFT_REPLACED = {
    "use_remove_padding": _PACKED,
    "data.use_dynamic_bsz": "set data.micro_batch_size_per_gpu, or leave it null to fill by tokens",
    "data.balance_dp_token": "ranks are always balanced; remove this key",
    "data.pad_mode": _PACKED,
    "data.multiturn.enable": "set data.messages_key for whole chats; remove this key",
    "model.use_liger": "fused kernels are always used; remove this key",
    "model.fsdp_config.offload_params": "set model.fsdp_config.offload_policy",
    "model.fsdp_config.param_offload": "set model.fsdp_config.offload_policy",
    "checkpoint.save_contents": "a checkpoint is always whole; trainer.save_hf_model adds the "
    "Hugging Face folder",
}
