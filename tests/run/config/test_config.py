"""Loading a configuration: values, overrides, and one line for every error."""

import re
import warnings
from functools import reduce
from pathlib import Path

import pytest
import yaml

from hybridengine.run.config import (
    ConfigError,
    ConfigNote,
    RLConfig,
    SFTConfig,
    config_to_yaml,
    keys_of,
    load_config,
    load_job,
    load_sft_config,
)

NEEDED = [
    "model.path=model",
    "data.train_files=train.jsonl",
    "reward.custom_reward_function.path=reward.py",
]


PATH_NAMES = {
    "path",
    "model_path",
    "train_files",
    "val_files",
    "external_lib",
    "chat_template",
    "resume_from_path",
    "default_local_dir",
    "rollout_data_dir",
}
RESUME = "trainer.resume_mode=path"
WITH_PATHS = {RLConfig: ["reward.reward_model.enable=true", RESUME], SFTConfig: [RESUME]}


def load(*overrides: str) -> RLConfig:
    return load_config(None, [*NEEDED, *overrides])


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_overrides_replace_values_of_the_file(tmp_path):
    file = write(tmp_path / "c.yaml", "actor: {optim: {lr: 1e-5}, grad_clip: 2}\nseed: 7\n")
    config = load_config(file, [*NEEDED, "actor.optim.lr=3e-6", "trainer.logger=[console]"])
    assert config.actor.optim.lr == 3e-6
    assert config.actor.grad_clip == 2.0 and isinstance(config.actor.grad_clip, float)
    assert config.trainer.logger == ("console",)
    assert config.seed == 7


def test_verl_prefixes_are_renamed():
    config = load(
        "actor_rollout_ref.actor.optim.lr=2e-6",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "data.seed=11",
    )
    assert config.actor.optim.lr == 2e-6
    assert config.rollout.n == 3
    assert config.model.enable_gradient_checkpointing
    assert config.seed == 11


def test_yaml_round_trip(tmp_path):
    config = load("data.train_files=[a.parquet,b.parquet]", "actor.clip_ratio_high=0.28")
    file = write(tmp_path / "resolved.yaml", config_to_yaml(config))
    assert load_config(file) == config


def test_switches_may_be_yamls_booleans(tmp_path):
    key, truncated = "algorithm.sampling_replay", "rollout.top_k=5"
    for text, value in {"on": "on", "off": "off", "false": "off", "auto": "auto"}.items():
        file = write(tmp_path / "c.yaml", f"algorithm: {{sampling_replay: {text}}}\n")
        for config in (load(truncated, f"{key}={text}"), load_config(file, [*NEEDED, truncated])):
            assert config.algorithm.sampling_replay == value
            assert config.replays_sampling == (value != "off")
            again = load_config(write(tmp_path / "again.yaml", config_to_yaml(config)), [])
            assert again == config
    assert not load().replays_sampling, "nothing is truncated"


def test_null_falls_back_to_other_keys():
    config = load("data.train_batch_size=6", "actor.clip_ratio_high=0.28")
    assert config.ppo_mini_batch_size == 6
    assert config.clip_ratios == (0.2, 0.28)
    assert config.max_model_len == 1024


