"""A `Mode` says what the ranks of a job do: everything on all of them, or what it assigns to each.

Other modes register themselves in the entry-point group `hybridengine.modes`, each under the value
of `trainer.mode`, or under `servers` or `critic_ranks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hybridengine.run import load_plugin
from hybridengine.run.config import JobConfig, RLConfig
from hybridengine.run.rank import run_rank
from hybridengine.run.session import Session

if TYPE_CHECKING:  # the launcher, which needs only an address, does not load a trainer
    from hybridengine.train.build import RunData
    from hybridengine.train.choices import Choices
    from hybridengine.train.models import ExternalCritic
    from hybridengine.train.rollout_source import RolloutSource


class Mode:
    """Every rank trains and generates. Other modes override these methods."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config

    def prepare_network(self) -> str:
        """Prepare the network of this process; return the address of the ranks' store.

        "" is every address of this machine.
        """
        return "127.0.0.1"

    def run(self, train: Callable[[Session], None]) -> int:
        """Run one rank and return its exit code, see `run_rank`. train: runs a trainer rank."""
        trainer = self.config.trainer
        return run_rank(train, trainer.default_local_dir, trainer.timeout_s)

    def rollouts(
        self, config: RLConfig, choices: Choices, session: Session, data: RunData
    ) -> RolloutSource:
        """Return where a trainer rank gets its rollouts from. config: with resolved dtypes."""
        from hybridengine.train.rollout_source import ColocatedRollouts

        return ColocatedRollouts(config, choices, session, data)

    def critic(self, config: RLConfig, session: Session, num_updates: int) -> ExternalCritic | None:
        """Return the critic that is on other ranks; None: the trainer ranks have it, if any.

        config: with resolved dtypes.
        num_updates: the critic's optimizer steps in the whole run.
        """
        return None


def mode_of(config: JobConfig) -> Mode:
    """Return the mode of a run; ConfigError if no installed package registers it."""
    if not isinstance(config, RLConfig):
        return Mode(config)
    name: str = config.trainer.mode
    key = "trainer.mode"
    if name == "sync" and config.rollout.servers:
        name, key = "servers", "rollout.servers"
    elif name == "sync" and config.num_critic_ranks:
        name, key = "critic_ranks", "critic.n_gpus_per_node"
    if name == "sync":
        return Mode(config)
    mode: Mode = load_plugin("modes", name, key)(config)
    return mode
