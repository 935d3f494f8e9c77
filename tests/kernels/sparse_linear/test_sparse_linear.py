"""sparse_linear_token_log_probs against the dense operator with a vocab_mask, in float64."""

import pytest
import torch
from hypothesis import given, settings

from hybridengine.kernels import SampledTokens, decode_linear, linear_token_log_probs
from hybridengine.kernels.sparse_linear import kept_log_probs, sparse_linear_token_log_probs
from hybridengine.kernels.sparse_linear import op as module
from tests import tolerances
from tests.kernels.interpreter import run_interpreted
from tests.kernels.sparse_linear.cases import OPTIONS, gradients, options_for, problem
from tests.kernels.strategies import integers
from tests.ranks import run_ranks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Of gradients of 16-bit inputs: one rounding to 8 bits.
ROUNDED = {"rtol": 2**-8, "atol": 2**-8}


def dense(hidden, weight, bias, token_ids, kept, **options):
    return linear_token_log_probs(
        hidden, weight, token_ids, bias=bias, vocab_mask=kept.mask, backend="reference", **options
    )


def sparse(hidden, weight, bias, token_ids, kept, **options):
    return sparse_linear_token_log_probs(
        hidden, weight, token_ids, kept.ids, kept.cu, bias=bias, **options
    )


def assert_equal_to_dense(case, device="cpu", tolerance=None, backend=None, **options):
    exact = gradients(dense, case, dtype=torch.float64, **options)
    found = gradients(sparse, case, device=device, backend=backend, **options)
    for name, got, expected in zip(
        ("log_prob", "entropy", "h", "w", "b"), found, exact, strict=True
    ):
        torch.testing.assert_close(
            got.double(),
            expected,
            **(tolerance or tolerances.LINEAR),
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=40)
@given(**integers(rows=(0, 30), width=(1, 70), vocab=(1, 300), most=(1, 12), seed=(0, 2**20)))
def test_equal_to_the_dense_operator(device, rows, width, vocab, most, seed):
    case = problem(rows, width, vocab, most, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "DENSE_PART", 1)
        assert_equal_to_dense(case, device)


@pytest.mark.parametrize("backend", ("cpp", "reference"))
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option(option, backend):
    case = problem(23, 65, 3000, 9, seed=1)
    assert_equal_to_dense(case, backend=backend, **options_for(option, case))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_16_bit_inputs(dtype):
    case = problem(40, 96, 5000, 8, seed=2, dtype=dtype)
    assert_equal_to_dense(case, tolerance=ROUNDED)


