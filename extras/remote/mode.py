"""The modes in which ranks have roles: trainers, engines, and the critic on ranks of its own."""

from __future__ import annotations

from collections.abc import Callable

from hybridengine.remote.roles import RoleLink, Roles, RoleWorld
from hybridengine.remote.servers.client import has_remote, prepare_network
from hybridengine.run.config import JobConfig, RLConfig
from hybridengine.run.rank import run_rank
from hybridengine.run.session import Session
from hybridengine.train.build import RunData
from hybridengine.train.choices import Choices
from hybridengine.train.models import ExternalCritic
from hybridengine.train.modes import Mode
from hybridengine.train.rollout_source import RolloutSource


class RoleMode(Mode):
    """`trainer.mode` one_step_off and async, `rollout.servers`, `critic.n_gpus_per_node`."""

    config: RLConfig
    _link: RoleLink  # of this rank, while it runs

    def __init__(self, config: JobConfig) -> None:
        assert isinstance(config, RLConfig)
        super().__init__(config)

    def prepare_network(self) -> str:
        servers = self.config.rollout.servers
        prepare_network(servers)
        return "" if has_remote(servers) else "127.0.0.1"

    def run(self, train: Callable[[Session], None]) -> int:
        config, trainer, rollout = self.config, self.config.trainer, self.config.rollout
        world = RoleWorld(
            Roles(
                trainer.nnodes,
                trainer.n_gpus_per_node,
                config.engine_ranks_per_node,
                rollout.tensor_model_parallel_size,
                uses_servers=bool(rollout.servers),
                critics_per_node=config.critic.n_gpus_per_node,
            )
        )

        def main(session: Session) -> None:
            self._link = world.link
            if world.role.kind == "trainer":
                train(session)
            elif world.role.kind == "critic":
                from hybridengine.remote.critic.worker import CriticWorker

                CriticWorker(session, world.link).run()
            else:
                from hybridengine.remote.overlap import RolloutWorker

                RolloutWorker(config, session, world.link).run()

        prepare_network(rollout.servers)
        return run_rank(main, trainer.default_local_dir, trainer.timeout_s, world)

    def rollouts(
        self, config: RLConfig, choices: Choices, session: Session, data: RunData
    ) -> RolloutSource:
        if not config.overlaps:
            return super().rollouts(config, choices, session, data)
        from hybridengine.remote.overlap import OverlappedRollouts

        return OverlappedRollouts(config, choices, session, self._link, data)

    def critic(self, config: RLConfig, session: Session, num_updates: int) -> ExternalCritic | None:
        if not config.num_critic_ranks:
            return None
        from hybridengine.remote.critic.remote import RemoteCritic

        return RemoteCritic(config, session, self._link, num_updates)
