"""Why one operator of the engine differs: alternatives are computed until one gives its values.

Every function takes what the engine computed (`theirs`) and what the trained model computed from
the same inputs (`ours`), float64, and returns a clause, or None where no alternative explains it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridengine.kernels.sampling.reference import kept_entries
from hybridengine.lab.parity.forced import ForcedForward
from hybridengine.lab.parity.points import LOGITS, EngineRecord

_ALIKE = 0.05  # of the difference to explain: what an alternative may leave of it


class Sampling(NamedTuple):
    """How tokens are drawn: `top_p` 1, `top_k` -1 or 0 and `min_p` 0 truncate nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def truncation(self) -> dict[str, float]:
        """Return the settings that truncate, by name."""
        active = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        return {name: getattr(self, name) for name, is_active in active.items() if is_active}


class Case(NamedTuple):
    """An operator that differs. config: of the trained model, as its text part has it."""

    point: str
    record: EngineRecord
    forced: ForcedForward
    config: Any

    @property
    def theirs(self) -> Tensor:
        return self.record.points[self.point].flatten(1).double().cpu()

    @property
    def ours(self) -> Tensor:
        return self.forced.points[self.point].flatten(1).double().cpu()

    def near(self, *points: str) -> list[Tensor] | None:
        """Return what the engine computed at other points of the same module.

        None if one of them was not recorded.
        """
        names = [f"{self.point.rpartition('.')[0]}.{point}" for point in points]
        found = [self.record.points[name] for name in names if name in self.record.points]
        return [x.double().cpu() for x in found] if len(found) == len(names) else None

    def explains(self, alternative: Tensor) -> bool:
        """Whether an alternative gives the engine's values."""
        left = (self.theirs - alternative.flatten(1)).norm()
        return bool(left <= _ALIKE * (self.theirs - self.ours).norm())


def cause_of(case: Case) -> str:
    """Return the likely cause of a difference as a clause."""
    name = case.point.rpartition(".")[2]
    explain: Callable[[Case], str | None]
    if case.point in case.record.inputs:
        explain = _norm
    else:
        explain = {
            "query": _rotary,
            "key": _rotary,
            "attention": _attention,
            "activation": _activation,
            "experts": _experts,
            LOGITS: _head,
        }.get(name, _scaled)
    return explain(case) or _scaled(case) or "none of the known causes; compare the operator's code"


def _ratios(case: Case) -> Tensor | None:
    """Return theirs / ours of every row, [T, 1], where that is one number."""
    ratio = (case.theirs * case.ours).sum(1, keepdim=True)
    ratio = ratio / case.ours.square().sum(1, keepdim=True).clamp(min=1e-300)
    return ratio if case.explains(ratio * case.ours) else None


def _scaled(case: Case) -> str | None:
    if (ratio := _ratios(case)) is None:
        return None
    low, high = float(ratio.min()), float(ratio.max())
    if high - low < 1e-3 * abs(high):
        return f"every token's values are {high:.4g} times those of the trained model"
    return f"a factor of each token, from {low:.4g} to {high:.4g}"


def _norm(case: Case) -> str | None:
    """RMSNorm: y = x w / sqrt(mean(x^2) + eps)."""
    if (ratio := _ratios(case)) is None:
        return None
    inputs = case.record.inputs[case.point]
    groups = inputs.reshape(-1, inputs.shape[-1]).cpu()
    squares = groups.square().mean(-1).view(len(ratio), -1).mean(1, keepdim=True)
    epsilon = getattr(case.config, "rms_norm_eps", None)
    if epsilon is None:
        return None
    theirs = float(((squares + epsilon) / ratio.square() - squares).median())
    if theirs < 0:
        return None
    return f"its epsilon is about {theirs:.1e}, the trained model's {epsilon:.1e}"


