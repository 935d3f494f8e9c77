"""Import what ranks with a vLLM engine use; as in a rank, vLLM first reads our settings."""

from hybridengine.rollout.vllm.environment import prepare_environment

prepare_environment()

import hybridengine.rollout.vllm.engine  # noqa: E402
import hybridengine.rollout.vllm.transfer  # noqa: E402, F401
