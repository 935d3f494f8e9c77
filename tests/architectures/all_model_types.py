"""Every model type of transformers, a process each; writes docs/model_types.md.

Not collected by `make test`: it takes minutes. `make test-architectures` names this file.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.architectures.all_architectures import NOT_LOADABLE
from tests.architectures.model_types import Answer, ask, model_types
from tests.architectures.types_table import DOCUMENT, render
from tests.ranks import run_ranks

# Of which transformers itself makes no model from a configuration alone.
FAILING = ("gemma4_assistant", "gemma4_unified_assistant")
TIMEOUT_S = 120.0  # of a type, on a machine that does other things too
MAX_CPU_S, MAX_MIB = 20.0, 2048
pytestmark = [pytest.mark.multirank, pytest.mark.timeout(TIMEOUT_S * len(model_types()))]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    folder = tmp_path_factory.mktemp("types")

    def answer(kind: str) -> Answer:
        result: Answer = run_ranks(ask, 1, kind, str(folder / kind), timeout_s=TIMEOUT_S)[0]
        return result

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(answer, model_types()))
    DOCUMENT.write_text(render(found, NOT_LOADABLE))
    return {answer.kind: answer for answer in found}


@pytest.mark.parametrize("kind", model_types())
def test_a_type_trains_or_is_refused_with_a_reason(answers: dict[str, Answer], kind: str) -> None:
    answer = answers[kind]
    assert answer.cpu_s <= MAX_CPU_S and answer.peak_mib <= MAX_MIB, answer
    assert bool(answer.refusal) != bool(answer.trained), answer
    assert "its forward fails" not in answer.refusal or kind in FAILING, answer
