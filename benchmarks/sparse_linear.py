"""Log-probs over the entries that sampling kept, from hidden states, against the dense operators.

`dense_mask` is `linear_token_log_probs` with a vocab_mask, what a trainer without sparse rows runs;
`eager` gathers the kept rows of the weight, padded to the longest, as plain PyTorch would.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks._bench import OURS, Bench
from hybridengine.kernels import linear_token_log_probs, sparse_linear_token_log_probs


def run(bench: Bench) -> None:
    shapes = [(512, 1024, 151_936, 8), (4096, 576, 49_152, 20)]
    for rows, width, vocab, kept in [(64, 64, 2000, 4)] if bench.quick else shapes:
        for dtype in (torch.float32, torch.bfloat16):
            compare(bench, rows, width, vocab, kept, dtype)


def compare(bench: Bench, rows: int, width: int, vocab: int, kept: int, dtype: torch.dtype) -> None:
    """kept: mean number of entries of a row; their numbers vary from 1 to twice that."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    hidden, weight = draw(rows, width).to(dtype), (draw(vocab, width) * width**-0.5).to(dtype)
    counts = torch.randint(1, 2 * kept, (rows,), generator=generator)
    mask = torch.zeros(rows, vocab, dtype=torch.bool)
    for row, count in enumerate(counts.tolist()):
        mask[row, torch.randperm(vocab, generator=generator)[:count]] = True
    ids = mask.nonzero()[:, 1]
    cu_kept = torch.cat([counts.new_zeros(1), mask.sum(1).cumsum(0)])
    token_ids = ids[cu_kept[:-1]]
    hidden, weight, mask, ids, cu_kept, token_ids = (
        x.to(bench.device) for x in (hidden, weight, mask, ids, cu_kept, token_ids)
    )
    functions = {
        OURS: partial(sparse_linear_token_log_probs, kept_ids=ids, cu_kept=cu_kept),
        "dense_mask": partial(linear_token_log_probs, vocab_mask=mask),
        "eager": partial(_eager, mask, int(counts.max())),
    }

    def forward_backward(name: str) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
        log_probs, entropy = functions[name](*leaves, token_ids)
        return torch.autograd.grad(log_probs.sum() + entropy.sum(), leaves)

    def forward(name: str) -> None:
        with torch.no_grad():
            functions[name](hidden, weight, token_ids)

    shape = f"T={rows} H={width} V={vocab} kept={kept}"
    for name, call in (("forward", forward), ("both", forward_backward)):
        calls = {impl: partial(call, impl) for impl in functions}
        bench.compare("sparse_linear", name, shape, dtype, calls)


def _eager(
    mask: Tensor, longest: int, hidden: Tensor, weight: Tensor, token_ids: Tensor
) -> tuple[Tensor, Tensor]:
    kept, ids = mask.to(torch.uint8).topk(longest, dim=1)  # [T, longest], padded with others
    logits = torch.einsum("th,tkh->tk", hidden, weight[ids]).float()
    log_p = logits.masked_fill(kept == 0, -torch.inf).log_softmax(-1)
    token = (ids == token_ids[:, None]) & (kept != 0)
    finite = log_p.masked_fill(kept == 0, 0.0)
    return (finite * token).sum(-1), -(finite.exp() * finite * kept).sum(-1)
