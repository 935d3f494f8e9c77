"""Preference losses from hidden states: the bases that Liger's DPO, CPO, ORPO, SimPO and KTO share.

Liger computes the logits of a few sequences at a time; here all tokens go through
`linear_token_log_probs` in chunks that fit its memory budget, ignored tokens are left out, and the
mean logits of the metrics come from sums of hidden states and weights. `chunk_size` and `compiled`
are accepted and change nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .head import GradientsInForward, detached, head_log_probs, loss_and_gradients, sum_of_logits


def sequence_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    average_log_prob: bool,
) -> tuple[Tensor, Tensor]:
    """Return (sums [N] or means over the targets of each row, log-probs [N, L], 0 if ignored)."""
    log_probs, _ = head_log_probs(hidden, weight, target, bias, ignore_index=ignore_index)
    totals = log_probs.sum(-1)
    return totals / (target != ignore_index).sum(-1) if average_log_prob else totals, log_probs


class LigerFusedLinearPreferenceBase(GradientsInForward):
    """A loss on pairs: the first half of the batch is chosen, the second half rejected.

    A subclass defines `preference_loss_fn`, and a `forward` that calls this one.
    """

    @staticmethod
    def preference_loss_fn(*args: Any, **kwargs: Any) -> Any:
        """Return the loss, or (loss, further results), of the log-probs of pairs."""
        raise NotImplementedError("Preference loss function must be implemented.")

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        cls,
        ctx,
        _input,
        weight,
        target,
        bias=None,
        chunk_size=1,
        ignore_index=-100,
        alpha=1.0,
        beta=0.1,
        compute_nll_loss=True,
        nll_target=None,
        compiled=True,
        use_ref_model=False,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        average_log_prob=True,
        **loss_kwargs,
    ):
        """Compute alpha * NLL of the chosen + preference loss.

        Args:
            _input: hidden states [2B, L, H]; weight: [V, H]; target: [2B, L]; bias: [V].
            nll_target: [2B, L], other targets for the NLL.
            ref_input, ref_weight, ref_bias: those of the reference model.
            loss_kwargs: for `preference_loss_fn`.

        Returns:
            (loss, (chosen log-probs [B], rejected log-probs [B], mean chosen logit, mean rejected
            logit, NLL, further results of preference_loss_fn)).
        """
        pairs = target.shape[0] // 2
        rows = (ignore_index, average_log_prob)
        if use_ref_model:
            ref, _ = sequence_log_probs(ref_input, ref_weight, target, ref_bias, *rows)
            loss_kwargs |= {"ref_chosen_logps": ref[:pairs], "ref_rejected_logps": ref[pairs:]}

        def compute(_input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Any]:
            totals, log_probs = sequence_log_probs(_input, weight, target, bias, *rows)
            nll = log_probs.new_zeros(())
            if compute_nll_loss:
                nll_sum, labels = -log_probs[:pairs].sum(), target[:pairs]
                if nll_target is not None:
                    labels = nll_target[:pairs]
                    nll_sum = -head_log_probs(
                        _input[:pairs], weight, labels, bias, ignore_index=ignore_index
                    )[0].sum()
                nll = nll_sum / (labels != ignore_index).sum()
            results = cls.preference_loss_fn(
                totals[:pairs], totals[pairs:], target, beta=beta, **loss_kwargs
            )
            loss, *others = results if isinstance(results, tuple) else (results,)
            return alpha * nll + loss, (totals[:pairs], totals[pairs:], nll, *others)

        loss, results, grads = loss_and_gradients(compute, (_input, weight, bias))
        ctx.save_for_backward(*grads)
        chosen, rejected, nll, *others = detached(results)
        count = pairs * target.shape[1] * weight.shape[0]
        means = (sum_of_logits(half, weight, bias) / count for half in _halves(_input, pairs))
        return loss, (chosen, rejected, *means, nll, *others)


def _halves(hidden: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    return hidden[:pairs], hidden[pairs:]


class LigerFusedLinearUnpairedPreferenceBase(GradientsInForward):
    """A loss on single sequences with a label, as KTO's.

    A subclass defines `preference_loss_fn`, and a `forward` that calls this one.
    """

    num_targets = 2

    @staticmethod
    def preference_loss_fn(*args: Any, **kwargs: Any) -> Any:
        """Return the loss, or (loss, further results), of log-probs and labels."""
        raise NotImplementedError("Preference loss function must be implemented.")

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        cls,
        ctx,
        _input,
        weight,
        target,
        preference_labels,
        bias=None,
        chunk_size=1,
        ignore_index=-100,
        compiled=True,
        use_ref_model=False,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        average_log_prob=False,
        **loss_kwargs,
    ):
        """Compute the loss.

        Args:
            _input: hidden states [N, L, H]; weight: [V, H]; target: [N, L]; bias: [V].
            preference_labels: [N] bool, True where chosen.
            ref_input, ref_weight, ref_bias: those of the reference model.
            loss_kwargs: for `preference_loss_fn`.

        Returns:
            (loss, (sum of chosen log-probs, of rejected ones, of chosen logits, of rejected ones,
            further 0-d results of preference_loss_fn)).
        """
        if preference_labels is None:
            raise ValueError("preference_labels is None; expected [N] bool.")
        rows = (ignore_index, average_log_prob)
        if use_ref_model:
            ref, _ = sequence_log_probs(ref_input, ref_weight, target, ref_bias, *rows)
            loss_kwargs["ref_log_prob_chunk"] = ref

        def compute(_input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Any]:
            totals, _ = sequence_log_probs(_input, weight, target, bias, *rows)
            results = cls.preference_loss_fn(totals, preference_labels, target, **loss_kwargs)
            loss, *others = results if isinstance(results, tuple) else (results,)
            return loss, (totals, *others)

        loss, (totals, *others), grads = loss_and_gradients(compute, (_input, weight, bias))
        ctx.save_for_backward(*grads)
        chosen, rejected = preference_labels, ~preference_labels
        sums = [(totals * chosen).sum(), (totals * rejected).sum()]
        sums += [sum_of_logits(_input[rows], weight, bias) for rows in (chosen, rejected)]
        return loss, detached([*sums, *(other for other in others if other.dim() == 0)])
