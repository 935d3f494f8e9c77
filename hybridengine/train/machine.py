"""The facts about machines that a run's choices depend on, and the data types that follow.

`dtype: auto` is bfloat16 where the hardware multiplies it fast, else float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, TypeVar

import torch

from hybridengine.engine.vllm.environment import vllm_available
from hybridengine.kernels import choose_backend, has_fast_products
from hybridengine.model.shared_parameters import untested_torch
from hybridengine.run.config import ConfigError, Dtype, JobConfig, keys_of

__all__ = ["Machine", "describe_precision", "resolve_dtypes"]

ConfigT = TypeVar("ConfigT", bound=JobConfig)

_EXACT_OPERATORS = (
    "decode_linear",
    "rms_norm",
    "gated_activation",
    "paged_attention",
    "tree_attention",
)


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
