"""verl's keys: each is native, renamed, ignored with a reason, or refused with a sentence."""

import importlib.util
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridengine import run as registered
from hybridengine.run.config import (
    ConfigError,
    ConfigNote,
    RLConfig,
    SFTConfig,
    load_config,
    load_job,
    load_sft_config,
    overrides_of,
    parse_overrides,
)
from hybridengine.run.config.settings import foreign_keys

# Settings of verl's example commands, one of each set of keys, with what is refused of each.
COMMANDS = json.loads((Path(__file__).parent / "verl_commands.json").read_text())
COMMON = """
    data.train_files=train.parquet data.val_files=test.parquet data.max_prompt_length=512
    data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation=error
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.fsdp_config.param_offload=False
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
    trainer.logger=["console","wandb"] trainer.project_name=p trainer.experiment_name=e
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5
    trainer.total_epochs=15
"""
GRPO = f"""{COMMON}
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False data.train_batch_size=1024
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.rollout.n=5
    actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.load_format=safetensors
    actor_rollout_ref.rollout.layered_summon=True actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.use_torch_compile=False data.return_raw_chat=True
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32
    actor_rollout_ref.ref.fsdp_config.param_offload=True trainer.critic_warmup=0
    trainer.val_before_train=False trainer.resume_mode=auto actor_rollout_ref.hybrid_engine=True
    ray_kwargs.ray_init.num_cpus=16 trainer.balance_batch=True trainer.device=cuda
    actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1
    actor_rollout_ref.rollout.val_kwargs.top_k=-1 actor_rollout_ref.rollout.calculate_log_probs=True
"""
LORA = f"""{GRPO}
    actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32
    actor_rollout_ref.model.target_modules=all-linear actor_rollout_ref.model.use_shm=True
"""
PPO_WITH_CRITIC = f"""{COMMON}
    algorithm.adv_estimator=gae data.train_batch_size=1024 actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24000
    critic.optim.lr=1e-5 critic.model.use_remove_padding=True
    critic.optim.lr_warmup_steps_ratio=0.05 critic.model.path=Qwen/Qwen2.5-0.5B
    critic.model.enable_gradient_checkpointing=True
    critic.ppo_micro_batch_size_per_gpu=32 critic.ppo_max_token_len_per_gpu=98304
    critic.forward_max_token_len_per_gpu=98304 critic.model.fsdp_config.param_offload=False
    critic.model.fsdp_config.optimizer_offload=False critic.use_dynamic_bsz=True
    critic.optim.weight_decay=0.01 critic.ulysses_sequence_parallel_size=1 critic.strategy=fsdp
    critic.cliprange_value=0.5 critic.ppo_epochs=1
    reward_model.enable=True reward_model.model.path=some/reward-model
    reward_model.model.use_remove_padding=True reward_model.model.fsdp_config.param_offload=True
    reward_model.micro_batch_size_per_gpu=32 reward_model.model.input_tokenizer=null
    reward_model.strategy=fsdp reward_model.use_dynamic_bsz=True
"""
DAPO = f"""{COMMON}
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0
    algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc
    algorithm.filter_groups.max_num_gen_batches=10 data.gen_batch_size=1536
    data.train_batch_size=512 data.prompt_key=prompt actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.loss_agg_mode=token-mean actor_rollout_ref.actor.grad_clip=1.0
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.actor.optim.weight_decay=0.1
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.fsdp_config.fsdp_size=-1
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4
    actor_rollout_ref.ref.ulysses_sequence_parallel_size=4
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24000
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.enable_chunked_prefill=True
    actor_rollout_ref.rollout.max_num_batched_tokens=22528 actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 actor_rollout_ref.rollout.val_kwargs.n=1
    +actor_rollout_ref.model.override_config.attention_dropout=null
    reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True
    reward_model.overlong_buffer.len=512 reward_model.overlong_buffer.penalty_factor=1.0
    +reward_model.reward_kwargs.overlong_buffer_cfg.log=False
    +reward_model.reward_kwargs.max_resp_len=1024
"""
SFT = """
    data.train_files=train.parquet data.val_files=test.parquet data.messages_key=messages
    data.train_batch_size=256 data.max_length=2048 data.pad_mode=no_padding data.truncation=error
    data.use_dynamic_bsz=True data.max_token_len_per_gpu=2048 data.num_workers=8
    model.path=Qwen/Qwen2.5-0.5B model.use_remove_padding=True
    model.enable_gradient_checkpointing=True engine=fsdp optim=fsdp optim.lr=1e-5
    optim.lr_warmup_steps_ratio=0.01 optim.weight_decay=0.1 optim.betas=[0.9,0.95]
    optim.clip_grad=1.0 optim.min_lr_ratio=0.0 optim.lr_scheduler_type=cosine
    engine.ulysses_sequence_parallel_size=1 engine.strategy=fsdp2 engine.fsdp_size=2
    trainer.total_epochs=4 trainer.n_gpus_per_node=2 trainer.save_freq=-1 trainer.test_freq=10
    trainer.logger=console trainer.max_ckpt_to_keep=2 trainer.resume_mode=disable
    checkpoint.save_contents=[model,optimizer,extra]
"""
OLD_SFT = """
    data.train_files=train.parquet data.val_files=test.parquet data.prompt_key=question
    data.response_key=answer data.prompt_dict_keys=null data.micro_batch_size=4
    data.multiturn.enable=False data.train_batch_size=64 data.balance_dp_token=False
    model.partial_pretrain=Qwen/Qwen2.5-0.5B model.lora_rank=32 model.lora_alpha=16
    model.target_modules=all-linear model.strategy=fsdp model.use_liger=True
    model.trust_remote_code=False model.fsdp_config.cpu_offload=False
    model.fsdp_config.offload_params=False
    ulysses_sequence_parallel_size=1 use_remove_padding=true optim.warmup_steps_ratio=0.1
    optim.lr_scheduler=cosine trainer.default_hdfs_dir=null trainer.seed=1
    trainer.logger=['console'] trainer.total_epochs=3
"""


