"""Muon over FSDP2 shards: every matrix is orthogonalized once, on one rank.

The momentum's slices of a matrix travel to its owner and the update's slices back (`exchange`);
owners are chosen so that all ranks have about as much work (`owners`). The usual form gathers every
matrix on every rank, and all ranks do the same work. An update is that of `torch.optim.Muon`.
Source: Keller Jordan, "Muon: An optimizer for hidden layers in neural networks".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridengine.model.optim import AdamW
from hybridengine.model.parameters import unwrapped_name
from hybridengine.muon.exchange import OrthogonalExchange
from hybridengine.muon.options import Options
from hybridengine.run.errors import ModelError
from hybridengine.sync.shards import ShardSpec, unite_holders

__all__ = ["Muon"]

_CONVOLUTION = nn.modules.conv._ConvNd


class Muon(AdamW):
    """Updates matrices by Muon, all other parameters by AdamW.

    Matrices are trained parameters [M, N], or [E, M, N] (E matrices, the weights of experts), of at
    least two rows and columns. AdamW updates embeddings, the output head, convolutions, biases and
    what `Options.adamw` names. Both take `lr` and `weight_decay` as `AdamW` does.

    Raises:
        ModelError: the model has LoRA adapters or no matrices, or an option is wrong.
    """

    def __init__(self, model: nn.Module, local: Mapping[str, nn.Parameter], **options: Any) -> None:
        shared = {key: options.pop(key) for key in ("lr", "betas", "eps", "weight_decay")}
        super().__init__(model, local, **shared)
        self._options = Options.of(options)
        named = dict(model.named_parameters())
        names = _matrix_names(model, local, self._options.adamw)
        self._placed = {name: named[name] for name in names}
        self._matrices = {name: local[name] for name in names}
        self._rows = _split_rows(self._placed, self._options.split)
        self._exchange: OrthogonalExchange | None = None

    def new_state(self, local: nn.Parameter) -> dict[str, Tensor]:
        if any(local is matrix for matrix in self._matrices.values()):
            return {"momentum_buffer": torch.zeros_like(local)}
        return super().new_state(local)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update by the gradients divided by `grad_scale`, unless `found_inf`. Collective.

        A device is not waited for: a skipped update computes with other gradients and adds 0.
        """
        given = {name: local.grad for name, local in self._matrices.items()}
        for local in self._matrices.values():
            local.grad = None  # AdamW leaves these out
        [group] = self.param_groups
        lr, weight_decay = group["lr"], group["weight_decay"]
        group["lr"] = lr * self._options.adamw_lr_ratio
        super().step()
        group["lr"] = lr
        gradients = {n: grad.contiguous() for n, grad in given.items() if grad is not None}
        updates, decay = self._updates(gradients), 1 - lr * weight_decay
        if self.found_inf is not None:
            is_skipped = self.found_inf > 0
            decay = torch.where(is_skipped, 1.0, decay)
            for update in updates:
                update.masked_fill_(is_skipped, 0)
        trained: list[Tensor] = [self._matrices[name] for name in gradients]
        if not trained:
            return
        torch._foreach_mul_(trained, decay)
        rates = [-lr * self._lr_factor(name) for name in gradients]
        for rate in set(rates):
            some = [i for i, own in enumerate(rates) if own == rate]
            torch._foreach_add_([trained[i] for i in some], [updates[i] for i in some], alpha=rate)

    def _updates(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the orthogonalized update of each gradient, in its memory. Collective."""
        grads, momentum = list(gradients.values()), self._options.momentum
        if grads:
            if self.grad_scale is not None:
                torch._foreach_div_(grads, self.grad_scale)
            buffers = [self._buffer(name) for name in gradients]
            if self.found_inf is not None:  # from a momentum to itself: no bit changes
                is_skipped = self.found_inf > 0
                for grad, buffer in zip(grads, buffers, strict=True):
                    torch.where(is_skipped, buffer, grad, out=grad)
            torch._foreach_lerp_(buffers, grads, 1 - momentum)
            if self._options.nesterov:
                torch._foreach_lerp_(grads, buffers, momentum)
            else:
                torch._foreach_copy_(grads, buffers)
        # Owners expect all slices, those of a matrix without a gradient, too.
        zeros = {n: torch.zeros_like(m) for n, m in self._matrices.items() if n not in gradients}
        self.exchange().run({**gradients, **zeros})
        return grads

    def _buffer(self, name: str) -> Tensor:
        state = self.state[self._matrices[name]]
        if not state:
            state.update(self.new_state(self._matrices[name]))
        buffer: Tensor = state["momentum_buffer"]
        return buffer

    def exchange(self) -> OrthogonalExchange:
        """Return what moves matrices between ranks. The first call is collective."""
        if self._exchange is None:
            rank, world_size = 0, 1
            if dist.is_initialized():
                rank, world_size = dist.get_rank(), dist.get_world_size()
            specs = {n: ShardSpec.of(n, p, world_size) for n, p in self._placed.items()}
            if world_size > 1:
                specs = unite_holders(specs)
            device = next(iter(self._matrices.values())).device
            dtype: torch.dtype = getattr(torch, self._options.ns_dtype)
            self._exchange = OrthogonalExchange(specs, rank, world_size, device, dtype, self._rows)
        return self._exchange

    def _lr_factor(self, name: str) -> float:
        rows, columns = self._placed[name].shape[-2:]
        rows = self._rows.get(name, rows)
        if self._options.adjust_lr_fn == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def _matrix_names(
    model: nn.Module, trained: Mapping[str, nn.Parameter], patterns: Sequence[str]
) -> list[str]:
    """Return the trained parameters that Muon updates."""
    adapters = next((name for name in trained if ".lora_" in name), None)
    if adapters is not None:
        raise ModelError(
            f"optim.name is muon, and {adapters!r} is a factor of a LoRA adapter: the product of "
            "orthogonal factors is no orthogonal update; set optim.name=adamw or model.lora_rank=0"
        )
    left_out = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding | _CONVOLUTION)
        for p in module.parameters(recurse=False)
    }
    if (head := getattr(model, "get_output_embeddings", lambda: None)()) is not None:
        left_out |= {id(p) for p in head.parameters()}

    def is_matrix(name: str, parameter: Tensor) -> bool:
        shape, own = parameter.shape, unwrapped_name(name)
        return (
            len(shape) in (2, 3)
            and min(shape[-2:]) > 1
            and id(parameter) not in left_out
            and "bias" not in own.rpartition(".")[2]
            and not any(re.search(pattern, own) for pattern in patterns)
        )

    names = [n for n, p in model.named_parameters() if n in trained and is_matrix(n, p)]
    if not names:
        raise ModelError(
            f"optim.name is muon, but none of the {len(trained)} trained parameters of "
            f"{type(model).__name__} is a matrix that it updates; set optim.name=adamw"
        )
    return names


def _split_rows(matrices: Mapping[str, Tensor], split: Mapping[str, int]) -> dict[str, int]:
    """Return the rows of each matrix of the parameters that `split` names."""
    found: dict[str, int] = {}
    for pattern, rows in split.items():
        names = [name for name in matrices if re.search(pattern, unwrapped_name(name))]
        for name in names:
            if found.setdefault(name, rows) != rows or matrices[name].shape[-2] % rows:
                raise ModelError(
                    f"optim.override_optimizer_config.split: {pattern!r} divides {name!r} into "
                    f"matrices of {rows} rows, but it has {matrices[name].shape[-2]}, or another "
                    "expression divides it otherwise; give a number that divides its rows"
                )
        if not names:
            raise ModelError(
                f"optim.override_optimizer_config.split: no matrix that Muon updates has "
                f"{pattern!r} in its name; remove it"
            )
    return found
