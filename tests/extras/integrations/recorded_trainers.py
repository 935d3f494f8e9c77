"""What our weight sync replaces in other trainers, as their releases declare it.

    record("areal")      # in this process `import areal…` then finds these modules

Signatures are those of SkyRL 0.4.0, AReaL 1.0.4 and NeMo RL's main branch of August 2026.
`python -m tools.trainers` runs the packages themselves.
"""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType

__all__ = ["RECORDED", "record"]

VERSIONS = {"skyrl": "0.4.0", "areal": "1.0.4", "nemo-rl": "0.6.0"}
RECORDED = {
    "skyrl": {
        "ray": """
calls = []
def init(runtime_env=None, **options): calls.append((runtime_env, options))
""",
        "skyrl.backends.skyrl_train.weight_sync": """
def get_vllm_receive_backend(weight_sync_backend, colocate_all): return "skyrl_nccl"
""",
        "skyrl.backends.skyrl_train.weight_sync.weight_senders": """
def build_trainer_engine(*, ie_cfg, colocate_all, rank, inference_world_size, source_factory,
    draft_source_factory, server_urls, data_parallel_size, base_model_path=None): ...
class SkyrlTrainerCapabilities: ...
""",
        "skyrl.train.utils.utils": """
import ray
def initialize_ray(cfg): ray.init(runtime_env={"env_vars": {"A": "1"}}, log_to_driver=cfg)
""",
    },
    "areal": {
        "areal.engine.fsdp_engine": """
class FSDPEngine:
    def _init_weight_update_from_distributed(self, meta): ...
    def _update_weights_from_distributed(self, meta): ...
""",
        "areal.api.cli_args": """
class vLLMConfig:
    @staticmethod
    def build_args(vllm_config, tp_size, pp_size, host=None, port=None, dist_init_addr=None,
                   n_nodes=1, node_rank=0):
        return {"tensor_parallel_size": tp_size, "port": port, "worker_extension_cls": "theirs"}
    @staticmethod
    def build_cmd_from_args(args): return get_py_cmd("theirs", args)
def get_py_cmd(module, args): return ["python3", "-m", module, *sorted(args)]
""",
        "areal.utils.network": """
def gethostip(): return "127.0.0.1"
""",
    },
    "nemo_rl": {
        "nemo_rl.utils.checkpoint_engines.base": """
class CheckpointEngine: ...
""",
        "nemo_rl.models.policy.workers.checkpoint_engine": """
class PolicyCheckpointEngineMixin:
    async def send_weights_via_checkpoint_engine(self, kv_scales=None): return "theirs"
""",
        "nemo_rl.models.generation.vllm.checkpoint_engine": """
class VllmCheckpointEngineMixin:
    async def _update_weights_from_checkpoint_engine_async(self): return "theirs"
""",
        "nemo_rl.models.generation.vllm.vllm_backend": """
class VllmInternalWorkerExtension:
    def update_weights_via_ipc_zmq(*args, **kwargs): return "theirs"
""",
        "nemo_rl.models.policy.utils": """
def resolve_policy_worker_cls(default_cls, config):
    return "quantized" if config.get("quant_cfg") else default_cls
""",
        "nemo_rl.models.policy.lm_policy": """
from nemo_rl.models.policy.utils import resolve_policy_worker_cls
""",
        "nemo_rl.distributed.ray_actor_environment_registry": """
ACTOR_ENVIRONMENT_REGISTRY = {
    "nemo_rl.models.policy.workers.dtensor_policy_worker_v2.DTensorPolicyWorkerV2": "automodel"}
""",
        "ray.util": """
def get_node_ip_address(): return "127.0.0.1"
""",
    },
}


def record(package: str, **changed: str) -> None:
    """Let this process import the recorded modules of a package.

    changed: last part of a module's name → another source.
    """
    for name, source in RECORDED[package].items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            parent = sys.modules.setdefault(".".join(parts[:end]), ModuleType(parts[0]))
            parent.__path__ = []
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
        exec(changed.get(parts[-1], source), vars(module))
        if len(parts) > 1:
            setattr(sys.modules[".".join(parts[:-1])], parts[-1], module)
    installed = importlib.metadata.version

    def version(name: str) -> str:
        return VERSIONS[name] if name in VERSIONS else installed(name)

    importlib.metadata.version = version
