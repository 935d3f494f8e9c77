"""The share of the peak FLOP/s of all devices that training reaches (MFU)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from hybridengine.model import SavedWork
from hybridengine.model.validation import takes_images
from hybridengine.train.performance import forward_flops_per_pair, share_per_token

# Dense bfloat16 TFLOP/s of the data sheets; the first entry that the device name contains applies.
_PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.5,
    "H100 PCIe": 756.5,
    "H100 NVL": 835.5,
    "H100": 989.5,
    "H800": 989.5,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L20": 119.5,
    "A10": 125.0,
    "MI300X": 1307.0,
}

_NOTHING = SavedWork()


class FlopCounter:
    """Model FLOPs of training `model`, and their share of the peak of all devices (MFU).

    Matrix products only (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), with three
    deviations: attention counts the keys that a token attends to, frozen weights have no gradient,
    and what shared prefixes save does not count. Recomputation by gradient checkpointing does not
    count. In a mixture of experts only the experts of a token count; of a model with a vision tower
    only the language model. The peak is the data sheet's; for a CPU or an unknown GPU, the measured
    rate of a matrix product.
    """

    def __init__(self, model: Any, device: torch.device, world_size: int) -> None:
        config = model.config.get_text_config()
        embedding = None if config.tie_word_embeddings else model.get_input_embeddings().weight
        parts = [model]
        if takes_images(model.config):
            parts = [model.get_decoder(), model.get_output_embeddings()]
        language = {id(p) for part in parts for p in part.parameters()}
        self._per_token = 0.0
        for name, p in model.named_parameters():
            if p.ndim >= 2 and p is not embedding and id(p) in language:
                share = share_per_token(name, config)
                self._per_token += share * p.numel() * (6 if p.requires_grad else 4)
        self._per_pair = 3.0 * forward_flops_per_pair(config)
        self._peak = world_size * _peak_flops(device)

    def training_flops(self, lengths: Sequence[int], saved: SavedWork = _NOTHING) -> float:
        """Return the FLOPs of a forward and a backward over sequences of these lengths."""
        pairs = sum(length * (length + 1) // 2 for length in lengths) - saved.pairs
        return self._per_token * (sum(lengths) - saved.tokens) + self._per_pair * pairs

    def __call__(
        self, lengths: Sequence[int], seconds: float, saved: SavedWork = _NOTHING
    ) -> dict[str, float]:
        """Return the MFU of a forward and a backward that took `seconds`."""
        return {"perf/mfu/actor": self.training_flops(lengths, saved) / seconds / self._peak}


@cache
def _peak_flops(device: torch.device) -> float:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, tflops in _PEAK_TFLOPS.items():
            if known in name:
                return tflops * 1e12
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.ones(1024, 1024, device=device, dtype=dtype)
    fastest = float("inf")
    for _ in range(3):  # the first one warms up
        started = time.perf_counter()
        float((a @ a)[0, 0])
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * 1024**3 / fastest
