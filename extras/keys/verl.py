"""Verl's keys: what they mean here, one table for each kind of job."""

from __future__ import annotations

from typing import Any

from hybridengine.run.config.settings import ForeignKeys

__all__ = ["VERL_KEYS"]

_OFF = (False, 0, -1, "")
_UNSUPPORTED = "it is not supported"
_BY_TOKENS = "micro-batches are filled by tokens, see actor.ppo_max_token_len_per_gpu"
_PACKED = "sequences are always packed"
_FUSED = "the operators are always fused"
_OFFLOAD = "offload of all models follows actor.fsdp_config"
_AS_ACTOR = "critic and reference are sharded as the actor"
_RAY = "ranks are started by torchrun, not by Ray"
_ENGINE = "pass it to the engine in rollout.engine_kwargs.vllm"
_VLLM = "the engine is vLLM, or plain generate"
_OWN_CODE = "register your own under a name, see model.external_lib"
_OWN_LOOP = "name the class in rollout.agent.default_agent_loop"
_COLOCATED = "set trainer.mode and rollout.n_gpus_per_node for engines on ranks of their own"
_TEXT = "only text and images are supported, no video or audio"
_MANAGER = (
    "set reward.reward_manager.name to package.module.Class, or to a class in the file "
    "reward.reward_manager.module.path"
)
_NOT_FSDP = "training is FSDP2; tensor, pipeline and expert parallelism are the engine's"

_REFUSED = {
    "*.megatron.* *.veomni.* *.torchtitan.* *.automodel.*": _NOT_FSDP,
    "*override_config.*": "edit the model's config.json; only max_position_embeddings of the "
    "trained model is a key",
    "critic.optim.override_optimizer_config*": "set it in actor.optim",
    "*.hf_config_path *.tokenizer_path": "config and tokenizer come from the model's folder",
    "data.video_key data.audio_key": f"{_TEXT}; leave it out",
    "*.lora.adapter_path": "set model.lora_adapter_path",
    "data.sampler.*": "order the rows of the data files, and set data.shuffle=false",
    "*.custom_cls.*": "convert the data to verl's columns",
    "trainer.checkpoint_callback_class": _UNSUPPORTED,
    "trainer.default_hdfs_dir": "copy the run's folder yourself",
}
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "*.strategy": (("fsdp", "fsdp2"), _NOT_FSDP),
    "*.optimizer": (("AdamW", "adamw"), "the optimizer is AdamW"),
    "*.optimizer_impl": (("torch.optim",), "the optimizer is AdamW, equal to torch's"),
    "*.optim.total_training_steps": ((-1,), "set trainer.total_training_steps"),
    "*.num_cycles": ((0.5,), "the cosine schedule is half a cycle"),
    "*.zero_indexed_step": ((True,), "the first step is step 0 of the schedule"),
    "*.model_dtype": (
        ("fp32", "float32", "bf16", "bfloat16"),
        "trained weights are float32, the compute type is fsdp_config.dtype",
    ),
    "*.mixed_precision.param_dtype": (("bf16", "bfloat16"), "set fsdp_config.dtype"),
    "*.mixed_precision.reduce_dtype *.mixed_precision.buffer_dtype": (
        ("fp32", "float32", "bf16", "bfloat16"),
        "gradients are reduced in float32",
    ),
    "*.qat.enable *.mtp.enable *.tiled_mlp.enabled *.full_determinism "
    "*.use_no_sync_for_gradient_accumulation trainer.esi_redundant_time trainer.val_only": (
        _OFF,
        _UNSUPPORTED,
    ),
    "*.pad_to_length": (_OFF, _PACKED),
    "*.lora.rank": ((0,), "set model.lora_rank"),
    "model.exclude_modules": (
        (".*visual.*",),
        "name the modules to adapt in model.target_modules; all-linear leaves a vision tower out",
    ),
    "data.train_max_samples data.val_max_samples": ((-1,), "write fewer rows to the data file"),
    "trainer.device": (("cuda", "cpu"), "ranks use GPUs if there are any, else the CPU"),
    "trainer.del_local_ckpt_after_load": (_OFF, "set trainer.max_actor_ckpt_to_keep"),
}
_IGNORED = {
    "*use_remove_padding *.pad_to_length_bucket *.pad_mode": _PACKED,
    "*.use_dynamic_bsz *.ppo_micro_batch_size *_micro_batch_size_per_gpu": _BY_TOKENS,
    "*.use_torch_compile *.use_liger *.fused_kernel_options.* *.tiled_mlp.* *.use_prefix_grouper "
    "*.entropy_from_logits* *.entropy_checkpointing actor.use_fused_kernels "
    "critic.model.use_fused_kernels": _FUSED,
    "*.use_orig_params *.forward_only *.fsdp_config.seed *.fsdp.seed *.rollout_n": "FSDP2 needs "
    "no such setting",
    "*.balance_batch data.balance_dp_token": "ranks are always balanced by tokens",
    "*profiler.* trainer.profile_interval *prometheus.* rollout.trace.*": "a run writes its "
    "timings to metrics.jsonl; trainer.trace_step records one step with torch.profiler",
    "*.checkpoint.* checkpoint.*": "a checkpoint always has everything, saved in the background; "
    "trainer.save_hf_model adds a Hugging Face folder",
    "*.enable_activation_offload": "activations stay on the GPU; "
    "model.enable_gradient_checkpointing saves their memory",
    "*.qat.* *.turbo_config.* *.mtp.* *.lora.*": "it belongs to a feature that is off",
    "*.use_shm data.tokenizer data.*num_workers data.filter_overlong_prompts_workers "
    "data.return_raw* data.return_full_prompt": "it changes how data is loaded, not what",
    "data.trust_remote_code": "model.trust_remote_code is for all models",
    "ray_kwargs.* ray_init.* *.nccl_timeout trainer.ray_* trainer.use_legacy_worker_impl "
    "trainer.use_v1": _RAY,
}

