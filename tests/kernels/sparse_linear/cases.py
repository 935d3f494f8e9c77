"""Problems for sparse_linear_token_log_probs."""

from dataclasses import dataclass, replace

import torch

OPTIONS = ("plain", "temperature", "per_token", "softcap", "scale", "ignored")


@dataclass
class Kept:
    ids: torch.Tensor
    cu: torch.Tensor
    mask: torch.Tensor  # [T, V]

    def to(self, device):
        return Kept(self.ids.to(device), self.cu.to(device), self.mask.to(device))


@dataclass
class Case:
    tensors: list  # hidden, weight, bias
    token_ids: torch.Tensor
    kept: Kept
    grads: torch.Tensor  # [2, T], of log-probs and entropy

    def rows(self, rows: slice):
        hidden, weight, bias = self.tensors
        return replace(
            self,
            tensors=[hidden[rows], weight, bias],
            token_ids=self.token_ids[rows],
            kept=kept_of(self.kept.mask[rows]),
            grads=self.grads[:, rows],
        )

    def with_tensors(self, *tensors):
        return replace(self, tensors=list(tensors))


def kept_of(mask):
    counts = mask.sum(1).cumsum(0)
    return Kept(mask.nonzero()[:, 1], torch.cat([counts.new_zeros(1), counts]), mask)


def problem(rows, width, vocab, most, seed, dtype=torch.float32):
    """Up to `most` kept entries a row, the token among them."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    tensors = [x.to(dtype) for x in (draw(rows, width), draw(vocab, width) / 4, draw(vocab))]
    token_ids = torch.randint(0, vocab, (rows,), generator=generator)
    mask = torch.zeros(rows, vocab, dtype=torch.bool)
    if rows:
        others = torch.randint(0, vocab, (rows, most - 1), generator=generator)
        mask.scatter_(1, torch.cat([token_ids[:, None], others], 1), True)
    return Case(tensors, token_ids, kept_of(mask), draw(2, rows))


def options_for(option, case):
    rows = case.token_ids.shape[0]
    if option == "ignored":
        case.token_ids[::3] = -100
    return {
        "temperature": {"temperature": 0.6},
        "per_token": {"temperature": torch.linspace(0.5, 1.5, rows)},
        "softcap": {"softcap": 5.0},
        "scale": {"logit_scale": 1.7, "softcap": 8.0, "temperature": 0.9},
    }.get(option, {})


def gradients(function, case, device="cpu", dtype=None, **options):
    """[log_probs, entropy, and the gradients of hidden, weight and bias]."""
    leaves = [
        x.to(device=device, dtype=dtype).detach().clone().requires_grad_() for x in case.tensors
    ]
    log_probs, entropy = function(
        *leaves, case.token_ids.to(device), case.kept.to(device), **options
    )
    weights = case.grads.to(device)
    loss = (log_probs * weights[0].to(log_probs)).sum() + (entropy * weights[1].to(entropy)).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused="main_grad" in options)
    return [None if x is None else x.detach().cpu() for x in (log_probs, entropy, *grads)]
