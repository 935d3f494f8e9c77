"""Run other packages' own tests with our functions in place of theirs (docs/dropins.md).

    python -m tools.dropins [NAME ...] [--json FILE] [--source NAME=FOLDER]

For every package: install it into an environment of its own over .venv, get the tests that belong
to its release, run them without and with `hybridengine.integrations.NAME.patch()`, and count the
calls of every function of ours. It fails if a test passes without ours and not with ours, or if a
function was never called and dropins_upstreams.py gives no reason.

`--source`: an unpacked source tree of the release, where it cannot be downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tools.dropins_upstreams import UPSTREAMS, Upstream
from tools.environments import overlay, run_logged

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "dropins"
RESULTS = ROOT / "benchmarks" / "results" / "dropins.json"
TIMEOUT_S = 1800  # of one package's tests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(UPSTREAMS))
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--source", action="append", default=[], metavar="NAME=FOLDER")
    options = parser.parse_args()
    if unknown := set(options.names) - set(UPSTREAMS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected {', '.join(UPSTREAMS)}")
    sources = dict(given.split("=", 1) for given in options.source)
    rows = {row["upstream"]: row for row in _rows(options.json)}
    faults: list[str] = []
    for name in options.names or UPSTREAMS:
        row = run(name, UPSTREAMS[name], sources.get(name))
        rows[name] = row
        options.json.write_text(json.dumps({"rows": list(rows.values())}, indent=1) + "\n")
        print(line(row), flush=True)
        faults += [f"{name}: passes only without ours: {test}" for test in row["broken"]]
        faults += [f"{name}: no test calls {target}" for target in row["never_called"]]
        if not row["passed"]:
            faults.append(f"{name}: no test passed")
    for fault in faults:
        print(fault, file=sys.stderr)
    return bool(faults)


def run(name: str, upstream: Upstream, given_source: str | None) -> dict[str, Any]:
    """Run one package's tests without and with ours; return its row of the results."""
    folder = CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    python = overlay(folder, () if upstream.from_source else upstream.requirements)
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    if given_source:
        shutil.copytree(given_source, source, symlinks=True)
    else:
        _unpack(_archive(folder, upstream), source)
    for test in upstream.tests:
        _rewrite(source / test, upstream.rewrite)
    if upstream.from_source:
        write_metadata(source, upstream.requirements)
    without, _ = run_pytest(python, source, upstream, {})
    outcomes, calls = run_pytest(python, source, upstream, {"HYBRIDENGINE_DROPIN": name})
    counts = Counter(outcomes.values())
    return {
        "upstream": name,
        "versions": list(upstream.requirements),
        "passed": counts["passed"],
        "skipped": counts["skipped"],
        "failed": counts["failed"],
        "failed_without_ours": Counter(without.values())["failed"],
        "broken": [t for t, o in without.items() if o == "passed" and outcomes.get(t) != o],
        "deselected": upstream.deselect,
        "rewritten": upstream.rewrite,
        "calls": calls,
        "never_called": [t for t, n in calls.items() if not n and t not in upstream.untested],
        "untested": upstream.untested,
    }


def line(row: dict[str, Any]) -> str:
    """Return what one package's tests gave, as one line."""
    called = sum(1 for calls in row["calls"].values() if calls)
    return (
        f"{row['upstream']}: {row['passed']} passed, {row['failed']} failed "
        f"({row['failed_without_ours']} without ours), {row['skipped']} skipped, "
        f"{len(row['broken'])} broken; {called} of {len(row['calls'])} functions called, "
        f"{sum(row['calls'].values())} calls"
    )


def _rows(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["rows"] if file.is_file() else []


def write_metadata(source: Path, requirements: tuple[str, ...]) -> None:
    """Give the packages of a source tree the metadata that importlib.metadata looks for."""
    for requirement in requirements:
        name, _, version = requirement.partition("==")
        info = source / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _archive(folder: Path, upstream: Upstream) -> Path:
    """Return the release's archive, downloaded once."""
    downloads = folder / "downloads" / upstream.source.rpartition("/")[2]
    if not list(downloads.glob("*.tar.gz")):
        shutil.rmtree(downloads, ignore_errors=True)
        downloads.mkdir(parents=True)
        if upstream.source.startswith("https://"):
            try:
                with urllib.request.urlopen(upstream.source, timeout=60) as response:
                    (downloads / "source.tar.gz").write_bytes(response.read())
            except OSError as error:
                raise SystemExit(
                    f"{upstream.source} cannot be downloaded ({error}); unpack it elsewhere and "
                    f"give --source {folder.name}=FOLDER."
                ) from error
        else:
            pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps")
            _call(*pip, "--no-binary", ":all:", "-d", str(downloads), upstream.source)
    (archive,) = downloads.glob("*.tar.gz")
    return archive


def _unpack(archive: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        with tarfile.open(archive) as tar:
            tar.extractall(temporary, filter="data")
        (top,) = Path(temporary).iterdir()
        top.rename(folder)


def _rewrite(path: Path, rewrite: dict[str, str]) -> None:
    if not path.exists():
        raise SystemExit(f"{path} is not in the release")
    for file in [path] if path.is_file() else path.rglob("*.py"):
        text = file.read_text()
        for old, new in rewrite.items():
            text = text.replace(old, new)
        file.write_text(text)


def run_pytest(
    python: Path, source: Path, upstream: Upstream, variables: dict[str, str]
) -> tuple[dict[str, str], dict[str, int]]:
    """Run the tests; return test id → outcome, and function of ours → number of calls."""
    with tempfile.TemporaryDirectory() as temporary:
        report, calls = Path(temporary, "report.xml"), Path(temporary, "calls.json")
        command = [str(python), "-m", "pytest", "-q", "--color=no"]
        command += [f"--rootdir={source}", "-p", "dropins_plugin", "-p", "no:cacheprovider"]
        command += ["-o", "addopts=", f"--junitxml={report}", *upstream.tests]
        command += [f"--deselect={test}" for test in upstream.deselect]
        environment = os.environ | upstream.environment | variables
        environment |= {
            "PYTHONPATH": str(ROOT / "tools"),
            "HYBRIDENGINE_DROPIN_CALLS": str(calls),
            "HYBRIDENGINE_DROPIN_GROUPS": ",".join(upstream.groups),
            "HYBRIDENGINE_DROPIN_STUBS": ",".join(upstream.stubs),
        }
        log = source.parent / ("with.log" if variables else "without.log")
        try:
            status = run_logged(command, source, environment, log, TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise SystemExit(
                f"{source.parent.name}: its tests {'with' if variables else 'without'} ours "
                f"did not end within TIMEOUT_S = {TIMEOUT_S} s; see {log}"
            ) from None
        if not report.is_file():
            raise SystemExit(f"pytest ended with {status}; see {log}")
        return outcomes_of(report), json.loads(calls.read_text()) if calls.is_file() else {}


def outcomes_of(report: Path) -> dict[str, str]:
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "passed"
        outcome = "skipped" if "skipped" in tags else outcome
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return outcomes


def _call(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
