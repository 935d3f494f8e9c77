"""The fused head gives what the logits of the model give; TRL itself is not needed."""

import copy
import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from hybridengine.hybrid import pack_linear_attention
from hybridengine.integrations.trl import add_fused_lm_head
from hybridengine.integrations.trl.padding import can_unpad
from hybridengine.model.attention import ATTENTION
from tests import tolerances
from tests.ranks import run_ranks
from tests.tiny_models import SIZES, TINY, VOCAB, tiny_config

FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
T = 0.7
_SMALL = SIZES | dict(hidden_size=64, head_dim=16, num_hidden_layers=1)


def build(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def batch(pad_left=True):
    ids = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :4] = -100
    return {"input_ids": ids, "attention_mask": mask}, labels


def expected_of(model, inputs, labels):
    """The fields from the model's own logits, in the labels' order."""
    z = model(**inputs).logits[:, :-1].double() / T
    target = labels[:, 1:]
    kept, log_p = target != -100, z.log_softmax(-1)
    fields = (
        log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0],
        -(log_p.exp() * log_p).sum(-1),
        log_p.exp().square().sum(-1).log(),
        z.mean(-1),
        z.argmax(-1) == target,
    )
    return {n: f.masked_fill(~kept, 0) for n, f in zip(FIELDS, fields, strict=True)}


def assert_fused(model, inputs, labels, **kwargs):
    reference = copy.deepcopy(model)
    add_fused_lm_head(model, T, outputs=FIELDS)
    got = model(**inputs, labels=labels, fused_lm_head=True, **kwargs)
    expected = expected_of(reference, inputs, labels)
    for name, e in expected.items():
        torch.testing.assert_close(got[name].to(e.dtype), e, **tolerances.LINEAR, msg=name)
    kept = labels[:, 1:] != -100
    assert torch.equal(got.label_mask, kept)
    (got.log_probs + 0.1 * got.entropy).sum().backward()
    (expected["log_probs"] + 0.1 * expected["entropy"]).sum().backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        scale = q.grad.abs().max().clamp(min=1e-6)
        torch.testing.assert_close(p.grad / scale, q.grad / scale, **tolerances.LINEAR, msg=name)
    return got, expected


@pytest.mark.parametrize("kind", TINY)
def test_equals_the_logits_of_the_model(kind):
    got, expected = assert_fused(build(tiny_config(kind)), *batch())
    loss = -expected["log_probs"].sum() / got.label_mask.sum()
    torch.testing.assert_close(got.loss.double(), loss, **tolerances.LINEAR)
    assert got.aux_loss is None


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [("cohere", {"logit_scale": 0.3}), ("granite", {"logits_scaling": 7.0}), ("phi", {})],
)
def test_scaled_logits_and_a_head_with_bias(model_type, settings):
    assert_fused(build(AutoConfig.for_model(model_type, **_SMALL, **settings)), *batch())


def test_other_transforms_are_computed_from_logits():
    model = build(tiny_config("llama"))
    plain = type(model).forward

    class Shifted(type(model)):
        def forward(self, *args, **kwargs):
            out = plain(self, *args, **kwargs)
            out.logits = out.logits + torch.linspace(0, 1, VOCAB)
            return out

    model.__class__ = Shifted
    with pytest.warns(UserWarning, match="Shifted does more to its logits"):
        assert_fused(model, *batch())


def test_an_adapter_on_the_head_is_part_of_it():
    peft = pytest.importorskip("peft")
    model = build(tiny_config("qwen2"))
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"])).get_base_model()
    torch.nn.init.normal_(model.lm_head.lora_B["default"].weight)
    inputs, labels = batch()
    reference = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="are computed from its logits"):
        add_fused_lm_head(model, T)
    got = model(**inputs, labels=labels, fused_lm_head=True)
    expected = expected_of(reference, inputs, labels)["log_probs"]
    torch.testing.assert_close(got.log_probs.double(), expected, **tolerances.LINEAR)


def test_load_balancing_loss():
    model, (inputs, labels) = build(tiny_config("qwen3_moe")), batch()
    reference = copy.deepcopy(model)(**inputs, labels=labels, output_router_logits=True)
    add_fused_lm_head(model)
    got = model(**inputs, labels=labels, fused_lm_head=True, output_router_logits=True)
    torch.testing.assert_close(got.aux_loss, reference.aux_loss)
    torch.testing.assert_close(got.loss, reference.loss)


def test_shifted_labels_and_num_items():
    model, (inputs, labels) = build(tiny_config("llama")), batch()
    add_fused_lm_head(model, T)
    usual = model(**inputs, labels=labels, fused_lm_head=True, num_items_in_batch=7)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    given = model(**inputs, shift_labels=shifted, fused_lm_head=True, num_items_in_batch=7)
    assert given.log_probs.shape == labels.shape
    torch.testing.assert_close(given.log_probs[:, :-1], usual.log_probs)
    torch.testing.assert_close(usual.loss, -usual.log_probs.sum() / 7)
    with pytest.raises(ValueError, match="needs labels or shift_labels"):
        model(**inputs, fused_lm_head=True)


