"""Check the keys of speculative decoding, see `run.config.validation`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hybridengine.run.config.common import JobConfig
from hybridengine.run.config.rl import RLConfig

KEY = "rollout.engine_kwargs.vllm.speculative_config"
_METHODS = {  # the arguments of each, apart from method and num_speculative_tokens
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "mtp": (),
}


def find_faults(config: JobConfig) -> Iterator[str]:
    """Yield a sentence for each setting that contradicts speculative decoding."""
    if not isinstance(config, RLConfig):
        return
    drafting = config.rollout.engine_kwargs.vllm.get("speculative_config")
    if drafting is None:
        return
    if not isinstance(drafting, Mapping):
        yield f"{KEY} is {drafting!r}; expected a mapping such as {{method: ngram, …}}"
        return
    method = str(drafting.get("method"))
    if method not in _METHODS:
        yield (
            f"{KEY}.method is {method!r}, whose drafts are not examined; set it to "
            f"{' or '.join(_METHODS)}"
        )
        return
    if not isinstance(count := drafting.get("num_speculative_tokens"), int) or count < 1:
        yield f"{KEY}.num_speculative_tokens is {count!r}; give a number of tokens, such as 4"
    known = {"method", "num_speculative_tokens", *_METHODS[method]}
    for name in drafting.keys() - known:
        yield f"{KEY}.{name} is not examined with method {method}; remove it"
    for key, is_set in (
        ("actor.router_replay=rollout", config.actor.router_replay == "rollout"),
        ("algorithm.score_centering", config.algorithm.score_centering.enabled),
        ("rollout.min_p", config.rollout.min_p > 0),  # vLLM ignores it there
    ):
        if is_set:
            yield f"{KEY} is set, with which {key} is not examined; remove one"
    if method == "mtp":
        yield from _mtp(config)
    import torch  # not needed by other runs

    if torch.cuda.is_available():
        for key, is_set in (
            ("rollout.exact=on", config.rollout.exact == "on"),
            ("algorithm.sampling_replay", config.replays_sampling),
        ):
            if is_set:
                yield (
                    f"{KEY} is set, and drafts on a GPU are verified by vLLM, without {key}; "
                    "remove one of the two"
                )


def _mtp(config: RLConfig) -> Iterator[str]:
    """Yield what vLLM would not load MTP layers for as the trainer's checkpoint has them."""
    for key, value in (
        ("rollout.quantization", config.rollout.quantization),
        ("reshard.lora", config.reshard.lora if config.reshard.lora == "adapters" else None),
    ):
        if value:
            yield f"{KEY}.method is mtp, which is not examined with {key}={value}; use method ngram"
