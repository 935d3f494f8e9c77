"""Measure the claims of docs/figures.md again: `python -m tools.claims [NUMBER ...]`.

With --write it measures nothing: it writes the first table of the claims and draws docs/claims.png.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

_PAGE = Path(__file__).parents[1] / "docs" / "figures.md"
_ROW = re.compile(r"^\| (\d+) \| (.+?) \|.* `python (.+?)` \| `(.+?)` \|$", re.MULTILINE)


class Claim(NamedTuple):
    """A row of the page."""

    number: int
    text: str
    arguments: str  # of python
    record: str  # file of benchmarks/results


def claims_section() -> str:
    """Return the part of the page with the claims, which has no other tables."""
    return _PAGE.read_text().partition("\n## Claims\n")[2]


def read_claims() -> list[Claim]:
    """Return the rows of the section."""
    claims = [Claim(int(n), *rest) for n, *rest in _ROW.findall(claims_section())]
    return sorted(claims, key=lambda claim: claim.number)


def main() -> int:
    """Run the commands; return 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", nargs="*", type=int, help="of docs/figures.md; default: all")
    parser.add_argument("--write", action="store_true", help="the page from recorded results")
    given = parser.parse_args()
    if given.write:
        from tools import claims_page, claims_plot

        claims_page.write_page()
        claims_plot.draw(claims_page.PLOT)
        return 0
    numbers = given.number
    claims = read_claims()
    if unknown := set(numbers) - {claim.number for claim in claims}:
        parser.error(f"{_PAGE.name} has no claim {sorted(unknown)[0]}; it has 1 to {len(claims)}")
    failed = []
    first_of: dict[str, Claim] = {}  # command → first claim; a command of several runs once
    for claim in claims:
        if not numbers or claim.number in numbers:
            first_of.setdefault(claim.arguments, claim)
    for claim in first_of.values():
        print(f"\n# {claim.number}: {claim.text}\n# python {claim.arguments}", flush=True)
        if subprocess.run([sys.executable, *shlex.split(claim.arguments)]).returncode:
            failed.append(claim.number)
    if failed:
        print(f"failed: {failed}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
