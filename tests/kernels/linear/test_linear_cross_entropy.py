"""linear_cross_entropy against torch's cross_entropy in float64."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from hybridengine.kernels import cross_entropy, linear_cross_entropy
from hybridengine.kernels.linear import chunks as linear_chunks
from hybridengine.kernels.linear.chunks import Chunks
from tests import tolerances
from tests.kernels.linear.cases import DEVICES, assert_all_close, problem
from tests.ranks import run_ranks

ROWS, WIDTH, VOCAB = 40, 16, 101
EXTRAS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"lse_square_scale": 0.01},
    "both": {"label_smoothing": 0.2, "lse_square_scale": 0.01},
}
TRANSFORMS = {
    "plain": {},
    "scale": {"logit_scale": 0.7, "temperature": 1.3},
    "softcap": {"softcap": 3.0, "logit_scale": 1.2, "temperature": 0.8},
    "temperatures": {"temperature": torch.linspace(0.5, 2, ROWS)},
}


def labels_of(token_ids):
    return token_ids.clone().index_fill(0, torch.arange(0, len(token_ids), 3), -100)


def exact_losses(hidden, weight, bias, labels, **options):
    """Losses and z-losses [T] by torch."""
    z = F.linear(hidden, weight, bias) * options.get("logit_scale", 1.0)
    if (cap := options.get("softcap")) is not None:
        z = cap * torch.tanh(z / cap)
    temperature = options.get("temperature", 1.0)
    z = z / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature)
    smoothing = options.get("label_smoothing", 0.0)
    loss = F.cross_entropy(z, labels, reduction="none", label_smoothing=smoothing)
    z_loss = options.get("lse_square_scale", 0.0) * z.logsumexp(1).square()
    z_loss = z_loss.masked_fill(labels == -100, 0)
    return loss + z_loss, z_loss


def exact(tensors, labels, incoming, **options):
    """[losses, z-losses, gradients] in float64."""
    leaves = [t.double().requires_grad_() for t in tensors]
    losses, z_losses = exact_losses(*leaves, labels, **options)
    grads = torch.autograd.grad(losses, leaves, incoming.double())
    return [losses.detach(), z_losses.detach(), *grads]


def results(tensors, labels, incoming, device="cpu", **options):
    """(loss, z_loss, gradients) of ours."""
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    leaves = [t.to(device).detach().requires_grad_() for t in tensors]
    loss, z_loss = linear_cross_entropy(*leaves[:2], labels.to(device), bias=leaves[2], **options)
    assert not z_loss.requires_grad
    grads = torch.autograd.grad(loss, leaves, incoming.to(loss))
    return [t.detach().cpu() for t in (loss, z_loss, *grads)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", (None, "reference"))
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_against_torch_in_float64(extra, transform, backend, device):
    tensors, token_ids, (incoming, _) = problem(ROWS, WIDTH, VOCAB)
    labels, options = labels_of(token_ids), EXTRAS[extra] | TRANSFORMS[transform]
    expected = exact(tensors, labels, incoming, **options)
    sums = exact(tensors, labels, torch.ones(ROWS), **options)
    count = int((labels != -100).sum())
    for budget_bytes in (7 * VOCAB * 4, 2**20):
        given = options | {"backend": backend, "budget_bytes": budget_bytes}
        got = results(tensors, labels, incoming, device, reduction="none", **given)
        assert_all_close(got, expected)
        for reduction, divisor in (("sum", 1), ("mean", count)):
            got = results(tensors, labels, torch.tensor(3.0), device, reduction=reduction, **given)
            assert_all_close(got[:2], [s.sum() / divisor for s in sums[:2]])
            assert_all_close(got[2:], [3.0 * g / divisor for g in sums[2:]])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_the_error_is_at_most_twice_that_of_torch(dtype, device):
    """In the dtype of the inputs, in two rows a chunk, 37, and all; logits and sums are float32."""
    width, vocab = 64, 501
    tensors, token_ids, _ = problem(200, width, vocab, dtype=dtype)
    labels, options = labels_of(token_ids), EXTRAS["both"] | {"softcap": 5.0}
    sums = exact(tensors, labels, torch.ones(200), **options)
    leaves = [t.detach().requires_grad_() for t in tensors]
    losses, z_losses = exact_losses(*leaves, labels, **options)
    torch_grads = torch.autograd.grad(losses.float().sum(), leaves)
    plain = [losses.detach().float().sum(), z_losses.detach().float().sum(), *torch_grads]
    exact_sums = [*(x.sum() for x in sums[:2]), *sums[2:]]
    for budget_bytes in (2 * vocab * 6, 37 * (vocab * 6 + 8 * width), 2**24):
        given = options | {"budget_bytes": budget_bytes}
        got = results(tensors, labels, torch.tensor(1.0), device, reduction="sum", **given)
        for ours, theirs, s in zip(got, plain, exact_sums, strict=True):
            size = s.abs().max()
            error, allowed = ((x.double() - s).abs().max() / size for x in (ours, theirs))
            assert error <= max(tolerances.ERROR_FACTOR * allowed, 8 * tolerances.ROUNDING)


@pytest.mark.parametrize("items", (57, 57.0, torch.tensor(57), torch.tensor([57])))
def test_items_of_a_larger_batch(items):
    """The parts of a batch add up to its mean."""
    tensors, token_ids, _ = problem(ROWS, WIDTH, VOCAB)
    labels, one = labels_of(token_ids), torch.tensor(1.0)
    full = results(tensors, labels, one, reduction="sum")
    parts = [
        results([tensors[0][rows], *tensors[1:]], labels[rows], one, num_items_in_batch=items)
        for rows in (slice(0, 9), slice(9, ROWS))
    ]
    names = ("loss", "z_loss", "hidden", "weight", "bias")
    joined = [
        torch.cat(pair) if name == "hidden" else pair[0] + pair[1]
        for name, pair in zip(names, zip(*parts, strict=True), strict=True)
    ]
    assert_all_close(joined, [value / 57 for value in full])


def test_no_product_has_ignored_rows(monkeypatch):
    tensors, token_ids, _ = problem(ROWS, WIDTH, VOCAB)
    labels, counts = labels_of(token_ids), dict.fromkeys(("hidden_grad", "weight_grad"), 0)
    seen, original = [], Chunks.logits

    def logits(self, rows, offset=0):
        seen.extend(rows.tolist())
        return original(self, rows, offset)

    def count(name, at):
        multiply = getattr(Chunks, name)

        def counting(self, *args, **keywords):
            counts[name] += len(args[at])
            return multiply(self, *args, **keywords)

        monkeypatch.setattr(Chunks, name, counting)

    monkeypatch.setattr(Chunks, "logits", logits)
    count("hidden_grad", 0)
    count("weight_grad", 1)
    results(tensors, labels, torch.tensor(1.0))
    assert seen == (labels != -100).nonzero().flatten().tolist()
    assert set(counts.values()) == {len(seen)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", (None, "reference"))
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_what_ignored_rows_hold_does_not_matter(reduction, backend, device):
    tensors, token_ids, (incoming, _) = problem(ROWS, WIDTH, VOCAB)
    labels, options = labels_of(token_ids), EXTRAS["both"] | {"softcap": 3.0, "backend": backend}
    incoming = incoming if reduction == "none" else torch.tensor(1.0)
    options["reduction"] = reduction
    clean = results(tensors, labels, incoming, device, **options)
    ignored = labels == -100
    tensors[0] = tensors[0].masked_fill(ignored[:, None], torch.nan)
    assert_all_close(results(tensors, labels, incoming, device, **options), clean)
    active = (~ignored).nonzero().squeeze(1)
    unread = labels.masked_fill(ignored, 10**9)
    got = results(tensors, unread, incoming, device, active_rows=active, **options)
    assert_all_close(got, clean)
    assert not got[2][ignored].any()


@pytest.mark.parametrize("rows", (0, 5))
@pytest.mark.parametrize("backend", (None, "reference"))
def test_without_labels_the_loss_is_0(backend, rows):
    tensors, token_ids, _ = problem(rows, WIDTH, VOCAB)
    labels = token_ids.fill_(-100)
    for got in results(tensors, labels, torch.tensor(1.0), backend=backend, label_smoothing=0.1):
        assert not got.any()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_deterministic_rows_do_not_depend_on_other_rows(dtype):
    tensors, token_ids, _ = problem(300, 64, 501, dtype=dtype)
    labels, one = labels_of(token_ids), torch.tensor(1.0)
    options = EXTRAS["both"] | {"deterministic": True, "num_items_in_batch": 300}
    full = results(tensors, labels, one, **options)
    again = results(tensors, labels, one, **options)
    assert all(torch.equal(a, b) for a, b in zip(full, again, strict=True))
    each = results(
        tensors, labels, torch.ones(300), **EXTRAS["both"], deterministic=True, reduction="none"
    )
    for rows in (slice(0, 101), slice(101, 300)):
        some = [tensors[0][rows], *tensors[1:]]
        part = results(some, labels[rows], one, budget_bytes=10**6, **options)
        assert torch.equal(full[2][rows], part[2])
        losses = results(
            some,
            labels[rows],
            torch.ones(len(labels[rows])),
            **EXTRAS["both"],
            deterministic=True,
            reduction="none",
        )
        assert all(torch.equal(a[rows], b) for a, b in zip(each[:3], losses[:3], strict=True))


@pytest.mark.parametrize("backend", (None, "reference"))
@pytest.mark.parametrize("reduction", ("sum", "none"))
def test_only_gradients_that_are_needed(reduction, backend):
    tensors, token_ids, (incoming, _) = problem(ROWS, WIDTH, VOCAB)
    incoming = incoming if reduction == "none" else torch.tensor(1.0)
    full = results(tensors, token_ids, incoming, reduction=reduction)[2:]
    for needed in itertools.product((False, True), repeat=3):
        leaves = [t.detach().requires_grad_(n) for t, n in zip(tensors, needed, strict=True)]
        loss, _ = linear_cross_entropy(
            *leaves[:2], token_ids, bias=leaves[2], reduction=reduction, backend=backend
        )
        assert loss.requires_grad == any(needed)
        if any(needed):
            loss.backward(incoming)
        for leaf, need, grad in zip(leaves, needed, full, strict=True):
            assert (leaf.grad is not None) == need
            if need:
                torch.testing.assert_close(leaf.grad, grad, **tolerances.LINEAR)


@pytest.mark.parametrize("backend", (None, "reference"))
@pytest.mark.parametrize("options", ({}, {"label_smoothing": 0.1}, {"lse_square_scale": 1e-30}))
def test_a_lse_whose_square_overflows(options, backend):
    tensors, token_ids, _ = problem(ROWS, WIDTH, VOCAB)
    results = []
    for dtype in (torch.float32, torch.float64):
        hidden, weight = ((1e10 * t.detach()).to(dtype).requires_grad_() for t in tensors[:2])
        loss, z_loss = linear_cross_entropy(hidden, weight, token_ids, backend=backend, **options)
        loss.backward()
        results.append([loss.detach(), z_loss, hidden.grad, weight.grad])
        logits = (hidden @ weight.t()).detach()
        by_row, z_rows = cross_entropy(logits, token_ids, backend=backend, **options)
        results[-1] += [by_row, z_rows]
    for got, want in zip(*results, strict=True):
        assert want.isfinite().all()
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4 * want.abs().max())


def test_adds_to_main_grad():
    tensors, token_ids, _ = problem(ROWS, WIDTH, VOCAB)
    expected = results(tensors, token_ids, torch.tensor(3.0))
    for backend in (None, "reference"):
        hidden, weight = (t.detach().clone().requires_grad_() for t in tensors[:2])
        main_grad = torch.ones(VOCAB, WIDTH)
        loss, _ = linear_cross_entropy(
            hidden, weight, token_ids, bias=tensors[2], main_grad=main_grad, backend=backend
        )
        (3.0 * loss).backward()
        assert weight.grad is None
        torch.testing.assert_close(main_grad - 1, expected[3], **tolerances.LINEAR)
        torch.testing.assert_close(hidden.grad, expected[2], **tolerances.LINEAR)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "sum", "num_items_in_batch": 3}, "num_items_in_batch is given with"),
        ({"reduction": "none", "main_grad": torch.zeros(VOCAB, WIDTH)}, "main_grad is given with"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    tensors, token_ids, _ = problem(ROWS, WIDTH, VOCAB)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(*tensors[:2], token_ids, **options)


@pytest.mark.parametrize("backend", (None, "reference"))
@pytest.mark.parametrize("label", (-1, VOCAB))
def test_a_label_out_of_range_is_an_error(label, backend):
    tensors, token_ids, _ = problem(ROWS, WIDTH, VOCAB)
    token_ids[3] = label
    with pytest.raises(IndexError, match=str(label)):
        linear_cross_entropy(*tensors[:2], token_ids, label_smoothing=0.1, backend=backend)


# Bounds of the ranks' vocabulary slices: uneven, and with an empty slice.
BOUNDS = ([0, 40, VOCAB], [0, VOCAB, VOCAB])


def _of_a_slice(rank, size):
    linear_chunks.GROUP_ROWS = 5  # several chunks
    tensors, token_ids, (incoming, _) = problem(23, WIDTH, VOCAB)
    labels, values = labels_of(token_ids), []
    options = EXTRAS["both"] | {"softcap": 3.0, "group": dist.group.WORLD}
    for bounds in BOUNDS:
        part = slice(*bounds[rank : rank + 2])
        mine = [tensors[0], *(t[part] for t in tensors[1:])]
        values.append(
            [
                results(mine, labels, torch.tensor(1.0), reduction="sum", **options),
                results(mine, labels, incoming, reduction="none", **options),
                results(mine, labels, incoming, reduction="none", backend="reference", **options),
            ]
        )
    return values


@pytest.mark.multirank
def test_vocabulary_parallel_equals_one_rank():
    tensors, token_ids, (incoming, _) = problem(23, WIDTH, VOCAB)
    labels, options = labels_of(token_ids), EXTRAS["both"] | {"softcap": 3.0}
    each = exact(tensors, labels, incoming, **options)
    sums = exact(tensors, labels, torch.ones(23), **options)
    sums = [*(s.sum() for s in sums[:2]), *sums[2:]]
    for rank, by_split in enumerate(run_ranks(_of_a_slice, 2)):
        for bounds, values in zip(BOUNDS, by_split, strict=True):
            part = slice(*bounds[rank : rank + 2])
            for got, expected in zip(values, (sums, each, each), strict=True):
                assert_all_close(got, [*expected[:3], *(e[part] for e in expected[3:])])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("smoothing", (0.9, 1.0))
@pytest.mark.parametrize("softcap", (None, 5.0))
def test_smoothing_is_subtracted_before_the_gradient_is_rounded(
    monkeypatch, softcap, smoothing, dtype
):
    """With 16-bit products: p nearly equals the uniform target."""
    monkeypatch.setattr(linear_chunks, "keeps_16_bits", lambda like: True)
    tensors, labels = problem(256, 16, 257, seed=5)[:2]
    tensors = [(0.1 * t).to(dtype).requires_grad_() for t in tensors]
    options = {"label_smoothing": smoothing, "lse_square_scale": 1e-3}
    loss, _ = linear_cross_entropy(
        tensors[0],
        tensors[1],
        labels,
        bias=tensors[2],
        softcap=softcap,
        grad_scale=1024,
        **options,
    )
    grads = torch.autograd.grad(1024 * loss, tensors)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    z = torch.nn.functional.linear(*exact)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    loss = torch.nn.functional.cross_entropy(z, labels, label_smoothing=smoothing)
    loss = loss + 1e-3 * z.logsumexp(1).square().mean()
    for grad, want in zip(grads, torch.autograd.grad(1024 * loss, exact), strict=True):
        error = (grad.double() - want).norm() / want.norm()
        assert error <= 2 * torch.finfo(dtype).eps, error
