"""Capture in a CUDA graph, for operators that never wait for the device."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def capture(step: Callable[[], Sequence[Tensor]]) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
    """Capture `step`, which is run twice before; return the graph and the results it writes.

    Fails where `step`, once it is compiled, waits for the device.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured
