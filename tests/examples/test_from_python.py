"""The example of the Python interface runs as written, but for model, data and sizes."""

import runpy
from pathlib import Path

import pytest

from tests.extras.api.small_job import alone, settings_of
from tests.ranks import run_ranks
from tests.train.in_process import small_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "from_python.py"


def _run(rank: int, world_size: int, folder: Path) -> float:
    alone()
    main = runpy.run_path(str(EXAMPLE))["main"]
    settings = settings_of(folder, "run")
    del settings["reward.custom_reward_function.path"]  # the example gives its own function
    return main(None, **settings)["training/global_step"]


@pytest.mark.multirank
def test_the_example_runs(tmp_path):
    import json

    (tmp_path / "job.json").write_text(json.dumps(small_job(tmp_path)))
    assert run_ranks(_run, 1, tmp_path, timeout_s=300.0) == [2.0]
