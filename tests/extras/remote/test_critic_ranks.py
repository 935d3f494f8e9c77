"""A critic on ranks of its own: the same run as on the policy's ranks, resumed either way."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from hybridengine.remote.roles import Role, Roles
from hybridengine.run.config import ConfigError, load_config
from hybridengine.run.errors import EXIT_STOPPED
from hybridengine.run.session import read_status
from hybridengine.train.preflight import check_job
from tests.extras.remote.overlapped import MULTI_TURN, overrides_of, run_named, run_overlapped
from tests.ranks import Ranks, message_of, run_ranks
from tests.train.in_process import Result, small_job
from tests.train.sft_job import start_run, write_sft_job
from tests.train.toy import assert_named_when_killed

pytestmark = pytest.mark.multirank

APART = ("critic.n_gpus_per_node=1",)
GAE = (
    "algorithm.adv_estimator=gae",
    "algorithm.lam=0.9",
    "model.path={dir}/stopping",
    "data.max_response_length=12",
    "trainer.total_training_steps=3",
)
# Old log-probs from a forward of their own, several updates per batch, rejected responses.
MINI = (
    *GAE,
    "actor.ppo_mini_batch_size=2",
    "algorithm.use_kl_in_reward=true",
    "rollout.dtype=bfloat16",
    "algorithm.rollout_correction.rollout_rs=token_k2",
    "algorithm.rollout_correction.rollout_rs_threshold=1e-6",
    "trainer.critic_warmup=1",
    "trainer.save_freq=1",
    "data.val_files={dir}/rows.jsonl",
)
TURNS = (*GAE, *MULTI_TURN, "trainer.total_training_steps=2")
RESUMED = (*MINI, "trainer.resume_mode=path")
JOBS = {
    "mini": MINI,
    "mini_apart": (*MINI, *APART),
    "once": GAE,
    "once_apart": (*GAE, *APART),
    "turns": TURNS,
    "turns_apart": (*TURNS, *APART),
    "apart_to_apart": (*RESUMED, *APART, "trainer.resume_from_path={dir}/mini_apart/global_step_2"),
    "apart_to_together": (*RESUMED, "trainer.resume_from_path={dir}/mini_apart/global_step_2"),
    "together_to_apart": (*RESUMED, *APART, "trainer.resume_from_path={dir}/mini/global_step_2"),
}
OWN_METRICS = {"actor/idle_ratio", "critic/idle_ratio"}

# On the critic's rank, a signal to itself as soon as a step is done.
SIGNALLING = """
import os, signal, threading, time
from pathlib import Path

def wait():
    while not Path("{dir}/run/rollouts/step_1.jsonl").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

if os.environ["LOCAL_RANK"] == "1":
    threading.Thread(target=wait, daemon=True).start()
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("critic")
    return run_named(folder, small_job(folder), JOBS, num_ranks=2)


def trained(result: Result) -> list[dict[str, float]]:
    """The metrics of every step that do not depend on time and place."""
    kinds = ("actor", "critic", "rollout_corr", "training")
    return [
        {n: x for n, x in row.items() if n.split("/")[0] in kinds and n not in OWN_METRICS}
        for row in result.rows
        if "critic/vf_loss" in row
    ]


@pytest.mark.parametrize("kind", ["mini", "once", "turns"])
def test_it_is_the_run_with_the_critic_on_the_policys_ranks(
    results: dict[str, Result], kind: str
) -> None:
    together, apart = results[kind], results[f"{kind}_apart"]
    assert trained(apart) == trained(together) and len(trained(apart)) >= 2
    assert apart.rollouts == together.rollouts and "step_2" in apart.rollouts
    losses = [row["critic/vf_loss"] for row in trained(apart)]
    assert len(set(losses)) == len(losses) and min(losses) > 1e-6
    for row in apart.rows:
        if "critic/vf_loss" in row:
            assert 0 <= row["actor/idle_ratio"] < 1 and 0 < row["critic/idle_ratio"] < 1
            assert row["timing_s/values"] > 0 and row["timing_s/update_critic"] > 0


def test_the_batches_are_those_that_matter(results: dict[str, Result]) -> None:
    """Lengths differ, tools' tokens are there, responses are rejected: masks and rows moved."""
    lengths = {len(row["response_ids"]) for row in results["mini"].rollouts["step_1"]}
    assert len(lengths) > 2
    assert any(len(row["turns"]) > 1 for row in results["turns"].rollouts["step_1"])
    rejected = [row["rollout_corr/rollout_rs_masked_fraction"] for row in trained(results["mini"])]
    assert max(rejected) > 0 and min(rejected) < 1


