"""One AdamW update of a model's shards, without and with the elements that change in bfloat16.

The share that changes is chosen by the learning rate: weights are uniform in [1, 2), where
neighbours in bfloat16 are 2^-7 apart, and every update has size lr, so it changes the rounded value
of a share 2^7 lr of them. The baseline finds changes by comparing with what was sent last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hybridengine.kernels import adamw_, change_mask, take_changed
from torch import Tensor

from benchmarks._bench import OURS, Bench

SHARES = (0.001, 0.01, 0.1)
BETAS, EPS = (0.9, 0.95), 1e-8
UPDATE_BYTES = 28  # of an element: four arrays are read, three written
CHANGE_BYTES = 6  # of a changed element: int32 index, bfloat16 value


@dataclass
class State:
    """Shards and their state, in which every update has size lr and the sign of the gradient."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]

    @classmethod
    def of(cls, sizes: list[int], device: torch.device) -> State:
        params = [torch.rand(n, device=device) + 1 for n in sizes]
        grads = [torch.randn(n, device=device) for n in sizes]
        squares = [g.square() for g in grads]
        steps = [torch.tensor(1e4, device=device) for _ in sizes]
        return cls(params, grads, [g.clone() for g in grads], squares, steps)

    def ours(self, lr: float, **options: Any) -> None:
        adamw_(
            self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, self.steps,
            lr=lr, betas=BETAS, eps=EPS, weight_decay=0.0, **options,
        )  # fmt: skip

    def fused(self, lr: float) -> None:
        torch._fused_adamw_(
            self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, [], self.steps,
            lr=lr, beta1=BETAS[0], beta2=BETAS[1], weight_decay=0.0, eps=EPS,
            amsgrad=False, maximize=False,
        )  # fmt: skip


def run(bench: Bench) -> None:
    # One layer of a 7B model on one of four ranks, and norms; repeated.
    layer = [4096 * 1024] * 4 + [4096 * 2752] * 3 + [1024] * 2
    layers = 16 if bench.device.type == "cuda" else 1
    sizes = [4000, 10, 333] if bench.quick else layer * layers
    numel = sum(sizes)
    state = State.of(sizes, bench.device)
    shape = f"{numel / 1e6:.0f}M in {len(sizes)}"
    calls: dict[str, Callable[[], object]] = {
        OURS: lambda: state.ours(1e-6),
        "torch fused": lambda: state.fused(1e-6),
    }
    moved = numel * UPDATE_BYTES
    bench.compare("adamw", "update", shape, torch.float32, calls, bytes_moved=moved, peak="copy")
    masks = [change_mask(param) for param in state.params]
    sent = [param.to(torch.bfloat16) for param in state.params]
    for share in SHARES:
        lr = share / 2**7

        def ours(lr: float = lr) -> object:
            state.ours(lr, changed=masks, engine_dtype=torch.bfloat16)
            return take_changed(masks, state.params, dtype=torch.bfloat16)

        def fused(lr: float = lr) -> object:
            state.fused(lr)
            return [changes(param, last) for param, last in zip(state.params, sent, strict=True)]

        calls = {OURS: ours, "torch fused + compare": fused}
        bench.compare(
            "adamw", f"{share:.1%}", shape, torch.float32, calls,
            bytes_moved=round(moved + CHANGE_BYTES * share * numel), peak="copy",
        )  # fmt: skip


def changes(param: Tensor, sent: Tensor) -> tuple[Tensor, Tensor]:
    """Return (index, value) of what differs from `sent`, and update that."""
    new = param.to(torch.bfloat16)
    indices = (new != sent).nonzero().flatten()
    sent.copy_(new)
    return indices.int(), new[indices]
