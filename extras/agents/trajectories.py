"""From trajectories of several turns to scored responses."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridengine.agents.trajectory import TokenSequence, Trajectory, Turn
from hybridengine.engine.response import Response
from hybridengine.train.data import PromptSample
from hybridengine.train.rewards.manager import ResponseTokens, RewardManager, score_checked
from hybridengine.train.rollouts import MultiTurn, ScoredResponse

__all__ = ["TURN_REWARDS", "score_trajectories", "tokens_of", "with_turns"]

TURN_REWARDS = "turn_rewards"  # the column, and the result that is its sum over a trajectory


def score_trajectories(
    trajectories: Mapping[int, Sequence[Trajectory]], tokenizer: Any, reward: RewardManager
) -> list[ScoredResponse]:
    """Return the responses of trajectories, given by the position of their prompt.

    The score is the reward functions' plus the rewards of the turns. The functions get the text of
    all turns after the prompt, and in extra_info `num_turns`, `turn_scores`, `tool_rewards`,
    `rollout_reward_scores` (verl's names) and `messages`.
    """
    if not trajectories:
        return []
    rows = [(position, t) for position, group in trajectories.items() for t in group]
    texts = [_text(t, tokenizer) for _, t in rows]
    tokens = [tokens_of(t) for _, t in rows]
    samples = [with_turns(t.sample, t.turns, t.turn_rewards, t.tool_rewards) for _, t in rows]
    result = score_checked(reward, samples, texts, tokens)
    rollouts: list[ScoredResponse] = []
    for k, (position, trajectory) in enumerate(rows):
        earned = result.of(k).add(TURN_REWARDS, 1.0, sum(trajectory.turn_rewards))
        reason = "length" if trajectory.is_truncated else "stop"
        turns = [_turn_row(turn) for turn in trajectory.turns]
        numbers = _numbers(trajectory)
        for sequence in trajectory.sequences:
            response = replace(_with_turn_rewards(sequence), finish_reason=reason)
            context, is_last = (
                array("i", sequence.context_ids or ()),
                sequence is trajectory.sequences[-1],
            )
            place = MultiTurn(context, sequence.images, is_last, turns, numbers)
            rollouts.append(ScoredResponse(response, position, texts[k], earned, place))
    return rollouts


def _with_turn_rewards(sequence: TokenSequence) -> Response:
    rewards = array("f", bytes(4 * len(sequence.ids)))
    for end, turn in sequence.turn_ends:
        rewards[end] += turn.reward
    columns = {**sequence.response.columns, TURN_REWARDS: rewards}
    return replace(sequence.response, columns=columns)


def with_turns(
    sample: PromptSample,
    turns: Sequence[Turn] = (),
    turn_rewards: Sequence[float] = (),
    tool_rewards: Mapping[str, float] | None = None,
) -> PromptSample:
    """Return the sample with what reward functions may read about a trajectory in extra_info."""
    about = {
        "num_turns": len(turns) + 1,  # with the prompt, as in verl
        "turn_scores": list(turn_rewards),
        "tool_rewards": list(turn_rewards),
        "rollout_reward_scores": dict(tool_rewards or {}),
        "messages": [
            *(dict(message) for message in sample.chat),
            *({"role": turn.role, "content": turn.text} for turn in turns),
        ],
    }
    return replace(sample, extra_info={**sample.extra_info, **about})


def _text(trajectory: Trajectory, tokenizer: Any) -> str:
    """Decode all tokens after the prompt, each once."""
    ids = [token for sequence in trajectory.sequences for token in sequence.ids]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def tokens_of(trajectory: Trajectory) -> ResponseTokens:
    """Return the tokens of a trajectory as rewards count them."""
    ids = [token for s in trajectory.sequences for token in s.ids]
    sampled = [int(x) for s in trajectory.sequences for x in s.response.columns.get("sampled", ())]
    return ResponseTokens(ids, sampled, trajectory.num_tokens)


def _numbers(trajectory: Trajectory) -> dict[str, float]:
    box = trajectory.toolbox
    tokens = {"assistant": 0, "tool": 0, "user": 0}
    for turn in trajectory.turns:
        tokens[turn.role] = tokens.get(turn.role, 0) + turn.num_tokens
    return {
        "num_turns": len(trajectory.turns) + 1,
        "tool_calls": box.num_calls,
        "tool_errors": box.num_errors,
        "truncated": float(trajectory.is_truncated),
        "branches": trajectory.num_branches,
        **{f"tokens/{role}": tokens[role] for role in ("assistant", "tool", "user")},
        "timing_s/agent_loop/tool_calls": box.seconds,
    }


def _turn_row(turn: Turn) -> dict[str, Any]:
    """Return a turn as rollout files have it."""
    row: dict[str, Any] = {"role": turn.role, "content": turn.text, "tokens": turn.num_tokens}
    if turn.role == "assistant":
        row |= {"reward": turn.reward, "finish_reason": turn.finish_reason}
    if turn.calls:
        row["tool_calls"] = [
            {"name": call.name, "arguments": dict(call.arguments)} for call in turn.calls
        ]
    return row
