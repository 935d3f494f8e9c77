"""Flash attention over packed sequences: the newest kernel that is installed and fits the GPU.

| kernel | package | GPUs |
|---|---|---|
| FlashAttention 4 | `flash_attn.cute` | Blackwell, heads of up to 128; Hopper in place of torch's |
| FlashAttention 3 | `flash_attn_interface` | Hopper |
| FlashAttention 2 | `flash_attn`, else torch's copy of it | Ampere and later |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hybridengine.kernels.attention.flash import ATEN
from hybridengine.kernels.attention.flash_choice import flash_pair
from hybridengine.kernels.attention.op import tokens_first
from hybridengine.kernels.attention.varlen import flash_attention


@dataclass(frozen=True)
class FlashKernel:
    """One implementation of `flash_attn_varlen_func`.

    function: takes q, k, v, and by their names cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
      max_seqlen_k, whose places differ, and options.
    max_head_size: the largest head that it has a backward for.
    no_window: how it names an unlimited window.
    has_softcap: whether it caps logits.
    takes_rows: whether it takes [B, H, L, D], as `flash_attention` does.
    """

    function: Callable[..., Any]
    max_head_size: int = 256
    no_window: int | None = -1
    has_softcap: bool = True
    takes_rows: bool = False

    def fits(self, q: Tensor, v: Tensor, softcap: float | None) -> bool:
        """Return whether it takes q [T, H, D] and v [T, H_kv, D_v]."""
        half = q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16)
        head_size = q.shape[-1]
        sizes = head_size == v.shape[-1] and head_size <= self.max_head_size and head_size % 8 == 0
        return half and sizes and (softcap is None or self.has_softcap)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        scale: float,
        window_size: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Causal attention: q [T, H, D], k and v [T, H_kv, D] -> [T, H, D].

        Or q [B, H, L, D], k and v [B, H_kv, L, D] -> [B, L, H, D], of T = B L tokens.

        Gradients are added in a fixed order where `torch.use_deterministic_algorithms` says so.
        """
        left = self.no_window if window_size is None else window_size - 1
        out = self.function(
            *((q, k, v) if self.takes_rows else map(tokens_first, (q, k, v))),
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen,
            softmax_scale=scale,
            causal=True,
            window_size=(left, 0),
            softcap=softcap or 0.0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        out = out[0] if isinstance(out, tuple) else out  # some return the log-sum-exp, too
        return out if out.dim() == q.dim() else out.unflatten(0, q.shape[::2][:2])


def torch_kernel() -> FlashKernel:
    """Return torch's copy of FlashAttention 2, which is always there, or what `flash_pair` prefers.

    It reads `torch.use_deterministic_algorithms` by itself. Compiled layers call torch's.
    """

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        window_size: tuple[int, int],
        **options: Any,
    ) -> Tensor:
        window = None if window_size[0] < 0 else window_size[0] + 1
        pair = ATEN if torch.compiler.is_compiling() else flash_pair(q.device, q.shape[-1])
        return flash_attention(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window, pair)

    return FlashKernel(attend, has_softcap=False, takes_rows=True)


# (package, major compute capabilities, options), newest first.
_PACKAGES: tuple[tuple[str, Sequence[int], dict[str, Any]], ...] = (
    ("flash_attn.cute", (10, 11), {"max_head_size": 128, "no_window": None}),
    ("flash_attn_interface", (9,), {}),
    ("flash_attn", range(8, 100), {}),
)


def find_flash_kernel(capability: int) -> FlashKernel:
    """Return the newest installed kernel for GPUs of a major compute capability."""
    for package, capabilities, options in _PACKAGES:
        if capability in capabilities:
            with suppress(ImportError, AttributeError):
                return FlashKernel(import_module(package).flash_attn_varlen_func, **options)
    return torch_kernel()


chosen_kernel = torch_kernel()


def choose_flash_kernel(device: torch.device, deterministic: bool = False) -> None:
    """Choose the kernel of this process by the GPU that it computes on.

    Called before a model is built: compiled layers read the choice as a constant.
    deterministic: gradients are added in a fixed order, in attention and wherever torch can; torch
      warns where it cannot.
    """
    global chosen_kernel
    if device.type != "cuda":
        return
    chosen_kernel = find_flash_kernel(torch.cuda.get_device_capability(device)[0])
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def flash_kernel() -> FlashKernel:
    """Return the kernel that `choose_flash_kernel` chose; torch's before that."""
    return chosen_kernel
