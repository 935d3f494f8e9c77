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

from .. import _check as check
from .._backend import choose_backend, register_backends
from ..logprob.op import rows_backward, rows_forward, token_log_probs
from ..logprob.row_options import in_shape, row_options
from ..policy_loss.aggregation import (
    LOSS_AGG_MODES,
    Segments,
    denominators,
    token_arguments,
    token_weights,
)
from ..policy_loss.op import policy_loss
from ..policy_loss.terms import (
    KL_TYPES,
    LOSS_MODES,
    MODE_ALIASES,
    SEQUENCE_MODES,
    LossOptions,
    check_kl_type,
)
from .arguments import (
    LINEAR_SCHEMA,
    budget,
    check_linear,
    split_row_options,
    wide_dtype,
)
from .logprob import Chunks, LinearGrads, linear_token_log_probs

register_backends(
    "linear_policy_loss", cpu=("cpp", "reference"), cuda=("cuda", "triton", "reference")
)


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    old_log_probs: Tensor,
    advantages: Tensor,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
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
        hidden: [T, H] of packed tokens, or [B, L, H], whose rows are the sequences; every [T] below
            is then [B, L]. weight: [V, H] of the same dtype; token_ids: [T] int32 or int64.
        old_log_probs, advantages: [T], constants.
        temperature, bias, logit_scale, softcap, keep_mask, group, budget_bytes, deterministic: as
            in `linear_token_log_probs`.
        response_mask: [T] bool, or 0 and 1; None: all. Tokens outside are not read beyond the first
            matrix product, and their log_probs and entropy are 0.
        ignore_index: tokens with this label (what `pack(shifted=)` gives the last one of a
            sequence) are outside the response mask too: not in the loss, its counts or gradients.
        entropy_coeff: subtracts entropy_coeff * entropy, differentiated.
        loss_arguments: everything else `policy_loss` takes (loss_mode, clip ratios, loss_agg_mode,
            cu_seqlens, global denominators, ref_log_probs and the KL, rollout_is_weights, ...).
        main_grad: [V, H] float32; the backward adds the weight gradient into it and leaves
            weight.grad None.
        backend: `cpp`, `cuda`, `triton` or `reference`; None takes the best one.

    Returns:
        (loss, log_probs [T], entropy [T], metrics): loss is differentiable in hidden, weight and
        bias (once, in reverse mode), the rest is without gradient. The metrics are those of
        `policy_loss`, tensors on the device; nothing here waits for a GPU. With gspo and gmpo,
        where a token's gradient needs the whole sequence first, this is `linear_token_log_probs`
        followed by `policy_loss` (8 T H V operations).

    Example:
        >>> hidden = torch.zeros(2, 8, requires_grad=True)
        >>> weight, ids = torch.ones(4, 8), torch.tensor([1, 3])
        >>> old = torch.full((2,), -1.3862944)
        >>> loss, *_ = linear_policy_loss(
        ...     hidden, weight, ids, old_log_probs=old, advantages=torch.tensor([1.0, 2.0])
        ... )
        >>> round(loss.item(), 4)
        -1.5
    """
    op = "linear_policy_loss"
    token_ids = check_linear(op, hidden, weight, token_ids, bias, main_grad)
    backend = choose_backend(op, hidden.device, backend)
    if hidden.dtype == torch.float64:
        backend = "reference"
    all_have_gradients = response_mask is None  # but for those labelled ignore_index
    loss_arguments |= {
        "old_log_probs": old_log_probs, "advantages": advantages,
        "response_mask": response_mask, "entropy_coeff": entropy_coeff,
    }  # fmt: skip
    loss_arguments = _packed_arguments(op, token_ids, ignore_index, loss_arguments)
    old_log_probs, advantages = (loss_arguments.pop(k) for k in ("old_log_probs", "advantages"))
    shape, mask = token_ids.shape, loss_arguments["response_mask"]
    ids = token_ids.masked_fill(~mask.view(shape), ignore_index)
    row_arguments = {
        "logit_scale": logit_scale, "softcap": softcap, "ignore_index": ignore_index,
        "keep_mask": keep_mask, "group": group,
    }  # fmt: skip
    chunking = {"budget_bytes": budget_bytes, "deterministic": deterministic}
    mode = loss_arguments.get("loss_mode", "ppo_clip")
    mode = MODE_ALIASES.get(mode, mode)
    if backend == "reference" or mode in SEQUENCE_MODES:
        # Log-probs, then the loss: the specification, and the form for the sequence-level modes.
        row_arguments |= {"temperature": temperature, "backend": backend}
        if backend == "reference" and main_grad is None and not deterministic:
            wide = wide_dtype(hidden)
            unmasked = hidden.masked_fill((ids == ignore_index).unsqueeze(-1), 0).to(wide)
            wide_bias = None if bias is None else bias.to(wide)
            logits = torch.nn.functional.linear(unmasked, weight.to(wide), wide_bias)
            log_probs, entropy = token_log_probs(logits, ids, **row_arguments)
        else:
            log_probs, entropy = linear_token_log_probs(
                hidden, weight, ids, bias=bias, main_grad=main_grad, **chunking, **row_arguments
            )
        loss, metrics = policy_loss(
            log_probs.flatten(), old_log_probs, advantages, entropy=entropy.flatten(),
            backend=backend, **loss_arguments,
        )  # fmt: skip
        return loss, log_probs.detach(), entropy.detach(), metrics
    # The loss and its metrics come from policy_loss itself, on the log-probs found on the way; it
    # also checks the arguments, before anything large is computed.
    hidden = hidden if hidden.dim() == 2 else hidden.flatten(0, -2)
    nothing = hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
    with torch.no_grad():
        policy_loss(nothing, old_log_probs, advantages, entropy=nothing, **loss_arguments)
    # Where every row has an entropy or KL term and none is masked, none can be without a gradient.
    terms = entropy_coeff or loss_arguments.get("kl_coef", 0.0)
    recording = torch.is_grad_enabled()
    wanted = [t is not None and recording and t.requires_grad for t in (hidden, weight, bias)]
    log_probs, entropy, *grads = torch.ops.hybridengine.linear_policy_gradient(
        hidden.detach(), weight.detach(), None if bias is None else bias.detach(), ids.flatten(),
        *row_options(op, ids, weight.shape[0], temperature, **row_arguments),
        budget(op, hidden, budget_bytes), deterministic,
        *_for_the_op(advantages, old_log_probs, mode, loss_arguments),
        not (all_have_gradients and terms), main_grad is not None, wanted, backend,
    )  # fmt: skip
    with torch.no_grad():
        loss, metrics = policy_loss(
            log_probs, old_log_probs, advantages, entropy=entropy, **loss_arguments
        )
    if any(wanted):
        # 0-d stand-ins of the inputs: the backward keeps them, and not what they stand for.
        anchors = [None if t is None else t[:0].sum() for t in (hidden, weight, bias)]
        loss = _AttachGradients.apply(loss, hidden, weight, bias, main_grad, *grads, *anchors)
    return loss, in_shape(log_probs, shape), in_shape(entropy, shape), metrics


class _AttachGradients(torch.autograd.Function):
    """loss, with gradients that were computed beside it."""

    @staticmethod
    def forward(ctx, loss, hidden, weight, bias, main_grad, *grads_and_anchors):
        ctx.save_for_backward(*grads_and_anchors)
        ctx.main_grad = main_grad
        return loss.clone()

    @staticmethod
    @check.differentiable_once("linear_policy_loss")
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
            for grad, need in zip(ctx.saved_tensors[:3], needs, strict=True)
        ]
        return None, *scaled, *(None,) * 7


def _packed_arguments(op: str, token_ids: Tensor, ignore_index: int, arguments: dict) -> dict:
    """The loss's arguments, those per token as [T]; its mask leaves out labels ignore_index."""
    names = ("old_log_probs", "advantages", "ref_log_probs", "rollout_is_weights")
    given, mask = arguments["response_mask"], token_ids != ignore_index
    check.same_device(
        op, token_ids=token_ids, old_log_probs=arguments["old_log_probs"], response_mask=given
    )
    check.integer(op, "ignore_index", ignore_index)
    sizes: check.Sizes = {"...": (tuple(token_ids.shape), "token_ids")}
    check.shape(op, "old_log_probs", arguments["old_log_probs"], "...", sizes)
    if given is not None:
        check.shape(op, "response_mask", given, "...", sizes)
        mask = mask & check.mask(op, "response_mask", given)
    floats = {name: arguments.get(name) for name in names}
    masks = {"response_mask": mask, "selected": arguments.get("selected")}
    tokens, cu_seqlens = token_arguments(op, floats, masks, arguments.get("cu_seqlens"))
    return arguments | tokens | {"cu_seqlens": cu_seqlens}


def _for_the_op(advantages, old_log_probs, mode, arguments):
    """The loss in the order linear_policy_gradient takes it: per-token tensors, then numbers."""
    mask = arguments["response_mask"]
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
        selected,
        floats(arguments.get("ref_log_probs")),
        floats(arguments.get("rollout_is_weights")),
        weights.float(),
    ]
    kl_type = arguments.get("kl_type", "low_var_kl")
    modes = (
        LOSS_MODES.index(mode),
        LOSS_AGG_MODES.index("token-sum"),
        KL_TYPES.index(check_kl_type("linear_policy_loss", kl_type)),
    )
    options = {k: arguments.get(k, v) for k, v in LossOptions()._asdict().items()}
    numbers = [*LossOptions.checked("linear_policy_loss", **options)]
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
    chunks = Chunks(
        hidden, weight, bias, budget_bytes, deterministic, any(wanted), on_device, options.group
    )
    if on_device:
        from .active_rows import LiveRowGrads

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
    from .active_rows import fits

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
