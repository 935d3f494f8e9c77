"""linear_policy_loss: hidden states to policy loss, with the gradients made in the forward.

Old log-probs, advantages, mask and the global denominators are known before the forward, so the
gradient of a chunk of logits can be formed right after its rows are reduced, while it is still in
the buffer: three matrix products (6 T H V operations) for forward and backward together where the
two-step form needs four. Rows whose gradient is zero (masked, zero advantage, clipped) are
compacted away before the two gradient products. docs/linear_policy_loss.md has the derivation.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.distributed as dist
from torch import Tensor

from ._backend import choose_backend, register_backends
from ._row_options import row_options
from .aggregation import LOSS_AGG_MODES, Segments, as_mask, denominators, token_weights
from .linear_logprob import (
    LINEAR_SCHEMA,
    Chunks,
    LinearGrads,
    budget,
    check_linear,
    linear_token_log_probs,
    split_row_options,
    wide_dtype,
)
from .logprob import rows_backward, rows_forward, token_log_probs
from .policy_loss import policy_loss
from .token_loss import (
    KL_ALIASES,
    KL_TYPES,
    LOSS_MODES,
    MODE_ALIASES,
    SEQUENCE_MODES,
    LossOptions,
)

register_backends(
    "linear_policy_loss", cpu=("cpp", "reference"), cuda=("cuda", "triton", "reference")
)


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    advantages: Tensor,
    old_log_probs: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    keep_mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    response_mask: Tensor | None = None,
    entropy_coeff: float = 0.0,
    budget_bytes: int | None = None,
    deterministic: bool = False,
    main_grad: Tensor | None = None,
    backend: str | None = None,
    **loss_arguments,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Policy loss from hidden states.

    Args:
        hidden: [T, H]; weight: [V, H] of the same dtype; bias: [V] or None; token_ids: [T] int64.
        advantages, old_log_probs: [T], constants.
        temperature, logit_scale, softcap, keep_mask, group, budget_bytes, deterministic: as in
            `linear_token_log_probs`.
        response_mask: [T] bool; tokens outside are not read beyond the first matrix product, and
            their log_probs and entropy are 0.
        entropy_coeff: subtracts entropy_coeff * entropy, differentiated.
        loss_arguments: everything else `policy_loss` takes (loss_mode, clip ratios, loss_agg_mode,
            cu_seqlens, global denominators, ref_log_probs and the KL, rollout_is_weights, ...).
        main_grad: [V, H] float32; the backward adds the weight gradient into it and leaves
            weight.grad None.
        backend: `cpp`, `cuda`, `triton` or `reference`; None takes the best one.

    Returns:
        (loss, log_probs [T], entropy [T], metrics): loss is differentiable in hidden, weight and
        bias, the rest is without gradient. The metrics are those of `policy_loss`, tensors on the
        device; nothing here waits for a GPU. With gspo and gmpo, where a token's gradient needs the
        whole sequence first, this is `linear_token_log_probs` followed by `policy_loss`
        (8 T H V operations).

    Example:
        >>> hidden = torch.zeros(2, 8, requires_grad=True)
        >>> weight, ids = torch.ones(4, 8), torch.tensor([1, 3])
        >>> old = torch.full((2,), -1.3862944)
        >>> loss, *_ = linear_policy_loss(hidden, weight, ids, torch.tensor([1.0, 2.0]), old)
        >>> round(loss.item(), 4)
        -1.5
    """
    op = "linear_policy_loss"
    check_linear(op, hidden, weight, token_ids, bias, main_grad)
    backend = choose_backend(op, hidden.device, backend)
    if hidden.dtype == torch.float64:
        backend = "reference"
    ids = token_ids if response_mask is None else token_ids.masked_fill(~response_mask, -100)
    row_arguments = {
        "logit_scale": logit_scale, "softcap": softcap, "ignore_index": -100,
        "keep_mask": keep_mask, "group": group,
    }  # fmt: skip
    chunking = {"budget_bytes": budget_bytes, "deterministic": deterministic}
    loss_arguments |= {"response_mask": response_mask, "entropy_coeff": entropy_coeff}
    mode = loss_arguments.get("loss_mode", "ppo_clip")
    mode = MODE_ALIASES.get(mode, mode)
    if backend == "reference" or mode in SEQUENCE_MODES:
        # Log-probs, then the loss: the specification, and the form for the sequence-level modes.
        row_arguments |= {"temperature": temperature, "backend": backend}
        if backend == "reference" and main_grad is None and not deterministic:
            wide = wide_dtype(hidden)
            unmasked = hidden.masked_fill((ids == -100).unsqueeze(1), 0).to(wide)
            wide_bias = None if bias is None else bias.to(wide)
            logits = torch.nn.functional.linear(unmasked, weight.to(wide), wide_bias)
            log_probs, entropy = token_log_probs(logits, ids, **row_arguments)
        else:
            log_probs, entropy = linear_token_log_probs(
                hidden, weight, ids, bias, main_grad=main_grad, **chunking, **row_arguments
            )
        loss, metrics = policy_loss(
            log_probs, old_log_probs, advantages, entropy=entropy, backend=backend, **loss_arguments
        )
        return loss, log_probs.detach(), entropy.detach(), metrics
    # The loss and its metrics come from policy_loss itself, on the log-probs found on the way; it
    # also checks the arguments, before anything large is computed.
    nothing = hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
    with torch.no_grad():
        policy_loss(nothing, old_log_probs, advantages, entropy=nothing, **loss_arguments)
    # Where every row has an entropy or KL term and none is masked, none can be without a gradient.
    terms = entropy_coeff or loss_arguments.get("kl_coef", 0.0)
    recording = torch.is_grad_enabled()
    wanted = [t is not None and recording and t.requires_grad for t in (hidden, weight, bias)]
    log_probs, entropy, *grads = torch.ops.hybridengine.linear_policy_gradient(
        hidden.detach(), weight.detach(), None if bias is None else bias.detach(), ids,
        *row_options(op, ids.shape, temperature, **row_arguments),
        budget(hidden, budget_bytes), deterministic,
        *_for_the_op(nothing, advantages, old_log_probs, mode, loss_arguments),
        response_mask is not None or not terms, main_grad is not None, wanted, backend,
    )  # fmt: skip
    with torch.no_grad():
        loss, metrics = policy_loss(
            log_probs, old_log_probs, advantages, entropy=entropy, **loss_arguments
        )
    if any(wanted):
        loss = _AttachGradients.apply(loss, hidden, weight, bias, main_grad, *grads)
    return loss, log_probs, entropy, metrics