@pytest.mark.parametrize(
    ("script", "load"),
    [
        (GRPO, load_config),
        (LORA, load_config),
        (PPO_WITH_CRITIC, partial(load_job, "ppo")),
        (DAPO, load_config),
        (SFT, load_sft_config),
        (OLD_SFT, load_sft_config),
    ],
    ids=["grpo", "lora", "ppo", "dapo", "sft", "old_sft"],
)
def test_a_pasted_script_runs(script, load):
    """Every key is accepted, or named in one of a few notes with a reason."""
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", ConfigNote)
        load(None, script.split())
    texts = [str(note.message) for note in notes]
    assert all(text.startswith("ignored: ") for text in texts)
    assert len(texts) <= 14


@pytest.mark.parametrize("name", COMMANDS["commands"])
def test_an_example_command_of_verl(name, tmp_path, monkeypatch):
    """It loads, or exactly the keys that cannot work are refused."""
    write_adapter(tmp_path / "lora_adapter")
    monkeypatch.chdir(tmp_path)
    command = COMMANDS["commands"][name]
    settings = [COMMANDS["settings"][i] for i in command["settings"]]
    loaded: list[Any] = []

    def load_and_keep(given: Any) -> Any:
        loaded.append(load_job(command["kind"], None, given))
        return loaded[-1]

    faults = faults_of(load_and_keep, settings)
    assert sorted({fault.split(" ", 1)[0] for fault in faults}) == command["refused"], faults
    assert not any("not a known key" in f for f in faults) or name.startswith("generation/")
    for config in loaded[:1]:  # as --print-config prints it
        shortest = overrides_of(command["kind"], config)
        assert not faults_of(load_and_keep, shortest)
        assert loaded == [config, config] and len(shortest) <= len(settings) + 2


def write_adapter(folder: Path, **entries: Any) -> None:
    folder.mkdir()
    plain = {"peft_type": "LORA", "r": 16, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(plain | entries))