def _rotary(case: Case) -> str | None:
    """The angle of pair j at position p is p base^(-2 j / d)."""
    heads = case.config.num_attention_heads
    if case.point.endswith("key"):
        heads = getattr(case.config, "num_key_value_heads", heads)
    theirs, ours = (x.view(len(x), heads, 2, -1) for x in (case.theirs, case.ours))
    angle = [torch.atan2(x[:, :, 1], x[:, :, 0]) for x in (theirs, ours)]
    turn = (angle[0] - angle[1]).median(1).values  # [T, d / 2], modulo 2 pi
    turn = torch.remainder(turn + math.pi, 2 * math.pi) - math.pi
    positions = torch.tensor(case.record.positions, dtype=torch.float64)
    ours_base = _rope_theta(case.config)
    pairs = torch.arange(turn.shape[1], dtype=torch.float64)
    frequencies = ours_base ** (-pairs / len(pairs))
    for shift in (-2, -1, 1, 2):
        if _wrapped(turn - shift * frequencies).abs().max() < 1e-3:
            return f"its positions are shifted by {shift}"
    small = float(turn.abs().max())
    if small < 2.0**-8 * max(1.0, float(positions.max())):
        rounded = frequencies.to(torch.bfloat16).double() - frequencies
        if small < 2.0**-7 or _wrapped(turn - positions[:, None] * rounded).abs().max() < 1e-2:
            return "its cosines and sines are rounded to 16 bits"
    at_one = (positions == 1).nonzero().flatten()
    if len(at_one):
        j = min(4, len(pairs) - 1)
        frequency = frequencies[1:] + turn[int(at_one[0]), 1:]
        bases = frequency.clamp(min=1e-30).log().mul(-len(pairs) / pairs[1:]).exp()
        base = float(bases[: j + 1].median())
        predicted = positions[:, None] * (base ** (-pairs / len(pairs)) - frequencies)
        if _wrapped(turn - predicted).abs().median() < 1e-2:
            return f"its rotary base is about {base:.6g}, the trained model's {ours_base:.6g}"
    return "the rotary embedding turns by other angles"


def _wrapped(angle: Tensor) -> Tensor:
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi


def _rope_theta(config: Any) -> float:
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta", getattr(config, "rope_theta", 10000.0)))


def _attention(case: Case) -> str | None:
    positions = case.record.positions
    module = case.point.rpartition(".")[0]
    options = case.forced.attention[module]
    if (near := case.near("query", "key", "v_proj")) is None:
        return None
    query, key, value = near
    window, softcap = options.get("sliding_window"), options.get("softcap")
    head = query.shape[1] // int(case.config.num_attention_heads)
    scale = float(options.get("scaling") or head**-0.5)
    operands = (query, key, value, head)

    def alternatives() -> Iterator[tuple[str, Tensor]]:
        options = _softmax_attention(*operands, scale, window, softcap)
        yield (
            "it is what the model's options say; the trained model's implementation of attention "
            f"leaves some out (soft-cap {softcap}, window {window})",
            options,
        )
        if window is not None:
            yield "it has no sliding window", _softmax_attention(*operands, scale, None, softcap)
            for size in (window - 1, window + 1):
                words = f"its sliding window is {size} tokens, the trained model's {window}"
                yield words, _softmax_attention(*operands, scale, size, softcap)
        elif size := getattr(case.config, "sliding_window", None):
            words = f"it has a sliding window of {size} tokens in a layer that has none"
            yield words, _softmax_attention(*operands, scale, size, softcap)
        if softcap is not None:
            yield (
                f"the soft-cap of its scores, {softcap:g}, is left out",
                _softmax_attention(*operands, scale, window, None),
            )
        other = _fitted_scale(case, operands, scale, window, softcap)
        words = f"its scores are scaled by {other:.4g}, the trained model's by {scale:.4g}"
        yield words, _softmax_attention(*operands, other, window, softcap)

    for words, result in alternatives():
        if case.explains(result):
            return words
    start = case.record.num_prompt
    error = (case.theirs - case.ours).norm(dim=1)
    if float(error[:start].max()) < 1e-3 * float(error.max()):
        first = int((error > 1e-2 * error.max()).nonzero()[0])
        return (
            f"its prompt is right and tokens from position {positions[first]} on are not: the "
            "cache holds keys or values of other weights or tokens (a stale block)"
        )
    return None


def _fitted_scale(
    case: Case, operands: tuple[Tensor, Tensor, Tensor, int], scale: float, *options: Any
) -> float:
    """Return the scale between 1/16 and 16 times the trained model's that fits best."""
    low, high = scale / 16, scale * 16
    for _ in range(6):
        scales = torch.logspace(math.log2(low), math.log2(high), 13, 2, dtype=torch.float64)
        errors = [
            float((case.theirs - _softmax_attention(*operands, float(s), *options)).norm())
            for s in scales
        ]
        best = min(range(len(errors)), key=errors.__getitem__)
        low, high = float(scales[max(best - 1, 0)]), float(scales[min(best + 1, len(errors) - 1)])
    return float(scales[best])


