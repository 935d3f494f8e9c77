"""Many trajectories on one engine, a scripted one: who waits for whom, and what ends a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hybridengine.agents import (
    AgentError,
    AgentLoop,
    AgentRunner,
    LoopContext,
    ToolCall,
    Trajectory,
    find_loop,
    register_agent_loop,
    runner,
)
from hybridengine.agents.tools import FunctionTool, Tool
from hybridengine.engine.interface import InFlightUpdate, Request, RequestStream, SamplingSpec
from hybridengine.engine.response import Response
from hybridengine.run.config.rl import MultiTurnConfig
from hybridengine.run.errors import ConfigError
from hybridengine.train.data import PromptSample
from tests.extras.agents.families import CHATML, byte_tokenizer, turn_template


class Stream(RequestStream):
    """Finishes every request in the step after the one that it joined."""

    def __init__(self, answer: Callable[[str], str], in_batches: bool) -> None:
        super().__init__()
        self.in_batches, self._answer = in_batches, answer
        self._running: list[Request] = []
        self.batches: list[int] = []
        self.version = 3

    def _add(self, request: Request) -> None:
        self._running.append(request)

    def _step(self) -> list[tuple[int, Response]]:
        running, self._running = self._running, []
        self.batches.append(len(running))
        return [(request.id, self._complete(request)) for request in running]

    def _complete(self, request: Request) -> Response:
        tokenizer = byte_tokenizer()
        text = self._answer(tokenizer.decode(request.prompt_ids))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids.append(tokenizer.convert_tokens_to_ids("<|im_end|>"))
        reason = "stop" if len(ids) <= request.max_tokens else "length"
        ids = ids[: request.max_tokens]
        return Response(ids, [-0.5] * len(ids), reason, versions=[(self.version, len(ids))])


class Engine:
    """What the runner uses of a `RolloutEngine`."""

    tp_size, tp_rank = 1, 0
    in_flight: InFlightUpdate | None = None

    def __init__(self, answer: Callable[[str], str], in_batches: bool = False) -> None:
        self.last = Stream(answer, in_batches)
        self.sent: list[Any] = []

    @contextmanager
    def stream(self, spec: SamplingSpec, seed: int) -> Iterator[Stream]:
        yield self.last

    def take_update(self) -> None:
        if self.in_flight is not None and self.in_flight.is_due():
            self.in_flight.update()

    def broadcast(self, value: Any, expected: Any) -> Any:
        self.sent.append(value)
        return value


def parse(text: str) -> list[ToolCall]:
    return [ToolCall(word[1:], {}) for word in text.split() if word.startswith("!")]


def run(
    engine: Engine,
    prompts: Sequence[str],
    tools: Sequence[Any] = (),
    loop: str = "tool_agent",
    n: int = 1,
    max_tokens: int = 400,
    **settings: Any,
) -> list[Trajectory]:
    template, _ = turn_template(CHATML)
    samples = {}
    for i, prompt in enumerate(prompts):
        chat = [{"role": "user", "content": prompt}]
        segment = template.begin(chat)
        samples[i] = PromptSample(i, segment.ids, segment.text, "toy", None, {}, chat)
    config = MultiTurnConfig(enable=True, **{"tool_timeout_s": 20.0, **settings})
    found = {tool.name: tool for tool in (Tool(FunctionTool(tool)) for tool in tools)}
    agents = AgentRunner(LoopContext(config, parse), loop, template, found)
    done = agents.run(engine, samples, SamplingSpec(n=n, max_tokens=max_tokens), seed=1)  # type: ignore[arg-type]
    return [trajectory for group in done.values() for trajectory in group]


def count_turns(text: str) -> int:
    return text.count("<|im_start|>assistant")


def test_a_slow_tool_holds_up_its_own_trajectory_only() -> None:
    """The slow tool returns when the other trajectory has taken all its turns."""
    others_done = threading.Event()

    def slow() -> str:
        """Wait for the others."""
        return "late" if others_done.wait(15) else "never"

    def quick() -> str:
        """Answer."""
        return "ok"

    def answer(text: str) -> str:
        if "be slow" in text:
            return "!slow" if count_turns(text) == 1 else "done"
        if count_turns(text) == 4:
            others_done.set()
        return "!quick" if count_turns(text) < 4 else "done"

    slow_one, quick_one = run(Engine(answer), ["be slow", "go"], [slow, quick])
    assert [turn.text for turn in slow_one.turns] == ["!slow", "late", "done"]
    assert [turn.role for turn in quick_one.turns] == ["assistant", "tool"] * 3 + ["assistant"]


def test_weights_are_taken_while_all_tools_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "HEARTBEAT_S", 0.01)
    updated = threading.Event()

    def wait() -> str:
        """Wait for new weights."""
        return "new" if updated.wait(15) else "old"

    def update() -> None:
        engine.last.version += 1
        updated.set()

    engine = Engine(lambda text: "!wait" if count_turns(text) == 1 else "done")

    def is_due() -> bool:
        return bool(engine.last.batches) and not updated.is_set()

    engine.in_flight = InFlightUpdate(is_due, update, keep_kv=True)
    [trajectory] = run(engine, ["go"], [wait])
    assert [turn.text for turn in trajectory.turns] == ["!wait", "new", "done"]
    [sequence] = trajectory.sequences
    turns = [turn.num_tokens for turn in trajectory.turns if turn.role == "assistant"]
    assert sequence.response.versions == [(3, turns[0]), (4, turns[1])]
    assert sum(turns) == sum(sequence.response.columns["sampled"])


def test_an_engine_that_runs_batches_gets_full_ones() -> None:
    def nap() -> str:
        """Rest."""
        threading.Event().wait(0.05)
        return "ok"

    engine = Engine(lambda text: "!nap" if count_turns(text) < 3 else "done", in_batches=True)
    trajectories = run(engine, ["a", "b"], [nap], n=3)
    assert engine.last.batches == [6, 6, 6]
    assert [t.number for t in trajectories] == [0, 1, 2] * 2
    assert engine.sent[-1] is None  # tells other ranks of the replica to leave


def test_tokens_are_the_sampled_ones_with_the_template_s_between() -> None:
    def two() -> str:
        """Return 2."""
        return "2"

    engine = Engine(lambda text: "I call !two  " if count_turns(text) == 1 else "It is 2")
    [trajectory] = run(engine, ["1+1?"], [two])
    [sequence] = trajectory.sequences
    tokenizer = byte_tokenizer()
    text = tokenizer.decode([*trajectory.sample.prompt_ids, *sequence.ids])
    assert text == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\nI call !two  <|im_end|>\n"
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\nIt is 2<|im_end|>"
    )
    mask = sequence.response.columns["sampled"]
    sampled = [i for i, m in zip(sequence.ids, mask, strict=True) if m]
    assert tokenizer.decode(sampled) == "I call !two  <|im_end|>It is 2<|im_end|>"
    assert {p for p, m in zip(sequence.response.log_probs, mask, strict=True) if not m} == {0.0}
    assert [turn.num_tokens > 0 for turn in trajectory.turns] == [True, True, True]


def test_limits_end_a_trajectory_with_a_token_of_the_model() -> None:
    def long() -> str:
        """Return much."""
        return "x" * 100

    engine = Engine(lambda text: "!long")
    [trajectory] = run(engine, ["go"], [long], max_tokens=60)
    assert trajectory.is_truncated
    assert all(sequence.response.columns["sampled"][-1] for sequence in trajectory.sequences)
    assert len(trajectory.sequences[0].ids) <= 60
    [trajectory] = run(engine, ["go"], [long], max_assistant_turns=2)
    assert [turn.role for turn in trajectory.turns] == ["assistant", "tool", "assistant"]
    [trajectory] = run(engine, ["go"], [long], max_user_turns=1)
    assert [turn.role for turn in trajectory.turns] == ["assistant", "tool", "assistant"]
    assert not trajectory.is_truncated


LOOPS = """
import sys, time
from hybridengine.agents import AgentLoop

