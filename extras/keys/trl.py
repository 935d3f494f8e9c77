"""The keys that TRL's settings have here, for suggestions and the table of docs/trl.md."""

from __future__ import annotations

from hybridengine.run.config.settings import ForeignKeys

__all__ = ["TRL_KEYS", "TRL_NAMES"]

_JOB = {
    "model_name_or_path": ("model.path",),
    "dataset_name": ("data.train_files",),
    "gradient_checkpointing": ("model.enable_gradient_checkpointing",),
    "per_device_train_batch_size": ("data.train_batch_size",),
    "gradient_accumulation_steps": ("data.train_batch_size",),
    "shuffle_dataset": ("data.shuffle",),
    "num_train_epochs": ("trainer.total_epochs",),
    "max_steps": ("trainer.total_training_steps",),
    "eval_steps": ("trainer.test_freq",),
    "save_steps": ("trainer.save_freq",),
    "save_total_limit": ("trainer.max_actor_ckpt_to_keep",),
    "output_dir": ("trainer.default_local_dir",),
    "run_name": ("trainer.experiment_name",),
    "report_to": ("trainer.logger",),
    "resume_from_checkpoint": ("trainer.resume_mode",),
}


def _optimizer(group: str) -> dict[str, tuple[str, ...]]:
    return {
        "learning_rate": (f"{group}optim.lr",),
        "lr_scheduler_type": (f"{group}optim.lr_scheduler_type",),
        "warmup_steps": (f"{group}optim.lr_warmup_steps",),
        "warmup_ratio": (f"{group}optim.lr_warmup_steps_ratio",),
        "weight_decay": (f"{group}optim.weight_decay",),
        "adam_beta1": (f"{group}optim.betas",),
        "adam_beta2": (f"{group}optim.betas",),
    }


# By kind of job: TRL's name → keys here.
TRL_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "grpo": {
        **_JOB,
        **_optimizer("actor."),
        "max_grad_norm": ("actor.grad_clip",),
        "generation_batch_size": ("data.train_batch_size",),
        "steps_per_generation": ("actor.ppo_mini_batch_size",),
        "num_iterations": ("actor.ppo_epochs",),
        "num_generations": ("rollout.n",),
        "num_generations_eval": ("rollout.val_kwargs.n",),
        "max_prompt_length": ("data.max_prompt_length",),
        "max_completion_length": ("data.max_response_length",),
        "chat_template_kwargs": ("data.apply_chat_template_kwargs",),
        "temperature": ("rollout.temperature",),
        "top_p": ("rollout.top_p",),
        "top_k": ("rollout.top_k",),
        "min_p": ("rollout.min_p",),
        "beta": ("actor.kl_loss_coef", "actor.use_kl_loss"),
        "epsilon": ("actor.clip_ratio",),
        "epsilon_high": ("actor.clip_ratio_high",),
        "loss_type": ("actor.policy_loss.loss_mode", "actor.loss_agg_mode"),
        "importance_sampling_level": ("actor.policy_loss.loss_mode",),
        "entropy_coef": ("actor.entropy_coeff",),
        "scale_rewards": ("algorithm.norm_adv_by_std_in_grpo",),
        "reward_funcs": ("reward.custom_reward_function.path",),
        "reward_weights": ("reward.weights",),
        "vllm_gpu_memory_utilization": ("rollout.gpu_memory_utilization",),
        "vllm_tensor_parallel_size": ("rollout.tensor_model_parallel_size",),
        "vllm_max_model_length": ("rollout.max_model_len",),
        "vllm_enable_sleep_mode": ("rollout.free_cache_engine",),
        "vllm_server_base_url": ("rollout.servers",),
        "vllm_importance_sampling_correction": ("algorithm.rollout_correction.rollout_is",),
        "vllm_importance_sampling_cap": ("algorithm.rollout_correction.rollout_is_threshold",),
        "max_tool_calling_iterations": ("rollout.multi_turn.max_assistant_turns",),
    },
    "sft": {
        **_JOB,
        **_optimizer(""),
        "max_grad_norm": ("optim.clip_grad",),
        "max_length": ("data.max_length",),
        "truncation_mode": ("data.truncation",),
        "chat_template_path": ("data.chat_template",),
    },
}

TRL_KEYS = {kind: ForeignKeys(suggested=names) for kind, names in TRL_NAMES.items()}
