"""Packed sequences with images equal transformers' own forward of each sequence alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import PaliGemmaConfig

from hybridengine.model import pack_batch, pack_rollouts, packed_log_probs, packed_logits
from hybridengine.model.head import accepts_head_function, patch_head
from hybridengine.run.errors import ModelError
from hybridengine.vision.formats import IMAGE_MODEL_TYPES, ImageFormat, ImageInputs
from hybridengine.vision.packed import SequenceImages
from tests.extras.vision.vision_models import (
    IMAGE,
    VISION,
    alone,
    cases,
    image,
    tokens_of,
    vision_models,
)
from tests.model.cases import GRADIENTS, LOGITS, loss_of

# Their parts are those of others here.
ALIKE = ("qwen3_5_moe", "glm4v_moe", "glm46v")
KINDS = [
    pytest.param(kind, marks=pytest.mark.exhaustive) if kind in ALIKE else kind for kind in VISION
]


def parts_of(model, images):
    return {"images": SequenceImages(images, ImageFormat(model.config))}


def one_by_one(model, pairs, images):
    """Response logits of each sequence by transformers' own forward."""
    parts = [
        alone(model, [*prompt, *response], own)[len(prompt) - 1 : len(prompt) + len(response) - 1]
        for (prompt, response), own in zip(pairs, images, strict=True)
    ]
    return torch.cat(parts)