class _AttachGradients(torch.autograd.Function):
    """loss, with gradients that were computed beside it."""

    @staticmethod
    def forward(ctx, loss, hidden, weight, bias, main_grad, *grads):
        ctx.save_for_backward(*grads)
        ctx.main_grad = main_grad
        return loss.clone()

    @staticmethod
    def backward(ctx, grad_loss):
        # Asking a GPU whether the factor is 1 would wait for it; a traced graph cannot ask.
        on_host = grad_loss.device.type == "cpu" and not torch.compiler.is_compiling()
        unit = on_host and grad_loss.item() == 1.0
        needs = list(ctx.needs_input_grad[1:4])
        if ctx.main_grad is not None and needs[1]:
            needs[1] = False
            ctx.main_grad.addcmul_(ctx.saved_tensors[1], grad_loss)
        scaled = [
            (grad if unit else grad * grad_loss) if need else None
            for grad, need in zip(ctx.saved_tensors, needs, strict=True)
        ]
        return None, *scaled, None, None, None, None


def _for_the_op(like, advantages, old_log_probs, mode, arguments):
    """The loss in the order linear_policy_gradient takes it: per-token tensors, then numbers."""
    mask = as_mask(arguments["response_mask"], like)
    agg_mode = arguments.get("loss_agg_mode", "token-mean")
    cu_seqlens = arguments.get("cu_seqlens")
    num_tokens, num_seqs = denominators(
        "linear_policy_loss", agg_mode, mask, cu_seqlens,
        arguments.get("global_num_tokens"), arguments.get("global_num_seqs"),
    ).unbind()  # fmt: skip
    segments = None if cu_seqlens is None else Segments.of(cu_seqlens, mask)
    weights = token_weights(
        agg_mode, mask, segments, num_tokens, num_seqs, arguments.get("loss_scale_factor")
    )

    def floats(tensor):
        return None if tensor is None else tensor.detach().float().contiguous()

    selected = arguments.get("selected")
    per_token = [
        floats(advantages),
        floats(old_log_probs),
        mask,
        None if selected is None else selected.bool(),
        floats(arguments.get("ref_log_probs")),
        floats(arguments.get("rollout_is_weights")),
        weights.float(),
    ]
    kl_type = arguments.get("kl_type", "low_var_kl")
    base = kl_type.removesuffix("+")
    modes = (
        LOSS_MODES.index(mode),
        LOSS_AGG_MODES.index("token-sum"),
        KL_TYPES.index(KL_ALIASES.get(base, base)),
    )
    numbers = [float(arguments.get(k, v)) for k, v in LossOptions()._asdict().items()]
    numbers += [float(arguments.get("kl_coef", 0.0)), float(arguments["entropy_coeff"]), 1.0]
    return *per_token, [*modes, kl_type.endswith("+"), True, True], numbers


