"""vLLM as the rollout engine, in the same processes as the trainer."""
