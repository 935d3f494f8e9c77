"""Bench: time, memory, the peaks of the machine, and the rows that every benchmark produces."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hybridengine.kernels import has_fast_products

from hybridengine import _C

ROOT = Path(__file__).resolve().parent.parent
OURS = "hybridengine"
KEYS = (
    *("op", "pass", "impl", "shape", "dtype", "device", "isa", "ms_p20", "ms_p50", "ms_p80"),
    *("gb_per_s", "tflop_per_s", "peak_mib"),
    *("error_vs_float64", "share_of_limit", "ratio_to_best_peer"),
)


class Bench:
    """Collect the rows of a run; `quick` shortens it to a test that everything runs."""

    def __init__(self, device: str, quick: bool = False):
        self.device = torch.device(device)
        self.quick = quick
        self.budget_s = 0.3 if quick else 1.5
        self.rows: list[dict[str, Any]] = []

    @property
    def device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{cpu_name()}, {torch.get_num_threads()} threads"

    @property
    def isa(self) -> str | None:
        """Instruction set of the CPU kernels: that of the machine, or the limit it runs under."""
        return None if self.device.type == "cuda" else _C.cpu_isa

    def add(
        self, op: str, pass_: str, impl: str, shape: str, note: str = "", **values: Any
    ) -> None:
        """Append a row and print it, followed by `note`; `values` are the other KEYS."""
        row: dict[str, Any] = dict.fromkeys(KEYS)
        row |= {"op": op, "pass": pass_, "impl": impl, "shape": shape}
        row |= {"device": self.device_name, "isa": self.isa, **values}
        self.rows.append(row)
        print(line(row) + note, flush=True)

    def leave_out(
        self, op: str, pass_: str, shape: str, dtype: torch.dtype, missing: Mapping[str, str]
    ) -> None:
        """Append rows without figures for baselines that cannot run here, with the reason."""
        for name, reason in missing.items():
            print(f"# {op} {pass_} {shape}: baseline {name} left out: {reason}", flush=True)
            row: dict[str, Any] = dict.fromkeys(KEYS)
            row |= {"op": op, "pass": pass_, "impl": name, "shape": shape, "note": reason}
            row |= {"dtype": str(dtype).removeprefix("torch."), "device": self.device_name}
            self.rows.append(row)

    def compare(
        self,
        op: str,
        pass_: str,
        shape: str,
        dtype: torch.dtype,
        implementations: Mapping[str, Callable[[], object]],
        *,
        bytes_moved: int | None = None,
        flops: int | None = None,
        peak: str | None = None,
        errors: Mapping[str, float] | None = None,
    ) -> None:
        """Time every implementation; ours start with `hybridengine`, the others are baselines.

        `bytes_moved` and `flops` are the least that the problem needs, the same for all
        implementations; `peak` is the measured peak to compare with: `read`, `copy` or `gemm`.
        """
        # Compile again: above dynamo's limit of recompilations `compile` would run eagerly.
        torch._dynamo.reset()
        peaks = [self.peak(peak, dtype)] if peak else []
        timed = {name: self._measure(call) for name, call in implementations.items()}
        peaks += [self.peak(peak, dtype)] if peak else []
        # Bare products do not solve the problem.
        others = [name for name in timed if not name.startswith((OURS, "gemm"))]
        baselines = [timed[name][1] for name in others]
        for name, (p20, p50, p80, peak_mib) in timed.items():
            gb_per_s = bytes_moved / p50 / 1e6 if bytes_moved else None
            tflop_per_s = flops / p50 / 1e9 if flops else None
            rate = tflop_per_s if peak == "gemm" else gb_per_s
            share = rate / max(peaks) if peaks and rate else None
            ratio = min(baselines) / p50 if baselines and name.startswith(OURS) else None
            self.add(
                op, pass_, name, shape, dtype=str(dtype).removeprefix("torch."), ms_p20=p20,
                ms_p50=p50, ms_p80=p80, gb_per_s=gb_per_s, tflop_per_s=tflop_per_s,
                peak_mib=peak_mib, error_vs_float64=(errors or {}).get(name),
                share_of_limit=share, ratio_to_best_peer=ratio,
            )  # fmt: skip

    def peak(self, kind: str, dtype: torch.dtype) -> float:
        """Measure GB/s (`read`, `copy`: read and write counted) or TFLOP/s (`gemm`).

        Shared machines change by the minute, so every comparison measures it before and after.
        """
        budget, self.budget_s = self.budget_s, self.budget_s / 4
        rate = getattr(self, f"_{kind}_peak")(dtype)
        self.budget_s = budget
        unit = "TFLOP/s" if kind == "gemm" else "GB/s"
        print(f"# peak {kind} {dtype}: {rate:.3g} {unit}", flush=True)
        return rate

    def _read_peak(self, _: torch.dtype) -> float:
        data = torch.ones(self._stream_bytes() // 4, device=self.device)
        return data.nbytes / self._measure(data.sum)[0] / 1e6

    def _copy_peak(self, _: torch.dtype) -> float:
        source = torch.ones(self._stream_bytes() // 4, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self._measure(lambda: target.copy_(source))[0] / 1e6

    def _gemm_peak(self, dtype: torch.dtype) -> float:
        if not has_fast_products(dtype, self.device):
            dtype = torch.float32  # converting to it first is faster
        n = (8192 if self.device.type == "cuda" else 2048) // (4 if self.quick else 1)
        a, b = (torch.randn(n, n, device=self.device, dtype=dtype) for _ in range(2))
        return 2 * n**3 / self._measure(lambda: a @ b)[0] / 1e9

    def _stream_bytes(self) -> int:
        return 2**26 if self.quick else 2**30 if self.device.type == "cuda" else 2**29

    def _measure(self, call: Callable[[], object]) -> tuple[float, float, float, float]:
        """Return the p20, p50 and p80 in ms, and the peak memory of a call in MiB."""
        start = time.perf_counter()
        call()
        is_slow = time.perf_counter() - start > 1.0
        peak_mib = self._peak_mib(call)
        times: list[float] = []
        start = time.perf_counter()
        at_least = 3 if is_slow else 5
        done = start + self.budget_s
        while len(times) < at_least or (time.perf_counter() < done and len(times) < 200):
            times.append(self._time_ms(call))
        times.sort()
        p20, p50, p80 = (times[round(q * (len(times) - 1))] for q in (0.2, 0.5, 0.8))
        return p20, p50, p80, peak_mib

    def _time_ms(self, call: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def _peak_mib(self, call: Callable[[], object]) -> float:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            return (torch.cuda.max_memory_allocated() - before) / 2**20
        # Too large for the pool, which then frees all of its memory.
        _C.empty_from_pool([2**30 + 2**22], torch.uint8)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = status_kib("VmRSS")
        call()
        return max(0.0, (status_kib("VmHWM") - before) / 2**10)


def status_kib(field: str) -> int:
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(field):
            return int(text.split()[1])
    raise KeyError(field)


def cpu_name() -> str:
    for text in Path("/proc/cpuinfo").read_text().splitlines():
        if text.startswith("model name"):
            return text.split(":", 1)[1].strip()
    return platform.machine()


def line(row: dict[str, Any]) -> str:
    """Format a row for the console."""

    def column(key: str, form: str) -> str:
        return "" if row[key] is None else form.format(row[key])

    return (
        f"{row['op']:>20} {row['pass']:>8} {row['dtype']:>8} {row['shape']:>22} {row['impl']:>26} "
        f"{row['ms_p50']:10.3f} ms"
        + column("gb_per_s", " {:8.1f} GB/s")
        + column("tflop_per_s", " {:8.3f} TFLOP/s")
        + column("share_of_limit", " {:5.0%} of peak")
        + column("peak_mib", " {:8.0f} MiB")
        + column("error_vs_float64", " err {:.1e}")
        + column("ratio_to_best_peer", "  {:.2f}x vs best baseline")
    )


def versions() -> dict[str, str | None]:
    """The versions that a committed result records."""
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    return {
        "commit": commit or None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **{name: _installed(name) for name in ("triton", "verl", "trl")},
    }


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def largest_errors(
    functions: Mapping[str, Callable], arguments: Sequence, exact: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Return the largest error over the results of each function, which may have fewer of them."""
    return {
        name: max(map(rms_error, function(*arguments), exact))
        for name, function in functions.items()
    }


def rms_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return (result.double() - exact).square().mean().sqrt().item()
