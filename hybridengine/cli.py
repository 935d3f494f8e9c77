"""The `hybridengine` command: run a job.

Commands import torch when they need it, after the configuration is checked, so that help and
`--print-config` answer at once. Installed extras add commands: the entry-point group
`hybridengine.commands` holds `typer.Typer` apps, whose modules are light to import.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.main
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from hybridengine import __version__
from hybridengine.run import plugins
from hybridengine.run.config import (
    JobConfig,
    config_to_yaml,
    load_job,
    overrides_of,
)
from hybridengine.run.errors import (
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    ConfigError,
    ConfigNote,
    Faults,
    InvalidConfigError,
    UserError,
    print_error,
    print_note,
)

if TYPE_CHECKING:  # a command that runs no job does not load torch
    from hybridengine.train.preflight import Checked


class _Commands(TyperGroup):
    """The commands of the core, and in a panel of their own those of each installed extra."""

    def list_commands(self, ctx: Any) -> list[str]:
        self._add_installed()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self._add_installed()
        return super().get_command(ctx, cmd_name)

    def _add_installed(self) -> None:
        for name, entry in plugins("commands").items():
            for command, added in typer.main.get_group(entry.load()).commands.items():
                added.rich_help_panel = f"Commands of hybridengine.{name}"  # type: ignore[attr-defined]
                self.commands.setdefault(command, added)


app = typer.Typer(
    cls=_Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False
)


def _show_version(show: bool) -> None:
    if show:
        print(f"hybridengine {__version__}")
        raise typer.Exit


@app.callback()
def _hybridengine(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """The fast path of LLM reinforcement learning."""


JobSettings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG.YAML] [KEY=VALUE]...", help="A YAML file, settings, or both."),
]
_DryRun = Annotated[bool, typer.Option(help="Check everything, print the plan, exit.")]
_PrintConfig = Annotated[
    bool,
    typer.Option("--print-config", help="Print the command that it means, and all keys as YAML."),
]
_ConfigPath = Annotated[str | None, typer.Option(help="Hydra's: the folder of --config-name.")]
_ConfigName = Annotated[
    str | None, typer.Option(help="Hydra's: the YAML file, with or without .yaml.")
]


def _add_job(kind: str, help: str) -> None:
    """Add the command that runs a job of `kind`."""

    @app.command(kind, help=help)
    def job(
        settings: JobSettings = None,
        dry_run: _DryRun = False,
        print_config: _PrintConfig = False,
        config_path: _ConfigPath = None,
        config_name: _ConfigName = None,
    ) -> None:
        with stop_before_start(), report_user_errors():
            config, invalid = load_checked(kind, settings or [], config_path, config_name)
            if not print_config:
                _run(config, dry_run, invalid)
            elif invalid is not None:
                raise invalid
            else:
                command = shlex.join(["hybridengine", kind, *overrides_of(kind, config)])
                print(f"# {command}\n{config_to_yaml(config)}", end="")


_STARTS = "Starts the ranks itself unless run under torchrun."
_add_job("grpo", f"Train with GRPO. {_STARTS}")
_add_job("ppo", "Train with PPO: as grpo, with a critic (algorithm.adv_estimator=gae by default).")
_add_job("sft", f"Fine-tune on conversations. {_STARTS}")


def split_settings(
    settings: list[str], config_path: str | None = None, config_name: str | None = None
) -> tuple[str | None, list[str]]:
    """Return the YAML file or None, and the overrides.

    config_path, config_name: Hydra's way to name the file; the folder is relative to the working
    directory.
    """
    if config_path is not None and config_name is not None:
        return str(Path(config_path, f"{config_name.removesuffix('.yaml')}.yaml")), settings
    if config_path is not None or config_name is not None:
        raise ConfigError(
            "--config-path and --config-name, Hydra's folder and name of a YAML file, go together; "
            "give both, or `hybridengine grpo FILE.yaml key=value …`, or leave out a --config-name "
            "that names a file of verl itself: its defaults are not read"
        )
    first = settings[0] if settings else "="
    if "=" in first and not Path(first).is_file():
        return None, settings
    return first, settings[1:]


@contextmanager
def report_user_errors() -> Iterator[None]:
    """Print a UserError as one line and exit with code 2."""
    try:
        yield
    except UserError as error:
        print_error(error)
        raise typer.Exit(EXIT_USER_ERROR) from None


@contextmanager
def stop_before_start() -> Iterator[None]:
    """End with EXIT_STOPPED on SIGINT or SIGTERM, until the launcher or the rank handles them."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, _end_by) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            if signal.getsignal(number) is _end_by:
                signal.signal(number, handler)


def _end_by(signum: int, frame: FrameType | None) -> None:
    name = signal.Signals(signum).name
    print(f"stopped by {name} before the start; run the same command again", file=sys.stderr)
    raise SystemExit(EXIT_STOPPED)


def load_checked(
    kind: str,
    settings: list[str],
    config_path: str | None = None,
    config_name: str | None = None,
) -> tuple[JobConfig, InvalidConfigError | None]:
    """Return the configuration and its faults; print notes on keys without effect, on rank 0."""
    file, overrides = split_settings(settings, config_path, config_name)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", ConfigNote)
        try:
            config = load_job(kind, file, overrides)
        except InvalidConfigError as invalid:
            return invalid.config, invalid
    for note in notes if _is_first() else ():
        print_note(str(note.message))
    return config, None


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _run(config: JobConfig, dry_run: bool, invalid: InvalidConfigError | None) -> None:
    from hybridengine.train.preflight import check_job
    from hybridengine.train.start import check_launch, launch, start_rank

    faults = Faults(invalid)
    if not dry_run:
        faults.attempt(check_launch, config)
    if _is_first() or faults:  # a rank that ends now would end the checks of rank 0
        checked = check_job(config, faults)
        if dry_run:
            Console().print(_plan(checked))
    if not dry_run:
        raise typer.Exit(start_rank(config) if "RANK" in os.environ else launch(config))


def _plan(checked: Checked) -> Table:
    """Return what a run prints itself, when all of it is known."""
    from hybridengine.train.plan import plan_table, start_of

    table = plan_table(*checked)
    table.add_row("[bold]start", start_of(checked.config, len(checked.train)))
    for name, entry in plugins("plan").items():
        if row := entry.load()(checked.config, checked.choices):
            table.add_row(f"[bold]{name.replace('_', ' ')}", row)
    return table
