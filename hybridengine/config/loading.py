"""YAML and overrides → a checked configuration; every refusal is one line."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from hybridengine.config.schema import GRPOConfig

__all__ = ["ALIASES", "PPO", "ConfigError", "Rules", "config_to_yaml", "load_config"]

Config = TypeVar("Config")

# verl's path → ours. The longest matching prefix wins; the rest of the path is kept.
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

# verl's keys that mean nothing here, with what to do instead (shown in the error).
_TOKENS = "set actor.ppo_max_token_len_per_gpu, in tokens"
_REPLACED = {
    "model.use_remove_padding": "sequences are always packed; remove this key",
    "actor.use_dynamic_bsz": "micro-batches are always filled by tokens; remove this key",
    "actor.ppo_micro_batch_size_per_gpu": _TOKENS,
    "actor.ppo_micro_batch_size": _TOKENS,
    "actor.strategy": "it is FSDP2; remove this key",
    "actor.fsdp_config.offload_policy": "set actor.fsdp_config.param_offload",
    "rollout.log_prob_micro_batch_size_per_gpu": _TOKENS,
    "critic.ppo_micro_batch_size_per_gpu": _TOKENS,
    "critic.ppo_max_token_len_per_gpu": _TOKENS,
    "critic.ppo_mini_batch_size": "actor.ppo_mini_batch_size is the critic's too",
    "critic.ppo_epochs": "actor.ppo_epochs is the critic's too",
    "critic.model.enable_gradient_checkpointing": "model.enable_gradient_checkpointing is for both",
    "actor_rollout_ref.hybrid_engine": "engine and trainer always share ranks; remove this key",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": _TOKENS,
    "actor_rollout_ref.ref.fsdp_config.param_offload": "set actor.fsdp_config.param_offload",
}


_REQUIRED = ("model.path", "data.train_files")


class ConfigError(ValueError):
    """A configuration that cannot run; one line: key, given, expected, what to do."""


@dataclass(frozen=True)
class Rules(Generic[Config]):
    """How a kind of job is configured.

    aliases: verl's path → ours; replaced: verl's keys without a meaning here, with what to do
    instead; required: keys that must be given; check: raises ConfigError for settings that are each
    right and wrong together; defaults: native key → value, in place of the schema's own.
    """

    schema: type[Config]
    aliases: Mapping[str, str]
    replaced: Mapping[str, str]
    required: tuple[str, ...]
    check: Callable[[Config], None]
    defaults: Mapping[str, Any] = field(default_factory=dict)


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), rules: Rules[Any] | None = None
) -> Any:
    """Read a YAML file (None: defaults only), apply `key=value` overrides, check everything.

    Returns a GRPOConfig, or what `rules` describe. Raises ConfigError for an unreadable file, an
    unknown key, a wrong type or range, and settings that contradict each other.
    """
    rules = rules or _GRPO
    values = dict(rules.defaults)
    if path is not None:
        values |= _native_keys(_read_yaml(Path(path)), str(path), rules)
    values |= _native_keys(_read_overrides(overrides), "the command line", rules)
    schema = dict(_walk(rules.schema))
    for key, value in values.items():
        values[key] = _checked(key, value, *schema[key])
    config = _build(rules.schema(), values)
    for key in rules.required:
        if not values.get(key):
            raise ConfigError(f"{key} is required and was not given; set it in the config")
    rules.check(config)
    return config


def config_to_yaml(config: Any) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal one."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


def _read_yaml(path: Path) -> Mapping[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist; check the path") from None
    except (OSError, YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"config file {path} cannot be read as YAML: {reason}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"config file {path} must hold `key: value` groups, not a list")
    return typing.cast("Mapping[str, Any]", content)


def _read_overrides(overrides: Sequence[str]) -> Mapping[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override {override!r} is not `key=value`, e.g. actor.optim.lr=1e-6")
    try:
        content = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)), resolve=True)
    except (YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"overrides {list(overrides)} cannot be read: {reason}") from None
    return typing.cast("Mapping[str, Any]", content)


def _native_keys(tree: Mapping[str, Any], source: str, rules: Rules[Any]) -> dict[str, Any]:
    """Flatten to {native dotted key: value}; rejects unknown keys and keys given twice."""
    known = {key for key, _ in _walk(rules.schema)}
    values: dict[str, Any] = {}
    for given, value in _leaves(tree):
        key = _resolve_alias(given, rules.aliases)
        if key in rules.replaced:
            raise ConfigError(f"{given} (in {source}) is not a key here: {rules.replaced[key]}")
        if any(k.startswith(f"{key}.") for k in known):
            raise ConfigError(f"{given} (in {source}) is a group of keys, not {value!r}")
        if key not in known:
            raise ConfigError(f"{given} (in {source}) is not a known key; {_suggest(key, known)}")
        if key in values:
            raise ConfigError(f"{key} is given twice in {source}, once under verl's name; keep one")
        values[key] = value
    return values


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _walk(group: type, prefix: str = "") -> Iterator[tuple[str, tuple[Any, Mapping[str, Any]]]]:
    """Every key of a config class with (type, limits)."""
    hints = typing.get_type_hints(group)
    for f in fields(group):
        if is_dataclass(hints[f.name]):
            yield from _walk(hints[f.name], f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", (hints[f.name], f.metadata)


def _resolve_alias(key: str, aliases: Mapping[str, str]) -> str:
    for alias in sorted(aliases, key=len, reverse=True):
        if key == alias or key.startswith(alias + "."):
            return aliases[alias] + key[len(alias) :]
    return key


def _suggest(key: str, known: set[str]) -> str:
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [k for k in sorted(known) if k.rsplit(".", 1)[-1] == leaf]
    close = same_leaf or difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    groups = sorted({k.split(".", 1)[0] for k in known})
    return f"the groups are {', '.join(groups)}"


def _checked(key: str, value: Any, hint: Any, limits: Mapping[str, Any]) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        accepted, converted = _convert(value, option)
        if accepted:
            for item in converted if isinstance(converted, tuple) else (converted,):
                _check_limits(key, item, limits)
            return converted
    expected = " or ".join(_TYPE_NAMES[option] for option in options)
    raise ConfigError(f"{key} is {value!r} ({type(value).__name__}), expected {expected}")


_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple[str, ...]: "a list of texts",
    tuple[float, ...]: "a list of numbers",
    tuple[float, float]: "a list of two numbers",
    types.NoneType: "null",
}


def _convert(value: Any, hint: Any) -> tuple[bool, Any]:
    """(whether `value` is a `hint`, the value in that type); true is no number, 1 is no text."""
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            return False, None
        kind, *more = typing.get_args(hint)
        if more != [...] and len(value) != 1 + len(more):
            return False, None
        items = [_convert(item, kind) for item in value]
        return all(accepted for accepted, _ in items), tuple(item for _, item in items)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return True, float(value)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool)), value


def _check_limits(key: str, value: Any, limits: Mapping[str, Any]) -> None:
    if value is None or not limits:
        return
    choices = limits["choices"]
    if choices and value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{key} is {value!r}, expected one of {', '.join(choices)}{hint}")
    low, above, high = limits["at_least"], limits["above"], limits["at_most"]
    # Written so that NaN, which compares false, is refused too.
    if low is not None and not value >= low:
        raise ConfigError(f"{key} is {value}, expected at least {low}")
    if above is not None and not value > above:
        raise ConfigError(f"{key} is {value}, expected more than {above}")
    if high is not None and not value <= high:
        raise ConfigError(f"{key} is {value}, expected at most {high}")


def _build(default: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """`default` with the given values in place of its own."""
    changed = {}
    for f in fields(default):
        key, own = f"{prefix}{f.name}", getattr(default, f.name)
        if is_dataclass(own):
            changed[f.name] = _build(own, values, f"{key}.")
        elif key in values:
            changed[f.name] = values[key]
    return replace(default, **changed)


def _check_together(config: GRPOConfig) -> None:
    """Settings that are each right and wrong together."""
    _check_rewards(config)
    _check_correction(config)
    data, actor, rollout, world = config.data, config.actor, config.rollout, config.world_size
    longest = data.max_prompt_length + data.max_response_length
    if data.train_batch_size % config.ppo_mini_batch_size:
        raise ConfigError(
            f"actor.ppo_mini_batch_size is {config.ppo_mini_batch_size}, which does not divide "
            f"data.train_batch_size {data.train_batch_size}; choose a divisor"
        )
    _check_parallel(config)
    _check_adapters(config)
    sharing = actor.ulysses_sequence_parallel_size
    if actor.ppo_max_token_len_per_gpu * sharing < longest:
        raise ConfigError(
            f"actor.ppo_max_token_len_per_gpu is {actor.ppo_max_token_len_per_gpu} on each of the "
            f"{sharing} ranks that share a micro-batch (ulysses_sequence_parallel_size), less than "
            f"one longest sequence of {longest} tokens (max_prompt_length + max_response_length)"
        )
    if config.max_model_len < longest:
        raise ConfigError(
            f"rollout.max_model_len is {config.max_model_len}, less than max_prompt_length + "
            f"max_response_length = {longest}; raise it, or leave it null"
        )
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < config.max_model_len:
        raise ConfigError(
            f"rollout.max_num_batched_tokens is {rollout.max_num_batched_tokens}, less than one "
            f"prompt may have ({config.max_model_len}, max_model_len), and "
            "rollout.enable_chunked_prefill is false; raise it, or allow chunks"
        )
    if world % rollout.tensor_model_parallel_size:
        raise ConfigError(
            f"rollout.tensor_model_parallel_size is {rollout.tensor_model_parallel_size}, which "
            f"does not divide the {world} ranks (trainer.n_gpus_per_node * trainer.nnodes)"
        )
    if rollout.name == "hf" and rollout.tensor_model_parallel_size > 1:
        raise ConfigError(
            "rollout.tensor_model_parallel_size needs rollout.name=vllm; plain generate has no "
            "tensor parallelism, set it to 1"
        )
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
        raise ConfigError(
            "rollout.val_kwargs.temperature is 0 with do_sample=true; give a temperature above 0"
        )
    if not rollout.val_kwargs.do_sample and rollout.val_kwargs.n > 1:
        raise ConfigError(
            f"rollout.val_kwargs.n is {rollout.val_kwargs.n}, but greedy responses are all equal; "
            "set rollout.val_kwargs.do_sample=true, or n=1"
        )


def _check_adapters(config: GRPOConfig) -> None:
    if config.reshard.lora == "adapters" and not config.model.lora_rank:
        raise ConfigError(
            "reshard.lora is 'adapters', but no adapter is trained; set model.lora_rank, or leave "
            "reshard.lora at 'merged'"
        )
    if config.reshard.lora == "adapters" and config.rollout.name == "hf":
        raise ConfigError(
            "reshard.lora=adapters needs rollout.name=vllm; plain generate has no LoRA slots, set "
            "reshard.lora=merged"
        )


def _check_parallel(config: GRPOConfig) -> None:
    actor, world = config.actor, config.world_size
    for key, size in (
        ("actor.fsdp_config.fsdp_size", actor.fsdp_config.fsdp_size),
        ("actor.ulysses_sequence_parallel_size", actor.ulysses_sequence_parallel_size),
    ):
        if size == 0 or (size > 0 and world % size):
            raise ConfigError(
                f"{key} is {size}, which does not divide the {world} ranks "
                "(trainer.n_gpus_per_node * trainer.nnodes); choose a divisor"
            )
    responses = config.ppo_mini_batch_size * config.rollout.n
    if responses < config.data_parallel_size:
        raise ConfigError(
            f"one optimizer step sees {responses} responses (ppo_mini_batch_size * rollout.n) but "
            f"{config.data_parallel_size} ranks want some; raise one of the two"
        )


def _check_correction(config: GRPOConfig) -> None:
    try:
        config.algorithm.rollout_correction.is_bounds  # noqa: B018
        config.algorithm.rollout_correction.rejection  # noqa: B018
    except ValueError as error:
        raise ConfigError(
            f"algorithm.rollout_correction: {error}; rollout_is_threshold is a number or "
            '"lower_upper", rollout_rs_threshold one of these per criterion of rollout_rs, '
            "separated by commas"
        ) from None


def _check_rewards(config: GRPOConfig) -> None:
    reward, limit = config.reward, config.data.max_response_length
    chosen = reward.custom_reward_function
    if not isinstance(chosen.name, str) and len(chosen.name) != len(chosen.path):
        raise ConfigError(
            f"reward.custom_reward_function.name has {len(chosen.name)} names for the "
            f"{len(chosen.path)} files of path; give one for each, or one text for all"
        )
    functions = len(config.reward_functions)
    if not functions and not reward.reward_model.enable:
        raise ConfigError(
            "reward.custom_reward_function.path is required and was not given; set it (or set "
            "reward.reward_model.enable=true)"
        )
    if reward.reward_model.enable != bool(reward.reward_model.model_path):
        raise ConfigError(
            f"reward.reward_model.enable is {reward.reward_model.enable} and model_path is "
            f"{reward.reward_model.model_path!r}; give both or neither"
        )
    if reward.weights is not None and len(reward.weights) != functions:
        raise ConfigError(
            f"reward.weights has {len(reward.weights)} numbers for {functions} reward functions; "
            "give one for each"
        )
    if reward.overlong_buffer.enable and reward.overlong_buffer.len > limit:
        raise ConfigError(
            f"reward.overlong_buffer.len is {reward.overlong_buffer.len}, more than "
            f"data.max_response_length {limit}; lower it"
        )


_GRPO = Rules(GRPOConfig, ALIASES, _REPLACED, _REQUIRED, _check_together)
PPO = replace(_GRPO, defaults={"algorithm.adv_estimator": "gae"})
