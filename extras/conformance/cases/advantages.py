"""Groups, leave-one-out, returns over tool output, whitening."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridengine.conformance.case import Case

_GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
_SINGLE = torch.tensor([0, 0, 1])


def _f64(*numbers: object) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _by_group(rewards: Tensor, groups: Tensor, rule: str, scored: Tensor | None = None) -> Tensor:
    """Advantages response by response: grpo, mean or rloo."""
    out = torch.zeros_like(rewards)
    used = torch.ones_like(groups, dtype=torch.bool) if scored is None else scored
    for i in torch.arange(len(rewards))[used].tolist():
        group = rewards[(groups == groups[i]) & used]
        others = torch.tensor([j for j in range(len(rewards)) if j != i and used[j]])
        if len(group) == 1:
            out[i] = rewards[i]
        elif rule == "rloo":
            out[i] = rewards[i] - rewards[others][groups[others] == groups[i]].mean()
        elif bool(group.ne(group[0]).any()):
            out[i] = rewards[i] - group.mean()
            if rule == "grpo":
                out[i] /= group.std()  # the unbiased one
    return out


def _expected(rewards: Tensor, groups: Tensor, estimator: str, **options: Tensor) -> Tensor:
    return _by_group(rewards, groups, estimator, options.get("scored"))


def _over_batch(rewards: Tensor, groups: Tensor, estimator: str) -> Tensor:
    return (rewards - rewards.mean()) / rewards.std()


def _residue(rewards: Tensor, groups: Tensor, estimator: str) -> Tensor:
    """The variance as E[x^2] - E[x]^2 in float32, without a check for equal rewards."""
    x = rewards.float()
    mean = x.mean()
    spread = ((x.square().mean() - mean.square()).abs() + 1e-7).sqrt()
    return ((x - mean + 1e-4) / spread).double()


def _none_as_zero(rewards: Tensor, groups: Tensor, estimator: str, scored: Tensor) -> Tensor:
    return _by_group(rewards.where(scored, 0), groups, estimator)


def _zeroed_singles(rewards: Tensor, groups: Tensor, estimator: str) -> Tensor:
    counts = (groups[:, None] == groups).sum(1)
    return _by_group(rewards, groups, estimator).where(counts > 1, 0)


def _with_own(rewards: Tensor, groups: Tensor, estimator: str) -> Tensor:
    return _by_group(rewards, groups, "mean")


def _scaled(rewards: Tensor, groups: Tensor, estimator: str) -> Tensor:
    return _by_group(rewards, groups, "grpo")


def _returns(
    rewards: Tensor, values: Tensor | None, mask: Tensor, gamma: float, lam: float
) -> Tensor:
    """Rewards to go, or GAE's returns, over the model's tokens only; 0 elsewhere."""
    out = torch.zeros_like(rewards)
    for row in range(len(rewards)):
        advantage = following = 0.0
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            value = 0.0 if values is None else float(values[row, t])
            delta = float(rewards[row, t]) + gamma * following - value
            advantage = delta + gamma * (1.0 if values is None else lam) * advantage
            following = value
            out[row, t] = advantage + value
    return out


def _stops_at_tools(
    rewards: Tensor, values: Tensor | None, mask: Tensor, gamma: float, lam: float
) -> Tensor:
    out, running = torch.zeros_like(rewards), torch.zeros(len(rewards), dtype=torch.float64)
    for t in reversed(range(rewards.shape[1])):
        out[:, t] = running = rewards[:, t] + gamma * running
        running = running * mask[:, t]
    return out * mask


def _tools_count(
    rewards: Tensor, values: Tensor | None, mask: Tensor, gamma: float, lam: float
) -> Tensor:
    return _returns(rewards, values, torch.ones_like(mask), gamma, lam) * mask


def _whiten(values: Tensor, mask: Tensor) -> Tensor:
    used = values[mask]
    return ((values - used.mean()) / used.std()).where(mask, 0)


def _whiten_all(values: Tensor, mask: Tensor) -> Tensor:
    return ((values - values.mean()) / values.std()).where(mask, 0)


_TURNS = {
    "rewards": _f64([0.0, 0.0, 0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.5, 0.0, 0.0]),
    "mask": torch.tensor([[1, 1, 0, 0, 1, 1], [1, 0, 1, 1, 0, 0]]).bool(),
}
_VALUES = _f64([0.2, -0.1, 3.0, 2.0, 0.4, 0.3], [0.1, 5.0, -0.3, 0.2, 7.0, 7.0])
_TOOL_KL = _TURNS["rewards"] - _f64([0.0, 0.0, 0.3, 0.4, 0.0, 0.0], [0.0, 0.2, 0.0, 0.0, 0.0, 0.0])

CASES = (
    Case(
        "grpo: a group of equal rewards has advantages of 0",
        "group_advantages",
        {"rewards": _f64(*[0.95] * 7), "groups": torch.zeros(7).long(), "estimator": "grpo"},
        _expected,
        _residue,
        "https://github.com/NVIDIA-NeMo/RL/pull/4161",
        "A float32 variance of equal rewards is not 0, and the division by it is an advantage "
        "of thousands.",
        atol=0.01,
    ),
    Case(
        "grpo: statistics are those of the group, not of the batch",
        "group_advantages",
        {
            "rewards": _f64(1, 0, 0, 1, 3, 5, 4, 9),
            "groups": _GROUPS,
            "estimator": "grpo",
        },
        _expected,
        _over_batch,
        "https://github.com/XU-YIJIE/grpo-flat/issues/2",
        "Mean and standard deviation were those of the whole batch.",
        rtol=1e-3,
    ),
    Case(
        "dr_grpo: there is no division by the standard deviation",
        "group_advantages",
        {"rewards": _f64(1, 0, 0, 0, 1, 1, 1, 0), "groups": _GROUPS, "estimator": "mean"},
        _expected,
        _scaled,
        "https://github.com/thinking-machines-lab/tinker-cookbook/issues/579",
        "Two papers define the advantage with and without the division; one name hid which.",
    ),
    Case(
        "rloo: the baseline is the mean of the others",
        "group_advantages",
        {"rewards": _f64(1, 0, 0, 1, 3, 5, 4, 9), "groups": _GROUPS, "estimator": "rloo"},
        _expected,
        _with_own,
        "https://github.com/redai-studio/Relax/pull/190",
        "With the response's own reward in its baseline the advantage is (k - 1) / k of it.",
    ),
    Case(
        "rloo, vectorised: a single response of a group keeps its reward",
        "group_advantages",
        {"rewards": _f64(1.0, 0.0, 0.7), "groups": _SINGLE, "estimator": "rloo"},
        _expected,
        _zeroed_singles,
        "https://github.com/verl-project/verl/issues/7793",
        "`rloo` gives 0.7 and `rloo_vectorized`, documented as the same estimator, 0.",
    ),
    Case(
        "grpo: a response without a score is no 0 in its group",
        "group_advantages",
        {
            "rewards": _f64(-1.0, -0.5, -0.8, 0.0, 1.0, 0.0, 1.0, 1.0),
            "groups": _GROUPS,
            "estimator": "grpo",
            "scored": torch.tensor([1, 1, 1, 0, 1, 1, 1, 1]).bool(),
        },
        _expected,
        _none_as_zero,
        "https://github.com/huggingface/trl/pull/5902",
        "A reward of None became 0 in a sum, the best one of a group with negative rewards.",
        rtol=1e-3,
    ),
    Case(
        "rloo: a response without a score is in no baseline",
        "group_advantages",
        {
            "rewards": _f64(1.0, 0.5, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0),
            "groups": _GROUPS,
            "estimator": "rloo",
            "scored": torch.tensor([1, 1, 1, 0, 1, 1, 1, 1]).bool(),
        },
        _expected,
        _none_as_zero,
        "https://github.com/huggingface/trl/pull/5902",
        "The divisor was the group's size, with the responses that have no score.",
    ),
    Case(
        "rewards to go cross the output of a tool",
        "returns",
        {**_TURNS, "values": None, "gamma": 1.0, "lam": 1.0},
        _returns,
        _stops_at_tools,
        "https://github.com/verl-project/verl/issues/7278",
        "The running return was set to 0 at masked tokens: turns before a tool call got nothing.",
    ),
    Case(
        "rewards to go are discounted per token of the model",
        "returns",
        {**_TURNS, "values": None, "gamma": 0.5, "lam": 1.0},
        _returns,
        _tools_count,
        "https://github.com/verl-project/verl/pull/6376",
        "Tool output was a boundary; as time steps it would discount the turns before it.",
    ),
    Case(
        "penalties at tool tokens are not in the returns",
        "returns",
        {"rewards": _TOOL_KL, "mask": _TURNS["mask"], "values": None, "gamma": 0.9, "lam": 1.0},
        _returns,
        _tools_count,
        "https://github.com/THUDM/slime/issues/1370",
        "The KL penalty of text that the model did not write went into the returns before it.",
    ),
    Case(
        "gae skips the output of a tool",
        "returns",
        {**_TURNS, "values": _VALUES, "gamma": 0.99, "lam": 0.95},
        _returns,
        _tools_count,
        "https://github.com/verl-project/verl/pull/2337",
        "Values at observations were the next values of the model's tokens.",
    ),
    Case(
        "whitening is over unmasked tokens",
        "whiten",
        {"values": _VALUES, "mask": _TURNS["mask"]},
        _whiten,
        _whiten_all,
        "https://github.com/verl-project/verl/pull/50",
        "What padding holds was in the statistics of all tokens.",
    ),
)
