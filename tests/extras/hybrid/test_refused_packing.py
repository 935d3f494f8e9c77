"""Wherever a packed batch could reach layers that would let it leak, it is refused by name."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridengine.engine.vllm.environment import vllm_available
from hybridengine.hybrid import pack_linear_attention, takes_packed
from hybridengine.hybrid.extension import extension
from hybridengine.integrations import transformers as integration
from hybridengine.integrations.trl import add_fused_lm_head
from hybridengine.model import check_sequence_parallel
from hybridengine.run.config import load_config
from hybridengine.run.errors import ModelError
from tests.extras.hybrid.hybrid_models import hybrid_config
from tests.model.cases import GRADIENTS, LOGITS
from tests.tiny_models import VOCAB, tiny_config

LENGTHS = (5, 1, 9)
DELTA_NET = dict(linear_key_head_dim=128, linear_value_head_dim=128)


def sdpa_model(kind: str = "qwen3_5_text"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(hybrid_config(kind), attn_implementation="sdpa").train()


def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (1, n), generator=generator) for n in LENGTHS]


def packed_inputs(parts, described_by: str = "position_ids"):
    """The arguments of other trainers for sequences in one row."""
    positions = torch.cat([torch.arange(x.shape[1]) for x in parts])[None]
    inputs = {"input_ids": torch.cat(parts, 1), "position_ids": positions, "use_cache": False}
    if described_by == "seq_idx":
        numbers = torch.arange(len(parts)).repeat_interleave(torch.tensor(LENGTHS))
        inputs["seq_idx"] = numbers[None].int()
    if described_by == "cu_seq_lens_q":
        ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
        inputs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends)
        inputs |= dict.fromkeys(("max_length_q", "max_length_k"), max(LENGTHS))
    return inputs


@pytest.mark.parametrize("described_by", ["position_ids", "seq_idx", "cu_seq_lens_q"])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2"])
def test_a_packed_row_of_another_trainer(kind, described_by):
    """transformers' sdpa reads the boundaries from position_ids; both orders of the sequences."""
    model, parts = sdpa_model(kind), sequences()
    own = copy.deepcopy(model)
    integration.pack_linear_attention(model)
    integration.pack_linear_attention(model)  # no effect
    expected = [own(input_ids=x, use_cache=False).logits for x in parts]
    inputs = packed_inputs(parts, described_by)
    logits = model(**inputs).logits
    torch.testing.assert_close(logits, torch.cat(expected, 1), **LOGITS)
    weights = torch.linspace(-1, 1, VOCAB)
    (logits * weights).sum().backward()
    (torch.cat(expected, 1) * weights).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), own.parameters(), strict=True):
        scale = theirs.grad.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(ours.grad / scale, theirs.grad / scale, **GRADIENTS, msg=name)
    reverse = model(**packed_inputs(parts[::-1])).logits if described_by == "position_ids" else None
    if reverse is not None:
        torch.testing.assert_close(reverse, torch.cat(expected[::-1], 1), **LOGITS)


def test_a_copy_of_a_model_packs_too():
    model, parts = sdpa_model(), sequences()
    integration.pack_linear_attention(model)
    twin = copy.deepcopy(model)
    assert takes_packed(twin)
    for parameter in twin.parameters():
        parameter.data.mul_(1.1)
    with torch.no_grad():
        expected = [twin(input_ids=x, use_cache=False).logits for x in parts]
        logits = twin(**packed_inputs(parts)).logits
    torch.testing.assert_close(logits, torch.cat(expected, 1), **LOGITS)


def test_padded_batches_and_generation_are_as_before():
    model = sdpa_model().eval()
    own = copy.deepcopy(model)
    integration.pack_linear_attention(model)
    ids = torch.randint(3, VOCAB, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    options = dict(attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(ids, **options), own.generate(ids, **options))
    with torch.no_grad():
        ours, theirs = (m(input_ids=ids, attention_mask=mask).logits for m in (model, own))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("described_by", ["position_ids", "seq_idx", "cu_seq_lens_q"])
@pytest.mark.parametrize("change", [integration.fuse_loss, add_fused_lm_head])
def test_losses_of_other_trainers_refuse_it(change, described_by):
    model, parts = sdpa_model(), sequences()
    change(model)
    labels = torch.cat(parts, 1)
    with pytest.raises(ModelError, match=r"Qwen3_5ForCausalLM: its layers .*pack_linear_attention"):
        model(**packed_inputs(parts, described_by), labels=labels)
    padded = torch.randint(3, VOCAB, (2, 6))
    assert model(input_ids=padded, labels=padded).loss.isfinite()
    pack_linear_attention(model)
    assert model(**packed_inputs(parts, described_by), labels=labels).loss.isfinite()


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("qwen3_next", 8, "divide linear_num_value_heads .* 'qwen3_next', 4"),
        ("kimi_linear", 4, "divide linear_num_heads .* 'kimi_linear', 2"),
        ("nemotron_h", 3, "divide mamba_num_heads .* 'nemotron_h', 8"),
        ("bamba", 3, "divide mamba_n_heads .* 'bamba', 8"),
        ("jamba", 3, r"divide mamba_expand \* hidden_size .* 'jamba', 256"),
    ],
)
def test_heads_that_ranks_cannot_share(kind, size, message):
    def check_shared(size: int) -> None:
        config = SimpleNamespace(sequence_parallel_size=size)
        extension.check(config, hybrid_config(kind), "", False)

    with pytest.raises(ModelError, match=f"ulysses_sequence_parallel_size is {size}, .*{message}"):
        check_shared(size)
    check_shared(2)
    with pytest.raises(ModelError, match="is 3, which does not divide the model's 8 attention"):
        check_sequence_parallel(hybrid_config("mamba2"), 3)


