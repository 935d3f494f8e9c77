"""An engine of vLLM over two engine ranks, which take the same actions, beside one trainer rank."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.model import pack_rollouts, packed_log_probs
from tests.engine.exact_engines import open_model
from tests.extras.remote.overlapped import run_overlapped
from tests.sync.quantized_kernel import register_kernel
from tests.train.in_process import small_job

pytest.importorskip("vllm")
pytestmark = pytest.mark.multirank


FP8 = {"rollout.quantization": "fp8", "rollout.dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("weights", "rounding"),
    [({}, 1e-3), pytest.param(FP8, 8e-3, marks=pytest.mark.exhaustive)],
    ids=["float32", "fp8"],
)
def test_a_tensor_parallel_engine_beside_a_trainer_rank(
    tmp_path: Path, weights, rounding: float
) -> None:
    settings = weights | {
        "rollout.name": "vllm",
        "rollout.enforce_eager": "true",
        "rollout.kv_cache_gib": 0.05,
        "rollout.max_num_seqs": 16,
        "rollout.n_gpus_per_node": 2,
        "rollout.tensor_model_parallel_size": 2,
        "trainer.mode": "one_step_off",
        "trainer.total_training_steps": 3,
    }
    job = [*small_job(tmp_path), *(f"{key}={value}" for key, value in settings.items())]
    pairs = dict(o.split("=", 1) for o in job)
    job = [f"{k}={v}" for k, v in pairs.items()]
    before = register_kernel if weights else None
    [run] = run_overlapped(tmp_path, [job], num_ranks=3, before=before)
    assert not run.refused
    versions = [{r["weight_version"] for r in run.rollouts[f"step_{k}"]} for k in (1, 2, 3)]
    assert versions == [{0}, {0}, {1}]
    # Engine and trainer have the same weights in the first step; then the engine's are older.
    diffs = [row["training/rollout_probs_diff_mean"] for row in run.rows if "actor/pg_loss" in row]
    assert diffs[0] < rounding < min(diffs[1:])


def keep_weights(folder: Path) -> None:
    """On every rank: each sync writes the trained weights to folder / its version."""
    from hybridengine.model import parameter_shards
    from hybridengine.sync.shards import full_tensor
    from hybridengine.train.rl import RLTrainer

    sync = RLTrainer.sync

    def keep_and_sync(self: Any, step: int) -> Any:
        weights = {n: full_tensor(p).clone() for n, p in parameter_shards(self.model).items()}
        torch.save(weights, folder / str(step))
        return sync(self, step)

    RLTrainer.sync = keep_and_sync  # type: ignore[method-assign]


MODES = {
    "one_step_off": {"rollout.tensor_model_parallel_size": 2},
    "async": {
        "rollout.tensor_model_parallel_size": 2,
        "trainer.staleness": 2,
        "rollout.in_flight_update": "recompute_kv",
    },
}


@pytest.mark.parametrize(
    "mode", ["one_step_off", pytest.param("async", marks=pytest.mark.exhaustive)]
)
def test_exact_log_probs_are_those_of_the_weights_that_generated(tmp_path: Path, mode: str) -> None:
    """The first step compares them by itself; later ones have older rollouts."""
    settings = MODES[mode] | {
        "rollout.name": "vllm",
        "rollout.exact": "on",
        "rollout.kv_cache_gib": 0.05,
        "rollout.max_num_seqs": 16,
        "rollout.n_gpus_per_node": 2,
        "trainer.mode": mode,
        "trainer.total_training_steps": 4,
        "data.max_response_length": 16,
    }
    given = [*small_job(tmp_path), *(f"{key}={value}" for key, value in settings.items())]
    pairs = dict(o.split("=", 1) for o in given)
    job = [f"{k}={v}" for k, v in pairs.items()]
    weights = tmp_path / "weights"
    weights.mkdir()
    [run] = run_overlapped(tmp_path, [job], num_ranks=3, before=partial(keep_weights, weights))
    assert not run.refused
    rows = [row for row in run.rows if "actor/pg_loss" in row]
    assert rows[0]["training/rollout_probs_diff_max"] == 0.0
    held = {int(path.name): torch.load(path) for path in weights.iterdir()}
    names = [n for n in held[0] if n.endswith(("o_proj.weight", "down_proj.weight"))]
    model = open_model(pairs["model.path"], "float32", dict.fromkeys(names, 2))
    ages, versions = set[int](), set[int]()
    for step in range(1, 5):
        for row in run.rollouts[f"step_{step}"]:
            theirs = torch.tensor(row["log_probs"])
            begin, runs = 0, [[row["weight_version"], len(theirs)]]
            for version, count in row.get("weight_versions", runs):
                part = slice(begin, begin := begin + count)
                assert torch.equal(log_probs_of(model, held[version], row)[part], theirs[part])
                versions.add(version)
                ages.add(step - 1 - version)
    assert len(versions) > 1 and min(ages) == 0 < max(ages)
    for older, newer in pairwise(sorted(versions)):  # which version it is matters
        row = run.rollouts["step_4"][0]
        assert not torch.equal(*(log_probs_of(model, held[v], row) for v in (older, newer)))


@torch.no_grad()
def log_probs_of(model: Any, weights: dict[str, torch.Tensor], row: dict[str, Any]) -> torch.Tensor:
    model.load_state_dict(weights, strict=False)
    batch = pack_rollouts([(row["prompt_ids"], row["response_ids"])])
    return packed_log_probs(model, batch)[0]
