"""Trajectories of several turns in the trainer: masks, branches, rewards of turns, whole jobs."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.train.in_process import run_jobs, small_job

pytestmark = pytest.mark.multirank

LOOP = """
from dataclasses import replace

from hybridengine.agents import ToolCall
from hybridengine.agents.loops import ToolLoop

def parse(text):  # the tiny model writes no JSON
    words = text.split()
    calls = [ToolCall("first", {"word": words[0]}), ToolCall("broken", {})] if words else []
    return calls

class Loop(ToolLoop):
    def __init__(self, context):
        super().__init__(replace(context, parse=parse))

class Environment:
    async def reset(self, sample):
        self.left = len(sample.extra_info["interaction_kwargs"]["word"])
        return sample.extra_info["interaction_kwargs"]["word"]

    def step(self, action):
        self.left -= 1
        return "w9", float("w" in action), self.left == 0

class Broken(Environment):
    def step(self, action):
        return "w9"
"""
TOOLS = '''
def first(word: str) -> str:
    """Repeat.

    Args:
        word: any
    """
    return f"{word} w4"

def broken() -> str:
    """Fail."""
    raise ValueError("always")
'''
# Without the first word of the model's earlier turns.
REWRITES = (
    "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split()[1:]|join(' ') }}{% else %}{{ m.content }}{% endif %} {% endfor %}"
)


def write_job(folder: Path) -> list[str]:
    import json

    base = small_job(folder)
    (folder / "loop.py").write_text(LOOP)
    (folder / "tools.py").write_text(TOOLS)
    (folder / "rewrites.jinja").write_text(REWRITES)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    for k, row in enumerate(rows):
        row["interaction_kwargs"] = {"word": f"w{5 + k}"}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *base,
        "rollout.multi_turn.enable=true",
        "rollout.multi_turn.max_assistant_turns=3",
        f"rollout.multi_turn.function_tool_path={folder}/tools.py",
        f"rollout.agent.default_agent_loop={folder}/loop.py:Loop",
        f"model.path={folder}/stopping",
        "data.max_response_length=40",
        "actor.ppo_max_token_len_per_gpu=256",
    ]


def test_jobs_of_several_turns(tmp_path: Path) -> None:
    base = write_job(tmp_path)
    environment = [
        f"rollout.agent.default_agent_loop={tmp_path}/loop.py:Environment",
        "reward.custom_reward_function.path=turn_rewards",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        f"data.val_files={tmp_path}/rows.jsonl",
    ]
    rewriting = [
        f"data.chat_template={tmp_path}/rewrites.jinja",
        "rollout.multi_turn.max_parallel_calls=2",
        "actor.ppo_mini_batch_size=2",
        "rollout.top_k=20",
    ]
    broken = [f"rollout.agent.default_agent_loop={tmp_path}/loop.py:Broken"]
    jobs = [base, [*base, *rewriting], [*base, *environment], [*base, *broken]]
    plain, branched, acted, refused = run_jobs(tmp_path, jobs, 2)

    assert [job.refused for job in (plain, branched, acted)] == [""] * 3
    [rows] = plain.rollouts.values()
    assert len(rows) == 16
    for row in rows:
        assert len(row["sampled"]) == len(row["response_ids"]) == len(row["log_probs"]) <= 40
        assert row["sampled"][-1] == 1
        by_role = {
            role: [t for t in row["turns"] if t["role"] == role] for role in ("assistant", "tool")
        }
        assert sum(t["tokens"] for t in by_role["assistant"]) == sum(row["sampled"])
        for turn, result in zip(by_role["assistant"], by_role["tool"], strict=False):
            assert result["content"] == f"{turn['content'].split()[0]} w4"
    assert plain.last["num_turns/max"] > 2
    assert plain.last["agent_loop/tool_calls"] > 0
    assert plain.last["agent_loop/tool_errors"] == plain.last["agent_loop/branches"] == 0
    assert plain.last["agent_loop/tokens/tool"] > 0
    check_recorded(plain)
    assert plain.last["training/rollout_probs_diff_max"] < 1e-4  # of the model's tokens alone

    [rows] = branched.rollouts.values()
    assert len(rows) > 16  # a trajectory has several sequences
    assert branched.last["agent_loop/branches"] == pytest.approx(len(rows) / 16 - 1)
    assert branched.last["agent_loop/tool_errors"] > 0
    assert branched.last["training/rollout_probs_diff_max"] < 1e-4
    assert branched.last["perf/shared_tokens_saved"] > 0
    check_recorded(branched)

    [row, *_] = acted.rollouts["step_1"]
    assert [t["role"] for t in row["turns"]][:3] == ["user", "assistant", "user"]
    assert row["reward"] == row["turn_rewards"] == sum(t.get("reward", 0) for t in row["turns"])
    assert acted.last["val/turn_rewards"] == acted.last["val/score"]
    assert any(row.get("critic/vf_loss", 0) > 0 for row in acted.rows)
    assert "environment Broken.step returned 'w9', expected (observation" in refused.refused


def check_recorded(result: Any) -> None:
    """Lengths count the model's tokens; other tokens have no values, not even zeros."""
    [rows] = result.rollouts.values()
    metrics = result.last
    assert metrics["response_length/mean"] == pytest.approx(metrics["agent_loop/tokens/assistant"])
    for row in rows:
        for name in ("log_probs", "old_log_probs", "advantages", "entropy", "clipped"):
            assert [x is not None for x in row[name]] == [bool(s) for s in row["sampled"]], name


