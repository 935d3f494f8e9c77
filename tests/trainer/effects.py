"""What a small job does, as text, before and after each key of its configuration is flipped.

What is seen: the plan, every metric that is not a time, the rollouts, the files, and what the
models, optimizers, engine and reshard are built with; or that the job is refused.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from hybridengine.config import keys_of
from tests.ranks import run_ranks

__all__ = ["Kind", "effects_body", "effects_of_flips", "merged"]


@dataclass(frozen=True)
class Kind:
    """Of a job. flips: key -> (other value, what must be set beside it for it to matter);
    beside: the latter for keys without a row, by how they begin."""

    schema: type
    flips: Mapping[str, tuple[str, Sequence[str]]]
    prepare: Callable[[Path], list[str]]  # writes all files of a job, returns its overrides
    load: Callable[[Sequence[str]], tuple[Any, Any, Callable[[], None]]]
    beside: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def flip(self, key: str, hint: Any) -> tuple[str, Sequence[str]]:
        """(another value, what must be set beside it)."""
        value, beside = self.flips.get(key, ("", ()))
        beside = [
            *beside,
            *(o for k, more in self.beside.items() if key.startswith(k) for o in more),
        ]
        default = reduce(getattr, key.split("."), self.schema())
        if value:
            return value, beside
        if typing.get_origin(hint) is Literal:
            return next(c for c in typing.get_args(hint) if c != default), beside
        if hint is bool:
            return str(not default).lower(), beside
        if isinstance(default, int | float):
            return str(default + 1 if isinstance(default, int) else default * 1.5 + 1e-3), beside
        assert isinstance(default, str), f"{key} wants a row"
        return f"{default}_else", beside


def merged(base: Sequence[str], more: Sequence[str], folder: Path) -> tuple[str, ...]:
    """One override per key, the later ones winning; `{dir}` is the folder."""
    pairs = dict(o.format(dir=folder).split("=", 1) for o in (*base, *more))
    return tuple(f"{key}={value}" for key, value in pairs.items())


def effects_of_flips(kind: Kind, folder: Path) -> dict[str, tuple[str, str]]:
    """For each key what a job does before and after its flip."""
    keys = [key for key, _ in keys_of(kind.schema)]
    assert set(kind.flips) <= set(keys), set(kind.flips) - set(keys)
    with ThreadPoolExecutor(2) as threads:  # two processes, for the sake of time
        folders, halves = (folder / "a", folder / "b"), (keys[::2], keys[1::2])
        found = list(threads.map(_effects_of, (kind, kind), folders, halves))
    return found[0] | found[1]


def _effects_of(kind: Kind, folder: Path, keys: Sequence[str]) -> dict[str, tuple[str, str]]:
    folder.mkdir()
    base, hints = kind.prepare(folder), dict(keys_of(kind.schema))
    jobs: list[tuple[str, ...]] = []
    pairs: dict[str, tuple[int, int]] = {}
    for key in keys:
        value, beside = kind.flip(key, hints[key])
        before = merged(base, beside, folder)
        after = merged(base, (*beside, f"{key}={value}"), folder)
        assert before != after, f"{key}: {value} is what it was"
        for job in (before, after):
            if job not in jobs:
                jobs.append(job)
        pairs[key] = (jobs.index(before), jobs.index(after))
    [texts] = run_ranks(effects_body, 1, kind, folder, jobs, timeout_s=500.0)
    return {key: (texts[before], texts[after]) for key, (before, after) in pairs.items()}


def effects_body(rank: int, world_size: int, kind: Kind, folder: Path, jobs: list) -> list[str]:
    from hybridengine.runtime import PeerWatch

    watch = PeerWatch(rank, world_size)
    spy = Spy()
    torch.set_num_threads(1)
    results = [effect(kind, folder, job, watch, spy) for job in jobs]
    watch.close()
    return results


class Stopped(Exception):
    """vLLM would be started now; what it would be started with is known."""


class Spy:
    """Notes what the parts of a run are built with."""

    def __init__(self) -> None:
        from hybridengine.rollout import vllm
        from hybridengine.trainer import job, report, setup

        self.seen: list[str] = []
        watched = [
            (setup, "Resharder"),
            (setup, "load_causal_lm"),
            (setup, "Optimizer"),
            (setup, "sharding_mesh"),
        ]
        for module, name in watched:
            self._watch(module, name)
        report.plot_learning_curves = self._instead("plot_learning_curves")
        job.save_pretrained = self._instead("save_pretrained")
        vllm.VllmEngine = self._instead("VllmEngine", Stopped)
        wandb = sys.modules["wandb"] = ModuleType("wandb")
        wandb.__spec__ = ModuleSpec("wandb", None)
        wandb.init = self._instead("wandb.init")

    def _watch(self, module: Any, name: str) -> None:
        real = getattr(module, name)

        def noted(*args: Any, **options: Any) -> Any:
            self.note(name, args, options)
            return real(*args, **options)

        setattr(module, name, noted)

    def _instead(self, name: str, error: type[Exception] | None = None) -> Any:
        def noted(*args: Any, **options: Any) -> None:
            self.note(name, args, options)
            if error is not None:
                raise error

        return noted

    def note(self, name: str, args: Any, options: Any) -> None:
        given = {str(i): arg for i, arg in enumerate(args)} | options
        self.seen.append(f"{name} { {k: v for k, v in given.items() if is_plain(v)} }")


def is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return isinstance(value, int | float | str | bool | tuple | torch.dtype | None)


def effect(kind: Kind, folder: Path, overrides: Sequence[str], watch: Any, spy: Spy) -> str:
    """All that can be seen of a job, as text."""
    from hybridengine.errors import UserError
    from hybridengine.runtime import Session
    from hybridengine.tracking import PhaseStatus

    for name in ("run", "elsewhere"):
        shutil.rmtree(folder / name, ignore_errors=True)
    spy.seen.clear()

    def run_rank(main: Any, *settings: Any) -> None:
        spy.note("run_rank", settings, {})
        main(Session(watch, PhaseStatus(folder / "status", 0)))

    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(Stopped):
            module, plan, train = kind.load(overrides)
            spy.seen += [str(list(column.cells)) for column in plan.columns]
            module.run_rank = run_rank
            train()
    except UserError as error:
        return f"refused: {error}"
    return "\n".join([*spy.seen, *left_behind(folder)])


def left_behind(folder: Path) -> list[str]:
    """Files, and what metrics and rollouts say that is not a time."""
    seen = []
    for top in ("run", "elsewhere"):
        for path in sorted((folder / top).rglob("*")):
            name = path.name if "events" not in path.name else "events"
            seen.append(f"{path.parent.relative_to(folder)}/{name}")
            if path.name.startswith(("step_", "val_")) and path.suffix == ".jsonl":
                seen.append(path.read_text())
            if path.name == "metrics.jsonl":
                rows = [json.loads(row) for row in path.read_text().splitlines()]
                seen += [str({k: v for k, v in row.items() if not is_a_time(k)}) for row in rows]
    return seen


def is_a_time(metric: str) -> bool:
    return metric.startswith(("timing_s/", "perf/")) or metric == "reshard/ms"
