"""Asynchronous saving, and resuming on the same and on other numbers of ranks."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ranks import run_ranks
from tests.tensors import part, whole
from tests.train.checkpoint.hostile import hostile_metadata, replace_metadata
from tests.train.sft_job import save_checkpoint, start_run, write_sft_job

pytestmark = pytest.mark.multirank


def weights_of(run) -> dict[str, torch.Tensor]:
    return {n: whole(p).detach().clone() for n, p in run.model.named_parameters()}


def moments_of(run) -> dict[str, torch.Tensor]:
    full = (whole(t) for t in run.optimizer.moments().values())
    return dict(zip(run.optimizer.moments(), (t.clone() for t in full), strict=True))


FSDP_SIZE = "model.fsdp_config.fsdp_size"


def save_amid_training(rank: int, world_size: int, folder: Path, fsdp_size: int) -> dict:
    """Two steps, then a save that cannot complete before two more steps."""
    import torch.distributed.checkpoint.filesystem as filesystem

    settings = {"trainer.max_actor_ckpt_to_keep": 1, FSDP_SIZE: fsdp_size}
    run = start_run(rank, world_size, folder, **settings)
    for step in (1, 2):
        run.step(step)
    may_write, write = threading.Event(), filesystem.FileSystemWriter.write_data

    def slow(*args, **kwargs):
        assert may_write.wait(300)
        return write(*args, **kwargs)

    filesystem.FileSystemWriter.write_data = slow
    saved = weights_of(run), moments_of(run), float(torch.rand(())), random.random()
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    save_checkpoint(run, 2, 0.5)
    draws = torch.rand(3).tolist(), random.random(), np.random.rand()
    uninterrupted = [run.step(step)[0]["train/loss"] for step in (3, 4)]
    assert not (folder / "run" / "global_step_2").exists()
    may_write.set()
    run.checkpoints.wait()
    return {
        "weights": saved[0],
        "moments": saved[1],
        "draws": draws,
        "losses": uninterrupted,
        "loader": run.loader.state_dict(),
    }


def resume(rank: int, world_size: int, folder: Path, fsdp_size: int, steps: int) -> dict:
    run = start_run(rank, world_size, folder, **{FSDP_SIZE: fsdp_size})
    assert run.checkpoints.resume("auto").step == 2
    weights, moments = weights_of(run), moments_of(run)
    draws = torch.rand(3).tolist(), random.random(), np.random.rand()
    losses = [run.step(step)[0]["train/loss"] for step in range(3, 3 + steps)]
    return {
        "weights": weights,
        "moments": moments,
        "draws": draws,
        "losses": losses,
        "loader": run.loader.state_dict(),
    }


@pytest.mark.parametrize(
    ("fsdp_size", "others"),
    [(-1, ((1, -1), (3, 1))), pytest.param(1, ((2, -1),), marks=pytest.mark.exhaustive)],
)
def test_state_at_save_is_resumed_on_any_number_of_ranks(
    tmp_path: Path, fsdp_size: int, others: tuple[tuple[int, int], ...]
) -> None:
    """others: ranks and `fsdp_size`, of which 1 is replicas without FSDP2."""
    folder = write_sft_job(tmp_path)
    before = run_ranks(save_amid_training, 2, folder, fsdp_size)
    marker = json.loads((folder / "run" / "global_step_2" / "complete.json").read_text())
    assert marker["step"] == 2 and marker["score"] == 0.5
    same = (2, fsdp_size)
    for world_size, size in (same, *others):
        after = run_ranks(resume, world_size, folder, size, 2)
        for rank, resumed in enumerate(after):
            for kind in ("weights", "moments"):
                want = before[0][kind]
                assert resumed[kind].keys() == want.keys()
                for name, tensor in want.items():
                    assert torch.equal(resumed[kind][name], tensor), (kind, name)
            assert resumed["losses"] == pytest.approx(before[0]["losses"], rel=1e-4)
            assert resumed["loader"] == before[0]["loader"]
            if (world_size, size) == same:
                assert resumed["losses"] == before[0]["losses"]
            if rank < 2:
                assert resumed["draws"] == before[rank]["draws"]


def fail_to_save(rank: int, world_size: int, folder: Path) -> list[str]:
    import torch.distributed.checkpoint.filesystem as filesystem

    from hybridengine.train.checkpoint import CheckpointError

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    run = start_run(rank, world_size, folder)
    write, filesystem.FileSystemWriter.write_data = filesystem.FileSystemWriter.write_data, full
    messages = []
    save_checkpoint(run, 1)
    with pytest.raises(CheckpointError) as error:
        run.checkpoints.wait()
    messages.append(str(error.value))
    assert not (folder / "run" / "global_step_1").exists()
    filesystem.FileSystemWriter.write_data = write
    save_checkpoint(run, 2)  # leftovers of the failed save are removed
    run.checkpoints.wait()
    if rank == 0:  # which gives the folder its name, when every rank has written
        assert not list((folder / "run").glob(".global_step_*"))
    return messages


def test_a_failed_save_surfaces_on_every_rank(tmp_path: Path) -> None:
    for [message] in run_ranks(fail_to_save, 2, write_sft_job(tmp_path)):
        assert "global_step_1 failed on rank" in message and message.endswith(" free)")
        assert "No space left" in message


def resume_wrongly(rank: int, world_size: int, folder: Path, case: str) -> str:
    from hybridengine.run.errors import ModelError
    from hybridengine.train.checkpoint import CheckpointError
    from hybridengine.train.data import DataError

    run = start_run(rank, world_size, folder)
    if case == "save":
        save_checkpoint(run, 1)
        run.checkpoints.wait()
        return ""
    with pytest.raises((CheckpointError, DataError, ModelError)) as error:
        run.checkpoints.resume("path", folder / "run" / case)
    return str(error.value)


def resume_mismatched(rank: int, world_size: int, folder: Path) -> list[str]:
    def refusal(job: Path, case: str) -> str:
        return resume_wrongly(rank, world_size, job, case)

    refusal(folder, "save")
    messages = [refusal(folder, "global_step_9")]
    write_sft_job(folder, rows=17)
    messages.append(refusal(folder, "global_step_1"))
    other = write_sft_job(folder / "other", width=64)
    (other / "run").mkdir()
    (folder / "run" / "global_step_1").rename(other / "run" / "global_step_1")
    return [*messages, refusal(other, "global_step_1")]


def test_mismatched_checkpoints_are_refused(tmp_path: Path) -> None:
    [(missing, rows, width)] = run_ranks(resume_mismatched, 1, write_sft_job(tmp_path))
    assert "global_step_9 does not exist" in missing
    assert "prompts was 24 and is 17" in rows
    assert "does not fit this job" in width and "mismatch" in width


def resume_damaged(rank: int, world_size: int, folder: Path) -> tuple[list[str], str, str]:
    from hybridengine.train.checkpoint import CheckpointError

    run = start_run(rank, world_size, folder)
    for step in (1, 2):
        run.step(step)
        save_checkpoint(run, step)
    run.checkpoints.wait()
    if rank == 0:
        file = max((folder / "run" / "global_step_2" / "tensors").iterdir(), key=_size)
        data = bytearray(file.read_bytes())
        data[1000:5000] = bytes(255 - byte for byte in data[1000:5000])
        file.write_bytes(data)
    torch.distributed.barrier()
    resumed = run.checkpoints.resume("auto")
    assert resumed.step == 1
    skipped = run.checkpoints.skipped
    with pytest.raises(CheckpointError) as by_path:
        run.checkpoints.resume("path", folder / "run" / "global_step_2")
    parameter = next(run.model.parameters())
    torch.nn.init.constant_(part(parameter), float("nan"))
    save_checkpoint(run, 3)
    run.checkpoints.wait()
    torch.distributed.barrier()  # rank 0 gives the folder its name
    with pytest.raises(CheckpointError) as diverged:
        run.checkpoints.resume("path", folder / "run" / "global_step_3")
    if rank == 0:
        _, content = next(hostile_metadata(folder / "ran"))
        replace_metadata(folder / "run" / "global_step_1", content)
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as hostile:
        run.checkpoints.resume("path", folder / "run" / "global_step_1")
    assert "posix.system" in str(hostile.value) and not (folder / "ran").exists()
    return skipped, str(by_path.value), str(diverged.value)


def _size(file: Path) -> int:
    return file.stat().st_size


def test_damaged_or_nan_checkpoints_are_not_resumed_from(tmp_path: Path) -> None:
    folder = write_sft_job(tmp_path)
    for [reason], by_path, diverged in run_ranks(resume_damaged, 2, folder):
        assert "global_step_2: tensors/__" in reason and "is damaged" in reason
        assert reason in by_path
        assert "global_step_3" in diverged and "contains NaN" in diverged


def test_unusable_checkpoints_are_reported_before_ranks_start(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from hybridengine import cli
    from hybridengine.train.checkpoint import find_checkpoints
    from tests.train.sft_job import sft_settings

    folder = write_sft_job(tmp_path)
    run_ranks(resume_wrongly, 1, folder, "save")
    (tmp_path / "config.yaml").write_text("")

    def preflight(*overrides: str) -> tuple[int, str]:
        settings = sft_settings(folder)
        command = ["sft", str(tmp_path / "config.yaml"), *settings, *overrides, "--dry-run"]
        result = CliRunner().invoke(cli.app, command)
        return result.exit_code, result.output

    code, output = preflight()
    assert code == 0 and "resumes after step 1" in output, output
    code, output = preflight("model.lora_rank=2")
    assert code == 2 and "was trained with all weights" in output, output
    code, output = preflight("seed=7")
    assert code == 2 and "seed was 1 and is 7" in output, output
    write_sft_job(tmp_path, width=64)
    code, output = preflight()
    assert code == 2 and "does not fit model.path: it contains" in output, output
    [checkpoint] = find_checkpoints(folder / "run")
    write_sft_job(tmp_path)
    metadata = checkpoint.path / "tensors" / ".metadata"
    metadata.write_bytes(bytes(255 - byte for byte in metadata.read_bytes()))
    code, output = preflight()
    assert code == 2 and ".metadata is damaged" in output, output
    _, content = next(hostile_metadata(tmp_path / "ran"))
    replace_metadata(checkpoint.path, content)
    code, output = preflight()
    assert code == 2 and "it names posix.system" in output, output
    assert not (tmp_path / "ran").exists()
    (checkpoint.path / "complete.json").write_text("{")
    code, output = preflight()
    assert code == 2 and "damaged complete.json" in output, output
    code, output = preflight("trainer.resume_mode=disable")
    assert code == 0 and "starts anew" in output, output
