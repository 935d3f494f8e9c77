"""The fused policy loss in a plain PyTorch loop: no trainer, no engine, one import.

    python examples/drop_in.py

A linear policy over 5,000 tokens learns which token each of 64 contexts rewards, by sampling,
rewarding and taking policy-gradient steps. Logits of all tokens at once are never stored.
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
            # Half of the samples are replaced by the target, so that there is something to find.
            lucky = torch.rand(tokens.shape) < 0.5
            tokens = torch.where(lucky, target[groups], tokens)
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