SPLIT = "trainer.mode=one_step_off rollout.n_gpus_per_node=2"
IN_FLIGHT = "trainer.mode=async rollout.in_flight_update=keep_kv"
SERVERS = "rollout.servers=[http://a:1,https://b:2/vllm]"
# Settings that are accepted → settings that are refused with them, with words of the message.
REFUSALS = {
    "": [
        ("actor.optim.learning_rate=1", "actor.optim.learning_rate.*the command line.*not a known"),
        ("actor.clip_rato=0.1", "did you mean actor.clip_ratio"),
        ("lr=0.1", "did you mean actor.optim.lr or critic.optim.lr"),
        ("data.bathc_size=4", "did you mean data.val_batch_size or data.train_batch_size"),
        ("actor.optim.warmup_stlye=cosine", "did you mean actor.optim.lr_scheduler_type"),
        ("data.train_files=null", "data.train_files is required and was not given"),
        ("data.train_files[0]=t.jsonl", "sets an entry of a list; give the full list"),
        ("reward.weights=3", "reward.weights is 3: input should be a list"),
        ("critic.betas=[0,0]", "did you mean actor.optim.betas"),
        ("rollout.optim.learning_rate=1", "known key; `hybridengine keys grpo` lists them"),
        ("actor_rollout_ref.actor.grad_clp=1", "did you mean actor.grad_clip"),
        ("nonsense.key=1", "the groups are actor, algorithm, critic, data"),
        ("actor_rollout_ref.actor.strategy=megatron", "strategy .* is 'megatron', .*FSDP2"),
        ("~rollout.n", "would remove a key; set rollout.n=null"),
        (
            "rollout.engine_kwargs.vllm=3",
            "rollout.engine_kwargs.vllm is 3: input should be a valid",
        ),
        ("seed=9223372036854775808", "seed is 9223372036854775808: input should be less than or"),
        ("seed=-1", "seed is -1: input should be greater than"),
        ("actor.optim={lr_warmup_steps: 3, lr_warmup_steps_ratio: 0.1}", "give one of them"),
        ("critic.optim={lr_warmup_steps: 3, lr_warmup_steps_ratio: 0.1}", "give one of them"),
        ("rollout.n=four", "rollout.n is 'four': input should be a valid integer"),
        ("rollout.n=2.5", "rollout.n is 2.5: input should be a valid integer"),
        ("rollout.n=true", "rollout.n is True: input should be a valid integer"),
        ("rollout.n=0", "rollout.n is 0: input should be greater than or equal to 1"),
        ("actor.optim.lr=0", "optim.lr is 0: input should be greater than 0"),
        ("actor.optim.lr=.nan", "actor.optim.lr is nan: input should be a finite number"),
        ("rollout.kv_cache_gib=.inf", "kv_cache_gib is inf: input should be a finite number"),
        ("rollout.top_p=1.5", "rollout.top_p is 1.5: input should be less than or equal to 1"),
        ("rollout.min_p=-0.1", "rollout.min_p is -0.1: input should be greater than or equal to 0"),
        ("model.trust_remote_code=1", "trust_remote_code is 1: input should be a valid boolean"),
        ("data.truncation=middle", "input should be 'error', 'left' or 'right'"),
        ("rollout.name=vlm", "should be 'auto', 'vllm' or 'hf'"),
        ("trainer.logger=[console,swanlab]", "'swanlab'.: input should be 'console', 'jsonl'"),
        ("data=null", "data .* is a group of keys, not None"),
        ("actor.optim.betas=[0.9]", "actor.optim.betas is .0.9.: field required"),
        ("actor.optim.betas=[0.9, 1.5]", "betas is .0.9, 1.5.: input should be less than"),
        ("data.train_batch_size", "is not `key=value`"),
        ("actor.ppo_mini_batch_size=48", "does not divide data.train_batch_size 64"),
        ("actor.ppo_max_token_len_per_gpu=100", "less than the longest sequence of 1024"),
        ("rollout.max_model_len=100", "less than data.max_prompt_length"),
        ("rollout.tensor_model_parallel_size=2", "does not divide the 1 ranks"),
        ("rollout.val_kwargs.n=4", "greedy responses are all equal"),
        ("rollout.val_kwargs.do_sample=true", "give a temperature above 0"),
        ("reward.weights=[1,2]", "2 numbers for 1 reward functions"),
        ("reward.custom_reward_function.name=[a,b]", "has 2 names for the"),
        ("reward.reward_model.enable=true", "give both or neither"),
        ("reward.reward_model.model_path=m", "give both or neither"),
        ("reward_model.reward_manger=dapo", "not a known key"),
        ("algorithm.rollout_correction.rollout_is_threshold=0.5_5", "0.55 is below 1; quote"),
        ("algorithm.rollout_correction.rollout_is_threshold=a", "could not convert"),
        ("algorithm.rollout_correction.rollout_rs=token_k2", "rollout_rs_threshold"),
        (
            "algorithm.rollout_correction.rollout_is=tokens",
            "input should be 'token', 'sequence' or 'sequence_mean'",
        ),
        ("algorithm.sampling_replay=on", "top_k and min_p keep the full vocabulary"),
        ("algorithm.sampling_replay=yes!", "input should be 'auto', 'on' or 'off'"),
        ("algorithm.kl_ctrl.type=adaptiv", "input should be 'fixed', 'adaptive' or 'linear'"),
        ("actor.policy_loss.loss_mode=gpso", "input should be 'vanilla', 'gspo'"),
        ("algorithm.distill.beta=1.5", "input should be less than or equal to 1"),
        (
            "reward.overlong_buffer.enable=true reward.overlong_buffer.len=513",
            "overlong_buffer.len is 513, more than .* 512; lower it",
        ),
        ("trainer.resume_mode=path", "path, which needs a folder in trainer"),
    ],
    "algorithm.distill.teacher_path=teacher": [
        ("actor.policy_loss.loss_mode=gspo", "loss_mode is gspo, but with algorithm.distill.teach"),
        ("actor.loss_agg_mode=token-sum", 'loss_agg_mode is token-sum, .* leave it "token-mean"'),
        ("actor.entropy_coeff=0.1", "entropy_coeff is 0.1, .* leave it 0.0"),
        ("actor.use_kl_loss=true", "use_kl_loss is True"),
        ("algorithm.use_kl_in_reward=true", "use_kl_in_reward is True"),
        ("model.use_fused_kernels=false", "use_fused_kernels is False, .* leave it true"),
        ("algorithm.adv_estimator=gae", "no critic is trained"),
    ],
    SPLIT: [
        ("rollout.n_gpus_per_node=0", "rollout.n_gpus_per_node is 0; give the number of engine"),
        ("trainer.staleness=2", "trainer.staleness is 2, and trainer.mode is one_step_off"),
        ("rollout.tensor_model_parallel_size=3", "does not divide the 2 engine ranks of a machine"),
        ("algorithm.rollout_correction.rollout_is=null", "rollouts of older weights"),
        ("async_training.staleness_threshold=0.5", "set trainer.mode=async and trainer.staleness"),
        ("async_training.partial_rollout=True", "set rollout.in_flight_update=recompute_kv"),
        (
            "rollout.in_flight_update=keep_kv",
            "trainer.mode is one_step_off, in which all responses",
        ),
        (
            f"{IN_FLIGHT} reshard.lora=adapters model.lora_rank=4",
            "stays with the adapter that it began with",
        ),
    ],
    SERVERS: [
        ("rollout.servers=[10.0.0.5:8000]", "is no URL; expected one like http://10.0.0.5:8000"),
        ("rollout.servers=[http://a:1,http://a:1]", "rollout.servers has a server twice"),
        ("trainer.nnodes=3", "has 2 servers for trainer.nnodes 3, .* at least one for each"),
        (
            "rollout.n_gpus_per_node=1",
            "n_gpus_per_node is 1, but with rollout.servers it is an opt",
        ),
        ("rollout.tensor_model_parallel_size=2", "is an option of `vllm serve`; leave it 1"),
        ("rollout.engine_kwargs.vllm.block_size=32", "is an option of `vllm serve`; leave it {}"),
        ("rollout.quantization=fp8", "is an option of `vllm serve`; leave it null"),
        ("rollout.name=hf", "rollout.name is hf, and rollout.servers are vLLM servers"),
        ("model.lora_rank=4 reshard.lora=adapters", "take merged weights"),
    ],
}


