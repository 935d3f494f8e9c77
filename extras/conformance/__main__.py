"""python -m hybridengine.conformance [LIBRARY ...] [--cases TEXT] [--json FILE]"""

from __future__ import annotations

import argparse
from pathlib import Path

from hybridengine.conformance import CASES, load, run_all, to_json, to_text


def main() -> int:
    """Print the table; return 1 if hybridengine is not right in a case."""
    parser = argparse.ArgumentParser(prog="python -m hybridengine.conformance")
    parser.add_argument("library", nargs="*", help="default: all that are installed")
    parser.add_argument("--cases", default="", metavar="TEXT", help="cases with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the outcomes here")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.cases.lower() in case.name.lower()]
    if not cases:
        parser.error(f"--cases: no name of the {len(CASES)} cases contains {arguments.cases!r}")
    try:
        libraries = load(arguments.library)
    except ValueError as error:
        parser.error(str(error))
    results = run_all(cases, libraries)
    print(to_text(cases, libraries, results))
    if arguments.json is not None:
        arguments.json.write_text(to_json(cases, libraries, results) + "\n")
    own = [row["hybridengine"].state for row in results.values() if "hybridengine" in row]
    return int(any(state != "right" for state in own))


if __name__ == "__main__":
    raise SystemExit(main())
