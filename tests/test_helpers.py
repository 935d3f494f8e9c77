"""What tests share is in modules of its own: a file of tests is not imported."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def test_no_file_of_tests_is_imported() -> None:
    imported = [
        (str(path.relative_to(TESTS)), node.module)
        for path in TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("tests.")
        and node.module.rsplit(".", 1)[-1].startswith("test_")
    ]
    assert not imported
