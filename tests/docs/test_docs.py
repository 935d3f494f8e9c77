"""Every code block of the documentation runs as printed, or says what it needs (see `blocks`)."""

from __future__ import annotations

import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.docs.blocks import BLOCKS, PAGES, ROOT, Block, commands_of, pages_with
from tests.docs.commands import check
from tests.docs.python_blocks import faults_of, trains
from tests.tiny_models import save_tiny

CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s:]*?)(?:#([^)\s]+))?\)")  # of this repository
PATH = re.compile(r"`((?:csrc|docs|extras|hybridengine|kernels|tests|tools)/[\w./]+)`")


def prose_of(page: Path) -> str:
    return CODE_BLOCK.sub("", page.read_text())


def anchors_of(page: Path) -> Iterator[str]:
    """Yield the anchors of the headings, as GitHub names them, and those set by hand."""
    for heading in re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    yield from re.findall(r'<a id="([^"]+)"', page.read_text())


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths(page: str) -> None:
    """What a page links to, and every path that it names, exists."""
    text, folder = prose_of(ROOT / page), (ROOT / page).parent
    for name, anchor in LINK.findall(text):
        target = folder / name if name else ROOT / page
        assert target.exists(), f"{page} links to {name}"
        assert not anchor or anchor in anchors_of(target), f"{page} links to {name}#{anchor}"
    missing = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    assert missing == [], f"{page} names {missing}"


def test_entry_point_groups() -> None:
    """The page has every group that the package itself registers in."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {group for group in project["entry-points"] if group.startswith("hybridengine.")}
    page = (ROOT / "docs" / "extending.md").read_text()
    assert set(re.findall(r"^\| `(hybridengine\.\w+)` \|", page, re.MULTILINE)) == groups


def python_of(page: str) -> list[Block]:
    return [b for b in BLOCKS[page] if b.language == "python"]


@pytest.mark.parametrize("page", pages_with("python"))
def test_python(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridengine.train import algorithms

    monkeypatch.setattr(algorithms, "ESTIMATORS", dict(algorithms.ESTIMATORS))
    namespace: dict[str, object] = {"__name__": "docs"}
    blocks = python_of(page)
    for number, block in enumerate(blocks):
        assert not faults_of(block, blocks[:number]), block
        if not block.needs and not trains(block):
            exec(compile(block.text, str(block), "exec"), namespace)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `.cache` that the demo's preparing commands make, with a tiny model."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        save_tiny("llama", folder / ".cache" / "demo" / "smollm2-135m-instruct")
        for name in ("demo", "multi_turn", "moe", "hybrid"):
            patch.setattr(sys, "argv", ["prepare.py"])
            runpy.run_path(str(ROOT / "examples" / name / "prepare.py"), run_name="__main__")
    return folder / ".cache"


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("bash"))
def test_commands(page: str, checkout: Path, prepared: Path) -> None:
    for block in BLOCKS[page]:
        for command in commands_of(block) if block.language == "bash" else ():
            try:
                check(command, prepared)
            except Exception as error:
                pytest.fail(f"{command}\n{type(error).__name__}: {error}")


@pytest.mark.parametrize("page", pages_with("yaml"))
def test_yaml(page: str) -> None:
    for block in BLOCKS[page]:
        if block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict), block
