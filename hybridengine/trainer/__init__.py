"""The training loops: `rl` (GRPO, PPO and related), `sft`, and `base`, which both share."""
