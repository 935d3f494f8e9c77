"""The index of rollout files, the filter, the values of tokens, and the view in the terminal."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hybridengine import cli
from hybridengine.lab.view.detail import COLORS, detail_of
from hybridengine.lab.view.rollouts import RolloutIndex
from hybridengine.run.errors import ConfigError
from tests.extras.lab.view.runs import write_run


@pytest.fixture
def index(tmp_path: Path) -> RolloutIndex:
    return RolloutIndex(write_run(tmp_path / "run"))


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("", 18),
        ("step=2", 6),
        ("step>1 reward>=1", 8),
        ("group=11 step!=1", 6),
        ("length<4", 9),  # those with tools: the model's tokens
        ("length=3 row=5", 3),
        ("kind=val", 0),
        ("prompt 1", 9),
        ("PROMPT 1  step=1", 3),
        ("onerror", 6),
        ("reward>x", 0),  # no number: a text
    ],
)
def test_a_query_selects(index: RolloutIndex, query: str, count: int) -> None:
    assert len(index.select(query)) == count


def test_entries_lead_to_their_rows(index: RolloutIndex) -> None:
    for entry in index.entries:
        row = index.read(entry)
        assert row["index"] == entry.group and row["reward"] == entry.reward
        assert len(row["response_ids"]) == 4
        assert entry.length == sum(row.get("sampled", [1] * 4))  # the model's tokens
    first = index.entries[0]
    assert [e.row for e in index.group(first)] == [0, 1, 2]
    assert [e.step for e in index.over_steps(first)] == [1] * 3 + [2] * 3 + [3] * 3


def test_values_and_turns_of_tokens(index: RolloutIndex) -> None:
    detail = detail_of(index.read(index.select("group=11 row=4")[0]))
    assert detail.values["log_prob"] == [-0.5, -1.0, -1.5, -2.0]
    assert detail.values["advantage"] == [0.0] * 4
    assert detail.values["ratio"] == pytest.approx([1.1] * 4)
    assert detail.values["difference"][0] == pytest.approx(0.1 * 0.60653, abs=1e-5)
    assert detail.values["entropy"] == [0.0, 0.5, 1.0, 1.5]
    assert [(p.title, p.is_model, p.start, p.end) for p in detail.parts] == [
        ("model · calls count[bold] · 2 tokens", True, 0, 2),
        ("tool or user · 1 tokens", False, 2, 3),
        ("model · reward 0.5 · 1 tokens", True, 3, 4),
    ]
    assert detail.results == {"ground_truth": [1, 2], "strict": 0.5}  # what the reward returned
    of_the_run = {"index", "data_source", "reward", "advantage", "finish_reason", "weight_version"}
    assert detail.facts.keys() == of_the_run | {"added"}


def test_a_query_that_selects_nothing_says_why(index: RolloutIndex) -> None:
    with pytest.raises(ConfigError, match=r"'foo=3' is no condition .* numbers of step, reward,"):
        index.select_some("step=1 foo=3")
    with pytest.raises(ConfigError, match=r"none of 18 rollouts; 'no such text' was looked for"):
        index.select_some("no such text")
    with pytest.raises(ConfigError, match=r"--filter 'step=9' selects none of 18 rollouts$"):
        index.select_some("step=9")
    assert len(index.select_some("step=1")) == 6


def test_clipped_tokens_have_the_sign_of_their_advantage(index: RolloutIndex) -> None:
    rows = [index.read(entry) for entry in index.select("step=1 group=10")]
    down, _, up = (detail_of(row).values["clipping"] for row in rows)
    assert down == [0, -1, 0, -1] and up == [0, 1, 0, 1]


def test_strength_of_colors() -> None:
    assert COLORS["log_prob"].strength(-3.0) == -0.5
    assert COLORS["log_prob"].strength(float("-inf")) == -1.0
    assert COLORS["advantage"].strength(9.0) == 1.0
    assert COLORS["ratio"].strength(1.0) == 0.0
    assert COLORS["ratio"].strength(0.5) == pytest.approx(-1.0)


def test_errors_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "missing"):
        result = CliRunner().invoke(cli.app, ["view", str(tmp_path / folder), "--html", "x.html"])
        assert result.exit_code == 2
    run = write_run(tmp_path / "run", steps=1)
    with (run / "rollouts" / "step_1.jsonl").open("a") as file:
        file.write('{"index": 1')
    with pytest.raises(ConfigError, match=r"step_1\.jsonl, line 7: not a rollout"):
        RolloutIndex(run)


def test_without_textual_the_message_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridengine.lab.commands.find_spec", lambda name: None)
    result = CliRunner().invoke(cli.app, ["view", str(write_run(tmp_path / "run"))])
    assert result.exit_code == 2 and "hybridengine[view]" in result.output


@pytest.mark.slow
def test_the_terminal_view(index: RolloutIndex) -> None:
    pytest.importorskip("textual", reason="the extra `view` is not installed")
    from textual.widgets import Collapsible, DataTable, Input

    from hybridengine.lab.view.terminal import RolloutApp

    async def use() -> None:
        app = RolloutApp(index)
        async with app.run_test(size=(140, 40)) as pilot:
            await pilot.pause()
            table = app.query_one(DataTable)
            assert table.row_count == 18 and len(app.query(".card")) == 1
            await pilot.press("g")
            assert len(app.query(".card")) == 3 and len(app.query(".chosen")) == 1
            await pilot.press("s")
            assert len(app.query(".card")) == 9
            await pilot.press("s")
            assert "log-prob of the engine" in str(app.query_one("#legend").render())
            await pilot.press("c", "c")
            assert "trainer minus engine" in str(app.query_one("#legend").render())
            app.query_one(Input).value = "group=11 reward=2"
            await pilot.press("slash", "enter")
            await pilot.pause()
            assert table.row_count == 3
            folded = [box.collapsed for box in app.query(Collapsible)]
            assert folded == [False, False, True, False]  # prompt, model, tool, model
            await pilot.press("f")
            assert all(box.collapsed for box in app.query(Collapsible))
            app.query_one(Input).value = "nothing like it"
            await pilot.press("slash", "enter")
            await pilot.pause()
            assert table.row_count == 0 and not app.query(".card")

    asyncio.run(use())
