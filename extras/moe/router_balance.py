"""The load of a mixture's experts: metrics, auxiliary losses, and the bias that balances it.

Per layer, with N tokens, E experts and k of them per token:

- f_e: tokens that select expert e / N (their sum is k); the choice is the replayed one, if any.
- P_e: the mean over the tokens of the router's score of e: softmax of the logits, or their
  sigmoids divided by the sum of these (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
- aux_loss = E sum_e f_e P_e (arXiv 2101.03961, equation 4; k where the load is even), and z_loss =
  mean of logsumexp(logits)^2 (arXiv 2202.08906, equation 5), each averaged over the layers.
- Without a loss: after an optimizer step, bias_e += rate * sign(mean load - load_e)
  (arXiv 2408.15664).

N, and the sum over tokens in P_e, are those of an optimizer step on all ranks. f_e is of all ranks
and of the micro-batches of the step up to the current one, as in arXiv 2501.11873, section 2.2: it
has no gradient, but the gradient of P_e needs it in each micro-batch's backward.

No graph of the losses exists. An operator beside each router notes f_e and P_e in the forward and
adds the gradient of the logits in the backward, when f_e of the other ranks is known. So a layer
that gradient checkpointing computes again counts once, and a compiled layer stays one graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridengine.model.extensions import ModelHook, add_hook, hooks_of
from hybridengine.model.packed import PackedBatch
from hybridengine.moe.routers import (
    Router,
    RouterOutputs,
    check_alike,
    find_routers,
    router_blocks,
)
from hybridengine.run.errors import ModelError

__all__ = ["BIASES", "RouterBalance", "balance_routers", "prepare_routers"]

# Added to the scores where experts are selected, only there; the second name is that of LFM2.
BIASES = ("e_score_correction_bias", "expert_bias")
_PURPOSE = "balancing experts (router_aux_loss_coef, router_z_loss_coef, router_bias_update_rate)"


def prepare_routers(model: nn.Module, *, freeze: bool = False, updates_bias: bool = False) -> None:
    """Prepare the routers of `model` before it is sharded.

    freeze: their parameters are not trained.
    updates_bias: `RouterBalance` updates their biases; they become buffers, which no rank shards
      and every checkpoint has.

    Raises ModelError for a model without routers, or without such biases.
    """
    blocks = [(block, router) for _, block, router in router_blocks(model) if router is not None]
    if not blocks:
        raise ModelError(
            f"freeze_moe_router and router_bias_update_rate need a mixture of experts, and "
            f"{type(model).__name__} has no module `experts` with a router beside it"
        )
    for block, router in blocks:
        if freeze:
            router.requires_grad_(False)
        if updates_bias:
            owner, name = _find_bias(block, model)
            value = getattr(owner, name)
            if isinstance(value, nn.Parameter):
                delattr(owner, name)
                owner.register_buffer(name, value.detach())


def _find_bias(block: nn.Module, model: nn.Module) -> tuple[nn.Module, str]:
    """Return the module that has the bias of a router, and its name there."""
    for module in block.modules():
        for name in BIASES:
            if hasattr(module, name):
                return module, name
    raise ModelError(
        f"router_bias_update_rate needs routers with {BIASES[0]}, and those of "
        f"{type(model).__name__} have none; set router_aux_loss_coef"
    )


class RouterBalance(ModelHook):
    """Counts the load of the experts of `model` in each optimizer step, and balances it.

    `begin_step`, micro-batches with a gradient (`forward`), `end_step`. The model is changed in
    place, after it is sharded; gradient checkpointing may be on, and layers may be compiled. One
    per model: `RouterBalance.of`.

    Args:
        aux_loss_coef, z_loss_coef: of the losses; 0: none.
        bias_update_rate: 0: biases stay as they are.

    Raises:
        ModelError: the logits of a router cannot be found, or it has no bias to update.
    """

    divisible = False

    def __init__(
        self,
        model: nn.Module,
        aux_loss_coef: float = 0.0,
        z_loss_coef: float = 0.0,
        bias_update_rate: float = 0.0,
    ) -> None:
        routers = find_routers(model, _PURPOSE)
        self._check(model, routers)
        self._aux_loss_coef, self._z_loss_coef = aux_loss_coef, z_loss_coef
        self._rate = bias_update_rate
        self._biases = list[Tensor]()
        if bias_update_rate:
            self._biases = [getattr(*_find_bias(r.block, model)) for r in routers]
        self._has_loss = bool(aux_loss_coef or z_loss_coef)
        self._top_k, self._num_experts = routers[0].top_k, routers[0].num_experts
        self._in_step = False
        self._layers = [_Layer(router, self._has_loss, bool(z_loss_coef)) for router in routers]
        add_hook(model, self)

    @staticmethod
    def _check(model: nn.Module, routers: Sequence[Router]) -> None:
        for router in routers:
            if router.outputs is None:
                raise ModelError(
                    f"{_PURPOSE} does not support the router {type(router.module).__name__} of "
                    f"{type(model).__name__}: its result is not the logits of all experts, weights "
                    "and indices of the selected ones"
                )
        check_alike([r.num_experts for r in routers], f"{_PURPOSE}: the layers have", model)

    @staticmethod
    def of(model: nn.Module) -> RouterBalance | None:
        """Return the one of `model`, None where it has none."""
        return next((hook for hook in hooks_of(model) if isinstance(hook, RouterBalance)), None)

    def begin_step(self, batches: Sequence[PackedBatch], grad_scale: float = 1.0) -> None:
        """Begin an optimizer step over the micro-batches `batches` of this rank. Collective.

        grad_scale: factor of the gradients of the losses, as of any other loss.
        """
        device = batches[0].input_ids.device
        self._in_step, self._grad_scale = True, grad_scale
        self._sums = self._empty(device)  # over this rank's micro-batches
        self._counts = self._sums[:, : self._num_experts].clone()  # over all ranks'
        num_tokens = torch.tensor(float(sum(map(_num_tokens, batches))), device=device)
        if self._has_loss:
            _all_reduce(num_tokens)
        self._num_tokens = num_tokens.clamp(min=1)

    def _empty(self, device: torch.device) -> Tensor:
        """Return [layers, E counts, E sums of scores, sum of squares], float64."""
        columns = 2 * self._num_experts + 1 if self._has_loss else self._num_experts
        return torch.zeros(len(self._layers), columns, dtype=torch.float64, device=device)

    @contextmanager
    def forward(self, batch: PackedBatch) -> Iterator[None]:
        """While open, a call of the model with gradients is that of `batch`. Collective.

        The backward follows before the next micro-batch. A dummy counts for nothing.
        """
        if not self._in_step or not torch.is_grad_enabled():
            yield
            return
        sums = self._empty(batch.input_ids.device)
        for layer, row in zip(self._layers, sums, strict=True):
            layer.begin(row, _num_tokens(batch))
        yield
        self._sums += sums
        if self._has_loss:
            self._set_gradients(sums[:, : self._num_experts].clone())

    def _set_gradients(self, counts: Tensor) -> None:
        """Compute the gradients of the losses of this micro-batch by scores; counts: of it."""
        if self._aux_loss_coef:
            _all_reduce(counts)
            self._counts += counts
        num_tokens = self._counts.sum(1, keepdim=True).clamp(min=1) / self._top_k
        share = self._grad_scale / (self._num_tokens * len(self._layers))
        by_score = self._counts / num_tokens * (self._num_experts * self._aux_loss_coef * share)
        for layer, row in zip(self._layers, by_score, strict=True):
            layer.by_score, layer.by_square = row, self._z_loss_coef * share

    def end_step(self, *, updated: bool = True) -> dict[str, Tensor]:
        """Update the biases, unless the update was skipped; return metrics. Collective."""
        self._in_step = False
        for layer, row in zip(self._layers, self._sums, strict=True):
            layer.begin(row, 0)
        _all_reduce(self._sums)
        counts = self._sums[:, : self._num_experts]
        mean = counts.mean(1).clamp(min=1e-9)
        violation = counts.amax(1) / mean - 1
        if updated:
            for bias, load in zip(self._biases, counts, strict=False):  # no biases: no update
                bias.add_((load.mean() - load).sign().view_as(bias), alpha=self._rate)
        metrics = {
            "moe/load_max_violation/mean": violation.mean(),
            "moe/load_max_violation/max": violation.amax(),
            "moe/dead_experts": (counts == 0).double().mean(),
        }
        if self._has_loss:
            scores, squares = self._sums[:, self._num_experts : -1], self._sums[:, -1]
            products = (counts * scores).sum(1).mean() * self._num_experts
            metrics["moe/aux_loss"] = products / self._num_tokens**2
            metrics["moe/z_loss"] = squares.mean() / self._num_tokens
        return metrics


def balance_routers(
    model: nn.Module, aux_loss_coef: float, z_loss_coef: float, bias_update_rate: float
) -> RouterBalance | None:
    """Return the `RouterBalance` of a model that is trained, which has its arguments.

    None where nothing is to be balanced and its load cannot be observed: it is no mixture, or has
    routers of another kind.
    """
    try:
        return RouterBalance(model, aux_loss_coef, z_loss_coef, bias_update_rate)
    except ModelError:
        if aux_loss_coef or z_loss_coef or bias_update_rate:
            raise
        return None


def _num_tokens(batch: PackedBatch) -> int:
    """Return how many tokens of a micro-batch count: not those of padding, none of a dummy."""
    return 0 if batch.is_dummy else batch.input_ids.shape[0] - batch.padding


def _all_reduce(values: Tensor) -> None:
    if dist.is_initialized():
        dist.all_reduce(values)


_LAYERS: dict[int, _Layer] = {}  # as long as their routers exist
_KEYS = itertools.count()


class _Layer:
    """What the operators below do for one router; they know it by a number.

    Attributes:
        by_score: [E], gradient of the losses by a token's score of an expert.
        by_square: gradient by a token's logsumexp(logits)^2.
    """

    def __init__(self, router: Router, has_loss: bool, has_z_loss: bool) -> None:
        assert router.outputs is not None
        self.outputs, self._is_sigmoid = router.outputs, router.is_sigmoid
        self._num_experts, self._has_loss = router.num_experts, has_loss
        self._has_z_loss = has_z_loss
        self._row, self._num_tokens = torch.empty(0), 0
        self.by_score, self.by_square = torch.empty(0), torch.empty(0)
        key = next(_KEYS)
        _LAYERS[key] = self
        weakref.finalize(router.module, _LAYERS.pop, key)
        # A tensor of the module: a number would be a constant of the graph that layers share.
        router.module._hybridengine_balance_key = torch.tensor(key)
        router.module.register_forward_hook(partial(_observe_result, router.outputs, has_loss))

    def begin(self, row: Tensor, num_tokens: int) -> None:
        """Let `row` receive the sums over the first `num_tokens` tokens of the next call."""
        self._row, self._num_tokens = row, num_tokens

    def observe(self, logits: Tensor, indices: Tensor) -> None:
        """Write the sums of a call, again where the layer is computed again."""
        size = self._num_experts
        if not self._num_tokens:
            return
        chosen = indices[: self._num_tokens].flatten().long()
        ones = self._row.new_ones(1).expand(chosen.numel())
        self._row[:size] = torch.zeros_like(self._row[:size]).scatter_add_(0, chosen, ones)
        if self._has_loss:
            logits = _wide(logits[: self._num_tokens])
            self._row[size:-1] = self._scores(logits).sum(0)
            self._row[-1] = logits.logsumexp(1).square().sum()

    def _scores(self, logits: Tensor) -> Tensor:
        if not self._is_sigmoid:
            return logits.softmax(1)
        sigmoids = logits.sigmoid()
        return sigmoids / sigmoids.sum(1, keepdim=True)

    def gradient(self, logits: Tensor) -> Tensor:
        """Return the gradient of the losses by the logits of the newest call, [T, E]."""
        grad = torch.zeros_like(logits)
        logits = _wide(logits[: self._num_tokens])
        if not logits.numel():  # of a dummy, or outside of a step
            return grad
        scores, by_score = self._scores(logits), self.by_score.to(logits.dtype)
        of_logits = scores * (by_score - (scores @ by_score)[:, None])
        if self._is_sigmoid:  # d sigmoid = sigmoid (1 - sigmoid), of a softmax 1
            of_logits *= 1 - logits.sigmoid()
        if self._has_z_loss:
            z = logits.logsumexp(1, keepdim=True)
            of_logits += (2 * self.by_square.to(z.dtype) * z) * (logits - z).exp()
        grad[: self._num_tokens] = of_logits
        return grad


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _observe_result(
    outputs: RouterOutputs, has_loss: bool, module: Any, args: Any, result: Any
) -> Any:
    """Return the result of a router with weights that also carry the gradient of the losses."""
    if not torch.is_grad_enabled():
        return result
    values = list(result)
    logits, weights, indices = (values[i] for i in outputs)
    logits = logits if has_loss else logits.detach()
    values[outputs.weights] = observe_router(
        weights, logits, indices, module._hybridengine_balance_key
    )
    return tuple(values)


@torch.library.custom_op("hybridengine::observe_router", mutates_args=())
def observe_router(weights: Tensor, logits: Tensor, indices: Tensor, key: Tensor) -> Tensor:
    """Return a copy of `weights`; note the load in the layer `key`."""
    _LAYERS[int(key)].observe(logits, indices)
    return weights.clone()


@torch.library.custom_op("hybridengine::router_loss_gradient", mutates_args=())
def router_loss_gradient(logits: Tensor, key: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the losses of the layer `key` by its logits.

    grad: of the weights; not read. Without it a compiled forward would compute this as well.
    """
    return _LAYERS[int(key)].gradient(logits)


@observe_router.register_fake
def _(weights: Tensor, logits: Tensor, indices: Tensor, key: Tensor) -> Tensor:
    return torch.empty_like(weights)


@router_loss_gradient.register_fake
def _(logits: Tensor, key: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(logits)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    _, logits, _, key = inputs
    ctx.save_for_backward(logits, key)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    logits, key = ctx.saved_tensors
    of_logits = router_loss_gradient(logits, key, grad) if ctx.needs_input_grad[1] else None
    return grad, of_logits, None, None


observe_router.register_autograd(_backward, setup_context=_setup_context)
