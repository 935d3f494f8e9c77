"""Checkpoints as they are published in FP8 and MXFP4, written from plain ones."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["quantize_fp8", "quantize_mxfp4"]

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def quantize_fp8(folder: Path, size: int) -> None:
    """Store the linear layers of the model in `folder` in FP8 with blocks of `size` x `size`."""

    def quantize(name: str, x: Tensor) -> dict[str, Tensor]:
        if x.ndim != 2 or "proj" not in name:
            return {name: x}
        rows, columns = (-(-n // size) for n in x.shape)
        padded = x.new_zeros(rows * size, columns * size)
        padded[: x.shape[0], : x.shape[1]] = x
        blocks = padded.view(rows, size, columns, size)
        scales = blocks.abs().amax((1, 3)).float().clamp(min=1e-12) / 448
        values = (blocks.float() / scales[:, None, :, None]).view_as(padded)
        values = values[: x.shape[0], : x.shape[1]].to(torch.float8_e4m3fn).contiguous()
        return {name: values, f"{name}_scale_inv": scales}

    _store(folder, quantize, {"quant_method": "fp8", "weight_block_size": [size, size]})


def quantize_mxfp4(folder: Path) -> None:
    """Store the experts of the gpt-oss model in `folder` as it is published."""

    def quantize(name: str, x: Tensor) -> dict[str, Tensor]:
        if x.ndim != 3 or not name.endswith("_proj"):
            return {name: x}
        blocks = x.mT.reshape(x.shape[0], x.shape[2], x.shape[1] // 32, 32).float()  # of the inputs
        exponents = (blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 6).log2().ceil()
        scaled = blocks / exponents.exp2()
        codes = (scaled.abs()[..., None] - _FP4).abs().argmin(-1) + 8 * (scaled < 0)
        packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        scales = (exponents.squeeze(-1) + 127).to(torch.uint8)
        return {f"{name}_blocks": packed, f"{name}_scales": scales}

    _store(folder, quantize, {"quant_method": "mxfp4"})


def _store(folder: Path, quantize, quantization: dict[str, object]) -> None:
    file = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, x in load_file(file).items():
        tensors |= {key: value.contiguous() for key, value in quantize(name, x).items()}
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
