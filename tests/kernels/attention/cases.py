"""Random forests, and the problem of attention over one."""

import random
from dataclasses import dataclass, field

import torch


@dataclass
class Forest:
    subtree_ends: torch.Tensor  # int32 [T]
    position_ids: torch.Tensor  # int64 [T]
    paths: list = field(default_factory=list)  # per leaf: the tokens from the root to its last one


def forest_of(*trees):
    """A tree is (tokens of the node, [children]); e.g. a prompt with two responses: (5, [3, 4])."""
    ends, positions, paths = [], [], []

    def add(node, ancestors):
        length, children = node if isinstance(node, tuple) else (node, [])
        start = len(ends)
        ends.extend([0] * length)
        positions.extend(range(len(ancestors), len(ancestors) + length))
        path = [*ancestors, *range(start, start + length)]
        for child in children:
            add(child, path)
        if not children:
            paths.append(path)
        ends[start : start + length] = [len(ends)] * length

    for tree in trees:
        add(tree, [])
    return Forest(torch.tensor(ends, dtype=torch.int32), torch.tensor(positions).long(), paths)


def random_forest(tokens, seed, longest=40):
    """About `tokens` tokens in trees of up to four levels, with empty nodes and chains."""
    draw = random.Random(seed)

    def node(level):
        children = [node(level + 1) for _ in range(draw.randint(0, 3 - level))]
        return draw.randint(0, longest), children

    def size(tree):
        return tree[0] + sum(map(size, tree[1]))

    trees = []
    while sum(map(size, trees)) < tokens:
        trees.append(node(draw.randint(0, 3)))
    return forest_of(*trees)


def dense_mask(forest):
    """bool [T, T]: which keys (columns) each query (row) sees."""
    tokens = torch.arange(forest.subtree_ends.shape[0])
    return (tokens <= tokens[:, None]) & (tokens[:, None] < forest.subtree_ends)


@dataclass
class Case:
    forest: Forest
    qkv: list  # [T, H, D], [T, H_kv, D], [T, H_kv, D_v]
    grad: torch.Tensor  # [T, H, D_v]
    sinks: torch.Tensor | None = None  # [H]

    @property
    def names(self):
        return ("out", "dq", "dk", "dv", *(["dsinks"] if self.sinks is not None else []))


def problem(
    forest, heads=3, kv_heads=1, dim=8, dim_v=None, dtype=torch.float32, seed=0, sinks=False
):
    generator = torch.Generator().manual_seed(seed)
    tokens = forest.subtree_ends.shape[0]
    dim_v = dim_v or dim

    def draw(*shape):
        return torch.randn(tokens, *shape, generator=generator).to(dtype)

    qkv = [draw(heads, dim), draw(kv_heads, dim), draw(kv_heads, dim_v)]
    grad = draw(heads, dim_v)
    drawn = torch.randn(heads, generator=generator).mul(3).to(dtype) if sinks else None
    return Case(forest, qkv, grad, drawn)


def plain_attention(q, k, v, forest, scale, window=None, softcap=None, sinks=None):
    """One leaf at a time, each token from the first path that has it: no packed mask anywhere.

    A sink is one more column of the scores, as in transformers' gpt_oss.
    """
    rows, tokens = [], []
    groups = q.shape[1] // k.shape[1]
    done = torch.zeros(q.shape[0], dtype=torch.bool)
    for path in forest.paths:
        path = torch.tensor(path, dtype=torch.long)
        qi, ki, vi = q[path], *(x[path].repeat_interleave(groups, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", qi, ki) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        index = torch.arange(path.shape[0])
        distance = index[:, None] - index
        visible = (distance >= 0) & (distance < (window or path.shape[0] + 1))
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(path), 1)], -1)
        weights = scores.softmax(-1)[..., : len(path)]
        new = ~done[path]
        rows.append(torch.einsum("hqk,khd->qhd", weights, vi)[new])
        tokens.append(path[new])
        done[path] = True
    return torch.cat(rows)[torch.cat(tokens).argsort()]


def results(function, case, dtype=None, device="cpu", **options):
    """[out, and the gradients of q, k and v, and of the sinks if there are some]."""
    given = case.qkv if case.sinks is None else [*case.qkv, case.sinks]
    leaves = [x.to(device=device, dtype=dtype).detach().requires_grad_() for x in given]
    if case.sinks is not None:
        options["sinks"] = leaves[3]
    out = function(*leaves[:3], **options)
    grads = torch.autograd.grad(out, leaves, case.grad.to(out), allow_unused=True)
    return [x.detach().cpu() for x in (out, *grads)]
