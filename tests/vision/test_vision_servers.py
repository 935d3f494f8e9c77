"""Images through a real vLLM server: the trainer's tokens are the server's, checked per prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridengine.errors import RolloutError
from hybridengine.rollout.engine import Prompt
from hybridengine.rollout.server import VllmServer
from hybridengine.rollout.server.images import ServerPrompt, check_image_settings
from hybridengine.vision import EncodedImage
from tests.rollout.vllm_server import START_S, serving
from tests.trainer.overlapped import run_overlapped
from tests.vision.test_vision_tools import check_trajectories, tool_job
from tests.vision.tiny_vision import save_tiny_vision
from tests.vision.vision_jobs import check_steps, vision_job


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    folder = tmp_path_factory.mktemp("server")
    model = save_tiny_vision("qwen2_vl", folder / "model")
    with serving(model, 1, folder, images=True) as server:
        yield server


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(START_S + 300)
def test_a_server_and_the_trainer_agree(server: VllmServer, tmp_path: Path) -> None:
    """Every step has the same images, and updates the tower: the server keeps no old features."""
    served = ("rollout.name=auto", f"rollout.servers=[{server.url}]", "rollout.max_num_seqs=8")
    folders = [tmp_path / name for name in ("rows", "tools")]
    for folder in folders:
        folder.mkdir()
    jobs = [[*job, *served] for job in (vision_job(folders[0]), tool_job(folders[1]))]
    rows, tools = run_overlapped(tmp_path, jobs, num_ranks=2)
    check_steps(rows)
    check_trajectories(tools)