@pytest.mark.parametrize(
    ("base", "given", "message"),
    [(base, *row) for base, rows in REFUSALS.items() for row in rows],
)
def test_refusals(base, given, message):
    with pytest.raises(ConfigError, match=message) as error:
        load(*base.split(), *_settings(given))
    assert base or "\n" not in str(error.value)


def _settings(text):
    """Return `key=value` pairs that blanks separate; a mapping may contain blanks."""
    return re.split(r" (?=[\w.]+=)", text)


def test_what_refusals_leave():
    for base in filter(None, REFUSALS):
        load(*base.split())
    for setting, _ in REFUSALS["algorithm.distill.teacher_path=teacher"]:
        load(setting)
    assert load("rollout.exact=true").rollout.exact == "on"


def test_ranks_that_generate_alone():
    split, servers = SPLIT.split(), SERVERS.split()
    config = load(*split, "rollout.tensor_model_parallel_size=2", "trainer.nnodes=2")
    assert (config.world_size, config.ranks_per_node, config.num_engines) == (2, 3, 2)
    for mode in ("sync", "one_step_off", "async"):
        config = load(*servers, f"trainer.mode={mode}", "trainer.n_gpus_per_node=2")
        assert (config.world_size, config.ranks_per_node, config.num_engines) == (2, 3, 2)
        assert config.overlaps and config.staleness == (mode != "sync")
    off_policy = "algorithm.rollout_correction.rollout_is=null"
    assert load(*split, "trainer.staleness=0", off_policy).staleness == load().staleness == 0
    assert load(*servers, off_policy).staleness == 0
    assert load("rollout.n_gpus_per_node=2").ranks_per_node == 1  # verl's scripts may have it
    for other in (split, servers):
        assert load(*other, *IN_FLIGHT.split()).rollout.in_flight_update == "keep_kv"
    assert load("rollout.in_flight_update=off").rollout.in_flight_update == "off"  # YAML: false


