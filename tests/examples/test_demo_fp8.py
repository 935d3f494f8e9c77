"""The demo's model, SmolLM2-135M, as it would be published in FP8: trained, exported, served."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridengine.lab.export import export_checkpoint
from hybridengine.model.stored import dequantize
from tests.model.served_checkpoints import serve
from tests.quantized_checkpoints import quantize_fp8
from tests.ranks import run_ranks
from tests.train.in_process import run_jobs

DEMO = Path(__file__).parents[2] / "examples" / "demo"


@pytest.mark.exhaustive
@pytest.mark.multirank
def test_a_published_fp8_model_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DEMO.parents[1])
    prepare = runpy.run_path(str(DEMO / "prepare.py"))
    for name in ("model", "sums", "job"):
        (tmp_path / name).mkdir()
    prepare["convert_model"](tmp_path / "model")
    prepare["write"](tmp_path / "sums", seed=1)
    plain = load_file(tmp_path / "model" / "model.safetensors")
    quantize_fp8(tmp_path / "model", 128)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    settings = {
        "model.path": tmp_path / "model",
        "data.train_files": tmp_path / "sums" / "train.parquet",
        "data.val_files": "null",
        "data.train_batch_size": 4,
        "rollout.n": 4,
        "rollout.name": "vllm",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 2,
        "trainer.save_freq": 2,
        "trainer.logger": "[jsonl]",
        "trainer.default_local_dir": tmp_path / "job" / "run",
    }
    job = [str(DEMO / "config.yaml"), *(f"{key}={value}" for key, value in settings.items())]
    [result] = run_jobs(tmp_path / "job", [job], timeout_s=1200)
    assert not result.refused
    errors = [row.get("training/rollout_probs_diff_mean") for row in result.rows]
    assert max(x for x in errors if x is not None) < 0.01  # bfloat16 in both
    final, out = tmp_path / "job" / "run" / "final", tmp_path / "exported"
    export_checkpoint(tmp_path / "job" / "run", out)
    found, exported = (load_file(folder / "model.safetensors") for folder in (final, out))
    assert found.keys() == plain.keys() == exported.keys()
    for name, x in found.items():
        assert torch.equal(x, exported[name]), name
        if (scales := stored.get(f"{name}_scale_inv")) is not None:
            before = dequantize(stored[name], scales, (128, 128))
            # Two steps of Adam change a weight by at most 2 · lr, which bfloat16 may round away.
            near = torch.isclose(x.float(), before, rtol=2**-8, atol=4e-5)
            assert near.all() and stored[name].dtype == torch.float8_e4m3fn, name
    tokenizer = AutoTokenizer.from_pretrained(final)
    text = "The capital of France is"
    prompt = tokenizer(text)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32).eval()
    assert not hasattr(model.config, "quantization_config")
    name, tokens, log_probs = run_ranks(serve, 1, str(final), "float32", prompt)[0]
    assert name == "LlamaForCausalLM" and "Paris" in tokenizer.decode(tokens)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens
    expected = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-3, rtol=0)