@torch.library.custom_op(
    "hybridengine::linear_policy_gradient",
    mutates_args=(),
    schema=f"({LINEAR_SCHEMA}, Tensor advantages, Tensor old_log_probs, Tensor mask, "
    "Tensor? selected, Tensor? ref_log_probs, Tensor? is_weights, Tensor weights, int[] plan, "
    "float[] numbers, bool dead_rows, bool wide_weight_grad, bool[] wanted, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _linear_policy_gradient(hidden, weight, bias, token_ids, *arguments):
    """log_probs, entropy and the gradients of hidden, weight and bias (empty if not wanted).

    weights: what the terms of each token are multiplied by in the loss. plan, numbers: those of
    the op policy_loss. dead_rows: whether rows without a gradient are to be expected.
    """
    options, rest = split_row_options(arguments)
    budget_bytes, deterministic, *per_token, plan, numbers = rest[:-4]
    dead_rows, wide_weight_grad, wanted, backend = rest[-4:]
    on_device = dead_rows and backend in ("cuda", "triton") and _can_compact(hidden, weight)
    chunks = Chunks(hidden, weight, bias, budget_bytes, deterministic, any(wanted), on_device)
    if on_device:
        from .linear_live_rows import LiveRowGrads

        grads = LiveRowGrads(chunks, wanted)
    else:
        grads = LinearGrads(chunks, wanted, dead=~per_token[2])
    log_probs, entropy = (torch.empty_like(per_token[-1]) for _ in range(2))
    for rows in chunks.slices():
        logits = grads.logits(rows)
        found = rows_forward(logits, token_ids[rows], options.rows(rows), False, backend)[:4]
        log_probs[rows], entropy[rows] = found[0], found[1]
        if not any(wanted):
            continue
        slopes = _token_slopes(
            found, [None if t is None else t[rows] for t in per_token], plan, numbers, backend
        )
        if on_device:
            grads.take(logits, rows, token_ids, options, found, slopes, backend)
            continue
        where, alive = rows, _alive_rows(logits, *slopes)
        if alive is not None:
            if alive.numel() == 0:
                continue
            logits = logits[: alive.numel()]
            found, slopes = ([value[alive] for value in values] for values in (found, slopes))
            where = alive + rows.start
        grad_logits = grads.room(logits)
        rows_backward(
            logits, grad_logits, token_ids[where], options.rows(where), list(found), *slopes,
            backend,
        )  # fmt: skip
        grads.add(grad_logits, where)
    return log_probs, entropy, *grads.finished(options.group, wide_weight_grad)


@_linear_policy_gradient.register_fake
def _(hidden, weight, bias, *arguments):
    wide_weight_grad, wanted = arguments[-3], arguments[-2]
    vectors = [hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(2)]
    grads = [
        torch.empty_like(t) if want else hidden.new_empty(0)
        for t, want in zip((hidden, weight, bias), wanted, strict=True)
    ]
    if wide_weight_grad:
        grads[1] = grads[1].float()
    return *vectors, *grads


def _token_slopes(found, per_token, plan, numbers, backend) -> tuple[Tensor, Tensor]:
    """d loss / d log_prob and d loss / d entropy of a chunk's tokens, by the policy-loss op."""
    advantages, old, mask, selected, ref, is_weights, weights = per_token
    ones = torch.ones(2, dtype=torch.float64, device=weights.device)
    *_, by_log_prob, by_entropy = torch.ops.hybridengine.policy_loss(
        found[0], found[1], old, advantages, mask, selected, ref, is_weights, None, ones, plan,
        numbers, backend,
    )  # fmt: skip
    return by_log_prob * weights, by_entropy * weights


def _can_compact(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the products over live rows take these; if not, all rows are multiplied."""
    if importlib.util.find_spec("triton") is None:
        return False
    from .linear_live_rows import fits

    return fits(hidden, weight)


def _alive_rows(logits: Tensor, by_log_prob: Tensor, by_entropy: Tensor) -> Tensor | None:
    """Moves the rows that have a gradient to the front; their numbers, or None for "all".

    On a GPU the count would have to come to the host: there `LiveRowGrads` counts on the device.
    """
    if not logits.is_cpu:
        return None
    alive = ((by_log_prob != 0) | (by_entropy != 0)).nonzero().squeeze(1)
    if alive.numel() == logits.shape[0]:
        return None
    for target, source in enumerate(alive.tolist()):
        if target != source:
            logits[target].copy_(logits[source])
    return alive
