"""Run many trajectories on one engine.

The main thread steps the engine; an event loop in another thread runs the trajectories, whose tools
run in threads of their own. A request joins the engine's batch as soon as a trajectory makes it, so
a slow tool holds up its own trajectory only. With tensor parallelism the first rank of a replica
does all that; the others add the requests that it broadcasts before each step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybridengine.agents.loops import LOOPS, AgentLoop, LoopContext, find_loop
from hybridengine.agents.parsers import find_parser
from hybridengine.agents.template import TurnTemplate
from hybridengine.agents.toolbox import Toolbox
from hybridengine.agents.tools import Tool, load_tools
from hybridengine.agents.trajectories import score_trajectories
from hybridengine.agents.trajectory import AgentError, Trajectory
from hybridengine.engine.interface import (
    Request,
    RequestStream,
    RolloutEngine,
    SamplingSpec,
    derive_seed,
)
from hybridengine.engine.response import Response
from hybridengine.model.attachments import Attachment
from hybridengine.run.config import RLConfig
from hybridengine.run.errors import UserError, shorten
from hybridengine.train.build import find_stop_token_ids, load_preparer
from hybridengine.train.data import PromptSample
from hybridengine.train.data.chats import ChatTemplate
from hybridengine.train.rollout_source import RolloutGenerator
from hybridengine.train.rollouts import ScoredResponse

__all__ = ["AgentRunner", "build_agents", "tool_schemas"]

_REQUESTS = list[Request] | None  # of a step, to all ranks of a replica
HEARTBEAT_S = 1.0  # while all tools run: between messages to other ranks, looks for new weights


def tool_schemas(config: RLConfig) -> list[dict[str, Any]]:
    """Return the tools that the chat template shows to the model."""
    return [tool.schema for tool in load_tools(config.rollout.multi_turn).values()]


def build_agents(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> AgentRunner:
    """Build what runs trajectories of several turns.

    Raises ConfigError for tools, a format or an agent loop that do not exist.
    """
    turns, name = config.rollout.multi_turn, config.rollout.agent.default_agent_loop
    find_loop(name)
    tools = load_tools(turns)
    data = config.data
    if data.special_tokens == "error":  # in rows, not in results of tools
        data = replace(data, special_tokens="text")
    schemas = [tool.schema for tool in tools.values()]
    chats = ChatTemplate(tokenizer, data, schemas, load_preparer(config))
    template = TurnTemplate(chats, tokenizer, find_stop_token_ids(config.model.path, tokenizer))
    context = LoopContext(turns, find_parser(turns.format, tokenizer))
    return AgentRunner(context, name, template, tools)


@dataclass(frozen=True)
class AgentRunner:
    """Runs the agent loop of each row.

    loop_name: of rows without `extra_info.agent_name`.
    """

    context: LoopContext
    loop_name: str
    template: TurnTemplate
    tools: Mapping[str, Tool]
    _loops: dict[str, Callable[[LoopContext], AgentLoop]] = field(default_factory=dict)

    def respond(
        self,
        generator: RolloutGenerator,
        samples: Mapping[int, PromptSample],
        spec: SamplingSpec,
        seed: int,
    ) -> list[ScoredResponse]:
        """Run the trajectories on the generator's engine and score them, see `run`."""
        with generator.session.phase("gen"):
            trajectories = self.run(generator.engine, samples, spec, seed)
        with generator.session.phase("reward"):
            return score_trajectories(trajectories, generator.tokenizer, generator.reward)

    def run(
        self,
        engine: RolloutEngine,
        samples: Mapping[int, PromptSample],
        spec: SamplingSpec,
        seed: int,
    ) -> dict[int, list[Trajectory]]:
        """Run spec.n trajectories of each sample; {} on all but the first rank of a replica.

        samples: by their position in the batch, which with `seed` sets the random numbers. Every
        rank of a replica calls it with the same arguments.

        Raises AgentError, with the row, where an agent loop or environment raises.
        """
        if not samples:
            return {}
        with engine.stream(replace(spec, n=1), seed) as stream:
            if engine.tp_rank != 0:
                _follow(engine, stream)
                return {}
            numbers = count()
            queue = _RequestQueue()

            def start(position: int, sample: PromptSample, k: int) -> Trajectory:
                turns = count()

                async def generate(
                    ids: Sequence[int], max_tokens: int, images: Sequence[Attachment]
                ) -> Response:
                    own = derive_seed(seed, position, k, next(turns))
                    return await queue.request(Request(number, ids, max_tokens, own, images))

                number = next(numbers)  # it has one request at a time
                kwargs, config = sample.extra_info.get("tools_kwargs") or {}, self.context.config
                slots = queue.slots(config.max_concurrent_calls)
                return Trajectory(
                    sample,
                    k,
                    template=self.template,
                    generate=generate,
                    toolbox=Toolbox(self.tools, kwargs, config, slots),
                    max_tokens=len(sample.prompt_ids) + spec.max_tokens,
                )

            trajectories = {
                position: [start(position, sample, k) for k in range(spec.n)]
                for position, sample in samples.items()
            }
            queue.start([self._run(t) for group in trajectories.values() for t in group])
            try:
                _lead(engine, stream, queue)
            finally:
                queue.close()
        return trajectories

    async def _run(self, trajectory: Trajectory) -> None:
        name = trajectory.sample.extra_info.get("agent_name") or self.loop_name
        try:
            await self.find(name)(self.context).run(trajectory)
            trajectory.tool_rewards = await trajectory.toolbox.close()
            trajectory.finish()
        except (Exception, SystemExit) as error:
            prompt = shorten(trajectory.sample.prompt_text, 300)
            reason = f"{error}" if isinstance(error, UserError) else repr(error)
            raise AgentError(f"agent loop {name!r}: {reason}; prompt {prompt!r}") from error

    def find(self, name: str) -> Callable[[LoopContext], AgentLoop]:
        """Return the loop that a row may name; raise AgentError for any other name."""
        if name != self.loop_name and name not in LOOPS:
            raise AgentError(
                f"extra_info.agent_name of the row is {name!r}, expected one of "
                f"{', '.join(LOOPS)}: data selects among registered loops; register yours with "
                "register_agent_loop in model.external_lib"
            )
        if name not in self._loops:
            self._loops[name] = find_loop(name)
        return self._loops[name]