_RL = ForeignKeys(
    aliases={
        "actor_rollout_ref.model": "model",
        "actor_rollout_ref.actor": "actor",
        "actor_rollout_ref.rollout": "rollout",
        "actor_rollout_ref.ref": "ref",
        "actor_rollout_ref.model.custom_chat_template": "data.chat_template",
        "actor_rollout_ref.rollout.seed": "seed",
        "actor_rollout_ref.model.torch_dtype": "actor.fsdp_config.dtype",
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes": "reshard.bucket_mib",
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": (
            "actor.ulysses_sequence_parallel_size"
        ),
        "actor_rollout_ref.actor.optim.warmup_style": "actor.optim.lr_scheduler_type",
        "critic.fsdp": "critic.model.fsdp_config",
        "custom_reward_function": "reward.custom_reward_function",
        "sandbox_fusion": "reward.sandbox_fusion",
        "reward_model.sandbox_fusion": "reward.sandbox_fusion",
        "reward_model.reward_manager": "reward.reward_manager.name",
        "reward_model.overlong_buffer": "reward.overlong_buffer",
        "reward_model.reward_kwargs": "reward.reward_kwargs",
        "reward_model.reward_kwargs.overlong_buffer_cfg": "reward.overlong_buffer",
        "reward.reward_kwargs.overlong_buffer_cfg": "reward.overlong_buffer",
        "reward_model.enable": "reward.reward_model.enable",
        "reward_model.model.path": "reward.reward_model.model_path",
        "reward_model.model": "reward.reward_model",
        "reward_model": "reward.reward_model",
        "data.seed": "seed",
        "data.tool_config_path": "rollout.multi_turn.tool_config_path",
        "data.function_tool_path": "rollout.multi_turn.function_tool_path",
    },
    refused=_REFUSED
    | {
        "ref.model.*": "the reference is the initial model",
        "actor.tis_imp_ratio_cap": "set algorithm.rollout_correction.rollout_is_threshold",
        "actor.policy_loss.?*": "the constants of a loss mode are its paper's, see "
        "docs/algorithms.md",
        "rollout.stop_token_ids": "set rollout.stop, or eos_token_id in the model's "
        "generation_config.json",
        "rollout.repetition_penalty": "it would change the distribution that is trained on",
        "reward.custom_reward_function.reward_kwargs.* reward.reward_kwargs.*": "write such "
        "constants into the reward function",
        "reward.sandbox_fusion.url": "call the sandbox in your reward function",
        "reward.reward_loop_* reward.reward_model.reward_loop_*": _OWN_CODE,
        "rollout.agent.agent_loop_config_path rollout.agent.custom_async_server.*": _OWN_LOOP,
        "rollout.multi_turn.interaction_config_path": _OWN_LOOP,
        "async_training.staleness_threshold": "set trainer.mode=async and trainer.staleness, in "
        "updates",
        "async_training.partial_rollout": "set rollout.in_flight_update=recompute_kv",
        "async_training.*": "set trainer.mode=async, see docs/remote.md",
    },
    fixed=_FIXED
    | {
        "actor.loss_scale_factor": ((), "it is data.max_response_length"),
        "actor.shuffle critic.shuffle": (_OFF, "mini-batches keep the order of the batch"),
        "actor.fsdp_config.offload_policy critic.model.fsdp_config.offload_policy": (
            _OFF,
            "set actor.fsdp_config.param_offload",
        ),
        "actor.policy_loss.clip_cov_ratio actor.policy_loss.kl_cov_ratio": (
            (0.0002,),
            "it is the paper's 0.0002",
        ),
        "actor.policy_loss.clip_cov_lb": ((1,), "it is the paper's 1"),
        "actor.policy_loss.clip_cov_ub": ((5,), "it is the paper's 5"),
        "actor.policy_loss.ppo_kl_coef": ((0.1,), "it is 0.1"),
        "actor.tau_pos": ((1,), "it is SAPO's 1.0"),
        "actor.tau_neg": ((1.05,), "it is SAPO's 1.05"),
        "actor_rollout_ref.hybrid_engine": ((True,), _COLOCATED),
        "rollout.do_sample": ((True,), "set rollout.temperature low to sample less"),
        "rollout.ignore_eos": (_OFF, "a response ends at the end-of-sequence token"),
        "rollout.logprobs_mode": (("processed_logprobs",), "log-probs are those sampled from"),
        "rollout.data_parallel_size rollout.expert_parallel_size "
        "rollout.pipeline_model_parallel_size": (
            (1, -1),
            "engines are tensor parallel, and all other ranks are further engines",
        ),
        "rollout.scheduling_policy": (("fcfs",), _ENGINE),
        "rollout.cudagraph_capture_sizes": ((), _ENGINE),
        "rollout.quantization_config_file rollout.mtp rollout.qat": (
            (),
            "the engine's weights are the trainer's; set rollout.quantization=fp8 for FP8",
        ),
        "rollout.enable_rollout_routing_replay algorithm.use_pf_ppo distillation.enabled "
        "transfer_queue.enable skip.*.enable": (_OFF, _UNSUPPORTED),
        "rollout.disaggregation.enabled": (_OFF, _COLOCATED),
        "rollout.multi_turn.use_inference_chat_template": (
            _OFF,
            "sampled tokens stay as they are, see docs/multi_turn.md",
        ),
        "rollout.nnodes": ((0,), _COLOCATED),
        "actor.router_replay.mode rollout.enable_rollout_routing_replay": (
            ("disabled", *_OFF),
            "set actor.router_replay: rollout for R3, old for R2",
        ),
        "critic.model.lora_rank critic.model.lora.rank": ((0,), "the critic trains all weights"),
        "critic.enable": ((True,), "only algorithm.adv_estimator=gae has a critic"),
        "data.validation_shuffle": (_OFF, "validation keeps the order of its files"),
        "reward.reward_manager.source": (("register", "importlib"), _MANAGER),
        "reward.reward_manager.module.name": (("custom_reward_manager",), _MANAGER),
        "reward.reward_model.enable_resource_pool": (_OFF, "all models share the ranks"),
        "trainer.v1.trainer_mode": (("sync",), "set trainer.mode"),
        "trainer.v1.sampler.custom_sampler.*": ((), _UNSUPPORTED),
    },
    shared={
        "critic.ppo_mini_batch_size": "actor.ppo_mini_batch_size",
        "critic.ppo_epochs": "actor.ppo_epochs",
        "critic.grad_clip critic.optim.clip_grad actor.optim.clip_grad": "actor.grad_clip",
        "critic.loss_agg_mode": "actor.loss_agg_mode",
        "critic.optim.weight_decay": "actor.optim.weight_decay",
        "critic.optim.betas": "actor.optim.betas",
        "critic.optim.min_lr_ratio": "actor.optim.min_lr_ratio",
        "critic.optim.lr_scheduler_type critic.optim.warmup_style": "actor.optim.lr_scheduler_type",
        "critic.model.fsdp_config.dtype ref.fsdp_config.dtype": "actor.fsdp_config.dtype",
        "critic.model.trust_remote_code "
        "reward.reward_model.trust_remote_code": "model.trust_remote_code",
        "rollout.prompt_length": "data.max_prompt_length",
        "rollout.response_length reward.reward_kwargs.max_resp_len": "data.max_response_length",
    },
    ignored=_IGNORED
    | {
        "actor.ppo_micro_batch_size_per_gpu critic.*micro_batch_size* rollout.log_prob_* "
        "ref.log_prob_* critic.*_max_token_len_per_gpu reward.reward_model.*micro_batch_size* "
        "reward.reward_model.forward_max_token_len_per_gpu": _BY_TOKENS,
        "ref.fsdp_config.*offload* critic.model.fsdp_config.*offload* "
        "reward.reward_model.fsdp_config.*offload*": _OFFLOAD,
        "ref.strategy ref.fsdp_config.* critic.model.fsdp_config.* "
        "reward.reward_model.fsdp_config.* *.ulysses_sequence_parallel_size "
        "critic.model.enable_gradient_checkpointing critic.data_loader_seed "
        "actor.data_loader_seed": _AS_ACTOR,
        "critic.model.external_lib reward.reward_model.external_lib": "model.external_lib is for "
        "all models",
        "critic.model.custom_chat_template": "the critic gets the actor's tokens",
        "critic.model.lora* critic.model.*_modules": "the critic trains all its weights",
        "critic.loss_scale_factor": "it is data.max_response_length",
        "actor.calculate_entropy actor.calculate_sum_pi_squared "
        "rollout.calculate_log_probs": "entropy and log-probs are always computed",
        "rollout.mode rollout.load_format rollout.layered_summon rollout.disable_log_stats "
        "rollout.skip_tokenizer_init rollout.multi_stage_wake_up rollout.checkpoint_engine.* "
        "rollout.agent.num_workers rollout.router_config_path "
        "rollout.max_parallel_loading_workers rollout.moe_load_balance_metrics_interval "
        "rollout.disaggregation.*": "the engine runs on the training ranks and gets its weights by "
        "the reshard",
        "rollout.multi_turn.tokenization_sanity_check_mode rollout.multi_turn._target_ "
        "rollout.multi_turn.num_repeat_rollouts rollout.agent._target_ "
        "data.need_tools_kwargs": "turns are always checked against the chat template",
        "data.gen_batch_size": "prompts are generated data.train_batch_size at a time",
        "data.return_multi_modal_inputs data.image_patch_size": "the model's own image processor "
        "prepares images, once for engine and trainer",
        "rollout.engine_kwargs.sglang.* rollout.engine_kwargs.trtllm.* "
        "rollout.sglang_rollout_mode rollout.server.*": _VLLM,
        "rollout.over_sample_rate": "every prompt gets rollout.n full responses",
        "algorithm.pf_ppo.* distillation.* transfer_queue.* skip.* trainer.v1.*": "it belongs to a "
        "feature that is off",
        "algorithm.filter_groups.max_inflight_gen_batches": "batches are generated one by one",
        "reward.overlong_buffer.log": "the penalty is always in the metrics",
        "reward.reward_model.num_workers reward.*launch_reward_fn_async "
        "reward.reward_model.use_reward_loop reward.sandbox_fusion.*": "rewards are "
        "computed on the ranks that generate",
        "reward.reward_model.rollout.* reward.reward_model.n_gpus_per_node "
        "reward.reward_model.nnodes reward.reward_model.strategy "
        "reward.reward_model.max_length": "a reward model runs packed on the training ranks",
        "reward.reward_model.input_tokenizer": "texts are tokenised again where tokenizers differ",
        "trainer.log_val_generations trainer.validation_data_dir": "all rollouts are written, see "
        "trainer.rollout_data_dir",
        "trainer.max_critic_ckpt_to_keep": "actor and critic share a checkpoint",
    },
    values={"rollout.name=sglang": ("vllm", _VLLM), "rollout.name=trtllm": ("vllm", _VLLM)},
)

