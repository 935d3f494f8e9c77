"""Observe the effects of a small job as text, before and after a configuration key is flipped.

Observed are the plan, all metrics but times, the rollouts, the files, and the arguments of
models, optimizers, engine and reshard; or the error, if the job is refused.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, is_dataclass
from functools import reduce
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn
from unittest.mock import Mock

import torch

from hybridengine.engine.interface import EngineOptions
from hybridengine.run.config import keys_of
from tests.ranks import run_ranks

__all__ = ["JobKind", "effects_body", "effects_of_flips", "merged"]


@dataclass(frozen=True)
class JobKind:
    """RL or SFT.

    flips: key -> (another value, overrides under which the key matters); a key without a row is
    flipped by its type. context: the overrides for all keys with a prefix.
    """

    schema: type
    flips: Mapping[str, tuple[str, Sequence[str]]]
    prepare: Callable[[Path], list[str]]  # write all files of a job, return its overrides
    load: Callable[[Sequence[str]], tuple[Any, Callable[[], None]]]  # (plan, what trains)
    context: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def flip(self, key: str, hint: Any) -> tuple[str, Sequence[str]]:
        """Return (another value, overrides under which the key matters)."""
        value, context = self.flips.get(key, ("", ()))
        context = [
            *context,
            *(o for prefix, more in self.context.items() if key.startswith(prefix) for o in more),
        ]
        default = reduce(getattr, key.split("."), self.schema())
        if value:
            return value, context
        if typing.get_origin(hint) is typing.Annotated:
            hint = hint.__origin__
        if typing.get_origin(hint) is Literal:
            return next(c for c in typing.get_args(hint) if c != default), context
        if hint is bool:
            return str(not default).lower(), context
        if isinstance(default, int | float):
            return str(default + 1 if isinstance(default, int) else default * 1.5 + 1e-3), context
        assert isinstance(default, str), f"{key} needs a row"
        return f"{default}_else", context


def merged(base: Sequence[str], more: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Merge overrides by key, the later ones win; `{dir}` becomes the folder."""
    pairs = dict(o.format(dir=folder).split("=", 1) for o in (*base, *more))
    return tuple(f"{key}={value}" for key, value in pairs.items())


def effects_of_flips(
    kind: JobKind, folder: Path, chosen: Collection[str]
) -> dict[str, tuple[str, str]]:
    """Return for each of the chosen keys the effects of a job before and after its flip."""
    keys = [key for key, _ in keys_of(kind.schema)]
    assert set(kind.flips) <= set(keys), set(kind.flips) - set(keys)
    keys = [key for key in keys if key in chosen]
    with ThreadPoolExecutor(2) as threads:  # one process each
        folders, halves = (folder / "a", folder / "b"), (keys[::2], keys[1::2])
        found = list(threads.map(_effects_of, (kind, kind), folders, halves))
    return found[0] | found[1]


def _effects_of(kind: JobKind, folder: Path, keys: Sequence[str]) -> dict[str, tuple[str, str]]:
    folder.mkdir()
    base, hints = kind.prepare(folder), dict(keys_of(kind.schema))
    jobs: list[tuple[str, ...]] = []
    pairs: dict[str, tuple[int, int]] = {}
    for key in keys:
        value, context = kind.flip(key, hints[key])
        before = merged(base, context, folder)
        after = merged(base, (*context, f"{key}={value}"), folder)
        assert before != after, f"{key}: {value} is no change"
        for job in (before, after):
            if job not in jobs:
                jobs.append(job)
        pairs[key] = (jobs.index(before), jobs.index(after))
    [texts] = run_ranks(effects_body, 1, kind, folder, jobs, timeout_s=500.0)
    return {key: (texts[before], texts[after]) for key, (before, after) in pairs.items()}


def effects_body(rank: int, world_size: int, kind: JobKind, folder: Path, jobs: list) -> list[str]:

    recorder = Recorder()
    torch.set_num_threads(1)
    results = [effect(kind, folder, job, recorder) for job in jobs]
    return results


class Stopped(Exception):
    """Raised in place of the start of vLLM, whose arguments are recorded."""


