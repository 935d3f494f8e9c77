"""Estimators by name: compared with verl where it is installed, and a user's own."""

import pytest
import torch
from omegaconf import OmegaConf

from hybridengine.kernels import pack
from hybridengine.train.algorithms import (
    ESTIMATORS,
    AdvantageOptions,
    Responses,
    advantages,
    register_estimator,
)
from tests.tolerances import VERL

B, L = 9, 23


@pytest.fixture
def padded():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, L + 1, (B,), generator=generator)
    mask = torch.arange(L)[None] < lengths[:, None]
    rewards = torch.randn(B, generator=generator)
    token_rewards = torch.zeros(B, L)
    token_rewards[torch.arange(B), lengths - 1] = rewards
    return {
        "mask": mask,
        "lengths": lengths,
        "rewards": rewards,
        "token_rewards": token_rewards,
        "values": torch.randn(B, L, generator=generator) * mask,
        "baselines": torch.randn(B, generator=generator),
        "parts": torch.randn(B, 2, generator=generator),
        "ids": torch.tensor([3, 3, 1, 1, 1, 3, 8, 8, 8]),
    }


def responses(padded, **fields):
    packed = pack([padded["values"]], padded["mask"])
    return Responses(
        rewards=padded["rewards"],
        group_ids=padded["ids"],
        cu_seqlens=packed.cu_seqlens,
        response_mask=torch.ones(packed.indices.numel(), dtype=torch.bool),
        token_rewards=padded["token_rewards"][padded["mask"]],
        values=packed.values[0],
        reward_baselines=padded["baselines"],
        reward_parts=padded["parts"],
        **fields,
    )


def theirs(name, p, **extra):
    core = pytest.importorskip(
        "benchmarks._verl", reason="pip install --no-deps verl==0.9.1", exc_type=ImportError
    ).core_algos
    function = core.get_adv_estimator_fn(name)
    arguments = {
        "token_level_rewards": p["token_rewards"].clone(),
        "response_mask": p["mask"].float(),
    }
    if name == "gae":
        return function(**arguments, values=p["values"], gamma=0.97, lam=0.9)
    if name == "remax":
        return function(**arguments, reward_baselines=p["baselines"])
    config = OmegaConf.create({"gamma": 0.97, "norm_adv_by_std_in_grpo": True})
    if name == "reinforce_plus_plus":
        return function(**arguments, config=config)
    if name == "gdpo":
        config = OmegaConf.create(
            {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.5]}
        )
        batch = {"prompts": torch.zeros(B, 0), "attention_mask": p["mask"].long()}
        parts = {"a": p["parts"][:, 0].numpy(), "b": p["parts"][:, 1].numpy()}
        return function(
            **arguments, index=p["ids"].numpy(), config=config, non_tensor_batch=parts, batch=batch
        )
    return function(**arguments, index=p["ids"].numpy(), config=config)


@pytest.mark.parametrize(
    "name",
    [
        "gae",
        "grpo",
        "rloo",
        "opo",
        "grpo_passk",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "gdpo",
    ],
)
def test_as_verl(padded, name):
    options = AdvantageOptions(gamma=0.97, lam=0.9, part_weights=(1.0, 0.5))
    got = advantages(name, responses(padded), options)
    for ours, want in zip(got, theirs(name, padded), strict=True):
        torch.testing.assert_close(ours.float(), want[padded["mask"]].float(), **VERL)


def test_every_estimator_leaves_masked_tokens_at_zero(padded):
    whole = responses(padded)
    mask = torch.rand(whole.response_mask.numel()) < 0.6
    some = Responses(**{**vars(whole), "response_mask": mask})
    for name in ESTIMATORS:
        out, _ = advantages(name, some)
        assert out.shape == mask.shape and out[~mask].eq(0).all(), name


def test_users_files_may_import_the_alias():
    from hybridengine import algorithms

    assert algorithms.register_estimator is register_estimator
    assert algorithms.ESTIMATORS is ESTIMATORS


def test_a_users_own_estimator():
    @register_estimator("constant_for_this_test")
    def constant(responses, options):
        out = torch.full_like(responses.response_mask, 2, dtype=torch.float32)
        return out, out

    try:
        given = Responses(*(torch.zeros(1),) * 5)
        assert advantages("constant_for_this_test", given)[0].tolist() == [2]
        with pytest.raises(ValueError, match="already registered"):
            register_estimator("constant_for_this_test")(lambda r, o: None)
    finally:
        del ESTIMATORS["constant_for_this_test"]


def test_errors(padded):
    with pytest.raises(ValueError, match="did you mean 'grpo'"):
        advantages("grop", responses(padded))
    without = Responses(**{**vars(responses(padded)), "values": None})
    with pytest.raises(ValueError, match=r"needs Responses\.values"):
        advantages("gae", without)
    with pytest.raises(ValueError, match="part_weights has 3 numbers for the 2 rewards"):
        advantages("gdpo", responses(padded), AdvantageOptions(part_weights=(1.0, 2.0, 3.0)))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda r: torch.zeros(3), r"returned one tensor of shape \[3\]"),
        (lambda r: (r.rewards, r.rewards), r"returned \(\[9\], \[9\]\); expected .* of shape \["),
        (lambda r: None, "returned 'NoneType'"),
    ],
)
def test_what_an_estimator_gives_is_checked(padded, monkeypatch, wrong, message):
    monkeypatch.setitem(ESTIMATORS, "wrong", lambda r, o: wrong(r))
    with pytest.raises(ValueError, match=f"advantage estimator 'wrong' {message}"):
        advantages("wrong", responses(padded))
