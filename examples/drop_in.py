"""The fused policy loss in a plain PyTorch loop, without trainer or engine.

    python examples/drop_in.py

A linear policy over 5,000 tokens learns the rewarded token of each of 64 contexts: sample, reward,
policy-gradient step. The logits of all tokens are never stored at once.
"""

import torch

from hybridengine.kernels import group_advantage, linear_policy_loss, linear_token_log_probs

CONTEXTS, SAMPLES, WIDTH, VOCAB = 64, 16, 32, 5000


def main() -> float:
    torch.manual_seed(0)
    contexts = torch.randn(CONTEXTS, WIDTH)
    target = torch.randint(0, VOCAB, (CONTEXTS,))
    head = torch.nn.Parameter(torch.zeros(VOCAB, WIDTH))
    optimizer = torch.optim.Adam([head], lr=0.05)
    hidden = contexts.repeat_interleave(SAMPLES, 0)
    groups = torch.arange(CONTEXTS).repeat_interleave(SAMPLES)
    reward_mean = 0.0
    for step in range(25):
        with torch.no_grad():
            probabilities = (contexts @ head.t()).softmax(-1)
            tokens = probabilities.multinomial(SAMPLES, replacement=True).flatten()
            # Half of the samples are replaced by the target, so that some are rewarded.
            replaced = torch.rand(tokens.shape) < 0.5
            tokens = torch.where(replaced, target[groups], tokens)
            rewards = (tokens == target[groups]).float()
            advantages = group_advantage(rewards, groups)
            old_log_probs, _ = linear_token_log_probs(hidden, head, tokens)
        loss, _, entropy, metrics = linear_policy_loss(
            hidden, head, tokens, old_log_probs=old_log_probs, advantages=advantages
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reward_mean = probabilities.gather(1, target[:, None]).mean().item()
        if step % 6 == 0 or step == 24:
            print(
                f"step {step:2d}  p(target) {reward_mean:.3f}  entropy {entropy.mean():.2f}  "
                f"clipped {metrics['pg_clipfrac']:.2f}"
            )
    return reward_mean


if __name__ == "__main__":
    main()