@pytest.mark.parametrize("load", [load_config, load_sft_config])
def test_an_initial_adapter_sets_rank_scale_and_targets(tmp_path, load):
    write_adapter(tmp_path / "adapter")
    needed = ["model.path=m", "data.train_files=t.jsonl"]
    given = f"model.lora_adapter_path={tmp_path / 'adapter'}"
    model = load(None, [*needed, given]).model
    assert (model.lora_rank, model.lora_alpha) == (16, 8.0)
    assert model.target_modules == ("q_proj", "v_proj")
    assert load(None, [*needed, given, "model.lora_rank=16"]).model == model
    fused = {"target_parameters": ["experts.down_proj", "layers.0.mlp.up_proj.weight"]}
    write_adapter(tmp_path / "experts", **fused)
    of_experts = load(None, [*needed, f"model.lora_adapter_path={tmp_path / 'experts'}"]).model
    assert of_experts.target_modules == ("layers.0.mlp.up_proj", "q_proj", "v_proj")
    assert of_experts.target_parameters == ("experts.down_proj",)
    for key, value, own in (("lora_rank", 64, 16), ("lora_alpha", 16.0, 8.0)):
        with pytest.raises(ConfigError) as error:
            load(None, [*needed, given, f"model.{key}={value}"])
        [fault] = error.value.faults
        assert f"model.{key} is {value}, " in fault and f"has {own}" in fault


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"bias": "all"}, "bias=all"),
        ({"peft_type": "IA3"}, "peft_type=IA3"),
        (None, "no adapter_config.json"),
    ],
)
def test_an_initial_adapter_that_is_no_plain_lora_is_refused(tmp_path, entries, reason):
    if entries is not None:
        write_adapter(tmp_path / "adapter", **entries)
    needed = ["model.path=m", "data.train_files=t.jsonl"]
    with pytest.raises(ConfigError) as error:
        load_config(None, [*needed, f"model.lora_adapter_path={tmp_path / 'adapter'}"])
    [fault] = error.value.faults
    assert reason in fault


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["loss_type=reinforce"], "set algorithm.rollout_correction.bypass_mode=true"),
        (["bypass_mode=true", "rollout_is_batch_normalize=true"], "no importance weights"),
        (["rollout_is=null", "rollout_is_batch_normalize=true"], "no importance weights"),
    ],
)
def test_what_contradicts_bypass_mode(given, reason):
    needed = ["model.path=m", "data.train_files=t.jsonl"]
    settings = [f"algorithm.rollout_correction.{setting}" for setting in given]
    with pytest.raises(ConfigError, match=reason):
        load_config(None, [*needed, *settings])


def test_other_engines_are_vllm():
    needed = ["model.path=m", "data.train_files=t.jsonl"]
    other = ["rollout.name=sglang", "+rollout.engine_kwargs.sglang.attention_backend=triton"]
    with pytest.warns(ConfigNote, match="rollout.name=sglang.*the engine is vLLM"):
        config = load_config(None, [*needed, *other])
    assert config.rollout.name == "vllm"


@pytest.mark.parametrize(
    ("given", "n"),
    [
        (["rollout.n=4", "actor_rollout_ref.rollout.n=2"], 2),
        (["actor_rollout_ref.rollout.n=2", "rollout.n=4"], 4),
        (["rollout.n=4", "actor_rollout_ref.rollout.n=2", "++rollout.n=3"], 3),
        (["rollout={n: 4, top_k: 5}", "actor_rollout_ref.rollout.n=2"], 2),
    ],
)
def test_the_last_of_two_overrides_wins(given, n):
    needed = ["model.path=m", "data.train_files=t.jsonl"]
    assert load_config(None, [*needed, *given]).rollout.n == n
    assert load_config(None, parse_overrides([*needed, *given])).rollout.n == n


