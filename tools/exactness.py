"""Measure the error factors of docs/exactness.md: `python tools/exactness.py > docs/exactness.md`.

Root-mean-square error against float64 over 256 rows of 32,003 logits (normal, deviation 4), for
every backend that runs here, divided by that of the plain PyTorch expression in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hybridengine.kernels import linear_token_log_probs, token_log_probs

ROWS, VOCAB, WIDTH = 256, 32_003, 256


def options(generator: torch.Generator, device: str) -> dict[str, dict]:
    keep = torch.rand(ROWS, VOCAB, generator=generator) < 0.5
    temperatures = torch.rand(ROWS, generator=generator) + 0.5
    return {
        "plain": {},
        "temperature 0.7": {"temperature": 0.7},
        "per-token temperature": {"temperature": temperatures.to(device)},
        "soft-cap 15": {"softcap": 15.0},
        "logit scale 0.25": {"logit_scale": 0.25},
        "keep-mask": {"keep_mask": keep.to(device)},
    }


def plain(logits, token_ids, temperature=1.0, softcap=None, logit_scale=1.0, keep_mask=None):
    x = (logits if logits.dtype == torch.float64 else logits.float()) * logit_scale
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    x = x / (temperature[:, None].to(x) if torch.is_tensor(temperature) else temperature)
    if keep_mask is not None:
        x = x.masked_fill(~keep_mask, -torch.inf)
    log_p = F.log_softmax(x, dim=-1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
    return log_p.gather(1, token_ids[:, None]).squeeze(1), entropy


def results(function, inputs, *rest, **arguments):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    log_probs, entropy = function(*leaves, *rest, **arguments)[:2]
    grads = torch.autograd.grad((log_probs.sum() + entropy.sum()), leaves)
    return [t.detach().cpu().double() for t in (log_probs, entropy, *grads)]


def factors(exact, peer, ours) -> list[str]:
    found = []
    for e, p, o in zip(exact, peer, ours, strict=True):
        error, peer_error = ((v - e).square().mean().sqrt().item() for v in (o, p))
        found.append(f"{error:.1e} / {peer_error:.1e} = {error / peer_error:.2f}")
    return found


def from_logits(backend: str, device: str) -> None:
    print("\n| dtype | option | log-prob | entropy | gradient |\n|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        generator = torch.Generator().manual_seed(0)
        logits = (torch.randn(ROWS, VOCAB, generator=generator) * 4).to(dtype).to(device)
        token_ids = torch.randint(0, VOCAB, (ROWS,), generator=generator).to(device)
        for name, chosen in options(generator, device).items():
            if "keep_mask" in chosen:
                chosen["keep_mask"].scatter_(1, token_ids[:, None], True)
            exact = results(plain, [logits.double()], token_ids, **chosen)
            peer = results(plain, [logits], token_ids, **chosen)
            ours = results(token_log_probs, [logits], token_ids, backend=backend, **chosen)
            cells = [str(dtype).removeprefix("torch."), name, *factors(exact, peer, ours)]
            print(f"| {' | '.join(cells)} |")


def of_led_rows(backend: str, device: str) -> None:
    """Rows that one entry leads: 1 - p and the entropy are sums of small numbers there."""
    print("\n| leader, nats ahead | log-prob | entropy | gradient |\n|---|---|---|---|")
    for gap in (5, 17, 30):
        for leads in (True, False):
            generator = torch.Generator().manual_seed(0)
            logits = torch.randn(ROWS, VOCAB, generator=generator).to(device)
            token_ids = torch.randint(1, VOCAB, (ROWS,), generator=generator).to(device)
            leader = token_ids if leads else token_ids - 1
            logits.scatter_(1, leader[:, None], logits.amax(1, keepdim=True) + gap)
            exact = results(plain, [logits.double()], token_ids)
            peer = results(plain, [logits], token_ids)
            ours = results(token_log_probs, [logits], token_ids, backend=backend)
            who = "the token" if leads else "another"
            print(f"| {' | '.join([f'{who}, {gap}', *factors(exact, peer, ours)])} |")


def from_hidden(backend: str, device: str) -> None:
    print("\n| dtype | log-prob | entropy | hidden gradient | weight gradient |")
    print("|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(ROWS, WIDTH, generator=generator).to(dtype).to(device)
        weight = (torch.randn(VOCAB, WIDTH, generator=generator) / 4).to(dtype).to(device)
        token_ids = torch.randint(0, VOCAB, (ROWS,), generator=generator).to(device)

        def two_steps(h, w, ids):
            return plain(F.linear(h, w), ids)

        def widened(h, w, ids):
            return plain(F.linear(h.float(), w.float()), ids)

        exact = results(two_steps, [hidden.double(), weight.double()], token_ids)
        ours = results(
            linear_token_log_probs, [hidden, weight], token_ids, backend=backend,
            budget_bytes=2**23,
        )  # fmt: skip
        peers = {"": two_steps}
        if dtype != torch.float32:
            peers[", PyTorch with a float32 head"] = widened
        for name, peer in peers.items():
            found = factors(exact, results(peer, [hidden, weight], token_ids), ours)
            print(f"| {' | '.join([str(dtype).removeprefix('torch.') + name, *found])} |")


def main() -> None:
    print(
        "# Exactness of log-prob and entropy\n\n"
        "Root-mean-square error against float64, ours / plain PyTorch's (float32 arithmetic on the "
        "same inputs) = factor. The promise is a factor of at most 2; tests/kernels hold every "
        "backend to it. Written by `python tools/exactness.py`, from 256 rows of 32,003 logits "
        "(hidden width 256 where there is one); gradients have the dtype of their inputs, so for "
        "16-bit ones both errors are mostly the final rounding. From hidden states PyTorch rounds "
        "16-bit logits and ours does not; the rows named so widen hidden and weight for PyTorch."
    )
    backends = {"cpp": "cpu"}
    if torch.cuda.is_available():
        backends |= {"cuda": "cuda", "triton": "cuda"}
    for backend, device in backends.items():
        print(f"\n## Backend `{backend}`, torch {torch.__version__}")
        print("\n### `token_log_probs`")
        from_logits(backend, device)
        print("\n### `token_log_probs` of rows that one entry leads, float32")
        of_led_rows(backend, device)
        print("\n### `linear_token_log_probs`")
        from_hidden(backend, device)
    if len(backends) == 1:
        print(
            "\nBackends `cuda` and `triton`: not yet measured (no GPU on this machine). In "
            "Triton's interpreter one case is above the factor of 2: float32 rows that the token "
            "leads by 30 nats, gradient of log-prob and entropy together, 4.4e-18 beside 7.9e-19."
        )


if __name__ == "__main__":
    main()
