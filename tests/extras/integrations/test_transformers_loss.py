"""Hugging Face's losses of causal LMs with ours in place: same values, same gradients."""

import copy
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.loss import loss_utils
from transformers.trainer_pt_utils import LabelSmoother

from hybridengine.integrations import transformers as adapter
from tests import tolerances
from tests.extras.integrations.trainer_arguments import TWO_STEPS
from tests.ranks import run_ranks
from tests.tiny_models import TINY, VOCAB, tiny_config

TEXT_LOSS, SMOOTH = loss_utils.ForCausalLMLoss, LabelSmoother.__call__


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def some_labels(*shape):
    labels = torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(1))
    labels[..., ::3] = -100
    return labels


def assert_same(call, ours, theirs, logits, close=tolerances.LINEAR):
    results = []
    for function in (ours, theirs):
        leaf = logits.clone().requires_grad_()
        loss = call(function, leaf)
        results.append((loss.float().detach(), torch.autograd.grad(loss, leaf)[0].float()))
    for got, expected in zip(*results, strict=True):
        scale = expected.abs().max().clamp(min=1e-12)
        torch.testing.assert_close(got / scale, expected / scale, **close)


@pytest.mark.parametrize("items", (None, 11, torch.tensor(11)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shifted", (False, True))
def test_causal_lm_loss(items, dtype, shifted):
    labels = some_labels(2, 7)
    given = {"shift_labels": labels.flip(1)} if shifted else {}
    assert_same(
        lambda f, x: f(x, labels, VOCAB, items, deterministic=True, **given),
        adapter.ForCausalLMLoss,
        TEXT_LOSS,
        draw(2, 7, VOCAB, dtype=dtype),
        tolerances.LINEAR if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-8},
    )


def test_another_ignore_index_and_no_label_at_all():
    labels, logits = some_labels(2, 7), draw(2, 7, VOCAB)
    assert_same(
        lambda f, x: f(x, labels.masked_fill(labels == -100, 5), VOCAB, ignore_index=5),
        adapter.ForCausalLMLoss,
        TEXT_LOSS,
        logits,
    )
    nothing = torch.full_like(labels, -100)
    for loss in (adapter.ForCausalLMLoss, TEXT_LOSS):
        assert loss(logits, nothing, VOCAB).isnan()
        assert loss(logits, nothing, VOCAB, num_items_in_batch=4) == 0


@pytest.mark.parametrize("items", (None, 11, torch.tensor(11)))
@pytest.mark.parametrize("shift", (False, True))
def test_label_smoothing(items, shift):
    labels, smoother = some_labels(2, 7), LabelSmoother(epsilon=0.2)

    def call(function, logits):
        output = {"logits": logits} if shift else (logits,)
        given = labels if shift else labels.unsqueeze(-1)
        return function(smoother, output, given, shift_labels=shift, num_items_in_batch=items)

    assert_same(call, adapter.smoothed_loss, SMOOTH, draw(2, 7, VOCAB))


def test_patch_reaches_models_and_is_undone():
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    with adapter.patched():
        assert model.loss_function is adapter.ForCausalLMLoss
        assert LabelSmoother.__call__ is adapter.smoothed_loss
    assert model.loss_function is TEXT_LOSS
    assert LabelSmoother.__call__ is SMOOTH


def build(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32)


def batch():
    ids = torch.randint(3, VOCAB, (4, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": some_labels(4, 9)}


@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("items", (None, 11))
def test_loss_without_logits(kind, items):
    reference, model = build(kind), build(kind)
    adapter.fuse_loss(model)
    router = {"output_router_logits": True} if "moe" in kind else {}
    outputs = [m.train()(**batch(), num_items_in_batch=items, **router) for m in (model, reference)]
    torch.testing.assert_close(outputs[0].loss, outputs[1].loss, **tolerances.LINEAR)
    assert outputs[0].logits is None
    for output in outputs:
        output.loss.backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        scale = q.grad.abs().max().clamp(min=1e-6)
        torch.testing.assert_close(p.grad / scale, q.grad / scale, **tolerances.LINEAR, msg=name)


def test_evaluation_and_calls_without_labels_have_logits():
    reference, model = build("llama").eval(), build("llama")
    adapter.fuse_loss(model)
    ids = {"input_ids": batch()["input_ids"]}
    assert torch.equal(model.eval()(**batch()).logits, reference(**batch()).logits)
    assert torch.equal(model.train()(**ids).logits, reference(**ids).logits)
    assert len(model(**batch(), return_dict=False)) >= 2


def train(folder, mode, **settings):
    """Two steps of a Trainer, its losses "theirs", "patched" or "fused"; return it.

    Two micro-batches a step with unequal numbers of labels: normalised over both.
    """
    rows = [{name: value[i].tolist() for name, value in batch().items()} for i in range(4)]
    rows[0]["labels"] = [-100] * 8 + rows[0]["labels"][8:]
    arguments = TrainingArguments(output_dir=str(folder), **TWO_STEPS, **settings)
    model = build("llama")
    if mode == "fused":
        adapter.fuse_loss(model)
    with adapter.patched() if mode == "patched" else nullcontext():
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
    return trainer


def losses_of(trainer):
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return [log[name] for log in logs for name in ("loss", "grad_norm")]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "smoothing"), [("patched", 0.0), ("patched", 0.1), ("fused", 0)])
def test_trainer_with_gradient_accumulation(tmp_path, mode, smoothing):
    settings = {"per_device_train_batch_size": 2, "label_smoothing_factor": smoothing}
    losses = [losses_of(train(tmp_path, m, **settings)) for m in ("theirs", mode)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-5)
    assert len(losses[0]) == 4


def ddp(rank: int, world_size: int, folder: str) -> dict[str, list[float]]:
    """Losses and gradient norms of a Trainer whose model Accelerate wraps in DDP."""
    results = {}
    for mode in ("theirs", "patched", "fused"):
        trainer = train(folder, mode, per_device_train_batch_size=1, ddp_backend="gloo")
        assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
        results[mode] = losses_of(trainer)
    return results


@pytest.mark.multirank
def test_trainer_under_ddp(tmp_path):
    for results in run_ranks(ddp, 2, str(tmp_path)):
        for mode in ("patched", "fused"):
            assert results[mode] == pytest.approx(results["theirs"], rel=1e-4, abs=1e-5), mode


def sharded(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = build("qwen2").train()
    adapter.fuse_loss(model)
    if world_size > 1:
        for part in (*model.model.layers, model.lm_head, model):
            fully_shard(part, reshard_after_forward=True)
    part = {name: value[rank::world_size] for name, value in batch().items()}
    (model(**part, num_items_in_batch=20).loss * world_size).backward()
    full = (lambda t: t.full_tensor()) if world_size > 1 else (lambda t: t)
    return {name: full(p.grad) for name, p in model.named_parameters()}


@pytest.mark.multirank
def test_sharded_by_fsdp2():
    expected = sharded(0, 1)
    for gradients in run_ranks(sharded, 2):
        for name, e in expected.items():
            torch.testing.assert_close(gradients[name], e, rtol=1e-4, atol=1e-5, msg=name)


def test_a_copy_computes_with_its_own_weights():
    model = build("llama").train()
    adapter.fuse_loss(model)
    other = copy.deepcopy(model)
    expected = model(**batch()).loss
    for parameter in model.parameters():
        parameter.data.zero_()
    loss = other(**batch()).loss
    assert torch.equal(loss, expected)
    loss.backward()
    assert all(p.grad is not None for p in other.parameters())
    assert all(p.grad is None for p in model.parameters())
