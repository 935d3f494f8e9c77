"""Split the ranks of one torchrun world into trainer ranks and engine ranks.

All trainer ranks form one torch.distributed world, and the ranks of each engine (one
tensor-parallel group) another. Code that asks for the rank or the world size sees its own world.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist


@dataclass(frozen=True)
class Role:
    """What one rank of the torchrun world is.

    engine: number of its engine; None for a trainer rank. rank, world_size, local_world_size: in
    its own world, the last one of its ranks on this machine.
    """

    kind: Literal["trainer", "engine"]
    rank: int
    world_size: int
    local_world_size: int
    engine: int | None = None

    @property
    def world(self) -> str:
        """Name of its world, for stores and messages."""
        return "trainer" if self.engine is None else f"engine {self.engine}"


@dataclass(frozen=True)
class Roles:
    """How many ranks of each machine train, and how many generate.

    The first ranks of a machine train. tp_size: consecutive engine ranks that form one engine.
    """

    num_nodes: int
    trainers_per_node: int
    engines_per_node: int
    tp_size: int

    @property
    def num_trainers(self) -> int:
        return self.num_nodes * self.trainers_per_node

    @property
    def num_engines(self) -> int:
        return self.num_nodes * self.engines_per_node // self.tp_size

    def role_of(self, rank: int) -> Role:
        """Return the role of a rank of the torchrun world.

        Example:
            >>> Roles(1, trainers_per_node=2, engines_per_node=2, tp_size=1).role_of(3).world
            'engine 1'
        """
        node, local = divmod(rank, self.trainers_per_node + self.engines_per_node)
        if local < self.trainers_per_node:
            own = node * self.trainers_per_node + local
            return Role("trainer", own, self.num_trainers, self.trainers_per_node)
        index = node * self.engines_per_node + local - self.trainers_per_node
        engine, own = divmod(index, self.tp_size)
        return Role("engine", own, self.tp_size, min(self.tp_size, self.engines_per_node), engine)


@dataclass(frozen=True)
class Link:
    """What connects the worlds of trainer and engines: a store that all ranks reach.

    store: of a connection of its own, with keys that no restart and no other use shares.
    """

    roles: Roles
    role: Role
    store: dist.Store
    timeout_s: float


def join_world(roles: Roles, rank: int, backend: str, timeout_s: float) -> Link:
    """Initialize the default process group of this rank's own world.

    Torchrun's variables then describe that world, as vLLM and `torch.distributed` expect; only
    LOCAL_RANK, the number of the device, stays. rank: of the torchrun world.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_s)
    connection = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"hybridengine/roles/{attempt}", connection)
    role = roles.role_of(rank)
    os.environ.update(
        RANK=str(role.rank),
        WORLD_SIZE=str(role.world_size),
        LOCAL_WORLD_SIZE=str(role.local_world_size),
    )
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(role.world, store),
        rank=role.rank,
        world_size=role.world_size,
        timeout=timeout,
    )
    return Link(roles, role, dist.PrefixStore("link", store), timeout_s)
