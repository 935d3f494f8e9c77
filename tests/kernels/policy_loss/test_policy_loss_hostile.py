"""policy_loss on hostile arguments: refused by name, or defined and equal in every backend."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from hybridengine.kernels import LOSS_MODES, policy_loss, select_by_covariance, token_kl, value_loss
from hybridengine.kernels._backend import native
from hybridengine.kernels.policy_loss.terms import LossOptions
from tests.kernels.batches import (
    KL,
    assert_close,
    assert_same,
    batch,
    impossible_tokens,
    run,
    to_float64,
)
from tests.tolerances import POLICY_LOSS

NAN, INF = math.nan, math.inf
X = torch.zeros(4)
LOG_P_MODES = ("cispo", "dppo_tv", "dppo_kl", "reinforce", "dro")  # A log p is 0 for log p = -inf


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize(
    "options, message",
    [
        ({"loss_mode": None}, "loss_mode is None"),
        ({"kl_type": "k1++"}, r"kl_type is 'k1\+\+'"),
        ({"kl_coef": 0.1}, "kl_coef is 0.1, but ref_log_probs is not given"),
        ({"entropy_coeff": 0.1}, "entropy_coeff is 0.1, but entropy is not given"),
        ({"global_num_tokens": torch.zeros(2)}, r"global_num_tokens is a tensor of shape \[2\]"),
        ({"global_num_tokens": torch.zeros((), device="meta")}, "global_num_tokens is a tensor"),
        ({"rollout_is_weights": torch.ones(4, 1)}, r"rollout_is_weights has shape \[4, 1\]"),
    ],
)
def test_a_bad_argument_is_named(backend, options, message):
    with pytest.raises(ValueError, match=f"policy_loss: {message}"):
        policy_loss(X, X, X, backend=backend, **options)


@pytest.mark.parametrize("index", range(1, 11))
def test_the_binding_compares_devices_itself(index):
    x, mask = torch.zeros(4), torch.ones(4, dtype=torch.bool)
    tensors = [x, x, x, mask, mask, x, x, x, ints(0, 4), torch.ones(1)]
    tensors.append(torch.ones(2, dtype=torch.float64))
    rest = (0, 0, 3, False, False, [*LossOptions()], [0.0, 0.0, 1.0, 4.0, 1.0], True, True, True)
    native().policy_loss(*tensors, *rest)
    tensors[index] = tensors[index].to("meta")
    with pytest.raises(ValueError, match="is on meta, log_probs on cpu"):
        native().policy_loss(*tensors, *rest)


@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("loss_mode", LOSS_MODES)
@pytest.mark.parametrize("side", ["both", "new", "old"])
def test_tokens_of_zero_probability(backend, loss_mode, side):
    inputs = impossible_tokens(batch([20, 30, 7]), side)
    options = {"loss_mode": loss_mode, "loss_agg_mode": "seq-mean-token-mean", "kl_type": "k3"}
    got = run(inputs, backend=backend, **options)
    assert_same(got, run(to_float64(inputs), backend="reference", **options))
    assert got[0].isfinite() and got[2].isfinite().all()
    if side != "old":
        assert got[2][::5].eq(0).all()
    if side == "both":
        assert all(value.isfinite() for value in got[1].values())
        ratio_one = batch([20, 30, 7])  # as any other log-prob that did not change
        for name in ("log_probs", "old_log_probs", "ref_log_probs"):
            ratio_one[name][::5] = 0.0 if loss_mode in LOG_P_MODES else -1.0
        assert_close(got[0], run(ratio_one, backend=backend, **options)[0], POLICY_LOSS)


@pytest.mark.parametrize("kl_type", KL)
def test_the_kl_of_tokens_of_zero_probability_is_zero(kl_type):
    log_probs = torch.tensor([-INF, -1.0], requires_grad=True)
    out = token_kl(kl_type, log_probs, torch.tensor([-INF, -2.0]))
    assert out[0] == 0 and torch.autograd.grad(out.sum(), log_probs)[0].isfinite().all()
    inputs = impossible_tokens(batch([9]), "both")
    assert_same(run(inputs, kl_type=kl_type), run(to_float64(inputs), kl_type=kl_type))


def test_large_taus_stay_finite():
    inputs = batch([40], spread=2.0)
    options = {"loss_mode": "sapo", "tau_pos": 500.0, "tau_neg": 1000.0}
    assert_same(run(inputs, backend="cpp", **options), run(to_float64(inputs), **options))


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_ppo_kl_is_the_unclamped_mean_of_old_minus_new(backend):
    old, new = torch.tensor([-1.0, -3.0, -2.0]), torch.tensor([-51.0, -1.0, -7.0])
    mask = torch.tensor([True, True, False])
    _, metrics = policy_loss(new, old, X[:3], response_mask=mask, backend=backend)
    assert metrics["ppo_kl"].item() == (50 - 2) / 2


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_none_switches_a_clip_off(backend):
    inputs = batch([40], spread=2.0)
    names = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    for loss_mode in LOSS_MODES:
        got = run(inputs, backend=backend, loss_mode=loss_mode, **dict.fromkeys(names))
        exact = to_float64(inputs)
        assert_same(got, run(exact, loss_mode=loss_mode, **dict.fromkeys(names, INF)))
        if loss_mode == "ppo_clip":
            ratio = (exact["log_probs"] - exact["old_log_probs"]).exp()
            surrogate = -(ratio * exact["advantages"] * exact["rollout_is_weights"])
            surrogate = surrogate[inputs["response_mask"]].mean()
            assert_close(got[1]["pg_loss"], surrogate, POLICY_LOSS)


@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
def test_rows_are_sequences_and_masks_have_any_dtype(backend, dtype):
    packed = batch([7, 7, 7])
    packed["cu_seqlens"] = packed["cu_seqlens"].long()
    padded = {name: value.view(3, 7) for name, value in packed.items() if name != "cu_seqlens"}
    for name in ("response_mask", "selected"):
        padded[name] = padded[name].to(dtype)
    for loss_mode in LOSS_MODES:
        options = {"loss_mode": loss_mode, "loss_agg_mode": "seq-mean-token-mean"}
        got = run(padded, backend=backend, **options)
        want = run(packed, backend=backend, **options)
        assert_same((*got[:2], got[2].flatten(), got[3].flatten()), want, {"rtol": 0, "atol": 0})
    with pytest.raises(ValueError, match="leave cu_seqlens out"):
        run(padded | {"cu_seqlens": packed["cu_seqlens"]})


@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_masked_tokens_may_lie_past_the_last_sequence(backend, loss_mode):
    inputs, longer = batch([5, 9]), batch([5, 9, 3])
    for name, value in inputs.items():
        if name != "cu_seqlens":
            longer[name][:14] = value
    longer["cu_seqlens"] = inputs["cu_seqlens"]
    longer["response_mask"][14:] = False
    options = {"loss_mode": loss_mode, "loss_agg_mode": "seq-mean-token-mean", "backend": backend}
    got, want = run(longer, **options), run(inputs, **options)
    assert_close(got[0], want[0], POLICY_LOSS)
    assert_close(got[2][:14], want[2], POLICY_LOSS)
    assert got[2][14:].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_reference_computes_half_precision_in_float32_as_the_kernel(dtype):
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch([40]).items()}
    got, want = (run(inputs, backend=backend) for backend in ("reference", "cpp"))
    assert got[0].dtype == want[0].dtype == torch.float32 and got[2].dtype == dtype
    assert_same(got, want)


def test_float64_is_computed_in_float64():
    inputs = to_float64(batch([30]))
    got, want = run(inputs), run(inputs, backend="reference")
    assert got[0].dtype == got[2].dtype == got[1]["ppo_kl"].dtype == torch.float64
    assert_same(got, want, {"rtol": 0, "atol": 0})


SMOOTH = ("gmpo", "sapo", "reinforce")


def loss_of(inputs, loss_mode):
    def loss(log_probs, entropy):
        rest = {k: v for k, v in inputs.items() if k not in ("log_probs", "entropy")}
        old, advantages = rest.pop("old_log_probs"), rest.pop("advantages")
        options = {"loss_mode": loss_mode, "kl_type": "k2", "kl_coef": 0.3, "entropy_coeff": 0.1}
        return policy_loss(log_probs, old, advantages, entropy=entropy, **rest, **options)[0]

    return loss, [inputs[k].clone().requires_grad_() for k in ("log_probs", "entropy")]


@pytest.mark.parametrize("loss_mode", SMOOTH)
def test_float64_has_second_derivatives_and_forward_mode(loss_mode):
    loss, leaves = loss_of(to_float64(batch([5, 3])), loss_mode)
    assert gradcheck(loss, leaves, check_forward_ad=True)
    assert gradgradcheck(loss, leaves)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"excluded": torch.zeros(3)}, r"excluded has shape \[3\]"),
    ],
)
def test_selection_names_a_bad_argument(options, message):
    with pytest.raises(ValueError, match=f"select_by_covariance: {message}"):
        select_by_covariance(X, X, **{"loss_mode": "clip_cov", **options})


def test_selection_leaves_out_tokens_of_zero_probability():
    generator = torch.Generator().manual_seed(0)
    log_probs, advantages = (torch.randn(2, 50, generator=generator) for _ in range(2))
    log_probs[0, :3] = -INF
    possible = ~log_probs.isneginf()
    for loss_mode in ("clip_cov", "kl_cov"):
        options = {"loss_mode": loss_mode, "ratio": 0.2, "lower": -1.0}
        chosen = select_by_covariance(log_probs, advantages, **options)
        assert chosen.shape == (2, 50) and chosen.any() and not chosen[~possible].any()
    options = {"loss_mode": "kl_cov", "ratio": 0.2}
    masked = select_by_covariance(
        log_probs.nan_to_num(neginf=NAN), advantages, response_mask=possible.int(), **options
    )
    assert torch.equal(masked, select_by_covariance(log_probs, advantages, **options))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_tensors_that_are_none_or_lists_are_named(index):
    for wrong, what in ((None, "None"), ([0.0] * 4, r"\[0.0.* \(list\)")):
        given = [X, X, X]
        given[index] = wrong
        name = ("log_probs", "old_log_probs", "advantages")[index]
        if (index, wrong) != (1, None):  # no old_log_probs: those of log_probs
            with pytest.raises(TypeError, match=f"policy_loss: {name} is {what}; expected a tens"):
                policy_loss(*given)
        name = ("values", "old_values", "returns")[index]
        with pytest.raises(TypeError, match=f"value_loss: {name} is {what}; expected a tensor"):
            value_loss(*given)


def test_importance_weights_have_one_source_and_valid_bounds():
    given = {"rollout_log_probs": X}
    with pytest.raises(ValueError, match="rollout_is_weights and rollout_log_probs are given"):
        policy_loss(X, None, X, rollout_is_weights=X, **given)
    with pytest.raises(ValueError, match=r"rollout_is_lower is 3\.0, above rollout_is_threshold"):
        policy_loss(X, None, X, rollout_is_lower=3.0, **given)
    with pytest.raises(ValueError, match=r"rollout_log_probs has shape \[1\]; expected"):
        policy_loss(X, None, X, rollout_log_probs=X[:1])


@pytest.mark.parametrize("mode", [7, 8], ids=["clip_cov", "kl_cov"])
def test_the_extension_needs_what_covariance_selected(mode: int) -> None:
    extension = native()
    if extension is None:
        pytest.skip("the extension is not built")
    vectors, nothing = [torch.zeros(4)] * 3, [None] * 8
    with pytest.raises(ValueError, match=r"selected is None; expected bool \[4\]"):
        extension.policy_loss(
            *vectors, *nothing, mode, 0, 0, False, False, [], [], False, False, False
        )