class _RequestQueue:
    """Requests and results between the engine's thread and the event loop of the trajectories."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.num_live = 0  # trajectories that have not ended
        self._inbox: SimpleQueue[tuple[Request, asyncio.Future] | BaseException | None] = (
            SimpleQueue()
        )
        self._waiting: dict[int, asyncio.Future[Response]] = {}
        self._slots: asyncio.Semaphore | None = None
        self._thread: threading.Thread | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def slots(self, limit: int) -> asyncio.Semaphore:
        """Return the semaphore of all trajectories."""
        self._slots = self._slots or asyncio.Semaphore(limit)
        return self._slots

    def start(self, runs: Sequence[Coroutine[Any, Any, None]]) -> None:
        self.num_live = len(runs)

        async def watch(run: Coroutine[Any, Any, None]) -> None:
            try:
                await run
                self._inbox.put(None)
            except BaseException as error:
                self._inbox.put(error)

        def main() -> None:
            asyncio.set_event_loop(self.loop)
            self._tasks = [self.loop.create_task(watch(run)) for run in runs]
            self.loop.run_forever()

        self._thread = threading.Thread(target=main, daemon=True, name="agent loops")
        self._thread.start()

    async def request(self, request: Request) -> Response:
        future: asyncio.Future[Response] = self.loop.create_future()
        self._inbox.put((request, future))
        return await future

    def take(self, wait_for: int, timeout_s: float | None) -> list[Request]:
        """Return new requests: at least `wait_for`, or one of each trajectory, in the given time.

        Raises what a trajectory raised.
        """
        taken: list[Request] = []
        while True:
            wanted = min(wait_for, self.num_live) - len(taken)
            try:
                item = self._inbox.get(timeout=timeout_s) if wanted > 0 else self._inbox.get(False)
            except Empty:
                return taken
            if isinstance(item, BaseException):
                raise item
            if item is None:
                self.num_live -= 1
            else:
                request, future = item
                self._waiting[request.id] = future
                taken.append(request)

    def deliver(self, finished: Sequence[tuple[int, Response]]) -> None:
        for number, completion in finished:
            future = self._waiting.pop(number)
            self.loop.call_soon_threadsafe(_resolve, future, completion)

    def close(self) -> None:
        """Stop the event loop. What tools still run is left alone."""

        async def cancel() -> None:
            own = asyncio.current_task()
            others = [task for task in asyncio.all_tasks() if task is not own]
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=1.0) if others else None
            self.loop.stop()

        if self._thread is not None:
            self.loop.call_soon_threadsafe(lambda: self.loop.create_task(cancel()))
            self._thread.join(5.0)
        if not self.loop.is_running():
            self.loop.close()


def _resolve(future: asyncio.Future[Response], completion: Response) -> None:
    if not future.done():
        future.set_result(completion)


def _lead(engine: RolloutEngine, stream: RequestStream, queue: _RequestQueue) -> None:
    """Step the engine until all trajectories have ended; take new weights between the steps."""
    try:
        while queue.num_live:
            wait_for, timeout_s = 0, None
            if stream.num_running == 0:
                wait_for = queue.num_live if stream.in_batches else 1
                if engine.tp_size > 1 or (engine.in_flight and not stream.in_batches):
                    timeout_s = HEARTBEAT_S
            requests = engine.broadcast(queue.take(wait_for, timeout_s), _REQUESTS)
            queue.deliver(_step(engine, stream, requests))
    finally:
        engine.broadcast(None, _REQUESTS)


def _follow(engine: RolloutEngine, stream: RequestStream) -> None:
    """Take the same steps as the first rank of the replica."""
    while (requests := engine.broadcast(None, _REQUESTS)) is not None:
        _step(engine, stream, requests)


def _step(
    engine: RolloutEngine, stream: RequestStream, requests: Sequence[Request]
) -> list[tuple[int, Response]]:
    for request in requests:
        stream.add(request)
    if stream.num_running:
        return stream.step()
    engine.take_update()
    return []
