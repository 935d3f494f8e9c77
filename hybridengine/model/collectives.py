"""FSDP2's collectives over gloo as direct sends, for models that train on CPUs.

Gloo's own all-gather receives into a temporary buffer of the full size and copies it; its
reduce-scatter all-reduces a copy of the full input, which is twice the traffic. Here every rank
sends each other rank exactly its chunk, from and into the tensors themselves. Buffers and gradients
are reused from step to step: clearing new pages for them costs more than filling them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter

from hybridengine.kernels import empty_from_pool


def use_direct_collectives(module: fsdp.FSDPModule) -> None:
    """Replace the collectives of an FSDP2 module on CPUs; its groups use gloo."""
    module.set_custom_all_gather(DirectAllGather())
    module.set_custom_reduce_scatter(DirectReduceScatter())


class _PooledMemory(Comm):
    """Take buffers, and with them the sharded gradients, from the pool of the last step's."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return empty_from_pool(size, dtype, device)


class DirectAllGather(_PooledMemory, AllGather):
    """Gather one chunk of every rank, in place: the input may be this rank's part of the output."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if async_op:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op=True)
        chunks = list(output_tensor.view(group.size(), -1))
        own = chunks[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        _exchange([own] * group.size(), chunks, group)
        return None


class DirectReduceScatter(_PooledMemory, ReduceScatter):
    """Add one chunk of every rank, in the order of the ranks."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            return dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op, group, async_op=async_op
            )
        sent = list(input_tensor.view(group.size(), -1))
        received = [self.allocate(x.shape, dtype=x.dtype, device=x.device) for x in sent[1:]]
        received.insert(group.rank(), sent[group.rank()])
        _exchange(sent, received, group)
        first, *others = received
        total = output_tensor.copy_(first) if not others else first
        for other in others:
            total = torch.add(total, other, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor /= group.size()
        return None


def _exchange(sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Send sent[r] to rank r and receive received[r] from it, for all ranks r but this one."""
    others = [r for r in range(group.size()) if r != group.rank()]
    works = [dist.irecv(received[r], group=group, group_src=r) for r in others]
    works += [dist.isend(sent[r], group=group, group_dst=r) for r in others]
    for work in works:
        assert work is not None  # this rank is in the group
        work.wait()