_DRAFTS = "rollout.engine_kwargs.vllm.speculative_config"
DRAFTS = [f"{_DRAFTS}.method=ngram", f"{_DRAFTS}.num_speculative_tokens=2"]
EXACT = ["rollout.exact=on", "actor.fsdp_config.dtype=bfloat16"]


@pytest.mark.skipif(not vllm_available(), reason="the rollout engine")
@pytest.mark.skipif(torch.cuda.is_available(), reason="of vLLM's CPU build")
@pytest.mark.parametrize(
    ("kind", "changes", "settings", "message"),
    [
        ("jamba", {}, [], "lacks selective_scan_fwd for its layer MambaMixer; set rollout.name=hf"),
        ("olmo_hybrid", {}, [], "lacks any operator for its layer OlmoHybridGatedDeltaNet"),
        ("kimi_linear", {}, [], "lacks any operator for its layer Kimi"),
        ("minimax", {}, [], "vllm, which has no model MiniMaxForCausalLM; set rollout.name=hf"),
        ("mamba2", {}, [], "does not compute 4 groups with one norm over all of the model"),
        ("falcon_h1", {"mamba_rms_norm": True}, [], "not compute mamba_norm_before_gate of"),
        ("nemotron_h", {"time_step_limit": (0.1, 1.0)}, [], r"time_step_limit \(0.1, 1.0\)"),
        ("nemotron_h", {}, [], "Mamba2 in vLLM on a CPU returns no states from inside a prompt"),
        (
            "qwen3_5_text",
            DELTA_NET,
            ["rollout.dtype=float32"],
            "rollout.dtype is float32",
        ),
        ("qwen3_next", {}, [], r"of \(\(64, 64\), \(128, 128\)\), and they are \(32, 16\)"),
        (
            "qwen3_next",
            DELTA_NET,
            ["rollout.enable_chunked_prefill=false"],
            "enable_chunked_prefill is false, but vLLM caches prefixes",
        ),
        (
            "qwen3_5_text",
            DELTA_NET,
            ["rollout.quantization=fp8"],
            "rollout.quantization is fp8 and rollout.enforce_eager false",
        ),
        ("qwen3_5_text", DELTA_NET, DRAFTS, "rollout.enable_prefix_caching true, but vLLM has"),
        ("lfm2", {}, DRAFTS, "the states of ShortConv after rejected drafts are not examined"),
        ("qwen3_5_text", DELTA_NET, [*DRAFTS, *EXACT], "of drafted tokens has no exact operator"),
    ],
)
def test_what_vllm_on_a_cpu_cannot_have(kind, changes, settings, message):
    needed = ["model.path=m", "data.train_files=t.jsonl", "rollout.name=vllm"]
    config = load_config(None, [*needed, "rollout.dtype=bfloat16", *settings])
    with pytest.raises(ModelError, match=message):
        exact = config.rollout.exact == "on"
        extension.check(config, hybrid_config(kind, **changes), "vllm", exact)
    extension.check(config, hybrid_config(kind, **changes), "hf", False)


def test_exact_operators_take_any_type_and_head_size_on_a_cpu():
    needed = ["model.path=m", "data.train_files=t.jsonl", "rollout.name=vllm"]
    for dtype in ("float32", "bfloat16"):
        given = [f"rollout.dtype={dtype}", f"actor.fsdp_config.dtype={dtype}"]
        model = hybrid_config("qwen3_5_text")
        extension.check(load_config(None, [*needed, *given]), model, "vllm", True)


def test_layers_that_cannot_be_replaced():
    with torch.device("meta"):
        mamba = AutoModelForCausalLM.from_config(AutoConfig.for_model("recurrent_gemma"))
    with pytest.raises(ModelError, match=r"RecurrentGemmaForCausalLM of type 'recurrent_gemma'"):
        pack_linear_attention(mamba)
    plain = AutoModelForCausalLM.from_config(tiny_config("llama"))
    pack_linear_attention(plain)
    assert not takes_packed(plain)


def test_what_a_packed_call_cannot_have():
    model, parts = sdpa_model(), sequences()
    pack_linear_attention(model)
    inputs = packed_inputs(parts, "cu_seq_lens_q")
    with pytest.raises(ModelError, match="packed in 2 rows"):
        rows = packed_inputs(parts)
        model(**rows | {name: rows[name].repeat(2, 1) for name in ("input_ids", "position_ids")})
    with pytest.raises(ModelError, match="with a cache are not supported"):
        model(**inputs | {"use_cache": True})
