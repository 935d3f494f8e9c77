"""Import what ranks with a vLLM engine use; as in a rank, vLLM first reads our settings."""

from hybridengine.engine.vllm.environment import prepare_environment

prepare_environment()

from vllm.config.logging import LoggingConfig  # noqa: E402
from vllm.logger import configure_logging_if_needed  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

if current_platform.is_cpu():
    # For small functions that every engine calls: 1.5 s a rank, 8 where torch's cache is empty.
    current_platform.simple_compile_backend = "eager"

import hybridengine.engine.vllm.engine  # noqa: E402
import hybridengine.remote.vllm_transfer.transfer  # noqa: E402, F401

# What an engine does as it starts, 2 s of CPU, and what it finds done in a fork.
configure_logging_if_needed(LoggingConfig())
if current_platform.is_cpu():
    import vllm.distributed.device_communicators.cpu_communicator
    import vllm.distributed.elastic_ep.elastic_execute
    import vllm.entrypoints.launchers.cli_args
    import vllm.lora.punica_wrapper.punica_cpu
    import vllm.model_executor.layers.fused_moe.experts.cpu_moe
    import vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn
    import vllm.model_executor.layers.quantization.auto_awq
    import vllm.model_executor.layers.quantization.auto_gptq
    import vllm.model_executor.layers.quantization.inc
    import vllm.model_executor.layers.quantization.online.base
    import vllm.model_executor.models.llama
    import vllm.plugins.lora_resolvers.hf_hub_resolver
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.core.sched.scheduler
    import vllm.v1.pool.flash_maxsim
    import vllm.v1.worker.cpu_worker  # noqa: F401

    current_platform.register_triton_kernel_overrides()  # searches all modules for kernels
    current_platform.register_triton_kernel_overrides = lambda: None