class Recorder:
    """Records the arguments that the parts of a run are built with."""

    def __init__(self) -> None:
        from hybridengine import compile as compiling
        from hybridengine.engine.vllm import engine as vllm
        from hybridengine.model import loading
        from hybridengine.train import base, build, report

        self.records: list[str] = []
        for name in ("Resharder", "Optimizer", "sharding_mesh"):
            self._record_calls(build, name)
        self._load = build.load_causal_lm
        build.load_causal_lm = self._note_load
        loading.needs_fsdp = lambda mesh, sharding: True  # as on several ranks
        compiling.compile_layers = self._replacement("compile_layers")
        report.plugins = Mock(return_value={})  # called when time has passed
        base.save_pretrained = self._replacement("save_pretrained")
        vllm.VllmEngine = self._note_engine
        wandb = sys.modules["wandb"] = ModuleType("wandb")
        wandb.__spec__ = ModuleSpec("wandb", None)
        wandb.init = self._replacement("wandb.init")

    def _record_calls(self, module: Any, name: str) -> None:
        real = getattr(module, name)

        def noted(*args: Any, **options: Any) -> Any:
            self.note(name, args, options)
            return real(*args, **options)

        setattr(module, name, noted)

    def _note_load(self, options: Any, mesh: Any) -> Any:
        """Load a model, and note what is read of its options."""
        read: dict[str, Any] = {}
        try:
            return self._load(Reads(options, read), mesh)
        finally:
            self.note("load_causal_lm", (), read)

    def _replacement(self, name: str, error: type[Exception] | None = None) -> Any:
        def noted(*args: Any, **options: Any) -> Mock:
            self.note(name, args, options)
            if error is not None:
                raise error
            return Mock()

        return noted

    def _note_engine(self, options: EngineOptions) -> NoReturn:
        """Note what a `VllmEngine` reads of its options."""
        from hybridengine.engine.vllm.options import llm_options

        own = {name: value for name, value in vars(options).items() if is_plain(value)}
        rollout = options.rollout
        own |= {"free_cache": rollout.free_cache_engine, "limit_images": rollout.limit_images}
        self.note("VllmEngine", (), own | llm_options(options))
        raise Stopped

    def note(self, name: str, args: Any, options: Any) -> None:
        given = {str(i): arg for i, arg in enumerate(args)} | options
        self.records.append(f"{name} { {k: v for k, v in given.items() if is_plain(v)} }")


class Reads:
    """A dataclass whose plain attributes are noted in `read` when they are read."""

    def __init__(self, value: Any, read: dict[str, Any], prefix: str = "") -> None:
        self._value, self._read, self._prefix = value, read, prefix

    def __getattr__(self, name: str) -> Any:
        value, key = getattr(self._value, name), f"{self._prefix}{name}"
        if is_dataclass(value):
            return Reads(value, self._read, f"{key}.")
        self._read[key] = value
        return value


def is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return isinstance(value, int | float | str | bool | tuple | torch.dtype | None)


def effect(kind: JobKind, folder: Path, overrides: Sequence[str], recorder: Recorder) -> str:
    """Run a job; return its observed effects as text."""
    from hybridengine.run.errors import UserError
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train import modes

    for name in ("run", "elsewhere"):
        shutil.rmtree(folder / name, ignore_errors=True)
    recorder.records.clear()

    def run_rank(main: Any, *settings: Any) -> None:
        recorder.note("run_rank", settings, {})
        main(Session(PhaseStatus(folder / "status", 0)))

    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(Stopped):
            plan, train = kind.load(overrides)
            recorder.records += [str(list(column.cells)) for column in plan.columns]
            modes.run_rank = run_rank
            train()
    except UserError as error:
        return f"refused: {error}"
    return "\n".join([*recorder.records, *outputs(folder)])


def outputs(folder: Path) -> list[str]:
    """List the files, and the contents of metrics and rollouts without times."""
    found = []
    for top in ("run", "elsewhere"):
        for path in sorted((folder / top).rglob("*")):
            name = path.name if "events" not in path.name else "events"
            found.append(f"{path.parent.relative_to(folder)}/{name}")
            if path.name.startswith(("step_", "val_")) and path.suffix == ".jsonl":
                found.append(path.read_text())
            if path.name == "metrics.jsonl":
                rows = [json.loads(row) for row in path.read_text().splitlines()]
                found += [str({k: v for k, v in row.items() if not is_a_time(k)}) for row in rows]
    return found


def is_a_time(metric: str) -> bool:
    return metric.startswith(("timing_s/", "perf/")) or metric == "reshard/ms"