def test_a_batch_without_labels_has_a_gradient_of_zero():
    model, (inputs, labels) = build(tiny_config("llama")), batch()
    add_fused_lm_head(model)
    out = model(**inputs, labels=torch.full_like(labels, -100), fused_lm_head=True)
    out.loss.backward()
    assert out.loss == 0
    assert all(not p.grad.any() for p in model.parameters())


def test_other_calls_are_the_forward_of_the_model():
    model, (inputs, labels) = build(tiny_config("llama")), batch()
    expected = model(**inputs, labels=labels)
    add_fused_lm_head(model, T)
    got = model(**inputs, labels=labels)
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(got.loss, expected.loss)
    assert "logits_to_keep" in inspect.signature(model.forward).parameters
    tokens = model.generate(inputs["input_ids"], max_new_tokens=2, do_sample=False)
    assert tokens.shape == (3, 11)


def test_no_logits_in_full():
    model, (inputs, labels) = build(tiny_config("qwen2")), batch()
    add_fused_lm_head(model, T)
    shapes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                shapes.append(tuple(out.shape))
            return out

    with Watch(), torch.no_grad():
        model(**inputs, labels=labels, fused_lm_head=True)
    rows = labels[:, 1:].ne(-100).sum().item()
    assert not [s for s in shapes if s and s[-1] == VOCAB and s[0] not in (VOCAB, 128, rows)]


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "qwen3_moe"])
def test_padding_is_left_out_with_our_attention(kind):
    """Padding on both sides, a row without labels; what it computes per token is unchanged."""
    model, (inputs, labels) = build(tiny_config(kind)), batch()
    inputs["attention_mask"][1, 6:] = 0
    labels = labels.masked_fill(inputs["attention_mask"] == 0, -100)
    labels[2] = -100
    model.set_attn_implementation(ATTENTION)
    rows, embed = [], model.model.embed_tokens
    embed.register_forward_hook(lambda _m, _a, out: rows.append(tuple(out.shape[:2])))
    assert_fused(model, inputs, labels)
    assert rows[0] == (1, inputs["attention_mask"].sum())


def test_a_state_along_the_sequence_is_not_packed():
    layers = ["linear_attention", "full_attention"]
    hybrid = AutoConfig.for_model("qwen3_next", num_hidden_layers=2, layer_types=layers)
    with torch.device("meta"):
        models = [
            AutoModelForCausalLM.from_config(config)
            for config in (tiny_config("llama"), AutoConfig.for_model("mamba"), hybrid)
        ]
    assert [can_unpad(model) for model in models] == [True, False, False]
    pack_linear_attention(models[2])
    assert can_unpad(models[2])


def test_products_in_float32_or_in_the_dtype_of_autocast():
    model, (inputs, labels) = build(tiny_config("qwen2")), batch()
    wide = copy.deepcopy(model)
    add_fused_lm_head(model)
    add_fused_lm_head(wide, cast_lm_head_to_fp32=True)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        narrow = model(**inputs, labels=labels, fused_lm_head=True).log_probs
        exact = wide(**inputs, labels=labels, fused_lm_head=True).log_probs
    assert narrow.dtype == exact.dtype == torch.float32
    assert 0 < (narrow - exact).abs().max() < 0.1


def sharded(rank: int, world_size: int, wrap_head: bool) -> dict[str, torch.Tensor]:
    """Gradients of a model on FSDP2 shards, whose head may be a group of its own."""
    from torch.distributed.fsdp import fully_shard

    model, (inputs, labels) = build(tiny_config("qwen2")), batch()
    add_fused_lm_head(model, T)
    if world_size > 1:
        for part in (*model.model.layers, *([model.lm_head] if wrap_head else [])):
            fully_shard(part, reshard_after_forward=True)
        fully_shard(model, reshard_after_forward=True)
    rows = slice(rank, None, world_size)
    part = {name: value[rows] for name, value in inputs.items()}
    for _ in range(2):  # the second backward after a first reshard
        out = model(**part, labels=labels[rows], fused_lm_head=True, num_items_in_batch=10)
        (out.loss * world_size).backward()
    full = (lambda t: t.full_tensor()) if world_size > 1 else (lambda t: t)
    return {name: full(p.grad) for name, p in model.named_parameters()}


@pytest.mark.multirank
@pytest.mark.parametrize("wrap_head", (False, True))
def test_sharded_by_fsdp2(wrap_head):
    expected = sharded(0, 1, False)
    for gradients in run_ranks(sharded, 2, wrap_head):
        for name, e in expected.items():
            torch.testing.assert_close(gradients[name], e, rtol=1e-4, atol=1e-5, msg=name)
