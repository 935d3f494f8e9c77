"""Bench: time, memory, peaks, and the rows that every benchmark produces."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks._gpu import Gpu, time_call
from benchmarks._results import Results
from hybridengine import _C
from hybridengine.kernels import has_fast_products
from hybridengine.kernels.pages import prefer_huge_pages

ROOT = Path(__file__).resolve().parent.parent
OURS = "hybridengine"
GPU_LOST = 3  # exit status: a baseline broke this process's context, another process can go on
WRONG_ABOVE = 0.02  # relative error: bfloat16 products and results stay below 0.01
KEYS = (
    *("op", "pass", "impl", "shape", "dtype", "device", "isa", "ms_p20", "ms_p50", "ms_p80"),
    *("gb_per_s", "tflop_per_s", "peak_mib", "launches"),
    *("error_vs_float64", "share_of_limit", "ratio_to_best_peer"),
)

PACKAGES = (
    *("triton", "verl", "trl", "liger_kernel", "cut_cross_entropy", "quack-kernels", "flash_attn"),
    *("flash-attn-4", "nvidia-cutlass-dsl"),
)


class Check(NamedTuple):
    """Results of baselines, and the right ones; one that is wrong is no baseline to beat.

    results: by name. Names without one are not checked.
    """

    results: Mapping[str, Callable[[], Sequence[torch.Tensor]]]
    expected: Sequence[torch.Tensor]

    def wrong(self, name: str) -> str:
        """Return why the result of a baseline is wrong; "" if it is right."""
        if name not in self.results:
            return ""
        for index, (result, exact) in enumerate(
            zip(self.results[name](), self.expected, strict=True)
        ):
            error = (result.double() - exact).norm() / exact.norm()
            if not error <= WRONG_ABOVE:  # NaN is wrong, too
                return f"wrong: result {index} has a relative error of {error:.1e}"
        return ""


class OutOfTime(Exception):
    """The benchmark has used its time."""


class Bench:
    """Collect the rows of a run; `quick` shortens it to a test that everything runs.

    transport: "ipc" for the reshard to engines in other processes of the same devices.
    impl: regular expression of the baselines that are timed; None: all.
    op_limit_s: seconds of a benchmark. op_end: when this one's are over, by time.monotonic().
    """

    impl: str | None = None
    op_limit_s = op_end = float("inf")

    def __init__(self, device: str, quick: bool = False, transport: str | None = None):
        self.device = torch.device(device)
        self.gpu = Gpu(self.device) if self.device.type == "cuda" else None
        self.quick, self.transport = quick, transport
        self.budget_s = 0.3 if quick else 1.5 if self.gpu is None else 0.5
        self.results = Results()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.results.rows

    @property
    def device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{cpu_name()}, {torch.get_num_threads()} threads"

    @property
    def isa(self) -> str | None:
        """Instruction set of the CPU kernels: that of the machine, or the limit it runs under."""
        return None if self.device.type == "cuda" else _C.cpu_isa

    def log_state(self, op: str, when: str) -> None:
        """Add clocks, temperature and power of the GPU to the results."""
        if self.gpu is not None:
            self.results.states.append({"op": op, "when": when, **self.gpu.state()})
            self.results.save()

    def _row(self, op: str, pass_: str, impl: str, shape: str, **values: Any) -> dict[str, Any]:
        """Make a row; `values` are the other KEYS."""
        row: dict[str, Any] = dict.fromkeys(KEYS)
        row |= {"op": op, "pass": pass_, "impl": impl, "shape": shape}
        return row | {"device": self.device_name, "isa": self.isa, **values}

    def add(
        self, op: str, pass_: str, impl: str, shape: str, note: str = "", **values: Any
    ) -> None:
        """Append a row and print it, followed by `note`; `values` are the other KEYS."""
        row = self._row(op, pass_, impl, shape, **values)
        self.results.append(row)
        print(line(row) + note, flush=True)

    def add_sync(
        self, op: str, impl: str, shape: str, times: Sequence[float], moved: int, **values: Any
    ) -> None:
        """`add` the sorted `times`, in ms, of syncs between gloo ranks that move `moved` bytes."""
        p20, p50, p80 = (times[len(times) * part // 10] for part in (2, 5, 8))
        values |= {"dtype": "float32→bf16", "isa": None, "gb_per_s": moved / p50 / 1e6}
        values |= {"ms_p20": p20, "ms_p50": p50, "ms_p80": p80}
        self.add(op, "sync", impl, shape, **values)

    def leave_out(
        self, op: str, pass_: str, shape: str, dtype: torch.dtype, missing: Mapping[str, str]
    ) -> None:
        """Append rows without figures for baselines that cannot run here, with the reason."""
        for name, reason in missing.items():
            print(f"# {op} {pass_} {shape}: baseline {name} left out: {reason}", flush=True)
            row = self._row(op, pass_, name, shape, dtype=short(dtype), isa=None)
            self.results.append(row | {"note": reason})

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
        check: Check | None = None,
    ) -> None:
        """Time every implementation; ours start with `hybridengine`, the others are baselines.

        `bytes_moved` and `flops` are the least that the problem needs, the same for all
        implementations; `peak` is the measured peak to compare with: `read`, `copy` or `gemm`.
        A baseline that raises gets a row with the reason; one that `check` finds wrong is timed,
        and is not the best one.
        """
        if time.monotonic() > self.op_end:
            raise OutOfTime
        implementations = {n: c for n, c in implementations.items() if self.is_wanted(n)}
        # Compile again: above dynamo's limit of recompilations `compile` would run eagerly.
        torch._dynamo.reset()
        peaks = [self.peak(peak, dtype)] if peak else []
        rows = []
        for name, call in implementations.items():
            row = self._row(op, pass_, name, shape, dtype=short(dtype))
            row["error_vs_float64"] = (errors or {}).get(name)
            measure = partial(self._rates, call, bytes_moved, flops)
            is_baseline = not name.startswith(OURS)
            if is_baseline:
                wrong = partial(check.wrong, name) if check else str
                measure = partial(self._unless_it_raises, measure, wrong)
            rows.append(self.results.measured(row, measure, may_crash=is_baseline))
            if self.gpu is not None and not self.gpu.answers():
                print(f"# {op} {pass_} {shape}: the GPU is lost after {name}", flush=True)
                raise SystemExit(GPU_LOST)
        peaks += [self.peak(peak, dtype)] if peak else []
        timed = [row for row in rows if row["ms_p50"] is not None]
        # Bare products do not solve the problem.
        others = [row for row in timed if not row["impl"].startswith((OURS, "gemm"))]
        baselines = [row["ms_p50"] for row in others if not row.get("wrong")]
        for row in timed:
            rate = row["tflop_per_s"] if peak == "gemm" else row["gb_per_s"]
            row["share_of_limit"] = rate / max(peaks) if peaks and rate else None
            if self.gpu is not None and peaks:
                row["peak"] = max(peaks)  # GB/s or TFLOP/s, that the share is of
            if baselines and row["impl"].startswith(OURS):
                row["ratio_to_best_peer"] = min(baselines) / row["ms_p50"]
            print(line(row), flush=True)
        for row in rows:
            if row["ms_p50"] is None:
                print(f"# {op} {pass_} {shape}: {row['impl']} left out: {row['note']}", flush=True)
            if row.get("wrong"):
                print(f"# {op} {pass_} {shape}: {row['impl']} is {row['wrong']}", flush=True)
        self.results.save()

    def is_wanted(self, impl: str) -> bool:
        return impl.startswith(OURS) or self.impl is None or bool(re.match(self.impl, impl))

    def _rates(
        self, call: Callable[[], object], bytes_moved: int | None, flops: int | None
    ) -> dict[str, Any]:
        """Return the measured part of a row."""
        measured = self.measure(call)
        p50 = measured["ms_p50"]
        measured["gb_per_s"] = bytes_moved / p50 / 1e6 if bytes_moved else None
        measured["tflop_per_s"] = flops / p50 / 1e9 if flops else None
        return measured

    def _unless_it_raises(
        self, measure: Callable[[], dict[str, Any]], wrong: Callable[[], str]
    ) -> dict[str, Any]:
        try:
            reason = wrong()
            return measure() | ({"wrong": reason} if reason else {})
        except Exception as error:  # whatever a library raises; ours still run
            if self.gpu is not None and self.gpu.answers():
                torch.cuda.empty_cache()
            return {"note": f"{type(error).__name__}: {first_line(error)}"}

    def peak(self, kind: str, dtype: torch.dtype) -> float:
        """Measure GB/s (`read`, `copy`: read and write counted) or TFLOP/s (`gemm`).

        Shared CPUs change by the minute, so every comparison measures it before and after; a GPU
        measures it once per run.
        """
        name = f"{kind} {short(dtype)}" if kind == "gemm" else kind
        if name in self.results.peaks:
            return self.results.peaks[name]
        budget, self.budget_s = self.budget_s, self.budget_s / 4
        rate = getattr(self, f"{kind}_peak")(dtype)
        self.budget_s = budget
        unit = "TFLOP/s" if kind == "gemm" else "GB/s"
        print(f"# peak {kind} {dtype}: {rate:.3g} {unit}", flush=True)
        if self.gpu is not None:
            self.results.peaks[name] = rate
        return rate

    def read_peak(self, _: torch.dtype) -> float:
        data = torch.empty(self._stream_bytes() // 4, device=self.device)
        prefer_huge_pages(data.untyped_storage())  # else it reads 10 to 35% less a second
        data.fill_(1)
        return data.nbytes / self.measure(data.sum)["ms_p20"] / 1e6

    def copy_peak(self, _: torch.dtype) -> float:
        source = torch.ones(self._stream_bytes() // 4, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.measure(lambda: target.copy_(source))["ms_p20"] / 1e6

    def gemm_peak(self, dtype: torch.dtype) -> float:
        if not has_fast_products(dtype, self.device):
            dtype = torch.float32  # converting to it first is faster
        n = (8192 if self.device.type == "cuda" else 2048) // (4 if self.quick else 1)
        a, b = (torch.randn(n, n, device=self.device, dtype=dtype) for _ in range(2))
        return 2 * n**3 / self.measure(lambda: a @ b)["ms_p20"] / 1e9

    def _stream_bytes(self) -> int:
        return 2**26 if self.quick else 2**30 if self.device.type == "cuda" else 2**29

    def measure(self, call: Callable[[], object]) -> dict[str, Any]:
        """Return p20, p50 and p80 in ms, the peak memory of a call in MiB, on a GPU also how."""
        if self.gpu is not None:
            self.gpu.warm_up(call)
            peak_mib = self.gpu.peak_mib(call)
            samples = time_call(self.gpu, call, self.budget_s)
            extremes = {"ms_min": min(samples.ms), "ms_max": max(samples.ms)}
            how = {"timing": samples.timing, "host_ms": samples.host_ms}
            return {**quantiles(samples.ms), "peak_mib": peak_mib, **extremes, **how}
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
        return quantiles(times) | {"peak_mib": peak_mib}

    def _time_ms(self, call: Callable[[], object]) -> float:
        if self.gpu is not None:
            return self.gpu.elapsed_ms(call)
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    def _peak_mib(self, call: Callable[[], object]) -> float:
        # Too large for the pool, which then frees all of its memory.
        _C.empty_from_pool([2**30 + 2**22], torch.uint8)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = status_kib("VmRSS")
        call()
        return max(0.0, (status_kib("VmHWM") - before) / 2**10)


def quantiles(times: list[float]) -> dict[str, float]:
    times = sorted(times)
    return {f"ms_p{q}": times[round(q / 100 * (len(times) - 1))] for q in (20, 50, 80)}


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        f"{row['op']:>20} {row['pass']:>8} {row['dtype']:>8} {row['shape']:>22} {row['impl']:>26}"
        + column("ms_p50", " {:10.3f} ms")
        + column("gb_per_s", " {:8.1f} GB/s")
        + column("tflop_per_s", " {:8.3f} TFLOP/s")
        + column("share_of_limit", " {:5.0%} of peak")
        + column("peak_mib", " {:8.0f} MiB")
        + column("error_vs_float64", " err {:.1e}")
        + column("ratio_to_best_peer", "  {:.2f}x vs best baseline")
    )


def versions() -> dict[str, str | None]:
    """The versions that a committed result records."""
    return {
        "commit": _commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **{name: _installed(name) for name in PACKAGES},
    }


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # no git on this machine
        return None
    return done.stdout.strip() or None


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def largest_errors(
    functions: Mapping[str, Callable], arguments: Sequence, exact: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Return the largest error over the results of each function, which may have fewer of them.

    Baselines that raise have none; `Bench.compare` records why.
    """
    errors = {}
    for name, function in functions.items():
        try:
            errors[name] = max(map(rms_error, function(*arguments), exact))
        except Exception:
            if name.startswith(OURS):
                raise
    return errors


def rms_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return (result.double() - exact).square().mean().sqrt().item()
