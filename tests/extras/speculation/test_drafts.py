"""Speculative decoding: with drafts an engine returns what it returns without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridengine.engine.interface import SamplingSpec
from hybridengine.engine.vllm.environment import vllm_available
from hybridengine.run.config import ConfigError, load_config
from tests.engines import build_engine, engine_options, synced_engine
from tests.extras.hybrid.hybrid_models import hybrid_config
from tests.loading import load_sharded
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, save_tiny

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.skipif(not vllm_available(), reason="the rollout engine; `make setup` installs it"),
]

KEY = "rollout.engine_kwargs.vllm.speculative_config"
PROMPTS = [[5, 9, 33, 5, 9, 33, 5], [7, 8, 9, 10, 7, 8, 9], [3] * 12, [*range(50, 90)] * 2]
TEXT = dict(linear_key_head_dim=128, linear_value_head_dim=128, mtp_num_hidden_layers=1)
TOWER = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=128)
SPECS = {
    "warm": SamplingSpec(n=2, temperature=0.8, max_tokens=60),
    "cold": SamplingSpec(n=2, temperature=0.2, max_tokens=60),
    "greedy": SamplingSpec(temperature=0.0, max_tokens=60),
    "kept": SamplingSpec(n=2, temperature=0.4, top_k=8, max_tokens=60, record_kept=True),
}


@pytest.mark.parametrize(
    ("method", "override", "message"),
    [
        ("eagle", "seed=1", "method is 'eagle', whose drafts are not examined; set it to ngram or"),
        ("ngram", "actor.router_replay=rollout", "actor.router_replay=rollout is not examined"),
        ("ngram", "rollout.min_p=0.1", "with which rollout.min_p is not examined; remove one"),
        ("mtp", "rollout.quantization=fp8", "is mtp, .* rollout.quantization=fp8; use method ngr"),
        ("mtp", "reshard.lora=adapters", "is mtp, .* reshard.lora=adapters; use method ngram"),
        ("ngram", f"{KEY}.prompt_lookup_maximum=2", "prompt_lookup_maximum is not examined with"),
        ("ngram", f"{KEY}.num_speculative_tokens=0", "num_speculative_tokens is 0; give a number"),
        ("ngram on a GPU", "rollout.exact=on", "on a GPU are verified by vLLM, without rollout.ex"),
        ("ngram on a GPU", "rollout.top_k=5", "by vLLM, without algorithm.sampling_replay"),
    ],
)
def test_what_cannot_be_combined_with_drafts(
    method: str, override: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, *gpu = method.split(" on a ")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpu))
    drafts = [f"{KEY}.method={method}", f"{KEY}.num_speculative_tokens=2"]
    needed = ["model.path=m", "data.train_files=t.jsonl", "rollout.name=vllm", *drafts]
    if method != "eagle":
        load_config(None, needed)
    with pytest.raises(ConfigError, match=message):
        load_config(None, [*needed, override])


def test_checkpoints_without_mtp_layers_that_vllm_loads(tmp_path: Path) -> None:
    from hybridengine.speculation.drafts import MtpDrafts

    drafting = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    for changes, message in (
        ({}, None),
        ({"mtp_num_hidden_layers": 0}, "declares no MTP layers; use method ngram"),
        (quantized, "is quantized, and its MTP layers would be read without"),
    ):
        config = hybrid_config("qwen3_5_text", **TEXT | changes)
        config.architectures = ["Qwen3_5ForCausalLM"]
        config.save_pretrained(tmp_path)
        options = engine_options(str(tmp_path), engine_kwargs=drafting, checkpoint=None)
        if message is None:
            assert "draft_load_config" in MtpDrafts.arguments(options)["speculative_config"]
            continue
        with pytest.raises(ConfigError, match=message):
            MtpDrafts.arguments(options)
    options = engine_options(save_tiny("llama", tmp_path / "llama"), engine_kwargs=drafting)
    with pytest.raises(ConfigError, match="vLLM has none of 'llama'; use method ngram"):
        MtpDrafts.arguments(options)


@contextmanager
def no_drafts(engine: Any) -> Iterator[None]:
    """While open, the engine drafts nothing."""
    with patch.object(engine.model_runner, "take_draft_token_ids", lambda: None):
        yield


def ngram_body(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """What an exact engine returns with n-gram drafts and without; prompts come in chunks."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    drafting = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    engine = synced_engine(
        "vllm", path, exact=True, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32,
        engine_kwargs={"speculative_config": drafting | {"prompt_lookup_min": 1}},
        tokenizer=tokenizer, stop=("text",),
    )  # fmt: skip
    specs, found = dict(SPECS), dict[str, Any]()
    for name in (*SPECS, "stop"):
        if name == "stop":  # two tokens within a greedy response
            ids = found["greedy"][0][0].token_ids
            stop = (tokenizer.decode(ids[20:22]),)
            specs[name] = SamplingSpec(temperature=0.0, max_tokens=60, stop=stop)
        generate = partial(engine.generate, PROMPTS, specs[name], seed=3)
        engine.drafts.reset()
        with_drafts, metrics = generate(), engine.drafts.metrics()
        engine.drafts.reset()
        with no_drafts(engine):
            without = generate()
        assert engine.drafts.stats.num_drafts == 0
        found[name] = [c for [c, *_] in with_drafts], with_drafts, without, metrics
    return found


