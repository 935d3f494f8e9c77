"""What is called of losses, advantages and sampling."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tools.fuzz.draw import FLOAT_DTYPES, SHORT_DTYPES, Draw


def gae(d: Draw) -> list:
    tokens = d.size(80)
    values, mask = d.maybe(lambda: d.floats(tokens)), d.maybe(lambda: d.bools(tokens))
    return [d.floats(tokens), values, d.ends(d.size(5) or 1, tokens), mask, 0.99, 0.95]


def group_advantage(d: Draw) -> list:
    rows, tokens = d.size(30), d.size(80)
    lengths = d.maybe(lambda: d.ints(0, 50, rows).float())
    with_tokens = rows > 0 and d.chance(0.5)
    cu_seqlens = d.ends(rows, tokens) if with_tokens else None
    mask = d.maybe(lambda: d.bools(tokens)) if with_tokens else None
    count = tokens if with_tokens else 0
    ids, estimator = d.ints(-3, 5, rows), d.random.randrange(7)
    return [d.floats(rows), ids, estimator, d.chance(0.5), 1e-6, lengths, cu_seqlens, mask, count]


class Options(list):
    """The arguments of LogProbOptions, which is made when they are final."""


def log_prob_options(d: Draw, rows: int, vocab: int) -> list:
    first, total = d.pick(((0, vocab), (0, 2 * vocab), (vocab, 2 * vocab)))
    return [
        d.pick((1.0, 0.5)),
        d.maybe(lambda: d.floats(rows).abs() + 0.1),
        1.0,
        d.pick((0.0, 0.0, 30.0)),
        -100,
        d.maybe(lambda: d.bools(rows, vocab)),
        d.maybe(lambda: torch.tensor([first, total])),
        d.chance(0.5),
    ]


def sparse_log_probs(d: Draw) -> list:
    rows, vocab = d.size(), 1 + d.size(30)
    entries = d.size(60) if rows else 0
    ids = d.ints(0, vocab, entries, dtype=torch.int32)
    ends = d.ends(rows, entries) if rows else torch.zeros(1, dtype=torch.int32)
    options = Options(log_prob_options(d, rows, vocab))
    return [d.floats(entries), ids, ends, d.ints(0, vocab, rows), options]


def log_prob_forward(d: Draw) -> list:
    rows, vocab = d.size(), d.pick((d.size(70), 2049))
    logits = d.rows(d.floats(rows, vocab, dtype=d.pick(FLOAT_DTYPES)))
    labels = d.ints(0, vocab, rows)
    options = Options(log_prob_options(d, rows, vocab))
    ends = d.maybe(lambda: d.ends(rows, len(labels))) if rows else None
    return [logits, labels, options, d.chance(0.5), d.pick((None, torch.zeros(1).int())), ends]


def soft_cap_(d: Draw) -> list:
    return [d.rows(d.floats(d.size(), d.size(70))), d.pick((0.5, 30.0))]


def log_prob_partial(d: Draw) -> list:
    logits, labels, options, _, bad_label, _ = log_prob_forward(d)
    return [logits, labels, options, bad_label]


def log_prob_backward(d: Draw) -> list:
    logits, labels, options, *_, ends = log_prob_forward(d)
    rows, vocab = logits.shape
    results = [d.floats(rows), d.floats(rows), d.floats(rows, d.pick((2, 3)))]
    grad_rows = d.pick((rows, rows + 3))
    chosen = torch.randperm(grad_rows, generator=d.torch)[:rows].int()
    index = chosen if grad_rows > rows or d.chance(0.3) else None
    dtype = d.pick(SHORT_DTYPES) if logits.dtype == torch.float32 else logits.dtype
    out = logits if index is None and d.chance(0.2) else d.floats(grad_rows, vocab, dtype=dtype)
    grads = [d.maybe(lambda: d.floats(rows)) for _ in range(2)]
    return [logits, labels, options, results, *grads, out, index, ends]


def distillation(d: Draw) -> list:
    rows, vocab = d.size(), d.size(70)
    student, teacher = d.rows(d.floats(rows, vocab)), d.rows(d.floats(rows, vocab))
    transforms = [(1.0, d.pick((0.0, 30.0)), d.pick((1.0, 0.5))) for _ in range(2)]
    incoming = d.maybe(lambda: d.floats(rows))
    dtype = d.pick(FLOAT_DTYPES)
    grad = None if incoming is None else d.pick((student, d.floats(rows, vocab, dtype=dtype)))
    beta = d.pick((0.0, 0.3, 0.9, 1.0))
    return [student, teacher, *transforms, beta, d.floats(rows), incoming, grad]


def policy_loss(d: Draw) -> list:
    tokens = d.pick((d.size(80), 3000))
    mode = d.random.randrange(13)

    def optional(make: Callable[..., Tensor]) -> Tensor | None:
        return d.maybe(lambda: make(tokens))

    selected = d.bools(tokens) if mode in (7, 8) else optional(d.bools)
    optionals = [optional(make) for make in (d.floats, d.floats, d.floats)]
    cu_seqlens = d.ends(d.size(6) or 1, tokens)
    counts = d.maybe(lambda: d.floats(len(cu_seqlens) - 1).abs())
    denominators = d.maybe(lambda: torch.tensor([7.0, 3.0], dtype=torch.float64))
    count = d.pick((math.nan, 10.0))
    return [
        *(d.floats(tokens) for _ in range(3)),
        optional(d.bools),
        selected,
        *optionals,
        cu_seqlens,
        counts,
        denominators,
        mode,
        d.random.randrange(5),
        d.random.randrange(4),
        d.chance(0.5),
        d.chance(0.5),
        [0.2, 0.3, 3.0, 1.0, 1.05, 0.1, 0.1, 20.0, 10.0],
        [0.1, 0.01, 4.0, count, count],
        *(d.chance(0.5) for _ in range(3)),
    ]


def sample_tokens(d: Draw) -> list:
    rows, vocab = d.size(), d.pick((d.size(70) or 1, 600))
    logits = d.rows(d.floats(rows, vocab, dtype=d.pick(FLOAT_DTYPES)))
    top_p, min_p = (d.pick((d.floats(rows).sigmoid(), torch.ones(rows))) for _ in range(2))
    temperature = d.floats(rows).relu()
    top_k = d.ints(-1, d.pick((5, 700)), rows, dtype=torch.int32)
    seeds, positions = d.ints(0, 2**40, rows), d.ints(0, 100, rows)
    return [logits, temperature, top_k, top_p, min_p, seeds, positions, d.chance(0.5)]


FUNCTIONS = (
    gae,
    group_advantage,
    sparse_log_probs,
    log_prob_forward,
    log_prob_partial,
    soft_cap_,
    log_prob_backward,
    distillation,
    policy_loss,
    sample_tokens,
)
