"""vLLM as the rollout engine, in the processes of the training ranks."""