_MESSAGES = "set data.messages_key for rows that are chats"
_SFT = ForeignKeys(
    aliases={
        "model.partial_pretrain": "model.path",
        "engine": "model.fsdp_config",
        "model.fsdp_config.cpu_offload": "model.fsdp_config.offload_policy",
        "engine.ulysses_sequence_parallel_size": "ulysses_sequence_parallel_size",
        "model.custom_chat_template": "data.chat_template",
        "data.multiturn.messages_key": "data.messages_key",
        "data.multiturn.tools_key": "data.tools_key",
        "data.multiturn.enable_thinking_key": "data.enable_thinking_key",
        "data.micro_batch_size": "data.micro_batch_size_per_gpu",
        "optim.lr_scheduler": "optim.lr_scheduler_type",
        "optim.warmup_style": "optim.lr_scheduler_type",
        "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
        "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
        "trainer.seed": "seed",
        "data.seed": "seed",
    },
    refused=_REFUSED | {"model.external_lib": "an SFT run has no registries"},
    fixed=_FIXED
    | {
        "model.fsdp_config optim model model_engine": (("fsdp", "hf_model", "dp"), _NOT_FSDP),
        "optim.total_training_steps": ((-1,), "set trainer.total_training_steps"),
        "model.fsdp_config.offload_params model.fsdp_config.param_offload": (
            _OFF,
            "set model.fsdp_config.offload_policy",
        ),
        "data.enable_thinking_default": (("none",), "set data.apply_chat_template_kwargs"),
    },
    shared={},
    ignored=_IGNORED
    | {
        "data.use_dynamic_bsz": "micro-batches are of data.micro_batch_size_per_gpu conversations, "
        "or filled by tokens where that is null",
        "data.multiturn.enable": _MESSAGES,
        "data.ignore_input_ids_mismatch": "a chat is rendered once, and the template tells the "
        "assistant's tokens",
    },
)

VERL_KEYS = {"grpo": _RL, "sft": _SFT}
