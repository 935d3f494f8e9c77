"""Expert parallelism: a rank holds a part of every layer's experts, and tokens go to their experts.

The weights of the experts are divided over the ranks of a group (dimension 0), and FSDP2 shards
each part over the ranks that hold it (dimension 1), so no rank gathers all experts of a layer. Each
rank sends its tokens to the ranks of their experts and gets the results back: two all-to-alls in
forward and two in backward. All other parameters are sharded over all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hybridengine.run.errors import ModelError
from hybridengine.sync.shards import local_shard

EXPERT_GROUP = "hybridengine_expert_group"  # attribute of experts: their process group
EXPERT_DIM = "ep"  # of the mesh over which experts are divided, as transformers names it


def distribute_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Divide the experts of `model`, on the meta device, over a mesh; return their modules.

    mesh: [ranks that hold the same experts, ranks that hold different ones (EXPERT_DIM)].

    Raises:
        ModelError: the model has no experts that transformers' experts interface runs, their number
            or a dimension of a weight is not divisible, or they have adapters.
    """
    found = [m for m in model.modules() if hasattr(m, "is_transposed") and hasattr(m, "has_gate")]
    num_shards, size = mesh.shape
    key = f"expert_parallel_size={size}"
    if not found:
        raise ModelError(
            f"{key}, but {type(model).__name__} has no experts that transformers' experts "
            "interface runs; set it to 1"
        )
    if any("lora_" in name for name, _ in model.named_parameters() if ".experts." in name):
        raise ModelError(f"{key} does not divide adapters of experts; leave target_parameters out")
    for module in found:
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.shape[0] % size or weight.shape[1] % num_shards:
                raise ModelError(
                    f"{key} on {num_shards * size} ranks does not divide {name} of "
                    f"{type(module).__name__}, {list(weight.shape)}, into {size} parts of its "
                    f"experts, and those into {num_shards} of dimension 1"
                )
            part = weight.new_empty(weight.shape[0] // size, *weight.shape[1:])
            placed = DTensor.from_local(part, mesh[EXPERT_DIM], [Shard(0)], run_check=False)
            module.register_parameter(name, nn.Parameter(placed, weight.requires_grad))
        setattr(module, EXPERT_GROUP, mesh.get_group(EXPERT_DIM))
    return found


class TokenExchange:
    """Sends rows to the ranks of their experts, and what becomes of them back.

    cu_counts: [E + 1], the rows of this rank by expert of all ranks.

    Attributes:
        cu_counts: [E / ranks + 1] int32, the received rows by expert of this rank.
    """

    def __init__(self, cu_counts: Tensor, group: dist.ProcessGroup) -> None:
        size = group.size()
        sent = cu_counts.diff().view(size, -1)
        received = torch.empty_like(sent)  # by source, then by expert
        dist.all_to_all_single(received, sent.contiguous(), group=group)
        self._group = group
        self._sent, self._received = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        experts = torch.arange(sent.shape[1], device=sent.device).repeat(size)
        self._order = experts.repeat_interleave(received.flatten()).argsort(stable=True)
        self._position = torch.empty_like(self._order)
        self._position[self._order] = torch.arange(len(self._order), device=sent.device)
        counts = received.sum(0, dtype=torch.int32)
        self.cu_counts = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])

    def send(self, rows: Tensor) -> Tensor:
        """Return this rank's experts' rows of all ranks, sorted by expert."""
        rows = _AllToAll.apply(rows, self._sent, self._received, self._group)
        return Rows.apply(rows, self._order, self._position, 1)

    def send_back(self, rows: Tensor) -> Tensor:
        """Return the results of the rows that this rank sent, in their order."""
        rows = Rows.apply(rows, self._position, self._order, 1)
        return _AllToAll.apply(rows, self._received, self._sent, self._group)


def local_experts(weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of a weight that FSDP2 has gathered.

    Its gradient is over the tokens of all ranks of `group`. FSDP2 takes the mean over the ranks
    that hold the part, so that it is divided by the size of the group for a mean over all ranks.
    """
    return _ScaledGradient.apply(local_shard(weight), 1 / group.size())


class _ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by `scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad * ctx.scale, None


class _AllToAll(torch.autograd.Function):
    """sent[r] consecutive rows go to rank r, received[r] come from it; back in backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.arguments = received, sent, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grad, *ctx.arguments), None, None, None


def _all_to_all(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group)
    return out


class Rows(torch.autograd.Function):
    """x[index], where every row of x is taken `copies` times.

    position: [len(x) * copies], where the copies of row 0, of row 1 and so on are in `index`. So
    the gradient is read by rows too, and the sum over copies has a fixed order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, position: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(position)
        ctx.copies = copies
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (position,) = ctx.saved_tensors
        rows = grad.index_select(0, position)
        if ctx.copies > 1:
            rows = rows.view(-1, ctx.copies, rows.shape[1]).sum(1)
        return rows, None, None, None