def test_many_entries_take_the_dense_operator(monkeypatch):
    case = problem(6, 16, 50, 40, seed=3)
    monkeypatch.setattr(
        torch.ops.hybridengine, "sparse_linear_token_log_probs", None, raising=False
    )
    assert_equal_to_dense(case)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_bits_do_not_depend_on_how_logits_are_computed(dtype):
    """From hidden states, and from all logits: as the trainer and as an engine have them."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 83, generator=generator).to(dtype) for n in (61, 300))
    probabilities = torch.rand(61, 1, generator=generator) ** 4
    mask = torch.rand(61, 300, generator=generator) < probabilities
    mask[0], token_ids = True, torch.randint(300, (61,), generator=generator)
    mask[torch.arange(61), token_ids] = True
    counts, kept_ids = mask.sum(1, dtype=torch.int32), mask.nonzero()[:, 1].int()
    cu_kept = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    logits = decode_linear(hidden, weight, out_dtype=torch.float32)
    temperature = torch.full((61,), 0.7)
    engine = kept_log_probs(logits, SampledTokens(token_ids, logits, counts, kept_ids), temperature)
    given = token_ids, kept_ids, cu_kept
    trainer, _ = sparse_linear_token_log_probs(hidden, weight, *given, 0.7, deterministic=True)
    assert torch.equal(engine, trainer)
    for row in (0, 7, 60):  # alone, without the rows around it
        own = cu_kept[row : row + 2] - cu_kept[row]
        ids = kept_ids[cu_kept[row] : cu_kept[row + 1]]
        one = slice(row, row + 1)
        alone, _ = sparse_linear_token_log_probs(
            hidden[one], weight, token_ids[one], ids, own, 0.7, deterministic=True
        )
        assert alone == trainer[row]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("option", OPTIONS)
def test_log_probs_of_the_kept_entries(option, device):
    """With gradients of all three results, as from masked logits in float64."""
    case = problem(23, 65, 600, 9, seed=8)
    options = options_for(option, case)
    live = case.token_ids != -100
    rows = case.kept.mask.nonzero()[:, 0]
    weights = torch.linspace(-1, 2, rows.numel()).where(live[rows], 0)
    results = []
    for kind, dtype in (("sparse", torch.float32), ("dense", torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in case.tensors]
        given = {k: v.to(dtype) if torch.is_tensor(v) else v for k, v in options.items()}
        if kind == "sparse":
            moved = [t.to(device) for t in leaves]
            log_probs, entropy, kept = sparse_linear_token_log_probs(
                *moved[:2],
                case.token_ids.to(device),
                case.kept.ids.to(device),
                case.kept.cu.to(device),
                bias=moved[2],
                return_kept_log_probs=True,
                **{k: v.to(device) if torch.is_tensor(v) else v for k, v in given.items()},
            )
        else:
            log_probs, entropy = dense(*leaves, case.token_ids, case.kept, **given)
            per_entry = {k: v[rows] if torch.is_tensor(v) else v for k, v in given.items()}
            kept, _ = linear_token_log_probs(
                leaves[0][rows],
                leaves[1],
                case.kept.ids,
                bias=leaves[2],
                vocab_mask=case.kept.mask[rows],
                backend="reference",
                **per_entry,
            )
        loss = (log_probs.cpu() * case.grads[0]).sum() + (entropy.cpu() * case.grads[1]).sum()
        loss = loss + (kept.cpu() * weights).sum()
        kept = kept.detach().cpu().where(live[rows], 0)
        results.append([kept, *torch.autograd.grad(loss, leaves)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), expected, **tolerances.LINEAR)


def test_main_grad_is_added_to():
    case = problem(20, 32, 2000, 8, seed=4)
    plain = gradients(sparse, case)
    main_grad = torch.ones(2000, 32)
    found = gradients(sparse, case, main_grad=main_grad)
    assert found[3] is None
    torch.testing.assert_close(main_grad - 1, plain[3], **tolerances.LINEAR)


def test_two_forwards_then_two_backwards_into_one_main_grad():
    case = problem(20, 32, 2000, 8, seed=4)
    hidden, weight, _ = case.tensors
    weight, main_grad = weight.clone().requires_grad_(), torch.zeros(2000, 32)
    losses = [
        sparse(hidden, weight, None, case.token_ids, case.kept, main_grad=main_grad)[0].sum()
        for _ in range(2)
    ]
    for loss in losses:
        loss.backward()
    (once,) = torch.autograd.grad(
        sparse(hidden, weight, None, case.token_ids, case.kept)[0].sum(), weight
    )
    assert weight.grad is None
    torch.testing.assert_close(main_grad, 2 * once, **tolerances.LINEAR)


def test_rows_do_not_depend_on_each_other():
    case = problem(33, 48, 4000, 10, seed=5)
    every = gradients(sparse, case)
    for rows in (slice(0, 1), slice(7, 20)):
        part = gradients(sparse, case.rows(rows))
        for got, whole in zip(part[:3], every[:3], strict=True):
            assert torch.equal(got, whole[rows])


def test_ignored_rows_may_hold_anything():
    case = problem(12, 16, 900, 5, seed=6)
    case.token_ids[[2, 7]] = -100
    case.tensors[0][2] = torch.nan
    clean = problem(12, 16, 900, 5, seed=6)
    clean.token_ids[[2, 7]] = -100
    for got, expected in zip(gradients(sparse, case), gradients(sparse, clean), strict=True):
        assert torch.equal(got, expected)


def test_a_token_that_was_not_kept_is_impossible():
    hidden, weight = torch.randn(1, 8), torch.randn(500, 8)
    log_probs, entropy = sparse_linear_token_log_probs(
        hidden, weight, torch.tensor([4]), torch.tensor([1, 9]), torch.tensor([0, 2])
    )
    assert log_probs.item() == -torch.inf and entropy.isfinite().all()


def slice_body(rank, world_size):
    from torch import distributed as dist

    case = problem(15, 24, 1201, 7, seed=8)
    ends = [0, 500, 1201]
    mine = slice(ends[rank], ends[rank + 1])
    hidden, weight, bias = case.tensors
    part = case.with_tensors(hidden, weight[mine], bias[mine])
    return [x.tolist() for x in gradients(sparse, part, group=dist.group.WORLD)]


@pytest.mark.multirank
def test_a_vocabulary_in_slices():
    case = problem(15, 24, 1201, 7, seed=8)
    log_probs, entropy, h, w, b = gradients(sparse, case)
    ranks = run_ranks(slice_body, 2)
    for found in ranks:
        for got, expected in zip(found[:3], (log_probs, entropy, h), strict=True):
            torch.testing.assert_close(torch.tensor(got), expected, **tolerances.LINEAR)
    for k, expected in ((3, w), (4, b)):
        joined = torch.cat([torch.tensor(found[k]) for found in ranks])
        torch.testing.assert_close(joined, expected, **tolerances.LINEAR)


@pytest.mark.slow
def test_in_tritons_interpreter():
    pytest.importorskip("triton")
    run_interpreted("sparse_linear/interpreted_sparse_linear.py")
