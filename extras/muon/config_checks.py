"""Check the keys of optimizers other than AdamW, see `run.config.validation`."""

from __future__ import annotations

from collections.abc import Iterator

from hybridengine.muon.options import Options
from hybridengine.run import plugins
from hybridengine.run.config.common import JobConfig, SFTConfig
from hybridengine.run.config.rl import RLConfig
from hybridengine.run.errors import ModelError


def find_faults(config: JobConfig) -> Iterator[str]:
    """Yield a sentence for each setting of an optimizer that contradicts another."""
    if isinstance(config, RLConfig):
        optim, group = config.actor.optim, "actor.optim"
    elif isinstance(config, SFTConfig):
        optim, group = config.optim, "optim"
    else:
        return
    given, known = dict(optim.override_optimizer_config), ["adamw", *plugins("optimizers")]
    if optim.name not in known:
        yield f"{group}.name is {optim.name!r}; choose from {', '.join(known)}"
    elif optim.name == "adamw" and given:
        yield (
            f"{group}.override_optimizer_config is {given}, but adamw has no further options; "
            f"set {group}.name=muon or leave it out"
        )
    elif optim.name == "muon":
        if config.model.lora_rank:
            yield (
                f"{group}.name is muon and model.lora_rank is {config.model.lora_rank}, but Muon "
                "does not update the factors of adapters; set it to 0, or take adamw"
            )
        if isinstance(config, SFTConfig) and config.model.fsdp_config.offload_policy:
            yield (
                f"{group}.name is muon and model.fsdp_config.offload_policy is true, by which the "
                "host would orthogonalize all matrices; set it to false (optimizer_offload keeps "
                "the momentum in host memory), or take adamw"
            )
        try:
            Options.of(given)
        except ModelError as error:
            yield f"{group}.name is muon: {error}"
