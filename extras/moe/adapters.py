"""Low-rank adapters of fused experts, as they merge into sharded weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hybridengine.sync.adapter import Adapter
from hybridengine.sync.shards import Box, full_tensor, local_shard

__all__ = ["ExpertAdapter", "adapter_of", "expert_factors"]


@dataclass(frozen=True)
class ExpertAdapter(Adapter):
    """The updates `scale * B_e @ A_e` of the weights of all experts e of a layer, [E, out, in].

    left: [out, r * E], whose column i * E + e is column i of B_e; or [out, r], one B of all
      experts. It is stored as PEFT does for `target_parameters`, and so is
    right: [E * r, in], whose rows from e * r are A_e; or [r, in], one A of all experts.
    rank: r.
    num_experts: E.
    transposed: the weight is [E, in, out].
    """

    of_experts: ClassVar[bool] = True
    rank: int
    num_experts: int
    transposed: bool

    def factors_of_box(
        self, base: torch.Tensor, origin: Sequence[int], box: Box
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        left, right = expert_factors(full_tensor(self.left), full_tensor(self.right), self.rank)
        if self.transposed:
            left, right = right.transpose(1, 2), left.transpose(1, 2)
        experts, rows, columns = (slice(*positions) for positions in box)
        left, right = (f.expand(self.num_experts, -1, -1)[experts] for f in (left, right))
        return zip(left[:, rows], right[:, :, columns], strict=True)

    def bytes_gathered(self, base: torch.Tensor) -> int:
        factors = (self.left, self.right)
        return sum((f.numel() - local_shard(f).numel()) * f.element_size() for f in factors)


def expert_factors(
    left: torch.Tensor, right: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return B [E, out, r] and A [E, r, in] of the factors of an `ExpertAdapter`, as views.

    A factor of all experts has 1 in place of E.
    """
    of_left = left.view(left.shape[0], rank, -1).permute(2, 0, 1)
    return of_left, right.view(-1, rank, right.shape[1])


def adapter_of(layer: Any) -> Adapter:
    """Return the adapter of PEFT's `layer`, a `ParamWrapper` of a weight of fused experts."""
    (key,) = layer.active_adapters
    return ExpertAdapter(
        layer.lora_B[key].weight.detach(),
        layer.lora_A[key].weight.detach(),
        layer.scaling[key],
        rank=layer.r[key],
        num_experts=layer.num_experts,
        transposed=layer.get_base_layer().is_transposed,
    )
