"""Whether engine and trainer have the same operators, so that log-probs are equal bit for bit."""

from __future__ import annotations

import warnings

import torch

from hybridengine.kernels import choose_backend
from hybridengine.model.exact import model_obstacle
from hybridengine.model.validation import check_model
from hybridengine.run.config import ConfigError, RLConfig
from hybridengine.run.config.engine_checks import exactness_obstacle
from hybridengine.train.build import engine_name

_KEY = "rollout.exact"
_OPERATORS = ("decode_linear", "rms_norm", "gated_activation", "paged_attention", "tree_attention")
# Compared bit for bit with vLLM's models: tests/rollout/test_exact.py.
_COMPARED = ("gemma", "llama", "mistral", "qwen2", "qwen3")


def inexact_reason(config: RLConfig) -> str | None:
    """Return why engine and trainer have operators of their own; None if they have the same ones.

    config: with data types in place of `auto`, or their check against each other is left out.

    Raises ConfigError: `rollout.exact` is on, and that is impossible.
    """
    chosen = config.rollout.exact
    if chosen == "off":
        return f"{_KEY} is off"
    obstacle = exactness_obstacle(config) or _obstacle(config)
    if chosen == "auto":
        obstacle = obstacle or _doubt(config)
    if obstacle is None:  # last, as it builds the model on the meta device
        model, trust = config.model, config.model.trust_remote_code
        obstacle = model_obstacle(check_model(model.path, trust, model.config_overrides), trust)
    if obstacle and chosen == "on":
        raise ConfigError(
            f"{_KEY} is on, but {obstacle}; set {_KEY}=auto to train without exact log-probs"
        )
    if obstacle is None and torch.cuda.is_available():
        warnings.warn(
            f"{_KEY} is on: on GPUs nobody has compared engine and trainer bit for bit; the run "
            "ends where a log-prob differs",
            stacklevel=2,
        )
    return obstacle


def _obstacle(config: RLConfig) -> str | None:
    """Return what the engine or this machine lacks."""
    if engine_name(config) != "vllm":
        return "the engine is plain generate (rollout.name), and the operators replace vLLM's"
    on_gpu = torch.cuda.is_available()
    device, kernels = ("cuda", "triton") if on_gpu else ("cpu", "cpp")
    if lacking := [op for op in _OPERATORS if choose_backend(op, torch.device(device)) != kernels]:
        language = "Triton" if on_gpu else "C++"
        return f"{lacking[0]} has no {language} kernel here (see `hybridengine env`)"
    return None


def _doubt(config: RLConfig) -> str | None:
    """Return what nobody has compared bit for bit, or what exact log-probs are no use for."""
    if config.rollout.servers:
        return f"rollout.servers may have other operators; start exact ones, and set {_KEY}=on"
    if config.overlaps:
        return f"trainer.mode is {config.trainer.mode}, in which the engine's weights are older"
    model, trust = config.model, config.model.trust_remote_code
    kind = check_model(model.path, trust, model.config_overrides).model_type
    advice = f"set {_KEY}=on to try it"
    if torch.cuda.is_available():
        return f"log-probs were not compared bit for bit on a GPU; {advice}"
    if kind not in _COMPARED or trust:
        code = " of remote code" if trust else ""
        return f"models of the type {kind}{code} were not compared with vLLM's; {advice}"
    if config.rollout.engine_kwargs.vllm:
        return f"rollout.engine_kwargs.vllm is given; {advice}"
    return None
