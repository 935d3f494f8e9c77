"""Timing, memory, machine limits and the rows that every benchmark produces."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from hybridengine.kernels import has_fast_products

from hybridengine import _C

ROOT = Path(__file__).resolve().parent.parent
OURS = "hybridengine"
KEYS = (
    "op",
    "pass",
    "impl",
    "shape",
    "dtype",
    "device",
    "isa",
    "ms_p20",
    "ms_p50",
    "ms_p80",
    "gb_per_s",
    "tflop_per_s",
    "peak_mib",
    "error_vs_float64",
    "share_of_limit",
    "ratio_to_best_peer",
)


class Bench:
    """Collects rows; `quick` shrinks budgets so that a test can run a benchmark end to end."""

    def __init__(self, device: str, quick: bool = False):
        self.device = torch.device(device)
        self.quick = quick
        self.budget_s = 0.3 if quick else 1.5
        self.rows: list[dict] = []

    @property
    def device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{cpu_name()}, {torch.get_num_threads()} threads"

    @property
    def isa(self) -> str | None:
        """Instruction set of the CPU kernels: the machine's, or the limit it runs under."""
        return None if self.device.type == "cuda" else _C.cpu_isa

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
        limit: str | None = None,
        errors: Mapping[str, float] | None = None,
    ) -> None:
        """Time every implementation; ours is named `hybridengine`, all the others are its peers.

        `bytes_moved` and `flops` are what the problem needs at least, the same for everyone;
        `limit` is `read`, `copy` or `gemm`.
        """
        # Compile afresh: past dynamo's limit of recompilations `compile` would be eager.
        torch._dynamo.reset()
        limits = [self.limit(limit, dtype)] if limit else []
        timed = {name: self._measure(call) for name, call in implementations.items()}
        limits += [self.limit(limit, dtype)] if limit else []
        peers = [
            p50
            for name, (_, p50, _, _) in timed.items()
            if not name.startswith((OURS, "gemm"))  # bare products do not solve the problem
        ]
        for name, (p20, p50, p80, peak) in timed.items():
            rate = bytes_moved / p50 / 1e6 if bytes_moved else None
            tflop = flops / p50 / 1e9 if flops else None
            share = None
            if limit is not None:
                share = (tflop if limit == "gemm" else rate) / max(limits)
            ours = name.startswith(OURS)
            row = dict.fromkeys(KEYS)
            row |= {
                "op": op,
                "pass": pass_,
                "impl": name,
                "shape": shape,
                "dtype": str(dtype).removeprefix("torch."),
                "device": self.device_name,
                "isa": self.isa,
                "ms_p20": p20,
                "ms_p50": p50,
                "ms_p80": p80,
                "gb_per_s": rate,
                "tflop_per_s": tflop,
                "peak_mib": peak,
                "error_vs_float64": (errors or {}).get(name),
                "share_of_limit": share,
                "ratio_to_best_peer": min(peers) / p50 if ours and peers else None,
            }
            self.rows.append(row)
            print(line(row), flush=True)

    def limit(self, kind: str, dtype: torch.dtype) -> float:
        """GB/s (`read`, `copy`: read and write counted) or TFLOP/s (`gemm`), as of this moment.

        Shared machines change by the minute, so every comparison asks before and after itself.
        """
        budget, self.budget_s = self.budget_s, self.budget_s / 4
        rate = getattr(self, f"_{kind}_limit")(dtype)
        self.budget_s = budget
        unit = "TFLOP/s" if kind == "gemm" else "GB/s"
        print(f"# limit {kind} {dtype}: {rate:.3g} {unit}", flush=True)
        return rate

    def _read_limit(self, _: torch.dtype) -> float:
        data = torch.ones(self._stream_bytes() // 4, device=self.device)
        return data.nbytes / self._measure(data.sum)[0] / 1e6

    def _copy_limit(self, _: torch.dtype) -> float:
        source = torch.ones(self._stream_bytes() // 4, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self._measure(lambda: target.copy_(source))[0] / 1e6

    def _gemm_limit(self, dtype: torch.dtype) -> float:
        if not has_fast_products(dtype, self.device):
            dtype = torch.float32  # converting first is faster
        n = (8192 if self.device.type == "cuda" else 2048) // (4 if self.quick else 1)
        a, b = (torch.randn(n, n, device=self.device, dtype=dtype) for _ in range(2))
        return 2 * n**3 / self._measure(lambda: a @ b)[0] / 1e9

    def _stream_bytes(self) -> int:
        return 2**26 if self.quick else 2**30 if self.device.type == "cuda" else 2**29

    def _measure(self, call: Callable[[], object]) -> tuple[float, float, float, float]:
        """-> ms p20, p50, p80 and the MiB that a call needs at its peak."""
        begin = time.perf_counter()
        call()
        slow = time.perf_counter() - begin > 1.0
        peak = self._peak_mib(call)
        times: list[float] = []
        start = time.perf_counter()
        fewest = 3 if slow else 5
        while len(times) < fewest or (
            time.perf_counter() - start < self.budget_s and len(times) < 200
        ):
            times.append(self._one(call))
        times.sort()
        return *(times[round(q * (len(times) - 1))] for q in (0.2, 0.5, 0.8)), peak

    def _one(self, call: Callable[[], object]) -> float:
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
        _C.empty_pooled([2**30 + 2**22], torch.uint8)  # too large to keep: all that was kept goes
        Path("/proc/self/clear_refs").write_text("5")  # restarts the high-water mark
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


def line(row: dict) -> str:
    """One performance line: what, how long, how near to the limit, against the best peer."""

    def shown(key: str, form: str) -> str:
        return "" if row[key] is None else form.format(row[key])

    return (
        f"{row['op']:>20} {row['pass']:>8} {row['dtype']:>8} {row['shape']:>22} {row['impl']:>26} "
        f"{row['ms_p50']:10.3f} ms"
        + shown("gb_per_s", " {:8.1f} GB/s")
        + shown("tflop_per_s", " {:8.3f} TFLOP/s")
        + shown("share_of_limit", " {:5.0%} of limit")
        + shown("peak_mib", " {:8.0f} MiB")
        + shown("error_vs_float64", " err {:.1e}")
        + shown("ratio_to_best_peer", "  {:.2f}x best peer")
    )


def versions() -> dict[str, str | None]:
    """What a quoted result is committed with."""
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


def rms_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return (got.double() - exact).square().mean().sqrt().item()
