"""What the operators launch on a GPU besides their own kernels, counted on meta tensors.

Meta tensors have no memory, so Python takes the path of a GPU, and an operator that reads a value,
which would wait for the device, raises.
"""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridengine.kernels import (
    GROUP_ESTIMATORS,
    LOSS_AGG_MODES,
    LOSS_MODES,
    _backend,
    gae,
    group_advantage,
    pack,
    policy_loss,
    rms_norm,
    rollout_correction,
    tree_attention,
    unpack,
    value_loss,
    whiten,
)

# They allocate or make views: nothing runs on the device.
NO_LAUNCH = {
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "detach",
    "empty",
    "empty_like",
    "expand",
    "flatten",
    "new_empty",
    "reshape",
    "select",
    "slice",
    "unbind",
    "unsqueeze",
    "view",
}


class Launches(TorchDispatchMode):
    """The names of the operators that launch something on the device, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket._qualified_op_name
        if name.removeprefix("aten::") not in NO_LAUNCH:
            self.names.append(name.removeprefix("hybridengine::"))
        return function(*arguments, **(options or {}))


@pytest.fixture(autouse=True)
def meta_as_cuda(monkeypatch):
    """Choose the CUDA kernels for meta tensors, as a build with CUDA does for its own."""
    as_cuda = {op: {**by, "meta": by.get("cuda", ())} for op, by in _backend.REGISTERED.items()}
    monkeypatch.setattr(_backend, "REGISTERED", as_cuda)
    monkeypatch.setattr(_backend, "why_unavailable", lambda *_: None)


@pytest.fixture
def tokens():
    names = ("log_probs", "old_log_probs", "advantages", "entropy", "ref_log_probs")
    made = {name: torch.empty(64, device="meta") for name in names}
    made["log_probs"].requires_grad_()
    made["entropy"].requires_grad_()
    made["response_mask"] = torch.empty(64, dtype=torch.bool, device="meta")
    made["cu_seqlens"] = torch.empty(5, dtype=torch.int32, device="meta")
    return made


def launches(call):
    with Launches() as seen:
        call()
    return seen.names


def without_seed(names):
    """Leave out the gradient of the loss itself, which autograd.grad makes."""
    return [name for name in names if name != "aten::ones_like"]


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_policy_loss_is_one_operator_and_its_gradient_one_product(tokens, loss_mode, loss_agg_mode):
    options = {"loss_mode": loss_mode, "loss_agg_mode": loss_agg_mode, "loss_scale_factor": 9.0}
    if loss_mode in ("clip_cov", "kl_cov"):
        options["selected"] = tokens["response_mask"]
    for counts in ({}, {"global_num_tokens": 40, "global_num_seqs": 4}):

        def step(counts=counts):
            loss, _ = policy_loss(**tokens, **options, **counts, kl_coef=0.1, entropy_coeff=0.1)
            torch.autograd.grad(loss, [tokens["log_probs"], tokens["entropy"]])

        assert without_seed(launches(step)) == ["policy_loss", "aten::_foreach_mul"]


def test_counts_in_device_tensors_add_one_launch(tokens):
    counts = {
        name: torch.empty((), dtype=torch.float64, device="meta")
        for name in ("global_num_tokens", "global_num_seqs")
    }
    assert launches(lambda: policy_loss(**tokens, **counts)) == ["aten::stack", "policy_loss"]


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
def test_value_loss_is_one_operator(tokens, loss_agg_mode):
    values = tokens["log_probs"]

    def step():
        loss, _ = value_loss(
            values,
            tokens["old_log_probs"],
            tokens["advantages"],
            loss_scale_factor=9.0,
            response_mask=tokens["response_mask"],
            cu_seqlens=tokens["cu_seqlens"],
            loss_agg_mode=loss_agg_mode,
        )
        torch.autograd.grad(loss, values)

    assert without_seed(launches(step)) == ["policy_loss", "aten::_foreach_mul"]


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_advantages_are_one_operator(tokens, estimator):
    lengths = torch.empty(4, device="meta") if estimator == "opo" else None
    rewards, ids = torch.empty(4, device="meta"), torch.empty(4, dtype=torch.int64, device="meta")
    options = {"estimator": estimator, "lengths": lengths}
    spread = {"response_mask": tokens["response_mask"], "cu_seqlens": tokens["cu_seqlens"]}
    assert launches(lambda: group_advantage(rewards, ids, **options)) == ["group_advantage"]
    spread_call = partial(group_advantage, rewards, ids, **options, **spread)
    assert launches(spread_call) == ["group_advantage"]
    rows = tokens["response_mask"].view(4, 16)
    by_row = partial(group_advantage, rewards, ids, **options, response_mask=rows)
    assert launches(by_row) == ["aten::arange", "group_advantage"]


def test_gae_is_one_operator(tokens):
    values, mask = tokens["old_log_probs"], tokens["response_mask"]
    ends = tokens["cu_seqlens"]
    assert launches(lambda: gae(values, values, ends, response_mask=mask)) == ["gae"]
    rows = values.view(4, 16)
    assert launches(lambda: gae(rows, rows)) == ["aten::arange", "gae"]


def test_whitening_is_two_operators(tokens):
    """Of two launches and one; between them the ranks exchange statistics."""
    values, mask = tokens["advantages"], tokens["response_mask"]
    for given in (None, mask):
        assert launches(lambda given=given: whiten(values, given)) == [
            "whiten_moments",
            "whiten_apply",
        ]


@pytest.mark.parametrize("rollout_is", [None, "token", "sequence", "sequence_mean"])
def test_rollout_correction_is_one_operator(tokens, rollout_is):
    old, rollout = tokens["old_log_probs"], tokens["ref_log_probs"]
    options = {name: tokens[name] for name in ("response_mask", "cu_seqlens")}
    options |= {"rollout_is": rollout_is, "rejection": {"seq_mean_k3": 0.1}}
    for count in (None, 40):
        call = partial(rollout_correction, old, rollout, **options, global_num_tokens=count)
        assert launches(call) == ["rollout_correction"]


def test_packing_is_two_operators_and_unpacking_one(tokens):
    mask = tokens["response_mask"].view(4, 16)
    hidden = torch.empty(4, 16, 8, device="meta", requires_grad=True)
    ids = torch.empty(4, 16, dtype=torch.int64, device="meta")
    call = partial(pack, [hidden, ids, ids], mask, shifted=[2], capacity=48)
    assert launches(call) == ["pack_layout", "move_rows"]
    packed = call()
    value = packed.values[0]
    assert launches(lambda: unpack(value, packed)) == ["move_rows"]
    gradient = torch.empty_like(value)
    assert launches(lambda: torch.autograd.grad(value, hidden, gradient)) == ["move_rows"]


@pytest.mark.parametrize("window", [None, 8])
def test_attention_is_an_operator_in_each_pass(window):
    """Without zeros as the gradient of the log-sum-exp, which nothing uses."""
    query, key, value, grad = (torch.empty(64, 2, 16, device="meta") for _ in range(4))
    index = torch.empty(64, dtype=torch.int32, device="meta")
    query.requires_grad_()

    def step():
        out = tree_attention(query, key, value, index, index, window_size=window)
        torch.autograd.grad(out, query, grad)

    assert launches(step) == ["tree_attention", "tree_attention_backward"]


def test_a_norm_is_an_operator_in_each_pass():
    x, grad = (
        torch.empty(4, 16, device="meta", requires_grad=True),
        torch.empty(4, 16, device="meta"),
    )
    weight = torch.empty(16, device="meta", requires_grad=True)

    def step():
        torch.autograd.grad(rms_norm(x, weight, 1e-6), [x, weight], grad)

    assert launches(step) == ["rms_norm", "rms_norm_backward"]