def gradients(model, loss):
    """By parameter; without those that no result depends on, such as SigLIP's last norm."""
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(ours, theirs):
    assert ours.keys() == theirs.keys()
    largest = max(gradient.abs().max() for gradient in theirs.values())
    for name, expected in theirs.items():
        scale = expected.abs().max().clamp(min=1e-3 * largest)  # some are zero but for rounding
        torch.testing.assert_close(ours[name] / scale, expected / scale, **GRADIENTS, msg=name)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_each_sequence_alone(kind, share):
    packed, eager = vision_models(kind)
    pairs, images = cases(kind)
    batch = pack_rollouts(pairs, parts=parts_of(packed, images), shared_prefix=share)
    logits, expected = packed_logits(packed, batch), one_by_one(eager, pairs, images)
    torch.testing.assert_close(logits, expected, **LOGITS)
    ours = gradients(packed, loss_of(logits, batch.target_ids))
    theirs = gradients(eager, loss_of(expected, batch.target_ids))
    assert any("vis" in name and grad.abs().max() > 1e-3 for name, grad in theirs.items())
    assert_equal_gradients(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_prefixes_with_one_image_are_shared_and_with_others_are_not(kind):
    a, b = image(kind, 2, 1, 1), image(kind, 2, 1, 2)
    model = vision_models(kind)[0]
    image_format = ImageFormat(model.config)
    prompt = [5, 6, *tokens_of(a), 7]

    def pack(second: ImageInputs):
        pairs = [(prompt, [8, 9]), (prompt, [10])]
        return pack_rollouts(pairs, shared_prefix=True, parts=parts_of(model, [[a], [second]]))

    same, other = pack(a), pack(b)
    assert same.saved.tokens == len(prompt) and other.saved.tokens == 2
    (rows, rows_of_two) = (x.parts["images"].tensors["pixel_values"] for x in (same, other))
    assert torch.equal(rows, image_format.join([a])["pixel_values"]), "encoded once"
    assert torch.equal(rows_of_two, image_format.join([a, b])["pixel_values"])
    assert int(same.parts["images"].placeholders.sum()) == a.num_tokens
    assert bool((same.input_ids[same.parts["images"].placeholders] == IMAGE).all())


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"])
def test_positions_are_those_of_transformers(kind):
    model = vision_models(kind)[0]
    pairs, images = cases(kind)
    batch = pack_rollouts(pairs, parts=parts_of(model, images))
    starts = batch.cu_seqlens.tolist()
    for i, own in enumerate(images):
        ids = batch.input_ids[starts[i] : starts[i + 1]]
        # The placeholders alone: transformers takes a sampled token of that id for an image.
        kinds = batch.parts["images"].placeholders[starts[i] : starts[i + 1]].int()
        grids = torch.cat([x.tensors["image_grid_thw"] for x in own]) if own else None
        expected, _ = model.model.get_rope_index(ids[None], kinds[None], grids)
        ours = batch.parts["images"].rope_position_ids[:, starts[i] : starts[i + 1]]
        assert torch.equal(ours, expected[:, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampled_placeholder_is_text(kind):
    """As in the engine: its embedding is that of the token, and the next token follows it."""
    packed, eager = vision_models(kind)
    with torch.no_grad():
        for name, module in packed.named_modules():
            if name.endswith(("embed_tokens", "embed_tokens_per_layer")):
                module.weight[IMAGE] = module.weight[11]
        eager.load_state_dict(packed.state_dict())
    picture = image(kind, 2, 2, 3)
    prompt = [5, *tokens_of(picture), 6]
    batch = pack_rollouts(
        [(prompt, [7, IMAGE, 8, 9])],
        parts=parts_of(packed, [[picture]]),
    )
    expected = one_by_one(eager, [(prompt, [7, 11, 8, 9])], [[picture]])
    torch.testing.assert_close(packed_logits(packed, batch), expected, **LOGITS)
    assert batch.target_ids.tolist() == [7, IMAGE, 8, 9]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_text_runs_the_tower_without_an_effect(kind):
    packed, eager = vision_models(kind)
    pairs = [([5, 6, 7], [8, 9]), ([5, 6, 7], [10])]
    for share in (False, True):
        batch = pack_rollouts(pairs, parts=parts_of(packed, None), shared_prefix=share)
        assert batch.padding == int(batch.parts["images"].placeholders.sum()) > 0
        calls: list[int] = []
        hook = packed.get_encoder(modality="image").register_forward_hook(
            lambda *arguments, calls=calls: calls.append(1)
        )
        logits = packed_logits(packed, batch)
        hook.remove()
        assert calls == [1]
        torch.testing.assert_close(logits, one_by_one(eager, pairs, [[], []]), **LOGITS)
        computed = gradients(packed, loss_of(logits, batch.target_ids))
        tower = [x for name, x in computed.items() if "visual" in name or "vision_tower" in name]
        assert tower and not any(gradient.any() for gradient in tower)


def test_log_probs_of_supervised_rows_and_the_fused_head():
    packed, eager = vision_models("qwen2_vl")
    patch_head(packed)
    assert accepts_head_function(packed)
    pairs, images = cases("qwen2_vl")
    ids = [prompt + response for prompt, response in pairs]
    masks = [[0] * len(prompt) + [1] * len(response) for prompt, response in pairs]
    parts = parts_of(packed, images)
    batch = pack_batch(ids, masks, parts=parts, shared_prefix=True)
    log_probs, _ = packed_log_probs(packed, batch)
    expected = one_by_one(eager, pairs, images).log_softmax(-1)
    expected = expected.gather(1, batch.target_ids[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected, **LOGITS)
    moved = batch.as_dummy().to("cpu")
    assert (
        moved.is_dummy
        and moved.parts["images"].tensors.keys() == batch.parts["images"].tensors.keys()
    )


def test_images_that_do_not_fit_are_refused():
    picture = image("qwen2_vl", 2, 1)
    model = vision_models("qwen2_vl")[0]
    right = ([5, IMAGE, IMAGE], [6])
    with pytest.raises(ModelError, match=r"sequence 1 has runs of \[3\] tokens .* need \[2\]"):
        pack_rollouts(
            [right, ([5, IMAGE, IMAGE, IMAGE], [6])], parts=parts_of(model, [[picture]] * 2)
        )
    with pytest.raises(ModelError, match=r"sequence 0 has runs of \[2\] tokens .* need \[2, 2\]"):
        pack_rollouts([right], parts=parts_of(model, [[picture, picture]]))
    with pytest.raises(ModelError, match="those of 2 sequences, expected 1"):
        pack_rollouts([right], parts=parts_of(model, [[picture], []]))
    with pytest.raises(ModelError, match=r"num_tokens 2, but .* \[1, 2, 2\] makes 1"):
        wrong = picture.tensors | {"image_grid_thw": torch.tensor([[1, 2, 2]])}
        pack_rollouts([right], parts=parts_of(model, [[replace(picture, tensors=wrong)]]))
    with pytest.raises(ModelError, match="needs 'image_grid_thw'"):
        only = {"pixel_values": picture.tensors["pixel_values"]}
        pack_rollouts([right], parts=parts_of(model, [[replace(picture, tensors=only)]]))


def test_other_families_are_refused_by_name():
    with pytest.raises(ModelError, match=r"'paligemma', expected one of .*'gemma3'") as error:
        ImageFormat(PaliGemmaConfig())
    assert all(repr(kind) in str(error.value) for kind in IMAGE_MODEL_TYPES)
