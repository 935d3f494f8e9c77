"""A matrix product for vLLM engines with FP8 weights on CPUs without AMX, where vLLM has none."""

from __future__ import annotations

import torch

__all__ = ["register_kernel"]


def register_kernel() -> None:
    """Let vLLM multiply by dequantized weights; it quantizes them as on any other device."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
        Fp8BlockScaledMMLinearKernel,
    )
    from vllm.platforms import PlatformEnum

    class DequantizingKernel(Fp8BlockScaledMMLinearKernel):
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(
            self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
        ) -> torch.Tensor:
            n, k = B.shape
            scale = Bs.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
            return torch.nn.functional.linear(A.float(), B.float() * scale)

    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [DequantizingKernel]
