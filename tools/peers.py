"""Try our patches on releases of the packages they replace functions of, by import and call.

    python -m tools.peers [NAME ...] [--newest N] [--page FILE] [--source NAME=FOLDER]

For every package: download its newest N releases that the registry has (without dependencies, into
a temporary folder in front of .venv), import them and check every function of every group as
`patch` does: name, signature, and results for a small input. The table goes into FILE between its
two markers. It fails if the newest release of a package has a function that is refused.

`--source`: an unpacked source tree of a release that is not in the registry.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "dropins.md"
MARKERS = "<!-- peers -->\n", "<!-- /peers -->\n"


class Peer(NamedTuple):
    """A package.

    distribution: its name in the registry; "": no release that ours stands for is there.
    published: the newest release that is known to exist.
    imports: distributions that it imports and .venv lacks.
    absent: packages that it imports and that a function under test does not use; they are empty.
    """

    distribution: str
    published: str = ""
    imports: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


PEERS = {  # adapter → package
    "liger": Peer("liger-kernel"),
    "nemo_rl": Peer("", "0.8"),
    "openrlhf": Peer(
        "openrlhf",
        imports=("ray", "msgpack"),
        absent=("deepspeed", "flash_attn", "pylatexenc", "torchdata"),
    ),
    "skyrl": Peer("", "0.5"),
    "transformers": Peer("transformers"),
    "trl": Peer("trl", "1.19.0"),
    "verl": Peer(
        "verl",
        absent=("ray", "tensordict", "codetiming", "hydra", "pylatexenc", "orjson", "megatron"),
    ),
}
TIMEOUT_S = 600

_CHECK = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
from hybridengine.conformance.libraries import services
from hybridengine.integrations._patching import _owner
from hybridengine.run.errors import UserError
patches = importlib.import_module("hybridengine.integrations." + sys.argv[1]).patch.__self__
found = {}
with services.empty_services(sys.argv[2:]):
    for replacement in patches.replacements:
        patches.replacements = (replacement,)
        group = found.setdefault(replacement.group, [])
        try:
            patches.check(replacement.group)
            owner, name = _owner(replacement.target)
        except UserError as error:
            owner, name = _owner(replacement.target)
            group.append(str(error))
        except ImportError as error:
            group.append("not tried: " + str(error))
            continue
        if getattr(getattr(owner, name, None), "__module__", "") == services.__name__:
            group[:] = ["not tried: it belongs to a package that is not installed"]
print("\\n" + json.dumps(found))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--newest", type=int, default=3, metavar="N")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--source", action="append", default=[], metavar="NAME=FOLDER")
    options = parser.parse_args()
    if unknown := set(options.names) - set(PEERS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected {', '.join(PEERS)}")
    sources = dict(given.split("=", 1) for given in options.source)
    before, lines, after = parts(options.page.read_text())
    rows, refused = {line.split(" ", 2)[1]: line for line in lines}, list[str]()
    for name in options.names or PEERS:
        found, peer = {}, PEERS[name]
        for release in newest(peer.distribution, options.newest) if peer.distribution else ():
            with tempfile.TemporaryDirectory() as folder:
                wanted = f"{peer.distribution}=={release}", *peer.imports
                found[release] = check(name, download(wanted, Path(folder)))
        first = next(iter(found.values()), {})
        refused += [text for texts in first.values() for text in refusals(texts)]
        if name in sources:
            found["sources"] = check(name, Path(sources[name]).resolve())
        rows[name] = row(name, found)
        print(rows[name], flush=True)
        options.page.write_text(before + "".join(f"{rows[n]}\n" for n in sorted(rows)) + after)
    for text in refused:
        print(text, file=sys.stderr)
    return bool(refused)


def newest(distribution: str, count: int) -> list[str]:
    """Return the newest final releases that the registry has, the newest first."""
    pip = (sys.executable, "-m", "pip", "index", "versions", distribution)
    output = subprocess.run(pip, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    (line,) = re.findall(r"Available versions: (.*)", output.stdout)
    return [r for r in line.split(", ") if re.fullmatch(r"[\d.]+", r)][:count]


def download(wanted: Iterable[str], folder: Path) -> Path:
    """Install wheels into `folder`, without what they depend on; return that."""
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile")
    options = ("--only-binary", ":all:", "--target", str(folder))
    subprocess.run([*pip, *options, *wanted], check=True, timeout=TIMEOUT_S)
    return folder


def check(name: str, folder: Path) -> dict[str, list[str]]:
    """Return, by group of an adapter, why functions of the release in `folder` are refused."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    result = subprocess.run(
        [sys.executable, "-c", _CHECK, name, *PEERS[name].absent],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if result.returncode:
        return {"import": ["not tried: " + result.stderr.strip().splitlines()[-1]]}
    found: dict[str, list[str]] = json.loads(result.stdout.splitlines()[-1])
    return found


def refusals(group: list[str]) -> list[str]:
    return [text for text in group if not text.startswith("not tried")]


def row(name: str, found: dict[str, dict[str, list[str]]]) -> str:
    """Return a package's line of the table, given by release and group why functions do not fit."""
    fit = [release for release, groups in found.items() if not any(groups.values())]
    published = PEERS[name].published
    others = []
    for release, groups in found.items():
        reasons = [f"`{group}` ({_names(texts)})" for group, texts in groups.items() if texts]
        others += [f"{release} without {', '.join(reasons)}"] if reasons else []
    if published not in ("", *found):
        others += [f"{published} is not available to try"]
    return f"| {name} | {', '.join(fit) or '-'} | {'; '.join(others) or '-'} |"


def _names(texts: list[str]) -> str:
    names = {text.split(" ")[0].rpartition(".")[2] for text in refusals(texts)}
    return ", ".join(sorted(names)) or "not tried: it lacks a package"


def parts(text: str) -> tuple[str, list[str], str]:
    """Split a page: up to the table's rows, its rows, and the rest."""
    start, end = MARKERS
    before, found, rest = text.partition(start)
    table, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise SystemExit(f"the page has no {start.strip()} ... {end.strip()}")
    lines = table.splitlines()
    head = next((i for i, line in enumerate(lines) if line.startswith("|--")), -1) + 1
    return before + start + "".join(f"{x}\n" for x in lines[:head]), lines[head:], end + after


if __name__ == "__main__":
    sys.exit(main())
