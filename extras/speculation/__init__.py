"""Speculative decoding in the engine of a run: `rollout.engine_kwargs.vllm.speculative_config`.

N-gram drafts are what followed the last tokens where they occurred before; they have no weights.
Tokens are verified by the policy, so that responses are samples of the policy with its log-probs
(`sampler`). Which arguments a run may have is checked before it starts (`config_checks`).
"""
