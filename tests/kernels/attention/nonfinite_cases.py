"""Values that are not finite reach the tokens that see them, and change no bit of the others."""

import torch

from hybridengine.kernels import tree_attention
from tests.kernels.attention.cases import dense_mask, forest_of, problem, results

# Tiles of 16 to 64 tokens have tokens of several sequences.
FOREST = ((12, [5, 9]), 7, (15, [(4, [6, 2])]))


def check(device, dtype, token, spoilt, value, **options):
    """spoilt: `key`, `value`, `query` or `grad`, whose `token` gets `value` in one column."""
    case = problem(forest_of(*FOREST), 2, 1, 16, dtype=dtype)
    tree = [x.to(device) for x in (case.forest.subtree_ends, case.forest.position_ids)]

    def ours():
        return results(lambda *qkv: tree_attention(*qkv, *tree, **options), case, device=device)

    clean = ours()
    tensor = [*case.qkv, case.grad][("query", "key", "value", "grad").index(spoilt)]
    tensor[token, 0, 5] = value
    got = ours()
    sees, positions = dense_mask(case.forest), case.forest.position_ids
    sees &= positions[:, None] - positions < options.get("window_size", len(sees))
    # The results that may differ: of tokens that see it, and of keys that such a token sees.
    rows = sees[:, token] if spoilt in ("key", "value") else torch.arange(len(sees)) == token
    keys = sees[rows].any(0)
    if spoilt == "grad":
        assert torch.equal(got[0], clean[0])
    for x, expected, affected in zip(got, clean, (rows, rows, keys, keys), strict=True):
        assert torch.equal(x[~affected], expected[~affected])
    if spoilt == "value":
        assert not got[0][rows].isfinite().all((1, 2)).any()
    if spoilt == "key" and value != value:
        assert not got[0][rows].isfinite().all((1, 2)).any()
        assert not got[1][rows].isfinite().all((1, 2)).any()
    if spoilt == "grad":
        assert not got[1][rows].isfinite().all((1, 2)).any()
