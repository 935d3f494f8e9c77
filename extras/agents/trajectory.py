"""One trajectory: the turns of the model and of its environment, and the tokens to train on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridengine.agents.parsers import ToolCall
from hybridengine.agents.template import Entry, ModelTurn, Segment, TurnTemplate
from hybridengine.agents.toolbox import Toolbox, ToolResult
from hybridengine.engine.response import Response
from hybridengine.model.attachments import Attachment
from hybridengine.run.errors import UserError
from hybridengine.train.data import PromptSample

__all__ = ["AgentError", "TokenSequence", "Trajectory", "Turn"]

# (prompt ids, maximum tokens, images of the prompt)
Generate = Callable[[Sequence[int], int, Sequence[Attachment]], Awaitable[Response]]


class AgentError(UserError):
    """An agent loop or environment that cannot be loaded, raised, or took too long."""


@dataclass
class Turn:
    """A turn of the model, of a tool or of the user.

    text: of the model, as sampled without the token that ended it; of others, the content.
    num_tokens: of the model, sampled; of others, with what the template writes around them, 0 where
      the model did not read them.
    reward: earned by this turn of the model.
    calls: the model's.
    """

    role: str
    text: str
    num_tokens: int = 0
    reward: float = 0.0
    finish_reason: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    _entry: ModelTurn | None = None

    def set_calls(self, calls: Sequence[ToolCall], content: str = "") -> None:
        """Note the tool calls of a turn of the model, and its text without them."""
        self.calls = list(calls)
        if self._entry is not None:
            self._entry.content, self._entry.tool_calls = content, tool_call_messages(calls)


def tool_call_messages(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Return calls as templates take them; ids have the nine characters that Mistral's wants."""
    return [
        {
            "id": f"call{k:05}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for k, call in enumerate(calls)
    ]


_EMPTY = Response((), (), "stop")


@dataclass
class TokenSequence:
    """Tokens that one forward pass reads: a prompt, then a response with sampled and other tokens.

    context_ids: the prompt, None for the sample's own.
    response: its tokens; the log-probs of those that were not sampled are 0.
    turn_ends: (index of a turn's last token, the turn).
    """

    segments: list[Segment]
    context_ids: list[int] | None = None
    response: Response = _EMPTY
    turn_ends: list[tuple[int, Turn]] = field(default_factory=list)

    @property
    def ids(self) -> Sequence[int]:
        return self.response.token_ids

    @property
    def images(self) -> list[Attachment]:
        """Those in the context, if it has one of its own, and in the tokens."""
        own = self.segments if self.context_ids is not None else self.segments[1:]
        return [image for segment in own for image in segment.images]

    def end_at(self, count: int) -> None:
        """Keep `count` tokens after the context, and what segments these have."""
        self.response = self.response.first(count)
        context = self.segments[0].ids if self.context_ids is None else self.context_ids
        rest, kept = len(context) + count, 0
        while rest > 0:
            rest, kept = rest - len(self.segments[kept].ids), kept + 1
        del self.segments[kept:]

    @property
    def is_sampled(self) -> bool:
        """Whether any of its tokens is the model's."""
        return any(self.response.columns.get("sampled", ()))

    def append(self, segment: Segment) -> None:
        """Append tokens that were not sampled."""
        reason = self.response.finish_reason
        self._append(segment, Response(segment.ids, [0.0] * len(segment.ids), reason))

    def append_sampled(self, response: Response, text: str, turn: Turn) -> None:
        columns = {**response.columns, "sampled": [1] * len(response.token_ids)}
        self._append(Segment(text, list(response.token_ids)), replace(response, columns=columns))
        self.turn_ends.append((len(self.ids) - 1, turn))

    def _append(self, segment: Segment, response: Response) -> None:
        self.segments.append(segment)
        self.response = self.response.join(response).compact()


def _with_images(sample: PromptSample) -> list[Entry]:
    """Return the chat of a row with its images in the parts that stand for them."""
    if not sample.images:
        return [dict(message) for message in sample.chat]
    images, chat = iter(sample.images), list[Entry]()
    for message in sample.chat:
        content = message.get("content")
        if isinstance(content, list):
            parts = [
                {**part, "image": next(images)} if part["type"] == "image" else dict(part)
                for part in content
            ]
            message = {**message, "content": parts}
        chat.append(dict(message))
    return chat


class Trajectory:
    """What an agent loop works on: `messages`, `generate`, `run_tools`.

    sample: the row.
    number: which of the responses to its prompt.
    messages: the chat so far; append to it, the model reads it at the next `generate`. A turn of
      the model is added by `generate`; messages that are there may not be changed then.
    turns: all turns, in order.
    state: free for the loop.
    max_tokens: of prompt and response.
    """

    def __init__(
        self,
        sample: PromptSample,
        number: int,
        *,
        template: TurnTemplate,
        generate: Generate,
        toolbox: Toolbox,
        max_tokens: int,
    ) -> None:
        self.sample, self.number, self.toolbox = sample, number, toolbox
        self.messages: list[Entry] = list(_with_images(sample))
        self.turns: list[Turn] = []
        self.state: dict[str, Any] = {}
        self.is_truncated = False
        self.tool_rewards: dict[str, float] = {}  # by tool, what its calc_reward returned
        self.sequences: list[TokenSequence] = []
        self._template = template.of_row(sample.tools, sample.template_options)
        self._generate, self._max_tokens = generate, max_tokens
        self._num_read = 0  # messages that the tokens contain

    @property
    def num_branches(self) -> int:
        return max(0, len(self.sequences) - 1)

    @property
    def num_tokens(self) -> int:
        """The tokens after the row's prompt that `max_tokens` limits: of the longest sequence."""
        longest = max(len(self._prompt_ids(s)) + len(s.ids) for s in self.sequences)
        return longest - len(self.sample.prompt_ids)

    @property
    def turn_rewards(self) -> list[float]:
        return [turn.reward for turn in self.turns if turn.role == "assistant"]

    async def generate(self, max_tokens: int | None = None) -> Turn | None:
        """Let the model write a turn; return it, None where no token is left for one.

        The turn is cut at `max_tokens` if given, and where the limit of the trajectory is reached;
        then `finish_reason` is "length".
        """
        sequence = self._read_messages()
        ids = [*self._prompt_ids(sequence), *sequence.ids]
        room = self._max_tokens - len(ids)
        if room < 1:
            self.is_truncated = True
            return None
        images = [image for segment in sequence.segments for image in segment.images]
        completion = await self._generate(ids, min(room, max_tokens or room), images)
        turn = self._add_turn(sequence, completion)
        self.is_truncated = turn.finish_reason == "length"
        return turn

    def _prompt_ids(self, sequence: TokenSequence) -> Sequence[int]:
        own = sequence.context_ids
        return self.sample.prompt_ids if own is None else own

    def _add_turn(self, sequence: TokenSequence, completion: Response) -> Turn:
        text = self._template.sampled_text(completion.token_ids)
        entry = ModelTurn(text, text)
        turn = Turn(
            "assistant",
            text,
            len(completion.token_ids),
            finish_reason=completion.finish_reason,
            _entry=entry,
        )
        sequence.append_sampled(completion, text, turn)
        self.messages.append(entry)
        self.turns.append(turn)
        self._num_read = len(self.messages)
        return turn

    def _read_messages(self) -> TokenSequence:
        """Append the new messages to the last sequence, or begin one; return it."""
        new = self.messages[self._num_read :]
        if not self.sequences:
            sequence = self._begin()
        elif new:
            sequence = self._extend(self.sequences[-1])
        else:
            raise AgentError(
                "the agent loop awaits trajectory.generate() twice without a message in between; "
                "append one to trajectory.messages, or end the loop"
            )
        self._num_read = len(self.messages)
        return sequence

    def _begin(self) -> TokenSequence:
        sample = self.sample
        if self.messages == _with_images(sample):
            prompt = Segment(sample.prompt_text, list(sample.prompt_ids), sample.images)
            sequence = TokenSequence([prompt])
        else:
            prompt = self._template.begin(self.messages)  # type: ignore[arg-type]
            sequence = TokenSequence([prompt], context_ids=prompt.ids)
            self._note_messages(self.messages[len(sample.chat) :], 0)
        self.sequences.append(sequence)
        return sequence

    def _extend(self, sequence: TokenSequence) -> TokenSequence:
        extension = self._template.extend(sequence.segments, self.messages)
        self._note_messages(self.messages[self._num_read :], len(extension.added.ids))
        if extension.kept == len(sequence.segments):
            sequence.append(extension.added)
            return sequence
        segments = [*sequence.segments[: extension.kept], extension.added]
        branch = TokenSequence(segments, [token for part in segments for token in part.ids])
        self.sequences.append(branch)
        return branch

    def _note_messages(self, entries: Sequence[Entry], num_tokens: int) -> None:
        """Record turns of others; they share `num_tokens`, which are the first one's."""
        for entry in entries:
            if not isinstance(entry, ModelTurn):
                content = entry["content"]
                parts = content if isinstance(content, list) else [{"text": str(content or "")}]
                text = "".join(part.get("text", "") for part in parts)
                self.turns.append(Turn(str(entry["role"]), text, num_tokens))
                num_tokens = 0

    async def run_tools(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run tool calls of the last turn at once and append their results to `messages`."""
        results = list(await asyncio.gather(*map(self.toolbox.run, calls)))
        for k, (wanted, result) in enumerate(zip(calls, results, strict=True)):
            self.messages.append(
                {
                    "role": "tool",
                    "name": wanted.name,
                    "tool_call_id": f"call{k:05}",
                    "content": result.content,
                }
            )
        return results

    def finish(self) -> None:
        """Drop tokens after the last sampled one, and record messages that the model never read.

        Raises AgentError where the loop has let the model write nothing.
        """
        self._note_messages(self.messages[self._num_read :], 0)
        self._num_read = len(self.messages)
        self.sequences = [s for s in self.sequences if s.is_sampled]
        for sequence in self.sequences:
            sequence.end_at(sequence.turn_ends[-1][0] + 1)
        if not self.sequences:
            raise AgentError(
                "the agent loop ended without a token of the model; it must await "
                "trajectory.generate() at least once, with room for a token in "
                "data.max_prompt_length + data.max_response_length"
            )
