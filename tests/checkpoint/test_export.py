"""Export of our and verl's checkpoints as Hugging Face folders, in one process."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hybridengine import cli
from hybridengine.checkpoint import CheckpointError
from hybridengine.checkpoint.export import export_checkpoint
from hybridengine.errors import ModelError
from hybridengine.storage import write_manifest
from tests.checkpoint.hostile import hostile_metadata, replace_metadata
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny
from tests.tolerances import MERGED
from tests.trainer.sft_job import save_checkpoint, start_run, write_sft_job

pytestmark = pytest.mark.multirank


KINDS: dict[str, dict] = {"tied": {}, "untied": {}, "lora": {"model.lora_rank": 2}}
TEMPLATE = (
    "{{ messages[0].content }} {{ mark }}{% for m in messages[1:] %} {{ m.content }}{% endfor %}"
)


def save_and_export(rank: int, world_size: int, folder: Path) -> None:
    """Of each kind: one step, its checkpoint, the model as the run itself saves it, in float32."""
    from hybridengine.checkpoint.pretrained import save_pretrained

    for kind, overrides in KINDS.items():
        overrides = {
            "data.chat_template": folder / "chat.jinja",
            "data.apply_chat_template_kwargs.mark": "w7",
            **overrides,
        }
        run = start_run(rank, world_size, folder / kind, **overrides)
        run.step(1)
        save_checkpoint(run, 1)
        run.checkpoints.wait()
        save_pretrained(run.model, run.tokenizer, folder / kind / "online", torch.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    (folder / "chat.jinja").write_text(TEMPLATE)
    for kind in KINDS:
        write_sft_job(folder / kind)  # untied
    save_tiny("llama", folder / "tied" / "model")
    run_ranks(save_and_export, 2, folder)
    return folder


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(model.named_parameters())


def assert_equal(one: Path, other: Path, **tolerance: float) -> None:
    first, second = parameters(one), parameters(other)
    assert first.keys() == second.keys()
    for name in first:
        close = tolerance or {"rtol": 0, "atol": 0}
        torch.testing.assert_close(first[name].data, second[name].data, **close, msg=name)


def assert_prompts_as_trained(folder: Path) -> None:
    """Template and variables of the run are those of the folder's tokenizer."""
    chat = [{"role": "user", "content": "w3"}]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "w3 w7"


def test_a_run_without_checkpoints_names_its_final_folder(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "run" / "final")
    for given in (tmp_path / "run", tmp_path / "run" / "final"):
        with pytest.raises(CheckpointError, match=r"needs none: .*final' is a Hugging Face folder"):
            export_checkpoint(given, tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_offline_equals_online(tmp_path: Path, saved: Path, kind: str) -> None:
    folder = saved / kind
    export_checkpoint(folder / "run", tmp_path / "own")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "own").dtype == torch.float32
    source = export_checkpoint(folder / "run", tmp_path / "out", torch.float32)
    assert source.name == "global_step_1"
    assert_equal(tmp_path / "out", folder / "online", **(MERGED if kind == "lora" else {}))
    start = parameters(folder / "model")
    assert any(not torch.equal(p, start[name]) for name, p in parameters(tmp_path / "out").items())
    assert_prompts_as_trained(tmp_path / "out")
    assert_prompts_as_trained(source / "huggingface")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.tie_word_embeddings == (kind == "tied")
    if kind == "untied":
        _, content = next(hostile_metadata(tmp_path / "ran"))
        replace_metadata(source, content)
        with pytest.raises(CheckpointError, match=r"it names posix\.system"):
            export_checkpoint(folder / "run", tmp_path / "out", torch.float32)
        assert not (tmp_path / "ran").exists()
    if kind == "lora":
        adapter = tmp_path / "adapter"
        export_checkpoint(folder / "run", adapter, as_adapter=True)
        assert_prompts_as_trained(adapter)
        from peft import PeftModel

        base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        merged = PeftModel.from_pretrained(base, adapter).merge_and_unload()
        for name, p in merged.named_parameters():
            torch.testing.assert_close(p.data, parameters(tmp_path / "out")[name].data)