LEARNING = """
from hybridengine.agents import ToolCall
from hybridengine.agents.loops import ToolLoop
from dataclasses import replace

def parse(text):  # a third of the words are calls
    words = [int(word[1:]) for word in text.split() if word.startswith("w")]
    return [ToolCall("lookup", {})] if words and words[0] < 36 else []

class Loop(ToolLoop):
    def __init__(self, context):
        super().__init__(replace(context, parse=parse))

def lookup() -> str:
    \"\"\"Look up.\"\"\"
    return "w50"

def compute_score(data_source, solution_str, ground_truth, extra_info):
    turns = extra_info["messages"][1:]
    if not any(turn["role"] == "tool" for turn in turns):
        return 0.0
    words = [int(word[1:]) for word in turns[-1]["content"].split() if word.startswith("w")]
    return sum(word % 2 == 0 for word in words) / max(1, len(words))
"""


def learning_job(folder: Path) -> list[str]:
    """A score for even words, but only after a call of the tool."""
    base = small_job(folder)
    (folder / "learning.py").write_text(LEARNING)
    return [
        *base,
        f"model.path={folder}/stopping",
        "rollout.multi_turn.enable=true",
        "rollout.multi_turn.max_assistant_turns=2",
        f"rollout.multi_turn.function_tool_path={folder}/learning.py:lookup",
        f"rollout.agent.default_agent_loop={folder}/learning.py:Loop",
        f"reward.custom_reward_function.path={folder}/learning.py",
        "data.max_response_length=8",
        "data.train_batch_size=8",
        "actor.ppo_max_token_len_per_gpu=1024",
        "actor.optim.lr=5e-3",
        "rollout.n=8",
        "trainer.total_training_steps=20",
        "trainer.rollout_freq=-1",
    ]


@pytest.mark.exhaustive
def test_a_model_learns_to_use_a_tool(tmp_path: Path) -> None:
    """From 39% of the trajectories to nearly all (docs/multi_turn.md)."""
    [result] = run_jobs(tmp_path, [learning_job(tmp_path)])
    steps = [row for row in result.rows if "critic/score/mean" in row]
    scores = [row["critic/score/mean"] for row in steps]
    calls = [row["agent_loop/tool_calls"] for row in steps]
    assert scores[0] < 0.4 and calls[0] < 0.6
    assert sum(scores[-4:]) / 4 > scores[0] + 0.25
    assert sum(calls[-4:]) / 4 > calls[0] + 0.2


def make_trajectories(rank: int, world_size: int) -> Any:
    """Advantages and tokens of two trajectories, one of which has two sequences."""
    from hybridengine.engine.response import Response
    from hybridengine.run.config.rl import AlgorithmConfig
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train.advantages import compute_advantages, compute_rewards
    from hybridengine.train.batch import DataParallel
    from hybridengine.train.data import PromptSample, Subset
    from hybridengine.train.rewards.manager import Reward
    from hybridengine.train.rollouts import MultiTurn, Rollouts, ScoredResponse

    sample = PromptSample(0, [5, 6, 7], "", "toy", None, {})

    def rollout(ids: list[int], mask: list[int], score: float, **more: Any) -> ScoredResponse:
        rewards = array("f", [0.25, *[0.0] * (len(ids) - 1)])
        response = Response(
            array("i", ids),
            array("f", [-1.0 * m for m in mask]),
            "stop",
            columns={"sampled": array("b", mask), "turn_rewards": rewards},
        )
        place = MultiTurn(turns=[{}], numbers={"num_turns": 3.0}, **more)
        return ScoredResponse(response, reward=Reward(score), multi_turn=place)

    own = [
        rollout([8, 9, 10, 11], [1, 0, 0, 1], 1.0, is_last=False),
        rollout([12], [1], 1.0, context_ids=array("i", [5, 6, 7, 9, 10])),
        rollout([13, 14, 15], [1, 0, 1], 0.0),
    ]
    rollouts = Rollouts.gather(Subset([sample], [0]), own, rank)
    session = Session(PhaseStatus(Path("/nonexistent"), rank))
    dp = DataParallel(session, 1, shared_prefix=True)
    batch = dp.build_batch(rollouts, 1, 64)
    found = {}
    for name in ("grpo", "reinforce_plus_plus"):
        algorithm = AlgorithmConfig(adv_estimator=name)
        rewards, _ = compute_rewards(batch, dp, None, algorithm)
        found[name] = compute_advantages(batch, dp, rewards, algorithm)
    packed = batch.micro_batches[0]
    batch = replace(batch, pack=None)  # a local function, which cannot be sent
    return batch, rewards, found, packed.target_ids, packed.input_ids


