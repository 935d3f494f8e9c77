"""Forty arithmetic faults of RL trainers as a suite: which library gives the right value.

`python -m hybridengine.conformance` runs every case on the installed libraries. A case has a small
input, the right value by a formula of its own in float64, and the public report that it comes from.

The outcomes are of functions on these inputs: `right`; `wrong`, with the value given and expected;
`convention`, where a library documents another meaning; `not there`; `error`.
"""

from .case import Case, NotThere, Outcome, run
from .cases import CASES
from .libraries import load
from .table import run_all, to_json, to_text

__all__ = ["CASES", "Case", "NotThere", "Outcome", "load", "run", "run_all", "to_json", "to_text"]
