"""On-policy distillation: the loss is the divergence from the teacher, whatever the split."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests import tolerances
from tests.kernels.linear.distillation_cases import divergence_terms
from tests.loading import load_sharded
from tests.ranks import run_ranks
from tests.tensors import whole
from tests.tiny_models import VOCAB, save_tiny, tiny_config
from tests.train.in_process import run_jobs, small_job
from tests.train.rollout_cases import make_rollouts, share

pytestmark = pytest.mark.multirank

PAIRS = [([5, 9], [7, 8, 4]), ([5, 9], [11]), ([6, 17, 3], [9, 9])]
BETA = 0.3


def load(path: str, world_size: int) -> Any:
    """Load a model of float32 under FSDP2 over all ranks."""
    from hybridengine.model import sharding_mesh

    return load_sharded(
        path,
        mesh=sharding_mesh("cpu", world_size),
        param_dtype=torch.float32,
    )


def losses(rank: int, world_size: int, student_path: str, teacher_path: str) -> dict[str, Any]:
    """The loss and gradients of PAIRS, the last response masked, on shards of Ulysses and FSDP2."""
    from hybridengine.distill import packed_distillation_loss
    from hybridengine.model import pack_rollouts

    student, teacher = (load(path, world_size) for path in (student_path, teacher_path))
    teacher.requires_grad_(False)
    group = torch.distributed.group.WORLD if world_size > 1 else None
    results = {}
    for shared_prefix in (False, True):
        batch = pack_rollouts(PAIRS, "cpu", group, shared_prefix=shared_prefix)
        mask = torch.tensor([True] * 4 + [False] * 2)
        student.zero_grad()
        loss, divergences = packed_distillation_loss(
            student, teacher, batch, beta=BETA, response_mask=mask, num_items=torch.tensor(4)
        )
        (world_size * loss).backward()  # FSDP2 averages
        total = loss.detach().clone()
        if world_size > 1:
            torch.distributed.all_reduce(total)
        grads = [whole(p.grad) for p in student.parameters()]
        results[shared_prefix] = [total, divergences, *grads]
        assert all(p.grad is None for p in teacher.parameters())
    return results


def test_loss_and_gradients_are_those_of_full_logits(tmp_path: Path) -> None:
    """The teacher has another width, and a vocabulary that is padded to more entries."""
    student_path, teacher_path = save_tiny("llama", tmp_path / "student"), tmp_path / "teacher"
    config = tiny_config("qwen2")
    config.hidden_size, config.vocab_size = 64, VOCAB + 3
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(teacher_path)
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        for path in (student_path, teacher_path)
    )
    divergences = []
    for prompt, response in PAIRS:
        ids, count = torch.tensor([prompt + response]), len(response)
        log_q, log_p = (
            F.log_softmax(model(ids).logits[0, -count - 1 : -1, :VOCAB], -1)
            for model in (student, teacher)
        )
        divergences.append(divergence_terms(log_q, log_p.detach(), BETA).sum(-1))
    exact = torch.cat(divergences)
    exact[4:] = 0
    loss = exact.sum() / 4
    loss.backward()
    expected = [loss.detach(), exact.detach(), *(p.grad for p in student.parameters())]
    for world_size in (1, 2):
        for results in run_ranks(losses, world_size, student_path, str(teacher_path)):
            for values in results.values():
                for got, want in zip(values, expected, strict=True):
                    torch.testing.assert_close(got.double(), want, **tolerances.LINEAR)


def gathered_after_update(rank: int, world_size: int, path: str) -> list[str]:
    """Return which parameters of student and teacher are gathered after an update."""
    from torch.distributed.tensor import DTensor

    from hybridengine.distill import Student
    from hybridengine.model import Optimizer, on_device
    from hybridengine.run.config import RLConfig
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train.batch import DataParallel

    student, teacher = load(path, world_size), load(path, world_size)
    dp = DataParallel(Session(PhaseStatus(Path(path) / "run", rank)), 1)
    optimizer = Optimizer(student, lr=1e-3, total_steps=1)
    frozen = partial(on_device, teacher.requires_grad_(False))
    prompts, responses, _ = make_rollouts(101)
    batch = dp.build_batch(share(prompts, responses, rank, world_size), 1, 10_000)
    _, metrics = Student(RLConfig(), student, frozen, optimizer, dp).update(batch)
    assert metrics["actor/distill_loss"] == pytest.approx(0, abs=1e-6)
    named = [*student.named_parameters(), *teacher.named_parameters()]
    return [name for name, p in named if not isinstance(p, DTensor)]


def test_no_weight_stays_gathered_after_an_update(tmp_path: Path) -> None:
    """Without a backward pass FSDP2 would keep the teacher's embedding and head gathered."""
    assert run_ranks(gathered_after_update, 2, save_tiny("llama", tmp_path)) == [[], []]


def test_a_student_learns_its_teacher_on_its_own_responses(tmp_path: Path) -> None:
    base = small_job(tmp_path)
    teacher = save_tiny("llama", tmp_path / "teacher", seed=1)
    recipe = Path(__file__).parents[3] / "examples" / "distill" / "config.yaml"
    job = [
        str(recipe),
        *base,
        "data.val_files=null",
        f"data.chat_template={recipe.parents[1] / 'demo' / 'chat_template.jinja'}",
        "trainer.n_gpus_per_node=1",
        f"algorithm.distill.teacher_path={teacher}",
        "algorithm.distill.beta=0",
        "actor.ppo_epochs=2",
        "actor.ppo_mini_batch_size=2",
        "trainer.total_training_steps=6",
    ]
    other = tmp_path / "other_tokens"
    save_tiny("llama", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["w50"], vocab["w51"] = vocab["w51"], vocab["w50"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused = [*base, f"algorithm.distill.teacher_path={other}"]
    learned, without, wrong = run_jobs(tmp_path, [job, base, refused])
    curve = [row["actor/distill_loss"] for row in learned.rows]
    assert curve[-1] < 0.7 * curve[0]
    assert "timing_s/old_log_prob" not in learned.last and "actor/pg_loss" not in learned.last
    assert learned.last["critic/score/mean"] >= 0
    assert "actor/distill_loss" not in without.last
    assert "another vocabulary than model.path" in wrong.refused and "'w5" in wrong.refused