@pytest.mark.parametrize("key", [k.split("=")[0] for k in NEEDED[:2]])
def test_required_keys(key):
    with pytest.raises(ConfigError, match=f"{re.escape(key)} is required"):
        load_config(None, [o for o in NEEDED if not o.startswith(key)])


def test_a_key_under_both_names_is_an_error(tmp_path):
    """In a file, whose order means nothing; of overrides, the last wins."""
    text = "rollout: {n: 2}\nactor_rollout_ref: {rollout: {n: 3}}\n"
    with pytest.raises(ConfigError, match=r"rollout\.n is given twice"):
        load_config(write(tmp_path / "c.yaml", text), NEEDED)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("a: [1", "cannot be read as YAML"),
        ("- 1\n- 2\n", "must hold `key: value`"),
        (
            "rollout: {n: 4, nn: 3}\n",
            r"rollout.nn \(in .*c.yaml\) is not a known key; did you mean",
        ),
        ("rollout:\n  n: ${missing.key}\n", "cannot be read as YAML"),
    ],
)
def test_bad_files(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message) as error:
        if content is not None:
            write(tmp_path / "c.yaml", content)
        load_config(tmp_path / "c.yaml", NEEDED)
    assert "\n" not in str(error.value)


def test_ppo_is_grpo_with_gae():
    ppo = load_job("ppo", None, NEEDED)
    assert ppo.algorithm.adv_estimator == "gae" and ppo.trainer.default_local_dir == "runs/ppo"
    chosen = load_job("ppo", None, [*NEEDED, "algorithm.adv_estimator=rloo"])
    assert chosen.algorithm.adv_estimator == "rloo"
    assert load().algorithm.adv_estimator == "grpo" and load().critic.optim.lr == 1e-5


def test_verls_reward_keys():
    config = load(
        "reward_model.reward_manager=dapo",
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable=true",
        "reward_model.reward_kwargs.overlong_buffer_cfg.len=64",
        "custom_reward_function.name=score",
    )
    assert config.reward.reward_manager.name == "dapo"
    assert config.reward.overlong_buffer.enable and config.reward.overlong_buffer.len == 64
    assert config.reward.functions == [("reward.py", "score")]


def test_bounds_of_the_rollout_correction():
    correction = load(
        "algorithm.rollout_correction.rollout_is_threshold='0.5_5'",
        "algorithm.rollout_correction.rollout_rs='token_k1,seq_mean_k3'",
        "algorithm.rollout_correction.rollout_rs_threshold='0.5_2,0.1'",
    ).algorithm.rollout_correction
    assert correction.is_bounds == (0.5, 5.0)
    assert correction.rejection == {"token_k1": (0.5, 2.0), "seq_mean_k3": 0.1}
    assert load().algorithm.rollout_correction.is_bounds == (None, 2.0)


