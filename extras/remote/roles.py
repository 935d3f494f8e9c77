"""Split the ranks of one torchrun world into trainer ranks, engine ranks and ranks of the critic.

All trainer ranks form one torch.distributed world, the ranks of each engine (one tensor-parallel
group) another, and those of a critic on ranks of its own a third. Code that asks for the
rank or the world size sees its own world.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from hybridengine.remote.messages import wait_until
from hybridengine.run.failures import RESTART_COUNT
from hybridengine.run.messages import SignedStore
from hybridengine.run.rank import connect_store
from hybridengine.run.session import World

SYNC_SHARE = 0.8  # of trainer.timeout_s: a sync gives up before the trainers' collectives do


@dataclass(frozen=True)
class Role:
    """The role of one rank of the torchrun world.

    rank, world_size: its rank in its own world, and the size of that world.
    local_world_size: how many ranks of its own world are on this machine.
    engine: the number of its engine; None for other ranks.
    uses_device: False for a rank that leaves generation to servers.
    """

    kind: Literal["trainer", "engine", "critic"]
    rank: int
    world_size: int
    local_world_size: int
    engine: int | None = None
    uses_device: bool = True

    @property
    def world(self) -> str:
        """Name of its world, for stores and messages."""
        return self.kind if self.engine is None else f"engine {self.engine}"

    @property
    def name(self) -> str:
        """Its own name, for stores and messages."""
        return self.name_of(self.world, self.rank)

    @staticmethod
    def name_of(world: str, rank: int) -> str:
        return f"{world}, rank {rank}"


@dataclass(frozen=True)
class Roles:
    """How many ranks of each machine train, generate, and have the critic alone, in this order.

    tp_size: consecutive engine ranks that form one engine.
    uses_servers: engine ranks leave generation to servers, and use no device.
    """

    num_nodes: int
    trainers_per_node: int
    engines_per_node: int
    tp_size: int
    critics_per_node: int = 0
    uses_servers: bool = False

    @property
    def num_trainers(self) -> int:
        return self.num_nodes * self.trainers_per_node

    @property
    def num_engines(self) -> int:
        return self.num_nodes * self.engines_per_node // self.tp_size

    @property
    def num_critics(self) -> int:
        return self.num_nodes * self.critics_per_node

    @property
    def ranks_per_node(self) -> int:
        return self.trainers_per_node + self.engines_per_node + self.critics_per_node

    def role_of(self, rank: int) -> Role:
        """Return the role of a rank of the torchrun world.

        Examples:
            >>> Roles(1, trainers_per_node=2, engines_per_node=2, tp_size=1).role_of(3).world
            'engine 1'
        """
        node, local = divmod(rank, self.ranks_per_node)
        if local < self.trainers_per_node:
            own = node * self.trainers_per_node + local
            return Role("trainer", own, self.num_trainers, self.trainers_per_node)
        local -= self.trainers_per_node
        if local >= self.engines_per_node:
            own = node * self.critics_per_node + local - self.engines_per_node
            return Role("critic", own, self.num_critics, self.critics_per_node)
        index = node * self.engines_per_node + local
        engine, own = divmod(index, self.tp_size)
        local_size = min(self.tp_size, self.engines_per_node)
        return Role("engine", own, self.tp_size, local_size, engine, not self.uses_servers)


@dataclass(frozen=True)
class RoleLink:
    """The connection between the worlds of all roles: a store that all ranks reach.

    store: a store with a connection of its own. Its keys begin with a name that no restart and no
      other use of the `TCPStore` shares.
    address: (host, port) of the `TCPStore`.
    """

    roles: Roles
    role: Role
    store: SignedStore
    timeout_s: float
    address: tuple[str, int] = ("", 0)

    def announce(self) -> None:
        """Tell the ranks of the other worlds that this one has started."""
        self.store.set(f"started/{self.role.name}", True)

    def group(self, name: str, members: Sequence[str]) -> Any:
        """Make a gloo group of ranks of several roles, this one among them.

        members: their names, see `Role.name`; the order is that of their ranks in the group.

        Raises DistError, a timeout, if a member does not come within `timeout_s`. The time in which
        one has not even started does not count: the monitor of ranks limits it.
        """

        def late(kind: str) -> list[str]:
            return [member for member in members if not self.store.has(f"{kind}/{member}")]

        own = members.index(self.role.name)
        self.store.set(f"{name}/{self.role.name}", True)
        wait_until(
            lambda: not late(name) or None,
            self.timeout_s,
            lambda: f"{' and '.join(late(name))} to connect to {self.role.name}",
            lambda: bool(late("started")),
        )
        timeout = timedelta(seconds=self.timeout_s)
        return dist.ProcessGroupGloo(self.store.substore(name), own, len(members), timeout)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Tell the ranks of the other worlds that those of this one wait for a disk."""
        self.store.set("writing", True)
        try:
            yield
        finally:
            self.store.set("writing", False)

    def is_writing(self) -> bool:
        """Return whether the ranks of another world wait for a disk: they give no work."""
        return bool(self.store.get("writing", bool))


class RoleWorld(World):
    """This rank's world, one of those into which `roles` split the ranks of torchrun.

    link: to the other worlds, from `join` on.
    """

    link: RoleLink

    def __init__(self, roles: Roles) -> None:
        self._roles, self.role = roles, roles.role_of(int(os.environ["RANK"]))
        self.name, self.uses_device = self.role.world, self.role.uses_device

    @property
    def num_ranks(self) -> int:
        return self._roles.num_nodes * self._roles.ranks_per_node

    def join(self, store: dist.Store, timeout_s: float) -> None:
        """Initialize the default process group of this rank's own world.

        Torchrun's variables then describe that world, as vLLM and `torch.distributed` expect; only
        LOCAL_RANK, the number of the device, stays.
        """
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        prefix = f"hybridengine/roles/{os.environ.get(RESTART_COUNT, '0')}"
        store_of_all = connect_store(timeout_s)
        own = SignedStore(store_of_all, prefix)
        os.environ.update(
            RANK=str(self.role.rank),
            WORLD_SIZE=str(self.role.world_size),
            LOCAL_WORLD_SIZE=str(self.role.local_world_size),
        )
        dist.init_process_group(
            self.backend,
            store=own.substore(self.role.world),
            rank=self.role.rank,
            world_size=self.role.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        self.link = RoleLink(
            self._roles, self.role, SignedStore(store_of_all, f"{prefix}/link"), timeout_s, address
        )
        self.link.announce()

    def writing(self) -> AbstractContextManager[None]:
        return self.link.writing()
