"""The table of model types has all of them, and shows what `ask` finds of some."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.architectures.model_types import Answer, ask, model_types
from tests.architectures.types_table import DOCUMENT, documented_types, render
from tests.ranks import run_ranks


def test_every_type_of_transformers_is_in_the_table() -> None:
    missing = set(model_types()) - set(documented_types(DOCUMENT.read_text()))
    assert not missing, f"run `make test-architectures`: {DOCUMENT.name} lacks {sorted(missing)}"


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("phi", Answer("phi", trained="phi", exact="auto")),
        ("glm_moe_dsa", r"\['indexed_attention'\] select or compress keys among all tokens"),
        ("musicgen", "Multiple valid text configs"),
    ],
)
def test_what_the_trainer_decides(tmp_path: Path, kind: str, expected: Answer | str) -> None:
    (answer,) = run_ranks(ask, 1, kind, str(tmp_path))
    if isinstance(expected, str):
        assert re.search(expected, answer.refusal)
    else:
        assert replace(answer, peak_mib=0, cpu_s=0.0) == expected


def test_types_with_one_outcome_are_one_row() -> None:
    refusal = "model 'm' ({}) cannot run packed: {}Attention differs by {}% in it; use another"
    answers = [
        Answer("gpt2", trained="gpt2"),
        Answer("phi", trained="phi"),
        Answer("kimi_k25", trained="deepseek_v3", exact="on"),
        Answer("dbrx", trained="dbrx", exact="auto", unshared="it reads positions"),
        Answer("xlm", trained="xlm"),
        Answer("bert", refusal.format("bert", "Bert", 12)),
        Answer("big-bird", refusal.format("big-bird", "BigBird", 85)),
    ]
    text = render(answers, not_loadable=["dbrx"])
    assert "| yes | no | yes | gpt2, phi |" in text
    assert "| yes | no | — | xlm |" in text
    assert "| yes | on request | yes | kimi_k25 (as deepseek_v3) |" in text
    assert "| no | yes | no | dbrx |" in text
    assert "| … differs by …% in it | bert, big-bird |" in text
    assert "lists 7 types of models" in text and "; 5 train." in text
    assert documented_types(text) == sorted(answer.kind for answer in answers)
