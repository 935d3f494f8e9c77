"""One packed forward equals unpacked forwards with transformers' eager attention."""

import pytest
import torch

from hybridengine.model import PackedBatch, pack_rollouts, packed_logits
from hybridengine.run.errors import ModelError
from tests.model.cases import (
    GRADIENTS,
    LOGITS,
    SIZES,
    gradients,
    loss_of,
    models,
    one_by_one,
    rollouts,
)
from tests.tiny_models import TINY, VOCAB


@pytest.mark.parametrize("kind", TINY)
def test_packed_equals_unpacked_forward_and_gradients(kind):
    packed, eager = models(kind)
    pairs = rollouts(SIZES)
    batch = pack_rollouts(pairs)
    logits, (expected, targets) = packed_logits(packed, batch), one_by_one(eager, pairs)
    assert torch.equal(batch.target_ids, targets)
    torch.testing.assert_close(logits, expected, **LOGITS)
    ours = gradients(packed, loss_of(logits, targets))
    theirs = gradients(eager, loss_of(expected, targets))
    for name in theirs:
        scale = theirs[name].abs().max()
        torch.testing.assert_close(ours[name] / scale, theirs[name] / scale, **GRADIENTS, msg=name)


def test_micro_batch_split_changes_nothing_but_rounding():
    packed, _ = models("llama")
    pairs = rollouts(SIZES)

    def summed(groups):
        packed.zero_grad()
        for group in groups:
            batch = pack_rollouts(group)
            loss_of(packed_logits(packed, batch), batch.target_ids).backward()
        return {n: p.grad.clone() for n, p in packed.named_parameters()}

    reference = summed([pairs])
    for groups in ([pairs[:3], pairs[3:]], [[p] for p in pairs if p[1]]):
        for name, grad in summed(groups).items():
            scale = reference[name].abs().max()
            torch.testing.assert_close(grad / scale, reference[name] / scale, **GRADIENTS, msg=name)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_generate_with_cache_and_left_padding_equals_eager(kind):
    packed, eager = models(kind)
    ids = torch.tensor([[0, 0, 5, 9, 11], [7, 8, 20, 33, 4]])
    options = dict(attention_mask=(ids > 0).long(), max_new_tokens=24, do_sample=False)
    assert torch.equal(packed.generate(ids, **options), eager.generate(ids, **options))


def test_row_batch_without_cu_seqlens_equals_eager():
    packed, eager = models("gemma2")
    ids = torch.randint(3, VOCAB, (3, 40), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(packed(input_ids=ids).logits, eager(input_ids=ids).logits, **LOGITS)


def test_packed_positions_without_cu_seqlens_are_refused():
    packed, _ = models("llama")
    with pytest.raises(ModelError, match=r"LlamaAttention \(layer 0\) uses position_ids"):
        packed(input_ids=torch.arange(3, 9)[None], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


def test_attention_dropout_in_training_is_refused():
    packed, _ = models("llama")
    packed.model.layers[1].self_attn.attention_dropout = 0.1
    packed.train()
    with pytest.raises(ModelError, match=r"\(layer 1\) uses attention dropout 0.1"):
        packed_logits(packed, pack_rollouts(rollouts([(4, 4)])))


def test_model_without_logits_to_keep_is_sliced():
    packed, _ = models("llama")
    batch = pack_rollouts(rollouts(SIZES))

    class Plain(torch.nn.Module):
        def forward(self, input_ids, position_ids, use_cache, **kwargs):
            return packed(
                input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, **kwargs
            )

    torch.testing.assert_close(
        packed_logits(Plain(), batch), packed_logits(packed, batch), rtol=1e-5, atol=1e-5
    )


def test_batch_layout():
    batch = pack_rollouts([([5, 6], [7, 8]), ([9], []), ([9], [5])])
    assert isinstance(batch, PackedBatch)
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 9, 5]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 4, 5, 7] and batch.max_seqlen == 4
    assert batch.logit_positions.tolist() == [1, 2, 5] and batch.target_ids.tolist() == [7, 8, 5]


def test_empty_prompt_is_refused():
    with pytest.raises(ModelError, match="rollout 1 has no prompt tokens"):
        pack_rollouts([([1], [2]), ([], [3])])


def test_no_response_tokens_at_all():
    packed, _ = models("llama")
    assert packed_logits(packed, pack_rollouts([([5, 6], [])])).shape == (0, VOCAB)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy_are_of_the_tempered_distribution(temperature):
    from hybridengine.model import packed_log_probs

    packed, eager = models("qwen2")
    pairs = rollouts(SIZES)
    log_probs, entropy = packed_log_probs(packed, pack_rollouts(pairs), temperature)
    logits, targets = one_by_one(eager, pairs)
    expected = (logits.double() / temperature).log_softmax(-1)
    assert log_probs.dtype == entropy.dtype == torch.float32
    chosen = expected.gather(1, targets[:, None])[:, 0].float()
    torch.testing.assert_close(log_probs, chosen, **LOGITS)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1).float(), **LOGITS)