def test_a_checkpoint_is_resumed_wherever_the_critic_is(results: dict[str, Result]) -> None:
    apart = results["mini_apart"]
    assert any(name.startswith("global_step_3/tensors_critic/") for name in apart.files)
    assert not any("tensors_critic" in name for name in results["mini"].files)
    last = trained(apart)[-1]
    for name in ("apart_to_apart", "apart_to_together", "together_to_apart"):
        assert [row["training/global_step"] for row in trained(results[name])] == [3], name
        assert trained(results[name])[-1] == last, name
        assert results[name].rollouts["step_3"] == apart.rollouts["step_3"], name


def test_groups_of_different_sizes(tmp_path: Path) -> None:
    """One rank of the policy and two of the critic, one of which has nothing to train in a step."""
    small = ("actor.ppo_mini_batch_size=1", "rollout.n=2", "data.train_batch_size=2")
    shared = (*GAE, *small)
    jobs = {"together": shared, "apart": (*shared, "critic.n_gpus_per_node=2")}
    compare(**run_named(tmp_path, small_job(tmp_path), jobs, num_ranks=3))


TWO = ("trainer.n_gpus_per_node=2",)
ULYSSES = (*TWO, "actor.ulysses_sequence_parallel_size=2")
OVERLAPPED = (
    *APART,
    "trainer.mode=one_step_off",
    "trainer.staleness=0",
    "rollout.n_gpus_per_node=1",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("shared", "own", "num_ranks"),
    [
        pytest.param(TWO, ("critic.n_gpus_per_node=2",), 4, id="fsdp"),
        pytest.param(ULYSSES, ("critic.n_gpus_per_node=2",), 4, id="ulysses"),
        pytest.param((), OVERLAPPED, 3, id="overlapped"),
    ],
)
def test_several_ranks_each(
    tmp_path: Path, shared: tuple[str, ...], own: tuple[str, ...], num_ranks: int
) -> None:
    """Both sharded over two ranks, with Ulysses, and beside an engine on a rank of its own."""
    jobs = {"together": (*MINI, *shared), "apart": (*MINI, *shared, *own)}
    compare(**run_named(tmp_path, small_job(tmp_path), jobs, num_ranks))


def compare(apart: Result, together: Result) -> None:
    assert len(trained(apart)) == len(trained(together)) == 3
    ours, theirs = trained(apart)[0], trained(together)[0]
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


def test_a_signal_to_the_critic_stops_the_run_after_a_checkpoint(tmp_path: Path) -> None:
    base = small_job(tmp_path)
    (tmp_path / "signalling.py").write_text(SIGNALLING.format(dir=tmp_path))
    more = (
        *GAE,
        *APART,
        "trainer.total_training_steps=1000",
        "trainer.save_freq=-1",
        f"model.external_lib={tmp_path}/signalling.py",
    )
    [stopped] = run_overlapped(tmp_path, [overrides_of(tmp_path, base, "run", more)], num_ranks=2)
    assert stopped.refused == f"exit code {EXIT_STOPPED}"
    steps = len(trained(stopped))
    assert 1 <= steps < 1000
    assert f"global_step_{steps}/tensors_critic/.metadata" in stopped.files


@pytest.mark.exhaustive
def test_a_killed_critic_ends_the_run_with_its_name(tmp_path: Path) -> None:
    """As test_overlap has it for an engine."""
    settings = {
        "algorithm.adv_estimator": "gae",
        "critic.n_gpus_per_node": 1,
        "rollout.name": "hf",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 10_000,
    }
    assert_named_when_killed(tmp_path, settings, "critic")


def fail_between_phases(rank: int, world_size: int, folder: Path, overrides: list[str]) -> None:
    """One rank of a job whose critic fails where a step begins, with its report in a file."""
    import torch.distributed as dist

    from hybridengine.run.config import load_config
    from hybridengine.train.batch import DataParallel
    from hybridengine.train.rl import RLTrainer

    def fail(*args: Any) -> None:
        raise RuntimeError("at the beginning")

    if rank == 1:
        DataParallel.build_batch = fail
    dist.barrier()
    dist.destroy_process_group()
    with (
        (folder / f"stderr_{rank}").open("w") as printed,
        contextlib.redirect_stderr(printed),
        pytest.raises(RuntimeError),
    ):
        RLTrainer.run(load_config(None, overrides))


