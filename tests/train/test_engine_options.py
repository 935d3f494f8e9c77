"""What a job hands on to vLLM, and what is said where vLLM does not start with it."""

from dataclasses import fields
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hybridengine.engine.vllm import engine as vllm
from hybridengine.engine.vllm import options
from hybridengine.engine.vllm.options import check_engine_options, check_plugins, llm_options
from hybridengine.run.config import ConfigError, load_config
from hybridengine.train.build import build_engine
from hybridengine.train.preflight import check_engine
from tests.tiny_models import save_tiny

pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
from vllm.engine.arg_utils import EngineArgs


def build(folder: Path, *overrides: str):
    path = save_tiny("llama", folder)
    needed = [f"model.path={path}", "data.train_files=t.jsonl", "rollout.name=vllm"]
    dtypes = ["rollout.dtype=float32", "actor.fsdp_config.dtype=float32"]
    config = load_config(None, [*needed, *dtypes, *overrides])
    return build_engine(config, AutoTokenizer.from_pretrained(path), "vllm")


def test_every_argument_of_vllm_is_sorted():
    """A new version's argument is refused until somebody has looked at it."""
    arguments = {field.name for field in fields(EngineArgs)}
    assert not options.ALLOWED & options.REFUSED.keys()
    assert options.ALLOWED | options.REFUSED.keys() == arguments
    check_engine_options(dict.fromkeys(options.ALLOWED, 1))
    for name in options.REFUSED:
        with pytest.raises(ValueError, match=f"^{name} "):
            check_engine_options({name: 1})
    check_engine_options({"kv_cache_dtype": None})  # vLLM's default


def test_an_argument_that_is_in_no_table(monkeypatch):
    monkeypatch.setattr(options, "ALLOWED", options.ALLOWED - {"block_size"})
    with pytest.raises(ValueError, match="block_size is not examined, an argument of vLLM"):
        check_engine_options({"block_size": 32})


def test_logits_processors_of_installed_packages_are_refused(tmp_path, monkeypatch):
    check_plugins()
    metadata = tmp_path / "biases-1.dist-info"
    metadata.mkdir()
    entry = "three = no_such_module:Three"  # which is never imported
    (metadata / "entry_points.txt").write_text(f"[vllm.logits_processors]\n{entry}\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: biases\nVersion: 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = "logits processors 'three' of biases .*uninstall"
    with pytest.raises(ConfigError, match=message):
        build(tmp_path / "model")
    needed = ["model.path=m", "data.train_files=t.jsonl", "rollout.name=vllm"]
    with pytest.raises(ConfigError, match=message):
        check_engine(load_config(None, needed), "vllm")


def test_options_and_stop_texts_reach_the_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm, "VllmEngine", llm_options)
    changed = build(tmp_path, "rollout.engine_kwargs.vllm.watermark=0.5", "rollout.stop=END")
    assert changed == build(tmp_path) | {"watermark": 0.5, "skip_tokenizer_init": False}
    assert changed["max_num_seqs"] == 256


def test_a_value_that_vllm_refuses_is_one_sentence(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise ValueError("1 validation error\nfor block_size")

    monkeypatch.setattr(vllm, "VllmEngine", refuse)
    with pytest.raises(ConfigError, match=r"engine_kwargs\.vllm is .*'block_size': 'x'") as error:
        build(tmp_path, "rollout.engine_kwargs.vllm.block_size=x")
    assert "1 validation error for block_size" in str(error.value)
    with pytest.raises(ValueError, match="1 validation error") as error:
        build(tmp_path)  # nothing was handed on: it is not the configuration's fault
    assert not isinstance(error.value, ConfigError)
