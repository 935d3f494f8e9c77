"""The packages of tools/dropins.py: releases, tests, and what the tests do not reach."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Upstream:
    """A package, its tests, and what of ours they do not reach.

    requirements: pinned, installed without their dependencies.
    source: the release with its tests, "NAME==VERSION" of an sdist or the URL of a tar.gz.
    tests: files or folders in it.
    groups: of functions that are replaced; empty: the adapter's default ones.
    deselect: test id (its beginning) → why it is not run.
    rewrite: text in the test files → what stands for it here (a device, say).
    untested: replaced function → why no test calls it.
    stubs: modules that the package imports and that its tests do not use; they become mocks.
    from_source: import the package from the source tree instead of installing it (one that asks for
        another Python, say); requirements is its name and version then.
    """

    requirements: tuple[str, ...]
    source: str
    tests: tuple[str, ...]
    groups: tuple[str, ...] = ()
    deselect: dict[str, str] = field(default_factory=dict)
    rewrite: dict[str, str] = field(default_factory=dict)
    untested: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    stubs: tuple[str, ...] = ()
    from_source: bool = False


# The installed release is tested, not the source tree's.
_INSTALLED = {"PYTHONSAFEPATH": "1", "PYTEST_ADDOPTS": "--import-mode=importlib"}

UPSTREAMS: dict[str, Upstream] = {
    "verl": Upstream(
        requirements=(
            *("verl==0.9.1", "tensordict==0.10.0", "pyvers==0.2.3", "ray==2.60.0"),
            *("hydra-core==1.3.2", "codetiming==1.4.0", "torchdata==0.11.0", "orjson==3.13.0"),
            *("pylatexenc==2.11", "msgpack==1.2.4", "TransferQueue==0.1.11"),
        ),
        # The sdist of 0.9.1 lacks tests/utils; its functions' tests are those of 0.9.0.
        source="https://github.com/verl-project/verl/archive/refs/tags/v0.9.0.tar.gz",
        tests=(
            "tests/trainer/ppo/test_core_algos_on_cpu.py",
            "tests/trainer/ppo/test_dynamic_policy_losses_on_cpu.py",
            "tests/trainer/ppo/test_loss_aggregation_on_cpu.py",
            "tests/trainer/ppo/test_reinforce_pp_multiturn_on_cpu.py",
            "tests/trainer/ppo/test_rollout_corr_integration.py",
            "tests/trainer/ppo/test_value_loss_normalization_on_cpu.py",
            "tests/trainer/test_multi_trajectories_advantage_on_cpu.py",
            "tests/utils/test_groupwise.py",
            "tests/utils/test_linear_cross_entropy.py",
            "tests/utils/test_padding_on_cpu.py",
            "tests/utils/test_prepare_micro_batches_with_group_size.py",
            "tests/utils/test_seqlen_balancing.py",
            "tests/utils/test_torch_functional.py",
        ),
        groups=(
            *("log_probs", "fused_head", "advantages", "balancing", "padding"),
            *("losses", "policy_losses"),
        ),
        deselect={
            f"tests/utils/{test}": reason
            for reason, tests in {
                "collectives on an accelerator": (
                    "test_seqlen_balancing.py::test_seqlen_balancing_distributed_params",
                    "test_torch_functional.py::test_distributed_mean_max_min_std",
                    "test_torch_functional.py::test_distributed_masked_mean",
                ),
                "groups longer than a micro-batch, which verl 0.9.1 refuses": tuple(
                    f"test_prepare_micro_batches_with_group_size.py::test_force_group_size_{name}"
                    for name in ("2_basic", "4_basic", "reconstruction", "large_group")
                ),
            }.items()
            for test in tests
        },
        rewrite={  # test_linear_cross_entropy.py on the CPU, with smaller matrices
            "if not torch.cuda.is_available() or is_torch": "if is_torch",
            'device="cuda"': 'device="cpu"',
            "    D = 3584": "    D = 64",
            "    N = 512": "    N = 32",
        },
        untested=dict.fromkeys(
            (
                *(
                    f"verl.utils.torch_functional.{name}"
                    for name in (
                        *("entropy_from_logits", "entropy_from_logits_with_chunking"),
                        *("log_probs_from_logits_all_rmpad", "log_probs_from_logits_response"),
                        *("log_probs_from_logits_response_rmpad", "logprobs_from_logits"),
                        *("logprobs_from_logits_flash_attn", "logprobs_from_logits_naive"),
                        "logprobs_from_logits_v2",
                    )
                ),
                "verl.utils.attention_utils.index_first_axis",
                "verl.utils.attention_utils.pad_input",
                "verl.utils.experimental.torch_functional.FusedLinearForPPO.forward",
            ),
            "verl tests it on a GPU only",
        )
        | dict.fromkeys(
            (
                "verl.utils.seqlen_balancing.karmarkar_karp",
                *(
                    f"verl.trainer.ppo.core_algos.compute_{name}_outcome_advantage"
                    for name in (
                        *("gpg", "grpo_passk", "opo", "remax", "reinforce_plus_plus_baseline"),
                    )
                ),
                *(
                    f"verl.trainer.ppo.core_algos.compute_policy_loss_{name}"
                    for name in (
                        *("cispo", "clip_cov", "dppo_kl", "dppo_tv", "geo_mean", "gpg", "gspo"),
                        *("kl_cov", "reinforce", "sapo"),
                    )
                ),
            ),
            "verl has no test of it",
        ),
        environment=_INSTALLED,
    ),
    "trl": Upstream(
        requirements=("trl==1.16.0",),
        source="https://github.com/huggingface/trl/archive/refs/tags/v1.16.0.tar.gz",
        tests=("tests/test_utils.py",),
        deselect={
            "tests/test_utils.py::TestChunkedLogProbFunction::test_backward_bfloat16": (
                "its expected values are of logits rounded to bfloat16; ours are not rounded"
            )
        },
        untested={
            "trl.trainer.utils.selective_log_softmax_and_entropy": "its tests need a GPU",
            "trl.kernels.chunked_logprob.ChunkedLogProbFunction": "only the fused head calls it",
            "trl.trainer.utils.add_fused_lm_head": "its tests need a GPU and models of the hub",
            "trl.generation.vllm_generation.VLLMGeneration._init_vllm": "its tests need a GPU",
            "trl.generation.vllm_generation.VLLMGeneration.sync_weights": "its tests need a GPU",
            "trl.generation.vllm_client.VLLMClient.init_communicator": "its tests need a GPU",
        },
        environment=_INSTALLED,
    ),
}

UPSTREAMS["liger"] = Upstream(
    requirements=("liger-kernel==0.8.5",),
    source="liger-kernel==0.8.5",
    tests=(
        "test/chunked_loss/test_grpo_loss.py",
        "test/chunked_loss/test_dpo_loss.py",
        "test/chunked_loss/test_cpo_loss.py",
        "test/chunked_loss/test_orpo_loss.py",
        "test/chunked_loss/test_simpo_loss.py",
        "test/chunked_loss/test_kto_loss.py",
        "test/transformers/test_grpo_loss.py",
        "test/transformers/test_fused_linear_cross_entropy.py",
    ),
    # Sizes for a CPU: the large ones take minutes and gigabytes there.
    rewrite={
        "(8, 128, 1024, 4096),": "",
        "1024, 151936)": "128, 1519)",
        "1024, 64000)": "128, 640)",
    },
    environment={"TORCHDYNAMO_DISABLE": "1"},  # every test would compile Liger's loss again
)

UPSTREAMS["openrlhf"] = Upstream(
    requirements=("openrlhf==0.11.2",),
    source="https://github.com/OpenRLHF/OpenRLHF/archive/refs/tags/v0.11.2.tar.gz",
    tests=("tests/test_actor_entropy_temperature.py", "tests/test_loss_aggregation.py"),
    groups=("log_probs", "losses"),
    # The tests execute the package's files under private names; here they import the package.
    rewrite={
        "Actor = _load_actor_module().Actor": "from openrlhf.models.actor import Actor",
        "_loss_module = _load_loss_module()": "import openrlhf.models.loss as _loss_module",
    },
    untested={
        "openrlhf.models.loss.ValueLoss.forward": "it has no test",
        "openrlhf.models.loss.GPTLMLoss.forward": "it has no test",
    },
    environment={"TORCHDYNAMO_DISABLE": "1"},
    stubs=(
        *("deepspeed", "flash_attn", "flash_attn.bert_padding", "flash_attn.utils"),
        *("flash_attn.utils.distributed", "pylatexenc"),
    ),
)

_NEMO_TESTS = "tests/unit/algorithms/test_utils.py::test_"
_NEMO_GRPO = "needs nemo_rl.algorithms.grpo, which needs Ray and torchdata"
_NEMO_CE = "nemo_rl.distributed.model_utils.ChunkedDistributedHiddenStatesToLogprobs"
UPSTREAMS["nemo_rl"] = Upstream(
    requirements=("nemo-rl==0.7.0",),
    source="https://github.com/NVIDIA-NeMo/RL/archive/refs/tags/v0.7.0.tar.gz",
    from_source=True,  # not on PyPI, and for Python 3.13 only
    tests=(
        "tests/unit/conftest.py",
        "tests/unit/distributed/test_distributed_logprob.py",
        "tests/unit/algorithms/test_utils.py",
        "tests/unit/data/packing/test_algorithms.py",
    ),
    groups=("log_probs", "advantages", "packing"),
    deselect={
        "tests/unit/distributed/test_distributed_logprob.py::"
        "test_get_next_token_logprobs_chunking_reduces_memory": "measures CUDA memory",
        f"{_NEMO_TESTS}sync_colocated_throughput_flops_and_imbalance": _NEMO_GRPO,
        f"{_NEMO_TESTS}async_non_colocated_idle_ratio_and_generation_time": _NEMO_GRPO,
        f"{_NEMO_TESTS}minimal_inputs_no_counts_no_flops": _NEMO_GRPO,
        f"{_NEMO_TESTS}empty_per_worker_token_counts_skips_imbalance": _NEMO_GRPO,
    },
    # Ranks on the CPU, forked, so that they have our functions, too.
    rewrite={
        'device="cuda"': 'device="cpu"',
        "    torch.cuda.set_device(rank)\n": "",
        "mp.spawn(": "mp.start_processes(",
        "            join=True,\n": '            join=True,\n            start_method="fork",\n',
        "world_size=tp_size)": 'world_size=tp_size, backend="gloo")',
        "world_size=2)": 'world_size=2, backend="gloo")',
        "from nemo_rl.algorithms.grpo import MasterConfig": "MasterConfig = dict",
    },
    untested={
        f"{_NEMO_CE}.forward": "its tests need Ray and GPUs",
        f"{_NEMO_CE}.backward": "its tests need Ray and GPUs",
    },
    stubs=(
        *("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies"),
        *("nemo_rl.models.policy", "nemo_rl.utils.logger"),
    ),
)

UPSTREAMS["transformers"] = Upstream(
    requirements=("transformers==5.19.0",),
    source="https://github.com/huggingface/transformers/archive/refs/tags/v5.19.0.tar.gz",
    tests=("tests/trainer/test_trainer_utils.py",),
    untested={"transformers.loss.loss_utils.ForCausalLMLoss": "its tests need models of the hub"},
    environment=_INSTALLED,
)
