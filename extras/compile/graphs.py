"""What captures work: CUDA graphs, and a check of what a replay could not see."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hybridengine.run.errors import ModelError

Result = TypeVar("Result")


class Graphs(Protocol):
    """Captures work on a device. All captures share the memory of what is not their input.

    runs: passes that have written into that memory. What a pass has left there is valid as long as
      this number stays.
    """

    runs: int

    def warm_up(self, work: Callable[[], Result]) -> Result:
        """Do the work, without a capture; an error if the host waits for the device in it."""
        ...

    def capture(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], object]]:
        """Return what the work returns, and what does it again, into the same memory.

        Nothing is computed before the first replay.
        """
        ...


class CudaGraphs:
    """`torch.cuda.CUDAGraph` on the current device, see `Graphs`.

    Work before a capture runs on the stream of the capture, so that its workspaces and compiled
    kernels are there. Calls of other threads (NCCL's watchdog, an engine) do not break a capture.
    """

    def __init__(self) -> None:
        self.runs = 0
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], Result]) -> Result:
        current, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
        self._stream.wait_stream(current)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(self._stream):
                return work()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            current.wait_stream(self._stream)

    def capture(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], object]]:
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, self._pool, self._stream, "thread_local")
        collects = gc.isenabled()
        gc.disable()  # it may free tensors or graphs, which is not allowed in a capture
        try:
            with capture:
                result = work()
        finally:
            if collects:
                gc.enable()
        return result, graph.replay


@contextmanager
def errors_named(what: str) -> Iterator[None]:
    """Turn what torch raises for work that cannot be captured into a ModelError with the line."""
    try:
        yield
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first: BaseException = error  # the end of a failed capture is another error
        while first.__context__ is not None:
            first = first.__context__
        frames = traceback.extract_tb(first.__traceback__)
        at = [x for x in frames if "torch/" not in x.filename and x.filename != __file__][-1]
        reason = str(first).strip().partition("\n")[0]
        raise ModelError(
            f"model.cuda_graphs is true, but {what} cannot be captured: "
            f"{type(first).__name__}: {reason} (in {at.filename}:{at.lineno}, {at.line}); "
            "set model.cuda_graphs=false"
        ) from error


class Probe(TorchDispatchMode):
    """Refuse operators whose replay would be silently wrong: random ones, and hidden inputs.

    inputs: all tensors that may be read besides those that are made meanwhile.
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self._kept = list(inputs)
        self._known = {x.untyped_storage()._cdata for x in self._kept}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.dim() and not self._knows(tensor):
                raise RuntimeError(
                    f"{func} reads a tensor {list(tensor.shape)} that is no argument, parameter or "
                    "buffer; a replay would read what it was at the capture"
                )
        may_draw = torch.Tag.nondeterministic_seeded in func.tags
        before = _random_states() if may_draw else []
        result = func(*args, **kwargs)
        if may_draw and not all(map(torch.equal, before, _random_states())):
            raise RuntimeError(f"{func} draws random numbers, as dropout does")
        made = (x for x in tree_iter(result) if isinstance(x, Tensor))
        self._known.update(x.untyped_storage()._cdata for x in made)
        return result

    def _knows(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._known


def _random_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else states