def test_all_errors_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        load(
            "rollout.n=four",
            "actor.grad_clip=-1",
            "actor.clip_rato=0.1",
            "data.train_batch_size=7.5",
            "actor.ppo_mini_batch_size=48",  # not reported: the batch size is wrong itself
            "rollout.val_kwargs.n=4",
            "reward.weights=[1,2]",
            "loose",
        )
    first, *lines = str(error.value).split("\n  ")
    assert first == "7 settings cannot be used:" and lines == list(error.value.faults)
    for key in (
        "rollout.n is 'four'",
        "actor.grad_clip is -1",
        "actor.clip_rato",
        "data.train_batch_size is 7.5",
        "rollout.val_kwargs.n is 4",
        "reward.weights has 2",
        "'loose' is not `key=value`",
    ):
        assert sum(key in line for line in lines) == 1, (key, lines)


def test_a_misspelt_required_key_is_one_error():
    with pytest.raises(ConfigError, match=r"model\.pth .* did you mean model\.path") as error:
        load_config(None, ["model.pth=m", "data.train_files=a.jsonl"])
    assert len(error.value.faults) == 1


@pytest.mark.parametrize("key", ["rollout.load", "data.return_chats", "critic.model.packing"])
def test_no_suggestion_for_a_distant_key(key):
    with pytest.raises(ConfigError) as error:
        load(f"{key}=1")
    assert "did you mean" not in str(error.value)


def test_hydra_prefixes_and_a_text_for_a_list():
    config = load("+rollout.n=3", "++seed=5", "trainer.logger=console", "data.val_files=v.jsonl")
    assert (config.rollout.n, config.seed) == (3, 5)
    assert config.trainer.logger == ("console",) and config.data.val_files == ("v.jsonl",)


def test_home_is_expanded_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    for load_any, schema in ((load_config, RLConfig), (load_sft_config, SFTConfig)):
        keys = [key for key, _ in keys_of(schema)]
        paths = [k for k in keys if k.rsplit(".")[-1] in PATH_NAMES]
        config = load_any(None, [*NEEDED[:2], *(f"{k}=~/x" for k in paths), *WITH_PATHS[schema]])
        for key in paths:
            value = reduce(getattr, key.split("."), config)
            assert value in ("/home/someone/x", ("/home/someone/x",)), key
    config = load("data.train_files=[~/a,b]")
    assert config.data.train_files == ("/home/someone/a", "b")


def test_mappings_with_free_keys():
    config = load(
        "rollout.engine_kwargs.vllm.block_size=32",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.level=3",
        "data.apply_chat_template_kwargs={enable_thinking: false}",
    )
    assert config.rollout.engine_kwargs.vllm == {
        "block_size": 32,
        "compilation_config": {"level": 3},
    }
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert load().rollout.engine_kwargs.vllm == {}


def test_a_folder_to_resume_from_that_is_not_read_is_noted():
    with pytest.warns(ConfigNote, match=r"resume_from_path is x, which trainer.resume_mode=auto"):
        load_config(None, [*NEEDED, "trainer.resume_from_path=x"])


def test_a_prompt_that_is_not_processed_in_chunks_fits_a_forward_pass():
    long = [*NEEDED, "rollout.max_model_len=10000"]
    whole = [*long, "rollout.enable_chunked_prefill=false"]
    assert load_config(None, long).max_num_batched_tokens == 8192
    assert load_config(None, whole).max_num_batched_tokens == 10000
    short = [*whole, "rollout.max_model_len=2000"]
    assert load_config(None, short).max_num_batched_tokens == 8192
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 9000, less than the longest"):
        load_config(None, [*whole, "rollout.max_num_batched_tokens=9000"])


