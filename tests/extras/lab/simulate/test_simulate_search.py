"""Searching layouts, and the command: the best fits, a cluster that is too small is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from hybridengine import cli
from hybridengine.lab.simulate.cluster import Cluster
from hybridengine.lab.simulate.config import (
    ClusterConfig,
    LayoutConfig,
    WorkloadConfig,
    load_simulation_config,
)
from hybridengine.lab.simulate.model import ModelShape, Workload
from hybridengine.lab.simulate.search import Result, describe, search
from hybridengine.lab.simulate.sync import split_plan
from hybridengine.model.parameters import checkpoint_layout_from_config
from hybridengine.run.config import ConfigError
from tests.sync.brute_force import fused_layout

WORK = WorkloadConfig(prompts=64, n=4, response_length=300.0, max_response_length=1000)
NODE = ClusterConfig(gpu="h100", gpus_per_node=8)


@pytest.fixture(scope="module")
def config() -> LlamaConfig:
    sizes = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16)
    heads = dict(num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=False)
    return LlamaConfig(**sizes, **heads, vocab_size=32000, architectures=["LlamaForCausalLM"])


@pytest.fixture(scope="module")
def model(config) -> ModelShape:
    return ModelShape.of(config, checkpoint_layout_from_config(config).parameters)


def found(model, cluster=NODE, work=WORK, **fixed) -> Result:
    return search(model, Workload(work), Cluster.of(cluster), LayoutConfig(**fixed))


def test_the_best_is_feasible_and_the_fastest(model) -> None:
    result = found(model)
    assert result.num_layouts > 200
    usable = Cluster.of(NODE).usable_bytes
    assert all(step.memory.peak[1] <= usable for step in result.steps)
    assert result.best.seconds <= 1.1 * min(step.seconds for step in result.steps)
    assert {step.layout.mode for step in result.placements()} == {"sync", "one_step_off"}
    runners_up = [describe(step.layout) for step in result.runners_up()]
    assert len(set(runners_up)) == len(runners_up) >= 4
    assert describe(result.best.layout) not in runners_up
    assert any(reason.startswith("TP ") for reason in result.reasons)


def test_phases_follow_each_other_and_groups_wait_for_the_slowest(model) -> None:
    for step in found(model, work=replace(WORK, critic=True, reference=True)).placements():
        for group in step.groups:
            phases = [phase for phase in step.phases if phase.group == group]
            assert all(a.end <= b.start + 1e-9 for a, b in pairwise(phases))
            assert phases[-1].name == ("update_critic" if group == "critic" else "update_weights")
            assert phases[-1].end <= step.seconds + 1e-9
            assert 0 < step.utilisation(group) <= 1 + 1e-9
    groups = {tuple(s.groups) for s in found(model, work=replace(WORK, critic=True)).placements()}
    assert groups == {
        ("all ranks",),
        ("actor", "critic"),
        ("engine", "trainer"),
        ("engine", "trainer", "critic"),
    }


def test_a_critic_on_its_own_ranks_works_beside_the_policy(model) -> None:
    work = replace(WORK, critic=True, reference=True, old_log_probs=True)
    fixed = {"mode": "sync", "fsdp_size": 4, "tp_size": 1, "sequence_parallel": 1}
    together = found(model, work=work, critic_ranks=0, **fixed).best
    apart = found(model, work=work, critic_ranks=4, **fixed).best
    at = {phase.name: phase for phase in apart.phases}
    assert at["values"].start == at["ref"].start == at["generate"].end
    both_known = max(at["values"].end, at["old_log_prob"].end)
    assert at["update_critic"].start == at["update_actor"].start == both_known
    assert apart.seconds == max(phase.end for phase in apart.phases)
    assert {p.group for p in apart.phases if p.name == "update_weights"} == {"actor"}
    order = [phase.name for phase in together.phases]
    assert order.index("values") < order.index("update_critic") < order.index("update_actor")
    # The policy's ranks have no critic, the critic's no frozen models, logits or engine.
    moments, before = apart.memory.moments, together.memory.moments
    assert "critic" in before["train"] and "critic" not in moments["train"]
    critic = moments["train critic"]
    assert not {"frozen models", "logits", "engine weights"} & critic.keys()
    for kind in ("weights", "gradients", "moments"):
        assert critic[kind] == moments["train"][kind], "both over four ranks"
    planned = apart.replace_sync(replace(apart.sync, seconds=apart.sync.seconds + 100))
    assert planned.seconds == pytest.approx(at["update_actor"].end + apart.sync.seconds + 100)
    two = found(model, work=work, critic_ranks=2, **fixed | {"fsdp_size": 6}).best.memory.moments
    assert two["train critic"]["weights"] == pytest.approx(4 * model.num_parameters / 2)


@pytest.mark.slow
def test_more_of_the_machine_is_never_slower(model) -> None:
    base = found(model, mode="sync").best.seconds
    for faster in (
        replace(NODE, gpus_per_node=16),
        replace(NODE, gpu="h200"),
        replace(NODE, gpu="b200"),
        replace(NODE, intra_gb_per_s=900.0),
    ):
        best = found(model, faster, mode="sync").best
        assert best.seconds <= base * 1.05, "layouts equal to two digits are ordered otherwise"
    assert found(model, replace(NODE, gpu="a100"), mode="sync").best.seconds > base
    longer = replace(WORK, response_length=600.0)
    assert found(model, work=longer, mode="sync").best.seconds > base


def test_fixed_parts_are_kept(model) -> None:
    step = found(model, tp_size=4, fsdp_size=4, mode="one_step_off", trainer_ranks=4).best
    layout = step.layout
    assert (layout.tp_size, layout.fsdp_size, layout.trainer_ranks) == (4, 4, 4)
    assert (layout.engine_ranks, layout.num_engines, layout.replicas) == (4, 1, 1)


def test_what_cannot_be_is_refused_with_a_reason(model) -> None:
    with pytest.raises(ConfigError, match=r"fits the 1\.\d\dB parameters.*GiB on a rank.*add nod"):
        found(model, replace(NODE, gpus_per_node=1, memory_gib=8.0))
    with pytest.raises(ConfigError, match=r"more than the 7\.2 usable"):
        found(model, replace(NODE, memory_gib=8.0), tp_size=1, fsdp_size=1, offload=False)
    with pytest.raises(ConfigError, match=r"train critic needs"):
        alone = {"critic_ranks": 1, "fsdp_size": 7, "mode": "sync", "offload": False}
        found(model, replace(NODE, memory_gib=18.0), replace(WORK, critic=True), **alone)
    with pytest.raises(ConfigError, match=r"'tp_size': 3.*16 attention heads"):
        found(model, tp_size=3)
    for setting, words in (
        ("cluster.gpus=8", "did you mean cluster.gpu"),
        ("cluster.gpu=v100", "a100"),
        ("cluster.gpu=cpu", "set cluster.memory_gib"),
        ("workload.response_length=9000.0", "workload.max_response_length 4096"),
        ("layout.critic_ranks=2", "workload.critic is false"),
        ("workload.prompts=0", "greater than or equal to 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_simulation_config(None, ["model.path=m", setting])
    with pytest.raises(ConfigError, match=r"model\.path is required"):
        load_simulation_config(None)


def test_a_split_sync_sends_every_byte_once() -> None:
    shapes = {"c": ("column", (64, 32)), "r": ("row", (32, 64))}
    engine = [fused_layout(shapes, rank, 2) for rank in range(2)]
    plan = split_plan({n: s for n, (_, s) in shapes.items()}, engine, 4, 2)
    total = 2 * 2 * 64 * 32
    assert sum(plan.bytes_sent) == sum(plan.bytes_received) == total
    assert plan.bytes_received == [0] * 4 + [total // 2] * 2
    assert min(plan.bytes_sent[:4]) > 0, "replicas share the sending"


@pytest.mark.slow
def test_the_command(config, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    fixed = ["layout.mode=sync", "layout.tp_size=2", "layout.sequence_parallel=1"]
    job = [f"model.path={tmp_path}", "workload.critic=true", "workload.optimizer=muon", *fixed]
    arguments = ["simulate", *job, "--no-plan-sync"]
    shown = CliRunner().invoke(cli.app, arguments)
    assert shown.exit_code == 0, shown.output
    for word in ("generate", "update_actor", "KV cache", "Why this layout", "runner-up", "Muon: "):
        assert word in shown.output
    picture = tmp_path / "step.png"
    read = CliRunner().invoke(cli.app, [*arguments, "--json", "--png", str(picture)])
    document = json.loads(read.stdout)
    assert document["best"]["layout"]["mode"] == "sync"
    total = sum(phase["seconds"] for phase in document["best"]["phases"])
    assert total == pytest.approx(document["best"]["seconds"]), "phases follow each other"
    assert picture.stat().st_size > 10_000
    refused = CliRunner().invoke(cli.app, ["simulate", "model.path=none"])
    assert refused.exit_code == 2 and "model.path is 'none'" in refused.output
