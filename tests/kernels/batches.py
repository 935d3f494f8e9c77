"""Random inputs that the tests of several operators share, and policy_loss on packed batches."""

from itertools import pairwise

import hypothesis.strategies as st
import torch

from hybridengine.kernels import LOSS_MODES, policy_loss, token_policy_loss
from tests.tolerances import POLICY_LOSS

# Options of policy_loss beside its modes, each with the loss modes that read it.
FURTHER_OPTIONS = [
    *(({"kl_times_ratio": True, "loss_mode": m}) for m in LOSS_MODES if m != "gmpo"),
    {"kl_times_ratio": True, "kl_type": "k1+"},
    {"kl_times_ratio": True, "kl_type": "k2", "loss_mode": "gspo"},
    {"kl_input_clamp": None, "kl_output_clamp": None},
    {"kl_input_clamp": 1.0, "kl_output_clamp": 0.2, "kl_type": "k3+"},
    {"seq_clip_ratio_c": 1.01, "loss_mode": "gspo"},
    {"dro_beta": 0.3, "loss_mode": "dro"},
    {"seq_num_tokens": torch.tensor([9, 0, 70.5, 2, 40]), "loss_agg_mode": "seq-mean-token-mean"},
]
KL = ["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+", "kl", "mse", "low_var_kl"]


def random_mask(batch: int, seqlen: int, seed: int, kind: str) -> torch.Tensor:
    """A mask of tokens at the start of each row (prefix), at its end (suffix) or scattered."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "prefix":
        lengths = torch.randint(0, seqlen + 1, (batch,), generator=generator)
        return torch.arange(seqlen)[None] < lengths[:, None]
    if kind == "suffix":
        return random_mask(batch, seqlen, seed, "prefix").flip(1)
    return torch.rand(batch, seqlen, generator=generator) < 0.5


# Arguments of random_groups, and an option.
GROUPS = dict(
    rows=st.integers(0, 80),
    groups=st.integers(1, 20),
    seed=st.integers(0, 2**16),
    binary=st.booleans(),
    norm_by_std=st.booleans(),
)


def random_groups(rows: int, groups: int, seed: int, binary: bool):
    """(rewards, group ids far apart)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-groups, groups, (rows,), generator=generator) * 10**15
    rewards = torch.randn(rows, generator=generator)
    return (rewards > 0).float() if binary else rewards, ids


def batch(lengths, seed=0, spread=0.4, dtype=torch.float32):
    """Random packed inputs with about a quarter of the tokens masked."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def normal(scale):
        return (torch.randn(tokens, generator=generator) * scale).to(dtype)

    old = -normal(1).abs() - 0.05
    per_sequence = torch.randn(len(lengths), generator=generator).to(dtype)
    advantages = torch.repeat_interleave(per_sequence, torch.tensor(lengths, dtype=torch.int64))
    return {
        "log_probs": (old + normal(spread)).clamp(max=-0.01),
        "old_log_probs": old,
        "advantages": advantages,
        "response_mask": torch.rand(tokens, generator=generator) < 0.75,
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "selected": torch.rand(tokens, generator=generator) < 0.2,
        "ref_log_probs": old + normal(0.3),
        "entropy": normal(1).abs(),
        "rollout_is_weights": normal(0.5).exp(),
    }


def split(inputs, parts):
    """Yield (rows, micro-batch) for every list of sequence numbers in `parts`."""
    ends = inputs["cu_seqlens"]
    for sequences in parts:
        rows = torch.cat([torch.arange(ends[n], ends[n + 1]) for n in sequences])
        micro_batch = {name: value[rows] for name, value in inputs.items() if name != "cu_seqlens"}
        lengths = [0, *ends.diff()[sequences].tolist()]
        yield rows, {**micro_batch, "cu_seqlens": torch.tensor(lengths).cumsum(0).int()}


def global_counts(inputs):
    """The denominators of the whole batch, as keyword arguments."""
    mask = inputs["response_mask"]
    counts = [int(mask[a:b].sum()) for a, b in pairwise(inputs["cu_seqlens"])]
    return {"global_num_tokens": sum(counts), "global_num_seqs": sum(count > 0 for count in counts)}


def to_float64(inputs):
    floats = {k: v.double() for k, v in inputs.items() if v.is_floating_point()}
    return {**inputs, **floats}


def run(inputs, **options):
    """(loss, metrics, gradient by log_probs, gradient by entropy)."""
    leaves = {k: inputs[k].clone().requires_grad_() for k in ("log_probs", "entropy")}
    arguments = {**inputs, **leaves}
    loss, metrics = policy_loss(
        arguments.pop("log_probs"),
        arguments.pop("old_log_probs"),
        arguments.pop("advantages"),
        **{"loss_scale_factor": 50.0, "kl_coef": 0.1, "entropy_coeff": 0.01, **options},
        **arguments,
    )
    gradients = torch.autograd.grad(loss * 2, list(leaves.values()))
    return loss.detach(), metrics, *gradients


def run_tokens(inputs, **options):
    """(loss, kl, ratio, clipped, clipped_lower, gradient by log_probs, by entropy)."""
    leaves = {k: inputs[k].clone().requires_grad_() for k in ("log_probs", "entropy")}
    arguments = {**inputs, **leaves}
    losses = token_policy_loss(
        arguments.pop("log_probs"),
        arguments.pop("old_log_probs"),
        arguments.pop("advantages"),
        **{"kl_coef": 0.1, "entropy_coeff": 0.01, **options},
        **arguments,
    )
    incoming = torch.arange(1.0, losses.loss.numel() + 1).sin().to(losses.loss)
    gradients = torch.autograd.grad(losses.loss, list(leaves.values()), incoming)
    return *(t.detach().to(losses.loss) for t in losses), *gradients


def assert_close(got, want, tolerance):
    torch.testing.assert_close(got.double(), want.double(), **tolerance)


def assert_same(ours, exact, tolerance=POLICY_LOSS):
    assert_close(ours[0], exact[0], tolerance)
    assert ours[1].keys() == exact[1].keys()
    for name in exact[1]:
        assert_close(ours[1][name], exact[1][name], tolerance)
    assert_close(ours[2], exact[2], tolerance)
    assert_close(ours[3], exact[3], tolerance)


def impossible_tokens(inputs, side):
    """Set some log-probs to -inf: those of both policies and the reference, or of one policy."""
    inputs = {name: value.clone() for name, value in inputs.items()}
    names = {"both": ["log_probs", "old_log_probs", "ref_log_probs"], "new": ["log_probs"]}
    for name in names.get(side, ["old_log_probs"]):
        inputs[name][::5] = -torch.inf
    return inputs


def sequences(inputs):
    """Per sequence the rows of its unmasked tokens and their log rho."""
    ends, mask = inputs["cu_seqlens"].tolist(), inputs["response_mask"].tolist()
    log_rho = (inputs["old_log_probs"] - inputs["ref_log_probs"]).tolist()
    for a, b in pairwise(ends):
        rows = [t for t in range(a, b) if mask[t]]
        yield rows, [log_rho[t] for t in rows]


def aggregated(loss_mode, loss_agg_mode):
    """A batch with empty, short and long sequences; options; and their results in float64."""
    inputs = batch([5, 0, 70, 1, 33, 1030, 16])
    options = {"loss_mode": loss_mode, "loss_agg_mode": loss_agg_mode}
    return inputs, options, run(to_float64(inputs), backend="reference", **options)
