"""rollout.exact in jobs: no token's probability differs between engine and trainer."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridengine.engine.vllm.environment import vllm_available
from hybridengine.kernels._backend import requested_backend
from hybridengine.run.config import ConfigError, load_config
from hybridengine.run.errors import RolloutError
from hybridengine.train.choices import Choices, Machine, decide
from tests.architectures.catalogue import CATALOGUE
from tests.architectures.types_table import DOCUMENT, exact_types
from tests.engine.exact_types import OTHERS, save_other
from tests.extras.moe.exact_mixtures import KINDS as MIXTURES
from tests.ranks import RankFailure, run_ranks
from tests.tiny_models import save_characters, save_tiny
from tests.train.exact_job import VLLM, train
from tests.train.in_process import lines_of, run_with_vllm, small_job

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.skipif(not vllm_available(), reason="the rollout engine; `make setup` installs it"),
]


def one_token_differs(rank: int, world_size: int) -> None:
    from hybridengine.train.metrics import probs_diff

    ours = torch.tensor([-0.5, -1.5, -2.5])
    theirs = ours.clone()
    batch: Any = SimpleNamespace(
        old_log_probs=ours,
        rollout_log_probs=theirs,
        response_mask=torch.tensor([True, True, False]),
    )
    same, older = torch.tensor([True, True, False]), torch.tensor([True, False, True])
    theirs[2] = -3.0  # masked
    assert probs_diff(batch, None, same)["training/rollout_probs_diff_max"] == 0.0
    if rank == 1:
        theirs[1] = torch.nextafter(theirs[1], theirs[0])
    assert 0 < probs_diff(batch, None, older)["training/rollout_probs_diff_max"] < 1e-6
    with pytest.raises(RolloutError, match=r"not of the trained weights.*hybridengine parity"):
        probs_diff(batch, None, same)
    theirs[1] = torch.nan if rank == 0 else ours[1]
    with pytest.raises(RolloutError):
        probs_diff(batch, None, same)


def test_a_token_of_other_weights_is_an_error_on_every_rank() -> None:
    run_ranks(one_token_differs, 2)


def choose(*job: str, machine: Machine | None = None) -> Choices:
    return decide(load_config(None, job), machine=machine)


def inexact_reason(*job: str, machine: Machine | None = None) -> str:
    choices = choose(*job, machine=machine)
    assert not choices.exact
    return choices.reasons["exact"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("rollout.top_p=0.9", "algorithm.sampling_replay=off"), "needs algorithm.sampling_replay"),
        (
            ("model.lora_rank=2", "actor.fsdp_config.wrap_policy.min_num_params=9"),
            "wrap_policy.min_num_params is given",
        ),
        (
            ("model.lora_rank=2", "reshard.lora=adapters", "model.target_modules=[q_proj,lm_head]"),
            "model.target_modules names lm_head",
        ),
        (
            ("model.lora_rank=2", "reshard.lora=merged", "model.target_parameters=[x]"),
            "adapters of experts have no exact form",
        ),
        (("rollout.dtype=bfloat16",), "rollout.dtype is bfloat16"),
        (("rollout.quantization=fp8",), "rollout.quantization is fp8"),
        (("model.compile=true",), "model.compile is True"),
        (("model.cuda_graphs=true",), "model.cuda_graphs is True"),
        (("model.use_fused_kernels=false",), "model.use_fused_kernels is False"),
        (("rollout.name=hf",), "the engine is plain generate (rollout.name)"),
    ],
)
def test_auto_names_what_is_not_exact(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    job = [*small_job(tmp_path), *VLLM]
    assert choose(*job).exact
    assert message in inexact_reason(*job, *overrides)
    with pytest.raises(ConfigError, match=f"rollout.exact is on, but .*{re.escape(message)}"):
        choose(*job, *overrides, "rollout.exact=on")
    assert inexact_reason(*job, "rollout.exact=off") == "rollout.exact is off"


def test_a_missing_kernel_is_named(tmp_path: Path) -> None:
    job, message = [*small_job(tmp_path), *VLLM], r"decode_linear has no C\+\+ kernel"
    with requested_backend("reference"):
        assert re.match(message, inexact_reason(*job))
        with pytest.raises(ConfigError, match=f"rollout.exact is on, but {message}"):
            choose(*job, "rollout.exact=on")


def test_on_a_gpu_it_is_on_only_where_it_is_set(tmp_path: Path) -> None:
    job = [*small_job(tmp_path), *VLLM]
    gpu = Machine(80 << 30, fast_bfloat16=True, has_vllm=True)
    assert "not compared bit for bit on a GPU" in inexact_reason(*job, machine=gpu)
    with pytest.warns(UserWarning, match="on GPUs nobody has compared engine and trainer"):
        assert choose(*job, "rollout.exact=on", machine=gpu).exact
    with pytest.raises(ConfigError, match="the product over kept entries adds in another order"):
        choose(*job, "rollout.exact=on", "rollout.top_k=5", machine=gpu)


def test_a_model_without_exact_operators(tmp_path: Path) -> None:
    path = save_tiny(CATALOGUE["apertus"].config(), tmp_path)
    job = [*small_job(tmp_path), *VLLM, f"model.path={path}"]
    assert "apertus were not compared" in inexact_reason(*job)
    message = r"layers.0.mlp.act_fn .*has parameters of its own"
    with pytest.raises(ConfigError, match=f"rollout.exact is on, but .*{message}"):
        choose(*job, "rollout.exact=on")


# Of ranks that vLLM's slots have and have not; the scale of 1.5 is no power of two.
ADAPTERS: dict[str, tuple[str, ...]] = {
    "all": ("model.lora_rank=4", "model.lora_alpha=6", "reshard.lora=adapters"),
    "some": (
        "model.lora_rank=8",
        "model.lora_alpha=12",
        "model.target_modules=[v_proj,o_proj]",
        "reshard.lora=adapters",
    ),
    "merged": ("model.lora_rank=4", "model.lora_alpha=6", "actor.use_kl_loss=true"),
}


LONG = pytest.mark.exhaustive
CENTERED = "algorithm.score_centering.enabled=true"
_DRAFTS = "rollout.engine_kwargs.vllm.speculative_config"
DRAFTS = (
    "rollout.exact=on",  # auto is off with any of vLLM's arguments
    f"{_DRAFTS}.method=ngram",
    f"{_DRAFTS}.num_speculative_tokens=3",
    f"{_DRAFTS}.prompt_lookup_max=1",
    "rollout.temperature=0.1",  # drafts of a random model are seldom accepted otherwise
)


@pytest.mark.parametrize(
    "tp_size, dtype, adapters",
    [
        *((1, "float32", ""), (1, "bfloat16", "some"), (2, "bfloat16", "all")),
        *(pytest.param(2, dtype, "", marks=LONG) for dtype in ("float32", "bfloat16")),
        pytest.param(2, "float32", "all", marks=LONG),
        pytest.param(4, "float32", "", marks=LONG),
        (2, "bfloat16", "merged"),
        pytest.param(1, "float32", "merged", marks=LONG),
    ],
)
def test_two_ranks_of_fsdp_and_an_engine_of_any_tp_size(
    tmp_path: Path, tp_size: int, dtype: str, adapters: str
) -> None:
    """Two steps with shared prompts, recomputed layers, and old log-probs of their own.

    Adapters of all layers are sampled with n-gram drafts, of some with top-p and centered scores,
    merged ones with min-p.
    """
    job = [
        *small_job(tmp_path),
        *VLLM,
        f"rollout.tensor_model_parallel_size={tp_size}",
        f"rollout.dtype={dtype}",
        f"actor.fsdp_config.dtype={dtype}",
        f"trainer.n_gpus_per_node={max(2, tp_size)}",
        "trainer.total_training_steps=2",
        "data.max_response_length=16",
        "actor.ppo_max_token_len_per_gpu=128",
        "model.enable_gradient_checkpointing=true",
    ]
    if adapters:
        job += [*ADAPTERS[adapters], "actor.optim.lr=0.01"]
    if truncates := adapters in ("some", "merged"):
        job += ["rollout.min_p=0.2"] if adapters == "merged" else ["rollout.top_p=0.7", CENTERED]
    if adapters == "all":
        job += DRAFTS
    for replayed, holds in run_ranks(train, max(2, tp_size), tmp_path, job, timeout_s=500):
        assert holds and all(holds)
        assert replayed > 0 if tp_size == 1 else replayed == 0
    rows = [row for row in lines_of(tmp_path / "run" / "metrics.jsonl") if "actor/grad_norm" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["training/rollout_probs_diff_max"] == 0.0
        assert row["rollout_corr/rollout_is_max"] == row["training/rollout_ratio_mean"] == 1.0
        assert row["actor/grad_norm"] > 0
        assert ("actor/score_centering" in row) == (adapters == "some")
        assert not truncates or 1 <= row["num_kept/min"] < row["num_kept/max"]
        if adapters == "all":
            assert 0 < row["rollout/draft_acceptance_rate"] <= 1
            assert 1 < row["rollout/accepted_length"] <= 4


TYPES = ("qwen2", "qwen3", "gemma", "mistral", *OTHERS)  # llama's jobs are above
# Soft-caps in slices; a parallel block; angles in float32, in a model of transformers in vLLM.
STAYS = (("gemma2", 2, ""), ("cohere2", 2, "merged"), ("olmo2", 1, "all"))
OF_TYPES = [
    *((kind, tp_size, "") for kind in TYPES for tp_size in (1, 2)),
    *((kind, 2, adapters) for kind in ("glm", "cohere", "olmo2") for adapters in ("all", "merged")),
]


@pytest.mark.parametrize(
    ("kind", "tp_size", "adapters"),
    [*STAYS, *(pytest.param(*case, marks=LONG) for case in OF_TYPES if case not in STAYS)],
)
def test_every_type_in_jobs(tmp_path: Path, kind: str, tp_size: int, adapters: str) -> None:
    """Two steps in bfloat16, between which only the weights that have changed are sent."""
    folder = tmp_path / kind
    path = save_other(kind, folder)[1] if kind in OTHERS else save_tiny(kind, folder)
    save_characters(folder)
    job = [
        *small_job(tmp_path),
        *VLLM,
        f"model.path={path}",
        f"rollout.tensor_model_parallel_size={tp_size}",
        "actor.fsdp_config.dtype=bfloat16",
        *(ADAPTERS[adapters] if adapters else ["reshard.delta=on"]),
        "reward.custom_reward_function.name=hashed",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        "data.max_prompt_length=20",
        "data.max_response_length=16",
        "actor.ppo_max_token_len_per_gpu=128",
    ]
    for _, holds in run_ranks(train, 2, tmp_path, job, timeout_s=500):
        assert holds and all(holds)
    rows = [row for row in lines_of(tmp_path / "run" / "metrics.jsonl") if "actor/grad_norm" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["training/rollout_probs_diff_max"] == 0.0
        assert row["actor/grad_norm"] > 0


def test_biases_that_vllm_drops_are_refused(tmp_path: Path) -> None:
    path = save_other("ernie4_5", tmp_path / "biased", use_bias=True)[1]
    job = [*small_job(tmp_path), *VLLM, f"model.path={path}"]
    message = "reads nothing of the trained parameter 'model.layers.0.self_attn.q_proj.bias'"
    with pytest.raises(RankFailure, match=f"{message}.*engine's code does not have all of it"):
        run_ranks(run_with_vllm, 1, tmp_path, job, timeout_s=200)


def test_no_type_is_exact_without_a_job() -> None:
    jobs = {"llama", *TYPES, *MIXTURES, "qwen3_5_text"}  # the last: test_hybrid_exact.py
    assert exact_types(DOCUMENT.read_text()) == jobs