def write_verl_shards(rank: int, world_size: int, model_folder: str, out: Path, mesh_shape) -> None:
    """As verl's FSDP checkpoint manager writes a sharded state dict."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    names = ("ddp", "fsdp")[-len(mesh_shape) :]
    fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
    out.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), out / f"model_world_size_{world_size}_rank_{rank}.pt")
    if rank == 0:
        model.config.save_pretrained(out / "huggingface")
        AutoTokenizer.from_pretrained(model_folder).save_pretrained(out / "huggingface")


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)])
def test_verl_shards(tmp_path: Path, mesh_shape: tuple[int, ...]) -> None:
    """Three ranks divide no dimension evenly; two by two is HSDP."""
    model = save_tiny("llama", tmp_path / "model")
    world_size = torch.tensor(mesh_shape).prod().item()
    actor = tmp_path / "run" / "global_step_7" / "actor"
    run_ranks(write_verl_shards, world_size, model, actor, mesh_shape)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("7")
    result = CliRunner().invoke(
        cli.app,
        ["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--dtype", "float32"],
    )
    assert result.exit_code == 0, result.output
    assert_equal(tmp_path / "out", Path(model))


def test_plain_shards(tmp_path: Path) -> None:
    """Plain shards of dim 0, and replicated tensors."""
    model = save_tiny("qwen2", tmp_path / "model")
    model_in_memory = AutoModelForCausalLM.from_pretrained(model)
    model_in_memory.config.save_pretrained(tmp_path / "shards" / "huggingface")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "shards" / "huggingface")
    for rank in range(2):
        shards = {
            name: (tensor if tensor.ndim == 1 else tensor.chunk(2)[rank]).clone()
            for name, tensor in model_in_memory.state_dict().items()
        }
        torch.save(shards, tmp_path / "shards" / f"model_world_size_2_rank_{rank}.pt")
    export_checkpoint(tmp_path / "shards", tmp_path / "out", torch.float32)
    assert_equal(tmp_path / "out", Path(model))
    (tmp_path / "shards" / "model_world_size_2_rank_0.pt").unlink()
    with pytest.raises(CheckpointError, match=r"shards of ranks \[1\], expected 2"):
        export_checkpoint(tmp_path / "shards", tmp_path / "out", torch.float32)


class _Bomb:
    def __reduce__(self):
        return Path.touch, (Path("exploded"),)


def test_a_shard_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny("llama", tmp_path / "shards" / "huggingface")
    torch.save({"lm_head.weight": _Bomb()}, tmp_path / "shards" / "model_world_size_1_rank_0.pt")
    with pytest.raises(CheckpointError, match="shard"):
        export_checkpoint(tmp_path / "shards", tmp_path / "out")
    (tmp_path / "shards" / "model_world_size_1_rank_0.pt").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(CheckpointError, match="shard"):
        export_checkpoint(tmp_path / "shards", tmp_path / "out")
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "out").exists()


def test_nothing_to_export(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["export", str(tmp_path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and "never completed" in result.stderr


def plain_shard(folder: Path) -> Path:
    """A checkpoint of verl on one rank."""
    model = AutoModelForCausalLM.from_pretrained(save_tiny("llama", folder / "huggingface"))
    torch.save(model.state_dict(), folder / "model_world_size_1_rank_0.pt")
    return folder


def test_only_an_earlier_export_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders with other files, checkpoints and the working directory are left unchanged."""
    shards, out = plain_shard(tmp_path / "shards"), tmp_path / "out"
    used = tmp_path / "used"
    used.mkdir()
    (used / "thesis.tex").write_text("years of work")
    work = tmp_path / "work"
    (work / "data").mkdir(parents=True)
    monkeypatch.chdir(work)
    checkpoint = tmp_path / "run" / "global_step_1"
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, step=1, score=None)
    (tmp_path / "file").write_text("")
    refusals = {
        used: "contains 'thesis.tex', which no export wrote",
        shards: "which no export wrote",
        Path("."): "the working directory",
        Path(".."): "the working directory",
        checkpoint: "contains 'complete.json', which no export wrote",
        checkpoint.parent: "which no export wrote",
        tmp_path / "file": "is a file",
    }
    before = sorted(tmp_path.rglob("*"))
    for given, words in refusals.items():
        for as_adapter in (False, True):
            with pytest.raises(ModelError, match=words):
                export_checkpoint(shards, given, as_adapter=as_adapter)
    assert sorted(tmp_path.rglob("*")) == before
    for dtype in (torch.float32, torch.bfloat16):
        export_checkpoint(shards, out, dtype)
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert {f.stat().st_mode for f in out.iterdir()} == {(tmp_path / "file").stat().st_mode}
    (out / "eval.json").write_text("{}")
    with pytest.raises(ModelError, match=r"contains 'eval\.json'"):
        export_checkpoint(shards, out)
    assert not list(tmp_path.glob(".out.*"))