def test_a_critic_that_fails_between_two_phases_names_its_step(tmp_path: Path) -> None:
    overrides = overrides_of(tmp_path, small_job(tmp_path), "run", (*GAE, *APART))
    with Ranks(fail_between_phases, 2, tmp_path, overrides) as ranks:
        ranks.results_without(0)
    printed = (tmp_path / "stderr_1").read_text()
    assert "rank 1 failed in phase 'wait_for_actor' of step 1: RuntimeError: at the" in printed
    assert read_status(tmp_path / "run")[1].step == 1


def fail_to_save(rank: int, world_size: int, folder: Path) -> tuple[list[Any], str, list[str]]:
    """(What the critic's ranks announce, the error of the policy's, checkpoints left)."""
    import torch.distributed.checkpoint.filesystem as filesystem

    from hybridengine.remote.critic.worker import PartWriter
    from hybridengine.train.checkpoint import Checkpointer, CheckpointError

    run = start_run(rank, world_size, folder)
    write = filesystem.FileSystemWriter.write_data
    announced: list[Any] = []
    writer = PartWriter("critic", run.model, run.optimizer, lambda _, x: announced.append(x))

    def full(self: Any, *args: Any) -> Any:
        if self.path.name == "tensors_critic":
            raise OSError(28, "No space left on device")
        return write(self, *args)

    filesystem.FileSystemWriter.write_data = full

    class Remote:
        name, num_bytes, load = "critic", 8, writer.load

        def save(self, folder: Path) -> None:
            writer.save(folder)
            writer.wait()

        def saved(self, folder: Path) -> dict[str, list[int]]:
            raise CheckpointError(f"the critic's ranks: {announced[0]}")

    root = folder / "run"
    checkpoints = Checkpointer(root, {"actor": (run.model, None)}, {}, remote=Remote())
    checkpoints.save(1, None, lambda folder: None)
    message = message_of(checkpoints.wait)
    return announced, message, [path.name for path in root.glob("global_step_*")]


def test_a_failed_save_of_the_critic_leaves_no_checkpoint(tmp_path: Path) -> None:
    [(announced, message, left)] = run_ranks(fail_to_save, 1, write_sft_job(tmp_path))
    assert len(announced) == 1 and announced[0].startswith("saving failed on rank 0: ")
    assert message.startswith("CheckpointError: saving checkpoint ")
    assert "failed on rank 0: the critic's" in message and "No space left" in message and not left


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    base = small_job(tmp_path)

    def load(*more: str):
        return load_config(None, overrides_of(tmp_path, base, "run", more))

    with pytest.raises(ConfigError, match=r"critic\.n_gpus_per_node is 1, but .*'grpo'.*no critic"):
        check_job(load("critic.n_gpus_per_node=1"))
    for more, words in (
        (
            (
                "critic.n_gpus_per_node=3",
                "actor.fsdp_config.fsdp_size=2",
                "trainer.n_gpus_per_node=2",
            ),
            r"3 ranks.*fsdp_size 2 does not divide",
        ),
        (
            (
                "critic.n_gpus_per_node=3",
                "actor.ulysses_sequence_parallel_size=2",
                "trainer.n_gpus_per_node=2",
            ),
            r"3 ranks.*ulysses_sequence_parallel_size 2 does not",
        ),
        (("critic.n_gpus_per_node=9", "data.train_batch_size=2"), r"one optimizer step has 8"),
        (("critic.n_gpus_per_node=-1",), r"critic\.n_gpus_per_node"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(*GAE, *more)
    from hybridengine.api.settings import check_ranks

    config = load(*GAE, "critic.n_gpus_per_node=2", "trainer.nnodes=2")
    assert (config.ranks_per_node, config.num_critic_ranks, config.num_engines) == (3, 4, 2)
    with pytest.raises(ConfigError, match=r"critic\.n_gpus_per_node is 2.*every process"):
        check_ranks(config)


def test_roles_of_three_kinds() -> None:
    roles = Roles(2, trainers_per_node=1, engines_per_node=2, tp_size=2, critics_per_node=2)
    found = [roles.role_of(rank).world for rank in range(10)]
    node = ["trainer", *["engine {}"] * 2, "critic", "critic"]
    assert found == [name.format(k) for k in (0, 1) for name in node]
    assert roles.role_of(9) == Role("critic", 3, 4, 2) and roles.role_of(3).rank == 0
    assert (roles.ranks_per_node, roles.num_critics, roles.num_engines) == (5, 4, 2)
