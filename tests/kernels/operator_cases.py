"""Every differentiable operator with inputs that it takes."""

from __future__ import annotations

import torch

from hybridengine import kernels as he

ROWS, WIDTH, VOCAB = 12, 16, 29
GENERATOR = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, generator=GENERATOR)


IDS = torch.randint(0, VOCAB, (ROWS,), generator=GENERATOR)
OLD, ADVANTAGES, TEACHER = draw(ROWS) - 3, draw(ROWS), draw(ROWS, WIDTH)
ENDS = torch.full((ROWS,), ROWS)
KEPT = torch.stack([IDS, (IDS + 1) % VOCAB], 1).sort(1).values.flatten()
CU_COUNTS = torch.tensor([0, 5, 5, ROWS])
CU_KEPT = torch.arange(0, 2 * ROWS + 1, 2)


# Operator -> (shapes of the inputs with a gradient, function of these that returns tensors).
CASES = {
    "token_log_probs": (
        [(ROWS, VOCAB)],
        lambda x, backend: he.token_log_probs(x, IDS, 0.7, backend=backend),
    ),
    "token_entropy": ([(ROWS, VOCAB)], lambda x, backend: [he.token_entropy(x, backend=backend)]),
    "cross_entropy": (
        [(ROWS, VOCAB)],
        lambda x, backend: he.cross_entropy(
            x, IDS, label_smoothing=0.1, lse_square_scale=0.1, backend=backend
        )[:1],
    ),
    "linear_token_log_probs": (
        [(ROWS, WIDTH), (VOCAB, WIDTH), (VOCAB,)],
        lambda h, w, b, backend: he.linear_token_log_probs(h, w, IDS, bias=b, backend=backend),
    ),
    "linear_cross_entropy": (
        [(ROWS, WIDTH), (VOCAB, WIDTH), (VOCAB,)],
        lambda h, w, b, backend: he.linear_cross_entropy(
            h, w, IDS, bias=b, label_smoothing=0.1, backend=backend
        )[:1],
    ),
    "linear_cross_entropy, none": (
        [(ROWS, WIDTH), (VOCAB, WIDTH)],
        lambda h, w, backend: he.linear_cross_entropy(h, w, IDS, reduction="none", backend=backend)[
            :1
        ],
    ),
    "linear_policy_loss": (
        [(ROWS, WIDTH), (VOCAB, WIDTH)],
        lambda h, w, backend: he.linear_policy_loss(
            h, w, IDS, old_log_probs=OLD, advantages=ADVANTAGES, entropy_coeff=0.1, backend=backend
        )[:1],
    ),
    "linear_distillation_loss": (
        [(ROWS, WIDTH), (VOCAB, WIDTH)],
        lambda h, w, backend: he.linear_distillation_loss(
            h, w, TEACHER.to(h), w.detach(), beta=0.3, backend=backend
        )[:1],
    ),
    "sparse_linear_token_log_probs": (
        [(ROWS, WIDTH), (VOCAB, WIDTH)],
        lambda h, w, backend: he.sparse_linear_token_log_probs(
            h, w, IDS, KEPT, CU_KEPT, backend=backend
        ),
    ),
    "grouped_linear": (
        [(ROWS, WIDTH), (3, VOCAB, WIDTH)],
        lambda x, w, backend: [he.grouped_linear(x, w, CU_COUNTS, backend=backend)],
    ),
    "linear_recurrence": (
        [(ROWS, 1, 4), (ROWS, 1, 4), (ROWS, 2, 3), (ROWS, 2), (ROWS, 2)],
        lambda q, k, v, g, beta, backend: he.linear_recurrence(
            q, k, v, -g.square(), beta, cu_seqlens=CU_COUNTS, l2_norm=True, backend=backend
        )[:1],
    ),
    "causal_conv1d": (
        [(ROWS, WIDTH), (WIDTH, 4), (WIDTH,)],
        lambda x, w, b, backend: [
            he.causal_conv1d(x, w, b, cu_seqlens=CU_COUNTS, activation="silu", backend=backend)
        ],
    ),
    "tree_attention": (
        [(ROWS, 2, WIDTH)] * 3 + [(2,)],
        lambda q, k, v, s, backend: [he.tree_attention(q, k, v, ENDS, sinks=s, backend=backend)],
    ),
    "policy_loss": (
        [(ROWS,)],
        lambda x, backend: he.policy_loss(x, OLD, ADVANTAGES, backend=backend)[:1],
    ),
    "value_loss": (
        [(ROWS,)],
        lambda x, backend: he.value_loss(x, OLD, ADVANTAGES, backend=backend)[:1],
    ),
}