def test_paths_are_found_from_every_folder(tmp_path, monkeypatch):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (project / "examples" / "a", project / "data", project / "gpt2", elsewhere):
        folder.mkdir(parents=True)
    for name in ("examples/a/reward.py", "examples/a/chat.jinja", "data/1.parquet", "data/2.json"):
        (project / name).touch()
    (project / "math_verify").mkdir()  # the name of a built-in rule: no path
    config = {
        "model": {"path": "gpt2", "external_lib": "math_verify"},
        "data": {
            "train_files": ["data/*.parquet", "data/2.json", "data/3.json"],
            "chat_template": "examples/a/chat.jinja",
        },
        "reward": {
            "custom_reward_function": {
                "path": ["examples/a/reward.py", "math_verify", "http://h/a"]
            }
        },
        "rollout": {"agent": {"default_agent_loop": "examples/a/reward.py:Loop"}},
        "trainer": {"rollout_data_dir": "out"},
    }
    file = write(project / "examples" / "a" / "c.yaml", yaml.safe_dump(config))
    loaded = []
    for folder in (project, file.parent, elsewhere):
        monkeypatch.chdir(folder)
        loaded.append(load_config(file))
        assert loaded[-1].trainer.rollout_data_dir == str(folder / "out")
    first = loaded[0]
    assert first.model.path == str(project / "gpt2")
    assert first.model.external_lib == "math_verify"
    assert first.data.train_files == (
        str(project / "data/*.parquet"),
        str(project / "data/2.json"),
        "data/3.json",
    )
    assert first.data.chat_template == str(file.parent / "chat.jinja")
    paths = first.reward.custom_reward_function.path
    assert paths == (str(file.parent / "reward.py"), "math_verify", "http://h/a")
    assert first.rollout.agent.default_agent_loop == f"{file.parent / 'reward.py'}:Loop"
    for other in loaded[1:]:
        assert (other.model, other.data, other.reward) == (first.model, first.data, first.reward)
    typed = load_config(
        None,
        [
            "model.path=gpt2",
            "data.train_files=data/2.json",
            "reward.custom_reward_function.path=math_verify",
        ],
    )
    assert typed.model.path == "gpt2"  # a command line's path: of the working directory alone
    monkeypatch.chdir(project)
    text = config_to_yaml(
        load_config(
            None,
            {
                "model.path": "gpt2",
                "data.train_files": "data/2.json",
                "data.chat_template": "{{ messages }}",
            },
        )
    )
    assert f"path: {project / 'gpt2'}\n" in text and "'{{ messages }}'" in text


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (["actor.kl_loss_coef=0.01"], "kl_loss_coef is 0.01, but actor.use_kl_loss is false"),
        (
            ["algorithm.kl_ctrl.kl_coef=0.2"],
            "kl_coef is 0.2, but algorithm.use_kl_in_reward is false",
        ),
        (
            ["actor.use_kl_loss=true", "actor.kl_loss_coef=0"],
            "use_kl_loss is true with actor.kl_loss_coef 0: a reference is loaded",
        ),
        (
            ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0"],
            "use_kl_in_reward is true with algorithm.kl_ctrl.kl_coef 0: a reference is loaded",
        ),
        (
            ["actor.policy_loss.loss_mode=gspo", "actor.clip_ratio_c=10"],
            "clip_ratio_c is 10, which actor.policy_loss.loss_mode gspo does not read",
        ),
        (["actor.kl_loss_coef=0", "actor.clip_ratio_c=10"], ""),
        (["actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true"], ""),
        (
            [
                "actor.use_kl_loss=true",
                "actor.kl_loss_coef=0",
                "actor.kl_loss_ctrl={type: linear, final_kl_coef: 0.1}",
            ],
            "",
        ),
    ],
)
def test_notes_on_settings_without_effect(overrides: list[str], note: str) -> None:
    needed = ["model.path=m", "data.train_files=t.jsonl"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigNote)
        load_config(None, [*needed, *overrides])
    texts = [str(w.message) for w in caught if issubclass(w.category, ConfigNote)]
    assert len(texts) == bool(note) and note in "".join(texts)