def test_one_note_per_reason():
    with pytest.warns(ConfigNote) as notes:
        load_config(None, GRPO.split())
    [packed] = [str(note.message) for note in notes if "packed" in str(note.message)]
    expected = "ignored: actor_rollout_ref.model.use_remove_padding (sequences are always packed)"
    assert packed == expected


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("actor_rollout_ref.actor.strategy=megatron", "training is FSDP2"),
        ("actor_rollout_ref.actor.megatron.param_offload=True", "training is FSDP2"),
        ("actor_rollout_ref.rollout.agent.agent_loop_config_path=a.yaml", "default_agent_loop"),
        ("actor_rollout_ref.rollout.do_sample=False", "rollout.temperature"),
        ("actor_rollout_ref.rollout.ignore_eos=True", "end-of-sequence"),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size=2", "tensor parallel"),
        ("actor_rollout_ref.actor.optim.num_cycles=2", "half a cycle"),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype=fp16", "trained weights are float32"),
        ("actor_rollout_ref.actor.optim.optimizer=AdamW8bit", "the optimizer is AdamW"),
        ("actor_rollout_ref.actor.tis_imp_ratio_cap=2", "rollout_is_threshold"),
        ("actor_rollout_ref.actor.policy_loss.ppo_kl_coef=1", "it is 0.1"),
        ("+actor_rollout_ref.model.override_config.rope_theta=1", "config.json"),
        ("critic.optim.min_lr_ratio=0.1", "one setting with actor.optim.min_lr_ratio"),
        ("critic.ppo_epochs=3", "one setting with actor.ppo_epochs, which is 1"),
        ("critic.grad_clip=0.5", "one setting with actor.grad_clip, which is 1.0"),
        ("actor_rollout_ref.rollout.prompt_length=100", "data.max_prompt_length, which is 512"),
        ("+custom_reward_function.reward_kwargs.scale=2", "into the reward function"),
        ("data.train_max_samples=100", "write fewer rows"),
        ("algorithm.use_pf_ppo=True", "is not supported"),
        ("trainer.device=npu", "GPUs"),
    ],
)
def test_keys_that_change_results_are_refused(override, reason):
    needed = ["model.path=m", "data.train_files=t.jsonl"]
    with pytest.raises(ConfigError) as error:
        load_config(None, [*needed, override])
    [fault] = error.value.faults
    assert override.split("=")[0].lstrip("+") in fault and reason in fault


def test_shared_settings_may_be_repeated():
    needed = ["model.path=m", "data.train_files=t.jsonl", "actor.ppo_epochs=3"]
    again = ["critic.ppo_epochs=3", "critic.optim.betas=[0.9,0.999]", "critic.grad_clip=1"]
    assert load_config(None, [*needed, *again]).actor.ppo_epochs == 3


def without_references(node: Any) -> Any:
    """Return verl's YAML without references to other keys."""
    if isinstance(node, dict):
        return {name: without_references(value) for name, value in node.items()}
    return None if isinstance(node, str) and ("${" in node or node == "???") else node


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl")
def test_verls_own_defaults_are_all_known(tmp_path):
    """No key of verl's two trainers is unknown, and few are refused at their defaults."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "trainer" / "config"

    def read(name: str) -> dict[str, Any]:
        return without_references(yaml.safe_load((folder / f"{name}.yaml").read_text()))

    sft = read("sft_trainer_engine")
    for group, name in (
        ("model", "model/hf_model"),
        ("engine", "engine/fsdp"),
        ("optim", "optim/fsdp"),
        ("profiler", "profiler/profiler"),
    ):
        sft[group] = read(name)
    refused = {  # null or 0 has another meaning in verl
        "data.video_key",
        "data.audio_key",  # refused, though they are set
        "data.tools_key",
        "data.enable_thinking_key",
        "algorithm.filter_groups.max_num_gen_batches",
        "reward.custom_reward_function.path",
        "reward.reward_model.model_path",
        "trainer.default_local_dir",
    }
    for load, tree in ((load_config, read("_generated_ppo_trainer")), (load_sft_config, sft)):
        tree["trainer"]["logger"] = "console"
        file = tmp_path / "verl.yaml"
        file.write_text(yaml.safe_dump(tree))
        faults = faults_of(load, file)
        assert not [f for f in faults if "not a known key" in f]
        assert not [f for f in faults if f.split(" ", 1)[0] not in refused], faults


def faults_of(load: Any, given: Any) -> tuple[str, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigNote)
        try:
            config = load(given)
        except ConfigError as error:
            return error.faults
    assert isinstance(config, RLConfig | SFTConfig)
    return ()


def test_without_an_extra_only_native_keys_are_known(monkeypatch):
    given = ["model.path=m", "data.train_files=f", "actor_rollout_ref.rollout.n=2"]
    assert load_config(None, given).rollout.n == 2
    caches = (registered.plugins, foreign_keys)
    monkeypatch.setattr(registered, "entry_points", lambda group: [])
    for cached in caches:
        cached.cache_clear()
    try:
        [fault] = faults_of(partial(load_config, None), given)
        assert fault.startswith("actor_rollout_ref.rollout.n (in the command line) is not a known")
        assert "entry-point group hybridengine.keys" in fault
        assert load_config(None, [*given[:2], "rollout.n=3"]).rollout.n == 3
    finally:
        for cached in caches:
            cached.cache_clear()
