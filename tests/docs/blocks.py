"""The code blocks of the documentation: fenced and indented ones, with what each states it needs.

A block runs as printed on a laptop, or a comment in it begins with "needs": `# needs 8 GPUs`. Of a
Python block that is its first comment, whose words may name what the block takes as given
(`# needs a model`). Of a shell block it is a comment on a line of its own, for all lines after it,
or behind a command, for that one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["BLOCKS", "PAGES", "ROOT", "Block", "Command", "blocks_of", "commands_of", "pages_with"]

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/*/README.md")
    for path in ROOT.glob(pattern)
)
LANGUAGES = ("python", "bash", "yaml", "text")

_FENCE = re.compile(r"```(\w*)$")
_ITEM = re.compile(r"([-*]|\d+\.) ")
_COMMENT = re.compile(r"(?:^|\s)# (.*)$")
_PROGRAMS = r"hybridengine|make|python3?|pip|torchrun|pytest|vllm|\.venv/bin/\S+|\.cache/\S+"
_SHELL = re.compile(rf"(# .*\n)?([A-Z_0-9]+=\S+ )*({_PROGRAMS}) ")


@dataclass(frozen=True)
class Block:
    """A code block of `page`, whose first line is number `line`; needs: "" for nothing special."""

    page: str
    line: int
    language: str
    text: str

    @property
    def needs(self) -> str:
        """What the first comment of a Python block states."""
        comments = []
        for line in self.text.splitlines():
            if not line.startswith("# "):
                break
            comments.append(line[2:])
        first = " ".join(comments)
        return first.removeprefix("needs ") if first.startswith("needs ") else ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command of a shell block: its words, the variables before them, and what it needs."""

    page: str
    line: int
    words: tuple[str, ...]
    variables: tuple[str, ...] = ()
    needs: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the blocks of a page. Raises ValueError for one whose language is not stated.

    An indented block is a shell block; indented lines of a list are text.
    """
    lines, number, in_list = (ROOT / page).read_text().splitlines(), 0, False
    while number < len(lines):
        line, start = lines[number], number
        in_list = bool(_ITEM.match(line)) or (in_list and (not line or line.startswith("  ")))
        if fence := _FENCE.match(line):
            end = lines.index("```", number + 1)
            if fence[1] not in LANGUAGES:
                raise ValueError(
                    f"{page}:{start + 1} is ```{fence[1]}, not one of {', '.join(LANGUAGES)}"
                )
            yield Block(page, start + 2, fence[1], "\n".join(lines[start + 1 : end]))
            number = end
        elif line.startswith("    ") and not in_list:
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number]):
                number += 1
            text = "\n".join(line[4:] for line in lines[start:number]).strip()
            if not _SHELL.match(text):
                raise ValueError(f"{page}:{start + 1} is no shell command: fence it, ```python, …")
            yield Block(page, start + 1, "bash", text)
            continue
        number += 1


def commands_of(block: Block) -> Iterator[Command]:
    """Yield the commands of a shell block."""
    needs, text, first = "", "", 0
    for number, line in enumerate(block.text.splitlines(), block.line):
        comment = _COMMENT.search(line)
        stated = comment[1].partition("needs ")[2] if comment else ""
        if line.startswith("#"):
            needs = stated or needs
            continue
        first = first if text else number
        text += _COMMENT.sub("", line).strip().removesuffix("\\")
        if line.endswith("\\") or not text:
            continue
        for part in text.split(" && "):
            yield replace(_command(block.page, first, part), needs=stated or needs)
        text = ""


def _command(page: str, line: int, text: str) -> Command:
    words = shlex.split(text)
    count = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    return Command(page, line, tuple(words[count:]), tuple(words[:count]))


BLOCKS = {page: list(blocks_of(page)) for page in PAGES}


def pages_with(language: str) -> list[str]:
    return [page for page in PAGES if any(b.language == language for b in BLOCKS[page])]