def test_ngram_drafts_change_no_token(tmp_path: Path) -> None:
    [found] = run_ranks(ngram_body, 1, save_tiny("llama", tmp_path), timeout_s=300)
    for name, (_, with_drafts, without, metrics) in found.items():
        assert with_drafts == without, name  # tokens, log-probs, kept entries, versions
        assert 0 <= metrics["rollout/draft_acceptance_rate"] < 1
    for name in ("cold", "greedy", "kept"):
        assert found[name][3]["rollout/accepted_length"] > 1.05, name
    assert any(c.columns["num_kept"] for [c, *_] in found["kept"][1])
    [stopped, *_] = found["stop"][1]
    assert stopped[0].finish_reason == "stop" and len(stopped[0].token_ids) <= 22


def save_counting(folder: Path, shift: int) -> str:
    """Write a Qwen3.5 inside a vision-language model, whose token t is followed by t + shift.

    Embeddings and head are rows of the identity, and no layer adds anything. The MTP layer finds
    the same from the embeddings.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = hybrid_config("qwen3_5_text", **TEXT).to_dict()
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=TOWER)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).bfloat16().save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, x in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            x.zero_()
    rows = torch.eye(*tensors["model.language_model.embed_tokens.weight"].shape).bfloat16()
    tensors["model.language_model.embed_tokens.weight"] = rows
    tensors["lm_head.weight"] = rows.roll(shift, 0).contiguous()
    tensors["model.language_model.norm.weight"].zero_()
    layer = "model.language_model.layers.1."
    mtp = {
        name.replace(layer, "mtp.layers.0."): x.clone()
        for name, x in tensors.items()
        if name.startswith(layer)
    }
    width = rows.shape[1]
    mtp["mtp.fc.weight"] = torch.eye(width, 2 * width).bfloat16()  # of (embedding, hidden state)
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        mtp[f"mtp.{name}.weight"] = torch.zeros(width).bfloat16()
    save_file(tensors | mtp, file, {"format": "pt"})
    return str(folder)


def mtp_body(rank: int, world_size: int, paths: list[str]) -> list[Any]:
    """(responses with drafts, without, metrics) after a sync from each of `paths` in turn."""
    from hybridengine.model import parameter_shards, sharding_mesh
    from hybridengine.sync.resharder import Resharder

    engine = build_engine(
        "vllm", paths[0], dtype="bfloat16", kv_cache_gib=0.1, enable_prefix_caching=False,
        engine_kwargs={"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
    )  # fmt: skip
    found, mesh = [], sharding_mesh("cpu", world_size)
    greedy, prompts = SamplingSpec(temperature=0.0, max_tokens=30), [[5, 9], [3], [60] * 20]
    for version, path in enumerate(paths, 1):
        model = load_sharded(path, mesh=mesh)
        Resharder(lambda model=model: parameter_shards(model), engine, 1 << 20).sync(version)
        engine.drafts.reset()
        with_drafts, metrics = engine.generate(prompts, greedy, seed=1), engine.drafts.metrics()
        with no_drafts(engine):
            without = engine.generate(prompts, greedy, seed=1)
        found.append(([c for [c] in with_drafts], [c for [c] in without], metrics))
        engine.sleep()
    return found


def test_mtp_layers_are_the_checkpoints_and_read_the_policys_embeddings(tmp_path: Path) -> None:
    shifts = 3, 7, 3
    paths = [save_counting(tmp_path / str(shift), shift) for shift in shifts]
    [found] = run_ranks(mtp_body, 1, paths, timeout_s=300)
    for shift, (with_drafts, without, metrics) in zip(shifts, found, strict=True):
        for response, plain in zip(with_drafts, without, strict=True):
            first, ids = response.token_ids[0], response.token_ids
            assert ids == [(first + shift * i) % VOCAB for i in range(30)] == plain.token_ids
            torch.testing.assert_close(response.log_probs, plain.log_probs, rtol=0, atol=1e-2)
        assert metrics["rollout/draft_acceptance_rate"] == 1, shift
        assert metrics["rollout/accepted_length"] > 2.5