class Raises(AgentLoop):
    async def run(self, trajectory):
        await trajectory.generate()
        raise KeyError("mine")

class Silent(AgentLoop):
    async def run(self, trajectory):
        pass

class Twice(AgentLoop):
    async def run(self, trajectory):
        await trajectory.generate()
        await trajectory.generate()

class Exits(AgentLoop):
    async def run(self, trajectory):
        sys.exit(1)

class Hangs:
    def reset(self, sample):
        time.sleep(60)
    def step(self, action):
        pass

class Neither:
    pass
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", r"KeyError\('mine'\); prompt '.*go"),
        ("Silent", "without a token of the model"),
        ("Twice", "twice without a message in between"),
        ("Exits", "SystemExit"),
        ("Hangs", r"environment Hangs.reset gave no result within .* = 0.2 s"),
    ],
)
def test_a_faulty_loop_ends_the_run_with_its_row(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "loops.py").write_text(LOOPS)
    engine = Engine(lambda text: "ok")
    with pytest.raises(AgentError, match=message):
        run(engine, ["go"], loop=f"{tmp_path}/loops.py:{name}", tool_timeout_s=0.2)
    assert engine.sent[-1] is None


def test_loops_are_found_by_name_and_file(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(LOOPS)
    with pytest.raises(ConfigError, match="expected one of single_turn_agent, tool_agent"):
        find_loop("missing")
    with pytest.raises(ConfigError, match="neither a subclass of AgentLoop nor a class with reset"):
        find_loop(f"{tmp_path}/loops.py:Neither")
    with pytest.raises(ConfigError, match=r"names 'Missing', which is not in .*; Raises, .*there"):
        find_loop(f"{tmp_path}/loops.py:Missing")
    with pytest.raises(ConfigError, match="cannot be imported"):
        find_loop("hybridengine.agents.Missing")

    @register_agent_loop("test_own")
    class Own(AgentLoop):
        async def run(self, trajectory: Trajectory) -> None:
            await trajectory.generate()

    assert find_loop("test_own") is Own
    with pytest.raises(ValueError, match="already registered"):
        register_agent_loop("test_own")(type("Other", (Own,), {}))


def test_a_row_cannot_name_code(tmp_path: Path) -> None:
    """A row selects among registered loops; what the configuration names is imported, once."""
    ran = tmp_path / "ran"
    file = tmp_path / "loop.py"
    file.write_text(
        f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n"
        "class Environment:\n    def reset(self, sample): ...\n"
        "    def step(self, action): return '', 0.0, True\n"
    )
    name = f"{file}:Environment"
    context = LoopContext(MultiTurnConfig(enable=True), parse=lambda text: [])
    template, _ = turn_template(CHATML)
    for given in (name, "os.system", "package.module.Class", "unknown"):
        agents = AgentRunner(context, "single_turn_agent", template, {})
        with pytest.raises(AgentError, match=r"expected one of single_turn_agent, tool_agent"):
            agents.find(given)
        assert not ran.exists()
    assert AgentRunner(context, name, template, {}).find("tool_agent")
    assert AgentRunner(context, name, template, {}).find(name) and ran.exists()