def _softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention of one sequence in float64, [T, H * D]."""
    q, k, v = (x.view(len(x), -1, head).transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    distance = torch.arange(len(query))[:, None] - torch.arange(len(key))
    hidden = (distance < 0) | (distance >= (window or len(key) + 1))
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return out.transpose(0, 1).flatten(1)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def _activation(case: Case) -> str | None:
    if (near := case.near("gate_proj", "up_proj")) is None:
        return None
    gate, up = near
    for name, function in _ACTIVATIONS.items():
        if case.explains(function(gate) * up):
            known = getattr(case.config, "hidden_act", None) or case.config.hidden_activation
            return f"its activation is {name}, the trained model's {known}"
        if case.explains(function(up) * gate):
            return "gate and up projection are exchanged"
    return None


def _experts(case: Case) -> str | None:
    if _ratios(case) is not None:
        normalised = "" if getattr(case.config, "norm_topk_prob", False) else "not "
        return (
            "the sum of the selected experts' weights differs; the trained model's are "
            f"{normalised}normalised to 1"
        )
    logits = case.record.points.get(case.point.removesuffix("experts") + "gate")
    if logits is None:
        return None
    logits = logits.double().cpu()
    served = torch.zeros_like(logits, dtype=torch.bool)
    served.scatter_(1, logits.topk(case.config.num_experts_per_tok).indices, True)
    rows = (case.theirs - case.ours).norm(dim=1) > 1e-4 * case.ours.norm(dim=1)
    for expert in range(served.shape[1]):
        if not rows.all() and torch.equal(rows, served[:, expert]):
            return (
                f"exactly the tokens of expert {expert} differ: its weights are of other (older) "
                "weights"
            )
    return (
        f"{int(rows.sum())} of {len(rows)} tokens have other experts, or experts with other "
        "weights, from equal router logits"
    )


def _head(case: Case) -> str | None:
    softcap = getattr(case.config, "final_logit_softcapping", None)
    ours = case.ours
    if softcap and case.explains(softcap * (ours / softcap).clamp(-1 + 1e-12, 1 - 1e-12).atanh()):
        return f"the soft-cap of the logits, {softcap:g}, is left out"
    relative = (case.theirs - ours).norm() / ours.norm()
    if 2.0**-13 < relative < 2.0**-6 and _ratios(case) is None:
        return "the head is computed, or its logits rounded, in 16 bits, the trained model's in 32"
    return None


def response_log_probs(record: EngineRecord, logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the log-probs of the response's tokens as they were sampled; logits: [T, V]."""
    scaled = logits / sampling.temperature
    if sampling.truncation:
        options = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        rows = [torch.full((len(logits),), x, device=logits.device) for x in options]
        scaled = scaled.masked_fill(~kept_entries(logits, *rows), -torch.inf)
    ids = torch.tensor(record.token_ids[record.num_prompt :], device=logits.device)
    return scaled.log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)


def sampling_cause(record: EngineRecord, sampling: Sampling) -> str | None:
    """Return how the engine's log-probs follow from its own logits; None: as the trainer's do."""
    logits = record.points[LOGITS].double().cpu()
    given = torch.tensor(record.log_probs, dtype=torch.float64)

    def fits(sampling: Sampling) -> bool:
        difference = response_log_probs(record, logits, sampling) - given
        return bool(difference.abs().max() < 1e-3)

    if fits(sampling):
        return None
    names = ", ".join(f"{name}={value:g}" for name, value in sampling.truncation.items())
    if names and fits(Sampling(sampling.temperature)):
        return f"its log-probs are not renormalised over what {names} keeps"
    if sampling.temperature != 1.0 and fits(sampling._replace(temperature=1.0)):
        return f"its log-probs are of temperature 1, not {sampling.temperature:g}"
    if fits(Sampling()):
        return f"its log-probs are of the raw logits, before temperature and {names or 'top_p'}"
    return "its log-probs follow neither from its logits nor from temperature and truncation"
