"""Export of our and verl's checkpoints as Hugging Face folders, in one process."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hybridengine import cli
from hybridengine.lab.export import export_checkpoint
from hybridengine.model.parameters import parameter_shards, saved_dtypes
from hybridengine.run.errors import ModelError
from hybridengine.run.storage import write_manifest
from hybridengine.train.checkpoint import CheckpointError
from hybridengine.train.checkpoint.pretrained import copy_files, copy_unread, unread_bytes
from tests.architectures.catalogue import CATALOGUE
from tests.model.own_code import UNCHANGED, save_own_code
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny
from tests.tolerances import MERGED
from tests.train.checkpoint.hostile import hostile_metadata, replace_metadata
from tests.train.sft_job import save_checkpoint, start_run, write_sft_job

pytestmark = pytest.mark.multirank


KINDS: dict[str, dict] = {"tied": {}, "untied": {}, "lora": {"model.lora_rank": 2}, "mtp": {}}
TEMPLATE = (
    "{{ messages[0].content }} {{ mark }}{% for m in messages[1:] %} {{ m.content }}{% endfor %}"
)


def save_and_export(rank: int, world_size: int, folder: Path) -> None:
    """Of each kind: one step, its checkpoint, the model as the run itself saves it, in float32."""
    from hybridengine.train.checkpoint.pretrained import save_pretrained

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
        if kind == "mtp":
            save_pretrained(run.model, run.tokenizer, folder / kind / "final", torch.bfloat16)


# As GLM-4.5 has them, with the layer after the last one; one is in a dtype of its own.
MTP = {
    "model.layers.2.eh_proj.weight": torch.randn(128, 256),
    "model.layers.2.enorm.weight": torch.randn(128).bfloat16(),
    "model.layers.2.mlp.gate.e_score_correction_bias": torch.randn(4),
    "model.layers.2.mlp.experts.0.up_proj.weight": torch.randn(128, 128).bfloat16(),
}


def save_unread_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Add a second weight file to the model in `folder`."""
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    (folder / "model.safetensors").rename(folder / first)
    save_file(tensors, folder / second, {"format": "pt"})
    names = dict.fromkeys(load_file(folder / first), first) | dict.fromkeys(tensors, second)
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's weight files, whose index is right."""
    files = {file.name: load_file(file) for file in sorted(folder.glob("*.safetensors"))}
    if (index := folder / "model.safetensors.index.json").is_file():
        expected = {name: file for file, tensors in files.items() for name in tensors}
        assert json.loads(index.read_text())["weight_map"] == expected
    return {name: x for tensors in files.values() for name, x in tensors.items()}


def assert_same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert torch.equal(one[name], other[name]), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    (folder / "chat.jinja").write_text(TEMPLATE)
    for kind in KINDS:
        write_sft_job(folder / kind)  # untied
    save_tiny("llama", folder / "tied" / "model")
    save_unread_tensors(folder / "tied" / "model", {"lm_head.weight": torch.zeros(101, 128)})
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(CATALOGUE["glm4_moe"].config())
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += torch.tensor([0.0, 1e-5, 2e-5, 3e-5])  # equal in bfloat16
            buffer += 1
    model.save_pretrained(folder / "mtp" / "model")
    save_unread_tensors(folder / "mtp" / "model", MTP)
    (folder / "mtp" / "model" / "LICENSE").write_text("terms")
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


def test_what_transformers_keeps_in_float32_and_what_the_model_has_besides(
    tmp_path: Path, saved: Path
) -> None:
    """Dtypes and values are those of transformers' own save; other tensors are the source's."""
    own = AutoModelForCausalLM.from_pretrained(saved / "mtp" / "online", dtype=torch.bfloat16)
    own.save_pretrained(tmp_path / "transformers")
    expected = stored(tmp_path / "transformers") | MTP
    kept = [name for name, x in expected.items() if x.dtype == torch.float32 and name not in MTP]
    assert kept == ["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert len(expected[kept[0]].unique()) == 4  # which bfloat16 rounds to one value
    export_checkpoint(saved / "mtp" / "run", tmp_path / "out", torch.bfloat16)
    for folder in (tmp_path / "out", saved / "mtp" / "final"):
        assert_same_tensors(stored(folder), expected)
        assert (folder / "LICENSE").read_text() == "terms"


def test_a_tied_weight_of_the_source_is_not_copied(saved: Path) -> None:
    assert "lm_head.weight" in stored(saved / "tied" / "model")
    assert "lm_head.weight" not in stored(saved / "tied" / "online")


def test_experts_that_transformers_fuses_are_read(saved: Path) -> None:
    """Each is a tensor of the source, under a name that the trained model does not have."""
    folder = saved / "mtp" / "model"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert "model.layers.1.mlp.experts.0.up_proj.weight" in stored(folder)
    assert unread_bytes(model, str(folder)) == sum(x.nbytes for x in MTP.values())


@pytest.mark.parametrize("names", [("pytorch_model.bin",), ("model.safetensors", "more.bin")])
def test_a_source_without_an_index(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Weights in one file, also of torch's format; other files are no weights of the model."""
    folder = Path(save_tiny("llama", tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors") | {"mtp.weight": torch.ones(3)}
    (folder / "model.safetensors").unlink()
    for name in names:
        save = torch.save if name.endswith("bin") else save_file
        save(tensors, folder / name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "out")
    copy_unread(model, str(folder), tmp_path / "out")
    added = stored(tmp_path / "out")
    assert added.pop("mtp.weight").tolist() == [1, 1, 1]
    assert added.keys() | {"mtp.weight"} == tensors.keys()


def test_own_code_comes_along(tmp_path: Path) -> None:
    """A folder with its configuration names the code, which is in no other place."""
    path = save_own_code(tmp_path / "model", UNCHANGED)
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    (tmp_path / "out").mkdir()
    model.config.save_pretrained(tmp_path / "out")
    copy_files(path, tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    own = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert type(own).__name__ == "OwnForCausalLM"
    copy_files(None, tmp_path / "out")
    copy_files(str(tmp_path / "moved"), tmp_path / "out")


@pytest.mark.parametrize("kind", ["deepseek_v3", "ernie4_5_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_are_those_of_transformers_own_save(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    config = CATALOGUE[kind].config()
    with torch.random.fork_rng():
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
    expected = {name: x.dtype for name, x in parameter_shards(loaded).items()}
    assert saved_dtypes(loaded, dtype) == expected
    assert dtype == torch.float32 or len(set(expected.values())) == 2 - (
        kind == "gpt_oss" and dtype == torch.bfloat16
    )


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
