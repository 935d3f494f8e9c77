"""What tests share is in modules of its own: a file of tests is not imported."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
IMPORT = re.compile(r"^\s*from tests\.(?:\w+\.)*test_\w+ import", re.MULTILINE)


def test_no_file_of_tests_is_imported() -> None:
    files = [path for path in TESTS.rglob("*.py") if IMPORT.search(path.read_text())]
    assert not files