def make_branched_groups(rank: int, world_size: int) -> Any:
    """Two groups of trajectories with tools and branches: (own rollouts, what is computed)."""
    from random import Random

    from hybridengine.engine.response import Response
    from hybridengine.run.config.rl import AlgorithmConfig, KLControlConfig
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train.advantages import compute_advantages, compute_rewards
    from hybridengine.train.algorithms import KLController
    from hybridengine.train.batch import DataParallel
    from hybridengine.train.data import PromptSample, Subset
    from hybridengine.train.metrics import batch_metrics
    from hybridengine.train.rewards.manager import Reward
    from hybridengine.train.rollouts import MultiTurn, Rollouts, ScoredResponse

    draw = Random(3)
    samples = [PromptSample(i, [5, 6, 7 + i], "", "toy", None, {}) for i in range(2)]
    own: list[ScoredResponse] = []
    for group in range(2):
        for branches in (1, 3, 2, 1):
            score = draw.random()
            for k in range(branches):
                mask = [1, *(draw.randrange(2) for _ in range(draw.randrange(9))), 1]
                response = Response(
                    array("i", [draw.randrange(8, 90) for _ in mask]),
                    array("f", [-draw.random() * m for m in mask]),
                    "stop",
                    columns={"sampled": array("b", mask)},
                )
                place = MultiTurn(
                    array("i", [5, 6, 7, 9, 10, 11, 12][: 7 if k else 0]),
                    is_last=k == branches - 1,
                    turns=[{}],
                    numbers={"num_turns": 3.0},
                )
                own.append(ScoredResponse(response, group, reward=Reward(score), multi_turn=place))
    rollouts = Rollouts.gather(Subset(samples, range(2)), own if rank == 0 else [], rank)
    dp = DataParallel(Session(PhaseStatus(Path("/nonexistent"), rank)), 1)
    batch = dp.build_batch(rollouts, 1, 64)
    old = torch.linspace(-2, -0.1, sum(len(r.response.token_ids) for r in own))
    lengths = [len(r.response.token_ids) for r in own]
    here = torch.cat([old.split(lengths)[i] for i in batch.index.tolist()])
    batch = replace(batch, old_log_probs=here, ref_log_probs=torch.full_like(here, -1))
    found: dict[str, Any] = {}
    for name in ("opo", "grpo", "dr_grpo", "rloo"):
        for coef in (0.0, 0.3):
            algorithm = AlgorithmConfig(adv_estimator=name)
            kl = KLController(KLControlConfig(), coef) if coef else None
            rewards, metrics = compute_rewards(batch, dp, kl, algorithm)
            advantages, _ = compute_advantages(batch, dp, rewards, algorithm)
            found[name, coef] = metrics, advantages.tolist()
    found["metrics"] = batch_metrics(replace(batch, advantages=here), dp.group)
    return own, old.tolist(), batch.index.tolist(), found


