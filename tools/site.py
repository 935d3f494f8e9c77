"""Hooks of mkdocs.yml: pages from files outside docs/, from docstrings and from schemas."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

import hybridengine.api
import hybridengine.kernels
import hybridengine.reshard
from hybridengine.lab.keys import key_reference
from tools.package_links import link_package

_ROOT = Path(__file__).parents[1]
_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_REFERENCE = {
    "operators": ("Operators", hybridengine.kernels),
    "sync": ("Weight sync", hybridengine.reshard),
    "trainer": ("Trainer", hybridengine.api),
}


def on_startup(command: str, dirty: bool) -> None:
    """Put the package together, parts of which lie in folders beside it."""
    link_package(_ROOT / "build" / "site_sources")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of docs/."""
    for source, page in _PAGES.items():
        text = (_ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    for name, (title, package) in _REFERENCE.items():
        text = "\n".join([f"# {title}", "", str(package.__doc__), *_members(package), ""])
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    for plot in (_ROOT / "benchmarks" / "results").glob("*.png"):
        files.append(File.generated(config, f"plots/{plot.name}", abs_src_path=str(plot)))
    for kind in ("grpo", "ppo", "sft"):
        files.append(File.generated(config, f"reference/keys_{kind}.md", content=_keys(kind)))
    return files


def _members(package: ModuleType) -> list[str]:
    """Return what shows the public functions and classes, from where they are defined."""
    members = [getattr(package, name) for name in package.__all__]
    shown = [m for m in members if callable(m) and m.__module__.startswith("hybridengine")]
    shown.sort(key=lambda member: (isinstance(member, type), member.__name__))
    return [f"::: {member.__module__}.{member.__qualname__}\n" for member in shown]


def _keys(kind: str) -> str:
    rows = [
        f"| `{key.name}` | {_cell(key.type)} | `{key.default or ' '}` | {_cell(key.meaning)} |"
        for key in key_reference(kind)
    ]
    head = [
        f"# Keys of `hybridengine {kind}`",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Show links to files that have no page as text; pages of ours, where they are in the site."""

    markdown = markdown.replace("](../benchmarks/results/growth_", "](plots/growth_")
    markdown = re.sub(r"(!\[[^\]]*\]\()\.\./benchmarks/results/", r"\1plots/", markdown)

    def link(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        name = target.split("#")[0].removeprefix("../")
        if name in _PAGES:
            return f"[{text}]({_PAGES[name]})"
        inside = "://" in target or target.startswith("#") or files.get_file_from_path(name)
        return match[0] if inside and not target.startswith("../") else text

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", link, markdown)
