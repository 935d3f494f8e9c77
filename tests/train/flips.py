"""Another value for every key of the configuration, and the overrides under which it matters.

A key without a row here is flipped by its type (`tests.train.effects`).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CRITIC", "FLIPS", "GRPO_CONTEXTS", "REFUSED_WITHOUT", "SFT_FLIPS"]

TWO_STEPS = "trainer.total_training_steps=2"
VALIDATED = ("data.val_files={dir}/rows.jsonl", "trainer.val_before_train=true")
SAMPLED = (*VALIDATED, "rollout.val_kwargs.do_sample=true", "rollout.val_kwargs.temperature=1.0")
VLLM = ("rollout.name=vllm",)
WITH_IMAGES = ("model.path={dir}/vision", "data.train_files={dir}/images.jsonl")
IMAGES = (
    *WITH_IMAGES,
    "data.max_prompt_length=48",
    "actor.ppo_max_token_len_per_gpu=256",
    "reward.custom_reward_function.name=shorter",
)
SFT_IMAGES = (*WITH_IMAGES, "data.max_length=48", "data.max_token_len_per_gpu=256")
REUSED = ("actor.ppo_epochs=3", "actor.optim.lr=0.1")
CRITIC = ("algorithm.adv_estimator=gae", TWO_STEPS)
KL_LOSS = ("actor.use_kl_loss=true", "actor.ppo_epochs=2")
KL_REWARD = ("algorithm.use_kl_in_reward=true", TWO_STEPS)
ADAPTIVE = (*KL_REWARD, "algorithm.kl_ctrl.type=adaptive")
LINEAR = (*KL_REWARD, "algorithm.kl_ctrl.type=linear")
LOSS_TWICE = ("actor.use_kl_loss=true", TWO_STEPS)
LOSS_LINEAR = (*LOSS_TWICE, "actor.kl_loss_ctrl.type=linear")
LOSS_ADAPTIVE = (*LOSS_TWICE, "actor.kl_loss_ctrl.type=adaptive", "actor.optim.lr=0.1")
UNREACHABLE = (  # port 9 of this machine, where nothing listens
    "reward.custom_reward_function.path=http://127.0.0.1:9/score",
    "reward.http.retries=1",
    "reward.http.backoff_s=0.01",
)
FAR_KL = (  # far above the default target: low_var_kl is never negative, and the step is huge
    *ADAPTIVE,
    "algorithm.kl_penalty=low_var_kl",
    "actor.optim.lr=0.1",
    "trainer.total_training_steps=3",
)
TURNS = (
    "rollout.multi_turn.enable=true",
    "rollout.multi_turn.max_assistant_turns=4",
    "rollout.agent.default_agent_loop={dir}/turn_loop.py:Loop",
    "model.path={dir}/stopping",
    "data.max_response_length=40",
)
TWO_REWARDS = (
    "reward.custom_reward_function.path=[{dir}/reward.py,{dir}/reward.py]",
    "reward.custom_reward_function.name=[compute_score,shorter]",
)
GDPO_OF_HASHES = (
    TWO_REWARDS[0],
    "reward.custom_reward_function.name=[hashed,reversed_hash]",
    "algorithm.adv_estimator=gdpo",
)
GDPO_OF_THREE = (
    "reward.custom_reward_function.path=[{dir}/reward.py,{dir}/reward.py,{dir}/reward.py]",
    "reward.custom_reward_function.name=[compute_score,shorter,hashed]",
    "algorithm.adv_estimator=gdpo",
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
CLASSIFIER = ("reward.reward_model.enable=true", "reward.reward_model.model_path={dir}/classifier")
DISTILLED = ("algorithm.distill.teacher_path={dir}/other", TWO_STEPS)
LONG = ("data.max_prompt_length=2", "data.train_batch_size=2")
LORA = ("model.lora_rank=4",)
BYPASS = (
    "rollout.dtype=bfloat16",
    "algorithm.rollout_correction.bypass_mode=true",
    "algorithm.rollout_correction.loss_type=reinforce",
)
SAVED = (TWO_STEPS, "trainer.save_freq=1")
SPECIAL = ("data.train_files={dir}/special.jsonl", "data.special_tokens=allow")
OPTIONS = ("{{word: w51}}", ("data.chat_template={dir}/template.jinja",))

# key: (another value, overrides under which the key matters)
FLIPS: dict[str, tuple[str, Sequence[str]]] = {
    "model.path": ("{dir}/other", ()),
    "model.external_lib": ("{dir}/none.py", ()),
    "model.lora_rank": ("4", ()),
    "model.lora_alpha": ("7", LORA),
    "model.target_modules": ("[q_proj]", LORA),
    "model.target_parameters": ("[experts.down_proj]", LORA),  # refused: the model has no experts
    "model.share_expert_adapters": ("all", LORA),
    "model.lora_adapter_path": ("{dir}/adapter", LORA),
    # refused: the engine is not vllm; its effects: test_shared_weights
    "model.share_engine_weights": ("on", ()),
    "model.override_config.max_position_embeddings": ("4", ()),
    "model.keep_vision_tower": ("true", ()),  # refused: the model has none
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
    "data.apply_chat_template_kwargs": OPTIONS,
    "data.special_tokens": ("error", SPECIAL),
    "data.tools_key": ("prompt", ()),
    "data.enable_thinking_key": ("prompt", ()),
    "data.image_key": ("pictures", IMAGES),
    "data.mm_processor_kwargs": ("{{max_pixels: 256}}", IMAGES),
    "rollout.limit_images": ("2", VLLM),
    "actor.ppo_mini_batch_size": ("2", ()),
    "actor.ppo_max_token_len_per_gpu": ("48", ()),
    "actor.shared_prefix": ("off", ()),
    # refused: the model has no experts; its effects: test_router_replay_jobs
    "actor.router_replay": ("old", ()),
    # refused: the model has no vision tower; its effects: test_vision_loading
    "actor.freeze_vision_tower": ("true", ()),
    "actor.clip_ratio": ("0.01", REUSED),
    "actor.clip_ratio_low": ("0.01", REUSED),
    "actor.clip_ratio_high": ("0.01", REUSED),
    "actor.clip_ratio_c": ("1.001", ("actor.ppo_epochs=3", "actor.ppo_mini_batch_size=2")),
    "actor.entropy_coeff": ("0.1", ()),
    "actor.kl_loss_coef": ("0.5", KL_LOSS),
    "actor.kl_loss_type": ("abs", KL_LOSS),
    "actor.grad_clip": ("0.01", (TWO_STEPS,)),
    "actor.fsdp_config.fsdp_size": ("2", ()),
    "actor.fsdp_config.expert_parallel_size": ("2", ()),  # refused: it divides no ranks
    "actor.optim.betas": ("[0.5,0.9]", ()),
    "actor.optim.name": ("muon", ()),
    "actor.optim.override_optimizer_config": (
        "{{adjust_lr_fn: original}}",
        ("actor.optim.name=muon",),
    ),
    "actor.optim.lr_warmup_steps": ("1", ()),
    "actor.optim.min_lr_ratio": ("0.5", ("actor.optim.lr_scheduler_type=linear", TWO_STEPS)),
    "actor.optim.lr_warmup_steps_ratio": ("0.5", (TWO_STEPS,)),
    "critic.optim.lr_warmup_steps": ("1", ()),
    "critic.optim.lr_warmup_steps_ratio": ("0.5", ()),
    "rollout.stop": ("[w]", ()),
    "rollout.engine_kwargs.vllm": ("{{block_size: 32}}", VLLM),
    "rollout.top_p": ("0.5", ()),
    "rollout.top_k": ("5", ()),
    "rollout.min_p": ("0.3", ()),
    "rollout.name": ("vllm", ()),
    "rollout.gpu_memory_utilization": ("0.25", VLLM),
    "rollout.max_num_seqs": ("3", ()),
    "rollout.max_num_batched_tokens": ("8193", ()),
    "rollout.max_model_len": ("32", VLLM),
    "rollout.dtype": ("bfloat16", ()),
    "rollout.quantization": ("fp8", ()),
    # refused: rollout.name is hf; its effects: test_exact_jobs
    "rollout.exact": ("on", ()),
    "rollout.val_kwargs.n": ("2", SAMPLED),
    "rollout.val_kwargs.temperature": ("0.5", SAMPLED),
    "rollout.val_kwargs.top_p": ("0.5", SAMPLED),
    "rollout.val_kwargs.top_k": ("5", SAMPLED),
    "rollout.val_kwargs.do_sample": ("true", (*VALIDATED, "rollout.val_kwargs.temperature=1.0")),
    "rollout.multi_turn.enable": ("false", ()),
    "rollout.multi_turn.max_assistant_turns": ("2", ()),
    "rollout.multi_turn.max_user_turns": ("1", ()),
    "rollout.multi_turn.tool_config_path": ("{dir}/nothing.yaml", ()),
    "rollout.multi_turn.function_tool_path": ("{dir}/turn_tools.py", ()),
    "rollout.multi_turn.max_tool_response_length": ("4", ()),
    "rollout.multi_turn.tool_response_truncate_side": (
        "left",
        ("rollout.multi_turn.max_tool_response_length=4",),
    ),
    "rollout.multi_turn.format": ("nothing", ()),
    "rollout.multi_turn.tool_timeout_s": (
        "0.05",
        ("rollout.multi_turn.function_tool_path={dir}/slow_tools.py",),
    ),
    "rollout.multi_turn.max_concurrent_calls": (
        "1",
        ("rollout.multi_turn.function_tool_path={dir}/busy_tools.py",),
    ),
    "rollout.agent.default_agent_loop": ("single_turn_agent", ()),
    # more ranks than responses; its effects: test_critic_ranks
    "critic.n_gpus_per_node": ("17", ()),
    "critic.model.path": ("{dir}/other", CRITIC),
    "critic.cliprange_value": ("1e-4", (*CRITIC, "actor.ppo_epochs=2")),
    "algorithm.adv_estimator": ("rloo", ()),
    "algorithm.gdpo_reward_keys": ("[shorter,hashed]", GDPO_OF_THREE),
    "algorithm.gdpo_reward_weights": (
        "[1,2]",
        (*GDPO_OF_HASHES, "algorithm.gdpo_reward_keys=[hashed,reversed_hash]"),
    ),
    "algorithm.gamma": ("0.5", ("algorithm.adv_estimator=reinforce_plus_plus",)),
    "algorithm.lam": ("0.5", CRITIC),
    "algorithm.kl_penalty": ("abs", KL_REWARD),
    "algorithm.kl_ctrl.type": ("adaptive", KL_REWARD),
    "algorithm.kl_ctrl.kl_coef": ("0.5", KL_REWARD),
    "algorithm.kl_ctrl.horizon": ("100", ADAPTIVE),
    "algorithm.kl_ctrl.target_kl": ("1e9", FAR_KL),
    "algorithm.kl_ctrl.final_kl_coef": ("0.5", LINEAR),
    "algorithm.kl_ctrl.num_steps": ("9", LINEAR),
    "actor.kl_loss_ctrl.type": ("linear", LOSS_TWICE),
    "actor.kl_loss_ctrl.horizon": ("100", LOSS_ADAPTIVE),
    "actor.kl_loss_ctrl.target_kl": ("1e9", (*LOSS_ADAPTIVE, "trainer.total_training_steps=3")),
    "actor.kl_loss_ctrl.final_kl_coef": ("0.5", LOSS_LINEAR),
    "actor.kl_loss_ctrl.num_steps": ("9", LOSS_LINEAR),
    "algorithm.filter_groups.metric": ("never", FILTERED),
    "algorithm.filter_groups.max_num_gen_batches": ("1", FILTERED),
    "algorithm.rollout_correction.rollout_is": ("null", ("rollout.dtype=bfloat16",)),
    "algorithm.rollout_correction.rollout_is_threshold": ("1.0", ("rollout.dtype=bfloat16",)),
    "algorithm.rollout_correction.rollout_is_batch_normalize": (
        "true",
        ("rollout.dtype=bfloat16",),
    ),
    "algorithm.rollout_correction.bypass_mode": ("true", ("rollout.dtype=bfloat16",)),
    "algorithm.rollout_correction.loss_type": ("ppo_clip", BYPASS),
    "algorithm.rollout_correction.rollout_rs": ("seq_max_k2", REJECTED),
    "algorithm.rollout_correction.rollout_rs_threshold": ("1e-3", REJECTED),
    "algorithm.score_centering.enabled": ("true", ("rollout.dtype=bfloat16",)),
    "algorithm.score_centering.top_k": (
        "3",
        ("algorithm.score_centering.enabled=true", "rollout.dtype=bfloat16"),
    ),
    "algorithm.sampling_replay": ("off", ("rollout.top_p=0.5",)),
    "algorithm.distill.teacher_path": ("{dir}/other", ()),
    "algorithm.distill.beta": ("0.9", DISTILLED),
    "algorithm.distill.temperature": ("2.0", DISTILLED),
    "algorithm.mask_truncated_completions": (
        "true",
        ("model.path={dir}/stopping", "data.max_response_length=1"),
    ),
    "reward.custom_reward_function.path": ("{dir}/other_reward.py", ()),
    "reward.custom_reward_function.name": ("shorter", ()),
    "reward.weights": ("[1,0.5]", TWO_REWARDS),
    "reward.timeout_s": ("0.001", ("reward.custom_reward_function.path={dir}/slow_reward.py",)),
    "reward.num_workers": (
        "2",
        ("reward.custom_reward_function.path={dir}/counted_reward.py", "reward.num_workers=1"),
    ),
    "reward.reward_manager.name": (
        "dapo",
        ("reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=2"),
    ),
    "reward.reward_manager.module.path": (
        "{dir}/other_reward.py",
        ("reward.reward_manager.name=naive",),
    ),
    "reward.http.batch_size": ("1", UNREACHABLE),
    "reward.http.retries": ("2", UNREACHABLE),
    "reward.http.backoff_s": ("0.02", UNREACHABLE),
    "reward.reward_model.enable": ("true", ()),
    "reward.reward_model.model_path": ("{dir}/other_classifier", CLASSIFIER),
    "reward.overlong_buffer.enable": ("false", OVERLONG),
    "reward.overlong_buffer.len": (
        "39",
        (*OVERLONG, "data.max_response_length=40", "model.path={dir}/stopping"),
    ),
    "reward.overlong_buffer.penalty_factor": ("0.5", OVERLONG),
    "reshard.lora": ("", LORA),
    "reshard.bucket_mib": ("1", ()),
    "reshard.delta": ("off", ()),
    "trainer.total_epochs": ("2", ("trainer.total_training_steps=null",)),
    "trainer.total_training_steps": ("2", ()),
    "trainer.test_freq": ("1", (*VALIDATED, TWO_STEPS)),
    "trainer.val_before_train": ("false", VALIDATED),
    "trainer.save_freq": ("1", (TWO_STEPS,)),
    "trainer.trace_step": ("1", ()),
    "trainer.save_hf_model": ("", SAVED),
    "trainer.save_dtype": ("bfloat16", ()),
    "trainer.max_actor_ckpt_to_keep": ("1", SAVED),
    "trainer.resume_mode": ("path", ()),
    "trainer.resume_from_path": ("{dir}/nothing", ("trainer.resume_mode=path",)),
    "trainer.default_local_dir": ("{dir}/elsewhere", ()),
    "trainer.logger": ("[jsonl,tensorboard]", ()),
    "trainer.project_name": ("mine", ("trainer.logger=[wandb]",)),
    "trainer.experiment_name": ("mine", ("trainer.logger=[wandb]",)),
    "trainer.rollout_data_dir": ("{dir}/run/other_rollouts", ()),
    "trainer.rollout_freq": ("-1", ()),
    "trainer.critic_warmup": ("1", CRITIC),
    "trainer.staleness": ("2", ("trainer.mode=one_step_off",)),
    "rollout.in_flight_update": ("keep_kv", ()),
    "rollout.n_gpus_per_node": (
        "1",
        ("trainer.mode=one_step_off", "rollout.tensor_model_parallel_size=3"),
    ),
    # refused together; its effects: test_overlap_servers
    "rollout.servers": ("[http://127.0.0.1:9]", ("rollout.n_gpus_per_node=1",)),
}
# The job without the flip of these is refused already.
REFUSED_WITHOUT = {
    "data.truncation",
    "data.filter_overlong_prompts",
    "trainer.resume_from_path",
    "reward.http.batch_size",
    "reward.http.retries",
    "reward.http.backoff_s",
    "trainer.staleness",
    "rollout.n_gpus_per_node",  # their effects: test_overlap
}
NEED_VLLM = (
    "rollout.kv_cache_gib",
    "rollout.max_num_batched_tokens",
    "rollout.enforce_eager",
    "rollout.enable_prefix_caching",
    "rollout.enable_chunked_prefill",
    "rollout.free_cache_engine",
)


CUT = ("data.max_length=5", "data.truncation=right")
RUN_KEYS = [
    key
    for key in FLIPS
    if key.startswith("trainer.")
    and key.removeprefix("trainer.")
    not in ("critic_warmup", "rollout_data_dir", "rollout_freq", "mode", "staleness")
]
SFT_FLIPS = {
    key: FLIPS[key]
    for key in (
        "model.path",
        "model.lora_rank",
        "model.lora_alpha",
        "model.target_modules",
        "model.target_parameters",
        "model.share_expert_adapters",
        "model.lora_adapter_path",
        "model.override_config.max_position_embeddings",
        "model.keep_vision_tower",
        "data.train_files",
        "data.val_files",
        "data.train_batch_size",
        "data.chat_template",
        "data.apply_chat_template_kwargs",
        *RUN_KEYS,
    )
} | {
    "trainer.test_freq": ("1", (VALIDATED[0], TWO_STEPS)),
    "trainer.val_before_train": ("false", VALIDATED[:1]),
    "model.freeze_vision_tower": ("true", ()),  # refused, as in GRPO
    "model.fsdp_config.dtype": ("bfloat16", ()),
    "model.fsdp_config.fsdp_size": ("2", ()),
    "model.fsdp_config.expert_parallel_size": ("2", ()),
    "data.messages_key": ("chat", ()),
    "data.special_tokens": ("error", SPECIAL),
    "data.image_key": ("pictures", SFT_IMAGES),
    "data.mm_processor_kwargs": ("{{max_pixels: 256}}", SFT_IMAGES),
    "data.prompt_dict_keys": ("[inner]", ()),
    "data.response_dict_keys": ("[inner]", ()),
    "data.tools_key": ("prompt", ()),
    "data.enable_thinking_key": ("prompt", ()),
    "data.max_length": ("6", CUT),
    "data.truncation": ("left", CUT),
    "data.filter_overlong_prompts": ("true", (*CUT, "data.train_batch_size=2")),
    "data.micro_batch_size_per_gpu": ("1", ()),
    "optim.betas": ("[0.5,0.9]", ()),
    "optim.name": ("muon", ()),
    "optim.override_optimizer_config": ("{{adjust_lr_fn: original}}", ("optim.name=muon",)),
    "optim.lr_warmup_steps": ("1", ()),
    "optim.min_lr_ratio": ("0.5", ("optim.lr_scheduler_type=linear", TWO_STEPS)),
    "optim.lr_warmup_steps_ratio": ("0.5", (TWO_STEPS,)),
    "optim.clip_grad": ("0.01", (TWO_STEPS,)),
    "ulysses_sequence_parallel_size": ("2", ()),
}

GRPO_CONTEXTS = {
    "critic.": CRITIC,
    "rollout.multi_turn.": TURNS,
    "rollout.agent.": TURNS,
    **dict.fromkeys(NEED_VLLM, VLLM),
}
