"""The first table of the claims in docs/figures.md, from benchmarks/results (`tools.claims`).

A claim without a complete result is "not measured yet".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, PLOT = ROOT / "docs" / "figures.md", ROOT / "docs" / "claims.png"
RESULTS = ROOT / "benchmarks" / "results"
FIRST = 14  # number of the first claim here; those before are in the page's second table
BEGIN, END = "<!-- written by tools.claims -->\n", "<!-- end -->\n"
OURS = "hybridengine"

F_975 = 4.99  # 97.5% quantile of the F distribution with 7 and 7 degrees of freedom: 8 seeds

Row = Mapping[str, Any]
Judgement = tuple[str, str, str]  # here, whether it holds, conditions and reason


@dataclass(frozen=True)
class Claim:
    """One claim that the field repeats for systems of this kind."""

    text: str
    field: str  # the field's figure
    benchmark: str
    record: str  # file of benchmarks/results
    judge: Callable[[list[Row]], Judgement]


def load(record: str) -> dict[str, Any]:
    """Return a document of benchmarks/results; without rows if it is missing or incomplete."""
    path = RESULTS / record
    document = json.loads(path.read_text()) if path.is_file() else {"finished": []}
    return document if document.get("finished") != [] else {"rows": []}


def less(ratio: float) -> str:
    """Return a ratio as a change in percent.

    Examples:
        >>> less(0.4), less(1.25)
        ('-60%', '+25%')
    """
    percent = round((ratio - 1) * 100)
    return f"-{-percent}%" if percent < 0 else f"+{percent}%"


def holds(condition: bool) -> str:
    return "holds" if condition else "does not hold"


def by_impl(rows: list[Row]) -> dict[str, Row]:
    return {row["impl"]: row for row in rows}


def sync_ratios(rows: list[Row], value: Callable[[Row], float]) -> dict[str, float]:
    """Return ours over the gather in bf16, by layout."""
    values = {(row["shape"].split(" ", 1)[1], row["impl"]): value(row) for row in rows}
    return {
        layout: own / values[layout, "gather_bf16"]
        for (layout, impl), own in values.items()
        if impl == OURS
    }


def judge_layouts(ratios: Mapping[str, float], wanted: float) -> tuple[str, str]:
    here = ", ".join(f"{less(ratio)} ({layout})" for layout, ratio in ratios.items())
    count = sum(ratio <= wanted for ratio in ratios.values())
    verdict = "holds" if count == len(ratios) else f"holds in {count} of {len(ratios)} layouts"
    return here, verdict


def judge_volume(rows: list[Row]) -> Judgement:
    ratios = sync_ratios(rows, lambda row: row["gb_per_s"] * row["ms_p50"])
    return (
        *judge_layouts(ratios, 0.4),
        "Bytes that a rank receives, compared with a gather of the full parameters in bf16 (verl "
        "gathers float32, twice as much). The bytes are the least possible: at N=8, TP 2 a rank "
        "holds 1/8 and needs 1/2, so 3/8 of the model travel, where a gather moves 7/8: -57% is "
        "all that there is.",
    )


def judge_time(rows: list[Row]) -> Judgement:
    ratios = sync_ratios(rows, lambda row: row["ms_p50"])
    return (
        *judge_layouts(ratios, 0.4),
        "A Llama of 499M parameters, float32 FSDP2 shards into bf16 vLLM ranks, gloo ranks of "
        "one thread on one machine; compared with the gather in bf16, then `load_weights`.",
    )


def judge_switch_memory(rows: list[Row]) -> Judgement:
    peaks = {impl: row["peak_mib"] for impl, row in by_impl(rows).items()}
    ratio = peaks[OURS] / peaks["gather_all"]
    each = peaks[OURS] / peaks["gather_each"]
    return (
        f"{less(ratio)} ({less(each)} where one parameter is gathered at a time)",
        holds(ratio <= 0.6),
        f"What a sync adds on a rank, staging buffers included, N=4, TP 2: {peaks[OURS]:.0f} MiB; "
        f"a full state dict {peaks['gather_all']:.0f} MiB, one parameter at a time "
        f"{peaks['gather_each']:.0f} MiB; between ranks that share no memory "
        f"{peaks['all_to_all']:.0f} MiB. The same model as above.",
    )


def judge_updates(rows: list[Row]) -> Judgement:
    steps = by_impl([row for row in rows if row["pass"] == "step"])
    ratio = steps[OURS]["ratio_to_best_peer"]
    short = by_impl(load("reward_curve_cpu_avx2.json")["rows"])
    other = f", {short[OURS]['ratio_to_best_peer']:.1f} × (claim {FIRST + 11})" if short else ""
    return (
        f"{ratio:.1f} ×{other}",
        holds(ratio >= 2.3),
        "Tokens of prompts and responses per second, SmolLM2-135M, 32 ragged responses a step, one "
        "rank, both with vLLM in the process. TRL pads its micro-batches to the longest sequence, "
        "and computes the old log-probs in a pass of their own.",
    )


def judge_overlap(rows: list[Row]) -> Judgement:
    modes = by_impl(rows)
    before, after = modes["in turn"], modes[f"{OURS} one_step_off"]
    asynchronous = modes[f"{OURS} async"]
    return (
        f"{before['busy']:.0%} → {after['busy']:.0%} (`one_step_off`), {asynchronous['busy']:.0%} "
        f"(`async`); updates per second {after['ratio_to_best_peer']:.2f} × and "
        f"{asynchronous['ratio_to_best_peer']:.2f} ×",
        holds(max(after["busy"], asynchronous["busy"]) >= 0.78),
        "Mean of the shares of a step in which trainer and engine work, on one rank each; "
        f"before: they wait for each other. The demo's task, {before['shape'].split(',')[0]}. In "
        f"`one_step_off` the trainer works {after['trainer_busy']:.0%} of the time and the engine "
        f"{after['engine_busy']:.0%}: the shorter of the two waits for the longer, and only "
        "another division of the ranks changes that. In `sync`, the default, both are on the "
        "same ranks and take turns, so that no rank waits for another.",
    )


def judge_vllm(rows: list[Row]) -> Judgement:
    ratios = {r["shape"].split()[-1]: r["ratio_to_best_peer"] for r in rows if r["impl"] == OURS}
    dtype = rows[0]["dtype"]
    return (
        f"{ratios['ragged']:.1f} × (ragged lengths), {ratios['equal']:.1f} × (equal lengths)",
        holds(ratios["ragged"] >= 3),
        f"Tokens per second, a random model of the shape of SmolLM2-135M in {dtype}, 32 prompts "
        "of 64 tokens, an exact engine. It gains from its products, steps without Python and "
        "sampler, and most where responses end at different times. On a CPU a step of 32 sequences "
        "is limited by the arithmetic of its products.",
    )


def judge_offload(rows: list[Row]) -> Judgement:
    default = by_impl(rows)[OURS]
    sizes = {name: default[f"{name}_mib"] for name in ("weights", "gradients", "optimizer")}
    whole = sum(sizes.values())
    return (
        f"by count: the optimizer's {less(1 - sizes['optimizer'] / whole)}, with the weights "
        f"{less(1 - (sizes['optimizer'] + sizes['weights']) / whole)}",
        "not measurable",
        "A CPU has no device memory apart from the host's, and the copies of an offload add to "
        f"the peak. Counted are the bytes of a training state of {whole:.0f} MiB that "
        "`optimizer_offload` keeps on the host during forward and backward, and `param_offload` "
        "while the engine generates.",
    )


def judge_checkpointing(rows: list[Row]) -> Judgement:
    default, recompute = by_impl(rows)[OURS], by_impl(rows)["gradient checkpointing"]
    memory = recompute["peak_mib"] / default["peak_mib"]
    here, verdict = f"{less(memory)} memory", "memory holds, time not measured yet"
    if default["ms_p50"] and recompute["ms_p50"]:  # not of a loaded machine
        slower = recompute["ms_p50"] / default["ms_p50"]
        here, verdict = f"{here}, {less(slower)} time", holds(memory <= 0.705 and slower <= 1.205)
    return (
        here,
        verdict,
        f"Peak of a step of SmolLM2-135M with {default['shape']} in one micro-batch, "
        f"{default['dtype']}: {default['peak_mib']:.0f} → {recompute['peak_mib']:.0f} MiB, of "
        "which "
        f"{default['weights_mib'] + default['gradients_mib'] + default['optimizer_mib']:.0f} are "
        "weights, gradients and moments, which it does not change. More tokens save more.",
    )


def judge_lora(rows: list[Row]) -> Judgement:
    default, lora = by_impl(rows)[OURS], by_impl(rows)["LoRA rank 16"]
    states = [
        sum(row[f"{name}_mib"] for name in ("weights", "gradients", "optimizer"))
        for row in (default, lora)
    ]
    state, peak = states[1] / states[0], lora["peak_mib"] / default["peak_mib"]
    return (
        f"{less(state)} of weights, gradients and moments; {less(peak)} of the peak",
        "holds" if peak <= 0.5 else f"{holds(state <= 0.5)} for the states, not for the peak",
        f"Rank 16: {states[0]:.0f} → {states[1]:.0f} MiB of states. The peak also has the "
        f"activations of {default['shape']} and the head's buffers, which are larger than the "
        "states of a model of 135M.",
    )


def judge_padding(rows: list[Row]) -> Judgement:
    padded = rows[0]["peak_mib"]
    forms = {row["shape"].split(",")[0]: row for row in rows}
    here = "; ".join(
        f"{name}: {less(1 / row['ratio_to_best_peer'])} time, {less(row['peak_mib'] / padded)} "
        "memory"
        if row["token_ratio"] > 1
        else f"{name}: nothing to gain"
        for name, row in forms.items()
    )
    ratios = ", ".join(f"{name} {less(1 / row['token_ratio'])}" for name, row in forms.items())
    return (
        here,
        "holds where lengths differ",
        f"A training step of SmolLM2-135M; tokens that are not computed: {ratios}. The memory has "
        "the weights, gradients and moments in it, which no packing saves.",
    )


def variance_ratio(rows: list[Row], value: Callable[[list[float]], float]) -> list[float]:
    """Return (ratio, low, high): ours over TRL's variance over seeds, and its 95% interval.

    value: makes one number of the KL of every step of a run.
    """
    ours, trl = (
        [value(curve) for curve in by_impl(rows)[name]["curves"]] for name in (OURS, "trl")
    )
    ratio = variance(ours) / variance(trl)
    return [ratio, ratio / F_975, ratio * F_975]


def judge_kl(rows: list[Row]) -> Judgement:
    ours, trl = (by_impl(rows)[name] for name in (OURS, "trl"))
    last = variance_ratio(rows, lambda curve: curve[-1])
    middle = variance_ratio(rows, lambda curve: median(curve[-8:]))
    here, robust = (
        f"{less(r)} (95% interval {less(low)} to {less(high)})" for r, low, high in (last, middle)
    )
    return (
        f"{here}; median of 8 steps {robust}",
        holds(max(last[2], middle[2]) <= 0.63),
        f"Variance over {len(ours['curves'])} seeds of a small job, with the same loss, prompts "
        f"and hyper-parameters; both learn it (score {fmean(ours['scores']):.2f} and "
        f"{fmean(trl['scores']):.2f}). Both estimate the KL by k3 on sampled tokens. Ours bounds "
        "a token's estimate by 10, as verl does, so that against verl no difference is to be "
        "expected; in TRL one token of small probability adds thousands to the mean and to the "
        "gradient (the spikes in the plot, which ends at 6). Of the last step, and of the median "
        "of the last 8 steps, which leaves spikes out. Intervals are those of normal values.",
    )


def judge_reward(rows: list[Row]) -> Judgement:
    ours, trl = (by_impl(rows)[name] for name in (OURS, "trl"))
    common = min(ours["seconds"][-1], trl["seconds"][-1])
    counts = [sum(t <= common for t in row["seconds"]) for row in (ours, trl)]
    return (
        f"{ours['score_at_end']:.2f} against {trl['score_at_end']:.2f} after {common:.0f} s "
        f"({counts[0]} and {counts[1]} updates)",
        holds(ours["score_at_end"] > trl["score_at_end"]),
        "Mean training score of the last fifth of the time; the demo's task from its initial "
        "weights, 6 x 8 responses a step, float32, one rank of two threads each, one after the "
        "other, one seed.",
    )


CLAIMS = (
    Claim(
        "train → generate switch: volume against a full gather",
        "-60%",
        "reshard",
        "reshard_cpu.json",
        judge_volume,
    ),
    Claim("the same: time", "-60%", "reshard", "reshard_cpu.json", judge_time),
    Claim(
        "the same: memory",
        "-40%",
        "switch_memory",
        "switch_memory_cpu.json",
        judge_switch_memory,
    ),
    Claim(
        "effective updates per second against TRL",
        "2.3 ×",
        "end_to_end",
        "end_to_end_cpu.json",
        judge_updates,
    ),
    Claim(
        "utilisation with generation beside training",
        "35% → 78%",
        "overlap",
        "overlap_cpu_avx2.json",
        judge_overlap,
    ),
    Claim(
        "vLLM against transformers' `generate`",
        "3 ×",
        "plain_generate",
        "plain_generate_cpu_avx2.json",
        judge_vllm,
    ),
    Claim("offload", "-40 to -60% memory", "memory", "memory_cpu_avx2.json", judge_offload),
    Claim(
        "gradient checkpointing",
        "-30 to -50% memory, +20% time",
        "memory",
        "memory_cpu_avx2.json",
        judge_checkpointing,
    ),
    Claim("LoRA", "-50% memory", "memory", "memory_cpu_avx2.json", judge_lora),
    Claim(
        "packed instead of padded, by distribution of lengths",
        "no figure",
        "padding",
        "padding_cpu_avx2.json",
        judge_padding,
    ),
    Claim("variance of the KL over seeds", "-37%", "kl_seeds", "kl_seeds_cpu_avx2.json", judge_kl),
    Claim(
        "reward at equal time, against TRL",
        "higher",
        "reward_curve",
        "reward_curve_cpu_avx2.json",
        judge_reward,
    ),
)


def render() -> str:
    """Return the table, the plot and the conditions as Markdown."""
    lines = [
        "| # | claim | the field | here | | command | recorded in |",
        "|---|---|---|---|---|---|---|",
    ]
    conditions = []
    for number, claim in enumerate(CLAIMS, FIRST):
        document = load(claim.record)
        here, verdict, why = "", "not measured yet", ""
        if document["rows"]:
            here, verdict, why = claim.judge(document["rows"])
            machine = f"{document['device']}, {document['isa']}, commit {document['commit']}"
            conditions.append(f"{number}. {why} ({machine})")
        command = f"`python -m benchmarks {claim.benchmark}` | `{claim.record}`"
        lines.append(
            f"| {number} | {claim.text} | {claim.field} | {here} | {verdict} | {command} |"
        )
    plot = f"![The claims of the field, and what is measured here]({PLOT.name})"
    return "\n".join([*lines, "", plot, "", "Conditions and reasons:", "", *conditions, ""])


def write_page() -> None:
    """Write the table into the page."""
    written = f"{BEGIN}\n{render()}\n{END}"
    page = re.sub(f"{BEGIN}.*{END}", lambda _: written, PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(page)
