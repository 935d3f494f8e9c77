"""The arguments of `vllm.LLM`, and which of them `rollout.engine_kwargs.vllm` may have.

Every argument of vLLM 0.32 is in one of the tables of arguments.yaml. One that is in none, as of
another version, is refused: what it does to weights and log-probs is not known.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, PretrainedConfig

from hybridengine.engine.interface import EngineOptions
from hybridengine.engine.vllm.environment import CPU_BLOCK_SIZE, prepare_environment
from hybridengine.model.stored import WRAPPERS, trained_config
from hybridengine.run import load_plugin
from hybridengine.run.config.common import TrainedModelConfig
from hybridengine.run.config.rl import RLConfig
from hybridengine.run.errors import ConfigError, UserError
from hybridengine.run.storage import total_memory

_TABLES = yaml.safe_load(Path(__file__).with_name("arguments.yaml").read_text())
ALLOWED = frozenset(_TABLES["allowed"].split())
REFUSED = {name: f"is set by {key}; use that key" for name, key in _TABLES["keys"].items()} | {
    name: group["why"] for group in _TABLES["refused"] for name in group["arguments"].split()
}


def llm_options(options: EngineOptions) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for an engine without images, adapters or recorders."""
    model, rollout, on_gpu = options.model, options.rollout, torch.cuda.is_available()
    cache = {} if on_gpu else {"block_size": CPU_BLOCK_SIZE}
    quantization: dict[str, Any] = {}
    if rollout.quantization:
        scheme = load_plugin("quantizations", rollout.quantization, "rollout.quantization")
        quantization = scheme.arguments()
    return {
        "model": str(model.path),
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": _AsTrained(model),
        "load_format": "dummy",
        "dtype": rollout.dtype,
        **quantization,
        "skip_tokenizer_init": not rollout.stop,  # which vLLM needs to find texts
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "mamba_ssm_cache_dtype": "float32",  # of recurrent layers; "auto" may round their states
        "seed": options.seed,
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enforce_eager": rollout.enforce_eager,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "kv_cache_memory_bytes": None if on_gpu else int(rollout.kv_cache_gib * 2**30),
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enable_sleep_mode": rollout.free_cache_engine and on_gpu,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": options.record_likely,
        "disable_log_stats": True,
        **cache,
        **rollout.engine_kwargs.vllm,
    }


@dataclass(frozen=True)
class _AsTrained:
    """Makes vLLM's configuration of the model that is trained from that of its checkpoint."""

    model: TrainedModelConfig

    def __call__(self, config: PretrainedConfig) -> PretrainedConfig:
        keep = self.model.keep_vision_tower
        if config.model_type in WRAPPERS and not keep:  # vLLM may have a class of its own
            config = AutoConfig.from_pretrained(self.model.path)
        config = trained_config(config, keep)
        # bfloat16 logits would change probabilities more than all other layers together
        config.update({"head_dtype": "float32"})
        config.get_text_config().update(self.model.config_overrides)
        return config


def find_faults(config: RLConfig) -> Iterator[str]:
    """Yield what vLLM cannot be given of a job's configuration."""
    rollout = config.rollout
    if rollout.quantization and rollout.dtype == "float32":
        yield (
            f"rollout.quantization is {rollout.quantization} and rollout.dtype is float32, but "
            "vLLM quantizes 16-bit weights; set rollout.dtype=bfloat16"
        )
    ranks = rollout.n_gpus_per_node if config.overlaps else config.trainer.n_gpus_per_node
    total, memory = rollout.kv_cache_gib * ranks, total_memory() / 2**30
    if not torch.cuda.is_available() and total > memory:
        yield (
            f"rollout.kv_cache_gib is {rollout.kv_cache_gib:g} on each of {ranks} ranks, "
            f"{total:.1f} GiB in all, but this machine has {memory:.1f} GiB of memory; lower it"
        )
    for check in (prepare_environment, check_plugins):
        try:
            check()
        except UserError as error:
            yield str(error)
    if rollout.engine_kwargs.vllm:
        try:
            check_engine_options(rollout.engine_kwargs.vllm)
        except UserError:  # of the environment, as above
            pass
        except ValueError as error:
            yield f"rollout.engine_kwargs.vllm: {error}"


def check_engine_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError, with a line for each, for arguments that a job cannot pass to `vllm.LLM`.

    An argument that is None is vLLM's default, and passes.
    """
    prepare_environment()
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    faults = []
    for name, value in options.items():
        if value is None or name in ALLOWED:
            continue
        if reason := REFUSED.get(name):
            faults.append(f"{name} {reason}")
        elif name in known:
            faults.append(
                f"{name} is not examined, an argument of vLLM {vllm.__version__}; remove it"
            )
        else:
            close = difflib.get_close_matches(name, ALLOWED, n=1, cutoff=0.8)
            hint = f"did you mean {close[0]}?" if close else "see the arguments of vllm.LLM"
            faults.append(f"{name} is no engine argument of vLLM {vllm.__version__}; {hint}")
    if faults:
        raise ValueError("; ".join(faults))


def check_plugins(advice: str = "uninstall these packages, or set rollout.name=hf") -> None:
    """Raise ConfigError if packages installed here add logits processors to every engine of vLLM.

    advice: what to do then.
    """
    found = [
        f"{entry.name!r} of {entry.dist.name if entry.dist else entry.value}"
        for entry in entry_points(group="vllm.logits_processors")
    ]
    if found:
        raise ConfigError(
            f"vLLM loads the logits processors {', '.join(sorted(found))} from installed packages, "
            f"which would sample from another distribution than the one that is trained; {advice}"
        )
