"""Run cases on libraries and print which are right."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from types import ModuleType

from .case import Case, Outcome, run

_MARKS = {
    "right": "right",
    "wrong": "WRONG",
    "convention": "other",
    "not there": "-",
    "error": "ERROR",
}

Libraries = Mapping[str, tuple[str, ModuleType]]
Results = dict[str, dict[str, Outcome]]  # case -> library -> outcome


def run_all(cases: Sequence[Case], libraries: Libraries) -> Results:
    """Run every case on every library."""
    return {
        case.name: {name: run(case, name, module) for name, (_, module) in libraries.items()}
        for case in cases
    }


def to_text(cases: Sequence[Case], libraries: Libraries, results: Results) -> str:
    """Return the table, what is behind each entry that is not right, and the counts."""
    headings = [f"{name} {version}" for name, (version, _) in libraries.items()]
    width = max(len(case.name) for case in cases)
    lines = ["  ".join([f"{'case':{width}}", *headings])]
    for case in cases:
        marks = [_MARKS[outcome.state] for outcome in results[case.name].values()]
        cells = [f"{mark:{len(head)}}" for mark, head in zip(marks, headings, strict=True)]
        lines.append("  ".join([f"{case.name:{width}}", *cells]).rstrip())
    lines.append("")
    for case in cases:
        for name, outcome in results[case.name].items():
            if outcome.state not in ("right", "not there"):
                lines += [f"{name}, {case.name}: {_explain(outcome)}", f"    {case.report}"]
    for name in libraries:
        counts = Counter(results[case.name][name].state for case in cases)
        lines.append(f"{name}: " + ", ".join(f"{n} {state}" for state, n in counts.items()))
    return "\n".join(lines)


def _explain(outcome: Outcome) -> str:
    if outcome.state == "error":
        return outcome.note
    values = f"{outcome.given:.6g}, expected {outcome.expected:.6g} at entry {outcome.position}"
    return f"another convention, {outcome.note}: {values}" if outcome.note else values


def to_json(cases: Sequence[Case], libraries: Libraries, results: Results) -> str:
    """Return versions and, per case, report, fault and the outcome of each library."""
    rows = [
        {
            "case": case.name,
            "report": case.report,
            "fault": case.fault,
            "outcomes": {name: vars(outcome) for name, outcome in results[case.name].items()},
        }
        for case in cases
    ]
    versions = {name: version for name, (version, _) in libraries.items()}
    return json.dumps({"versions": versions, "cases": rows}, indent=1)
