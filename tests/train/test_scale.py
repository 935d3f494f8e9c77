"""Options of scale and memory, through whole PPO steps on two and four ranks: the results stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.in_process import Result, run_jobs, small_job

pytestmark = pytest.mark.multirank

FSDP = "actor.fsdp_config"
VARIANTS = {
    "plain": [],
    "replicated": [f"{FSDP}.fsdp_size=1"],
    "shared": ["actor.ulysses_sequence_parallel_size=2"],
    "offloaded": [f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true"],
    "traffic": [
        f"{FSDP}.reshard_after_forward=false",
        f"{FSDP}.forward_prefetch=true",
        f"{FSDP}.wrap_policy.min_num_params=30000",
    ],
    "float16": [f"{FSDP}.dtype=float16"],
}
# A second step samples from weights that Adam moved: it divides gradients by their own size, so
# rounding in small ones (float32 sums in another order) comes back larger.
REL = {"offloaded": 0.0}


def run_on(num_ranks: int, folder: Path, variants: list[list[str]]) -> list[Result]:
    base = [
        *small_job(folder),
        "algorithm.adv_estimator=gae",
        "actor.use_kl_loss=true",
        "actor.optim.lr=1e-3",
        "critic.optim.lr=1e-3",
        "trainer.total_training_steps=2",
        f"trainer.n_gpus_per_node={num_ranks}",
    ]
    # The first loss scale of float16 would overflow now and then, and the step be skipped.
    library = folder / "small_loss_scale.py"
    library.write_text("from hybridengine.model import optim\noptim.INITIAL_LOSS_SCALE = 2.0**8\n")
    base.append(f"model.external_lib={library}")
    return run_jobs(folder, [[*base, *variant] for variant in variants], num_ranks)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Result]:
    found = run_on(2, tmp_path_factory.mktemp("scale"), list(VARIANTS.values()))
    return dict(zip(VARIANTS, found, strict=True))


def trained(result: Result) -> list[dict[str, float]]:
    assert not result.refused
    return [row for row in result.rows if "actor/grad_norm" in row]


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("plain", "float16")])
def test_two_steps_are_those_of_plain_sharding(results: dict[str, Result], name: str) -> None:
    assert_same(results[name], results["plain"], REL.get(name, 2e-3), REL.get(name, 1e-5))


@pytest.mark.exhaustive
def test_rows_of_sequences_on_two_ranks_of_each_replica(tmp_path: Path) -> None:
    shared = [*VARIANTS["shared"], f"{FSDP}.fsdp_size=2"]
    plain, result = run_on(4, tmp_path, [[], shared])
    assert_same(result, plain, 2e-3, 1e-5)


def assert_same(result: Result, want: Result, rel: float, absolute: float) -> None:
    plain, rows = trained(want), trained(result)
    assert len(rows) == len(plain) == 2
    for row, expected in zip(rows, plain, strict=True):
        compared = [k for k in expected if k.startswith(("actor/", "critic/", "response_length/"))]
        assert {"actor/grad_norm", "actor/kl_loss", "critic/vf_loss"} <= set(compared)
        for key in compared:
            assert row[key] == pytest.approx(expected[key], rel=rel, abs=absolute), key


def test_float16_computes_the_same_otherwise(results: dict[str, Result]) -> None:
    plain, half = trained(results["plain"])[0], trained(results["float16"])[0]
    assert half["actor/entropy"] != plain["actor/entropy"]
    for key in ("actor/entropy", "actor/grad_norm", "critic/grad_norm"):
        assert half[key] == pytest.approx(plain[key], rel=2e-2), key