@pytest.mark.parametrize("world_size", [1, 2])
def test_advantages_weigh_the_tokens_that_the_model_wrote_in_all_branches(world_size: int) -> None:
    """Against plain loops over trajectories, in Python's float64."""
    results = run_ranks(make_branched_groups, world_size)
    own, old, *_ = results[0]
    trajectories: list[dict[str, Any]] = []
    position, is_new = 0, True
    of_row = []
    for r in own:
        if is_new:
            trajectories.append({"group": r.group, "score": r.reward.score, "tokens": 0, "kl": 0.0})
        of_row.append(len(trajectories) - 1)
        for k, is_sampled in enumerate(r.response.columns["sampled"]):
            trajectories[-1]["tokens"] += is_sampled
            trajectories[-1]["kl"] += is_sampled * (old[position + k] + 1)  # log-prob - reference
        position, is_new = position + len(r.response.token_ids), r.multi_turn.is_last
    assert len(trajectories) == 8 < len(own)

    def advantage_of(name: str, coef: float, t: dict[str, Any]) -> float:
        group = [u for u in trajectories if u["group"] == t["group"]]
        rewards = [u["score"] - coef * u["kl"] for u in group]
        reward, mean = t["score"] - coef * t["kl"], sum(rewards) / len(group)
        if name == "opo":
            weighted = sum(u["tokens"] * x for u, x in zip(group, rewards, strict=True))
            return reward - weighted / sum(u["tokens"] for u in group)
        if name == "rloo":
            return reward - (sum(rewards) - reward) / (len(group) - 1)
        return (reward - mean) / ((stdev(rewards) + 1e-6) if name == "grpo" else 1)

    for _, _, index, found in results:
        logged = found.pop("metrics")
        for (name, coef), (metrics, advantages) in found.items():
            want = [
                advantage_of(name, coef, trajectories[of_row[row]]) * is_sampled
                for row in index
                for is_sampled in own[row].response.columns["sampled"]
            ]
            assert advantages == pytest.approx(want, abs=1e-5), (name, coef)
            rewards = [t["score"] - coef * t["kl"] for t in trajectories]
            assert metrics["critic/rewards/mean"] == pytest.approx(fmean(rewards), abs=1e-5)
            if coef:
                means = [t["kl"] / t["tokens"] for t in trajectories]
                assert metrics["actor/reward_kl_penalty"] == pytest.approx(fmean(means), abs=1e-5)
        tokens = [t["tokens"] for t in trajectories]
        assert logged["response_length/mean"] == pytest.approx(fmean(tokens))
        assert logged["response_length/max"] == max(tokens)
        assert logged["prompt_length/max"] == 3  # of the row, not of a branch


def test_statistics_count_trajectories_and_masks_cover_the_model_s_tokens() -> None:
    [(batch, rewards, found, targets, packed_ids)] = run_ranks(make_trajectories, 1)
    mask = torch.tensor([1, 0, 0, 1, 1, 1, 0, 1]).bool()
    assert batch.response_mask.equal(mask)
    assert targets.tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    # The prompt 5 6 7 is there once, and the branch reads its own context 9 10.
    assert packed_ids.flatten().tolist().count(5) == 1
    assert packed_ids.flatten().tolist().count(9) == 2
    # Two trajectories with scores 1 and 0, not three: the deviation is 1 / sqrt(2).
    want = 0.5 / (0.5**0.5 + 1e-6)
    advantages, _ = found["grpo"]
    expected = torch.tensor([want, 0, 0, want, want, -want, 0, -want])
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=1e-5)
    # The turn's reward is where it was earned, the rest of the score at the last token.
    per_token = [0.25, 0, 0, 0.75, 1.0, 0.25, 0, -0.25]
    torch.testing.assert_close(rewards.per_token, torch.tensor(per_token))
    _, returns = found["reinforce_plus_plus"]
    torch.testing.assert_close(returns[mask], torch.tensor([1.0, 0.75, 1.0, 0.0, -0.25]))


def test_rewards_read_the_tokens_of_all_branches_and_the_length_that_is_limited() -> None:
    from hybridengine.agents.trajectories import tokens_of
    from hybridengine.agents.trajectory import TokenSequence, Trajectory
    from hybridengine.engine.response import Response
    from hybridengine.run.config import RewardConfig
    from hybridengine.run.config.rl import OverlongBufferConfig
    from hybridengine.train.data import PromptSample
    from hybridengine.train.rewards.manager import DapoRewardManager, ResponseTokens, score_checked

    def sequence(context: list[int] | None, mask: list[int]) -> TokenSequence:
        response = Response([9] * len(mask), [0.0] * len(mask), "stop", columns={"sampled": mask})
        return TokenSequence([], context, response)

    sample = PromptSample(0, [5, 6, 7], "", "toy", None, {})
    template = SimpleNamespace(of_row=lambda *_: None)
    given: Any = {"template": template, "generate": None, "toolbox": None}
    trajectory = Trajectory(sample, 0, **given, max_tokens=13)
    trajectory.sequences = [
        sequence(None, [1, 0, 0, 0, 0, 1]),
        sequence([5, 6, 7, 8, 8], [1, 0, 1]),
    ]
    tokens = tokens_of(trajectory)  # of the sequences, 6 and 2 + 3 tokens follow the prompt of 3
    assert tokens == ResponseTokens([9] * 9, [1, 0, 0, 0, 0, 1, 1, 0, 1], 6)
    # The limit is 10 tokens and the buffer its last 5: the 6th costs a fifth, and none costs more.
    buffer = OverlongBufferConfig(enable=True, len=5, penalty_factor=1.0)
    manager = DapoRewardManager([], RewardConfig(overlong_buffer=buffer), 10)
    full = tokens._replace(length=10)
    result = score_checked(manager, [sample] * 2, ["", ""], [tokens, full])
    assert result.scores == [-0.2, -1.0]
