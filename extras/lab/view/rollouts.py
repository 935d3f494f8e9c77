"""The rollouts of a run: an index of small numbers; a row is read from its file when shown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from hybridengine.run.errors import ConfigError

_FILE = re.compile(r"(step|val)_(\d+)\.jsonl")
_KEYS = ("step", "reward", "length", "group", "row", "kind")
_TERM = re.compile(rf"({'|'.join(_KEYS)})(<=|>=|!=|=|<|>)(\S+)")
_LIKE_A_TERM = re.compile(r"[a-z_]+(?:<=|>=|!=|=|<|>)\S+")
_OPERATORS = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
}


class _Line(msgspec.Struct):
    """The fields of a line that the index keeps; msgspec skips the others."""

    index: int
    reward: float
    response_ids: msgspec.Raw
    sampled: msgspec.Raw = msgspec.Raw()
    finish_reason: str = ""
    advantage: float | None = None
    prompt: str = ""
    response: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One response of a run.

    kind: "step" (training) or "val" (validation).
    row: the number of its line in the file.
    group: the row of the dataset, which all responses to one prompt share.
    length: the number of tokens of the response that the model wrote.
    offset, size: the position and the length of its line in the file, in bytes.
    """

    kind: str
    step: int
    row: int
    group: int
    reward: float
    length: int
    advantage: float | None
    finish_reason: str
    preview: str
    offset: int
    size: int


class RolloutIndex:
    """The rollout files of `run`: the folder of a run, or one with step_<n>.jsonl files.

    Attributes:
        entries: one per response, by step, in the order of the files.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        folder = _rollout_folder(run)
        named = [(m, p) for p in folder.glob("*.jsonl") if (m := _FILE.fullmatch(p.name))]
        self._files = {(m[1], int(m[2])): path for m, path in named}
        if not self._files:
            raise ConfigError(
                f"{folder} has no rollouts (step_<n>.jsonl); give the folder of a run whose "
                "trainer.rollout_freq is not -1"
            )
        by_step = sorted(self._files, key=lambda key: (key[1], key[0]))
        self.entries = [entry for key in by_step for entry in self._read_file(*key)]

    def _read_file(self, kind: str, step: int) -> Iterator[Entry]:
        decoder, offset = msgspec.json.Decoder(_Line), 0
        with self._files[kind, step].open("rb") as file:
            for row, text in enumerate(file):
                try:
                    line = decoder.decode(text)
                except msgspec.DecodeError as error:
                    path = self._files[kind, step]
                    raise ConfigError(f"{path}, line {row + 1}: not a rollout: {error}") from None
                ids, sampled = bytes(line.response_ids), bytes(line.sampled)
                length = sampled.count(b"1") if sampled else ids.count(b",") + (len(ids) > 2)
                preview = " ".join(line.response[:80].split())
                yield Entry(
                    kind,
                    step,
                    row,
                    line.index,
                    line.reward,
                    length,
                    line.advantage,
                    line.finish_reason,
                    preview,
                    offset,
                    len(text),
                )
                offset += len(text)

    def read(self, entry: Entry) -> dict[str, Any]:
        """Read all columns of a response."""
        return dict(json.loads(self.read_bytes(entry)))  # NaN as Python writes it

    def read_bytes(self, entry: Entry) -> bytes:
        """Read the line of a response."""
        with self._files[entry.kind, entry.step].open("rb") as file:
            file.seek(entry.offset)
            return file.read(entry.size)

    def select(self, query: str) -> list[Entry]:
        """Return the entries that `query` selects, see `Filter`."""
        chosen = Filter(query)
        entries = [entry for entry in self.entries if chosen.matches(entry)]
        if not chosen.text:
            return entries
        return [entry for entry in entries if chosen.text in self._text(entry)]

    def select_some(self, query: str) -> list[Entry]:
        """As `select`; ConfigError where that is nothing."""
        if entries := self.select(query):
            return entries
        text = Filter(query).text
        hint = f"; {text!r} was looked for in the texts" if text else ""
        if words := [word for word in text.split() if _LIKE_A_TERM.fullmatch(word)]:
            hint = (
                f"; {words[0]!r} is no condition and was looked for in the texts: conditions are "
                f"numbers of {', '.join(_KEYS[:-1])}, and kind=step or kind=val"
            )
        raise ConfigError(
            f"--filter {query!r} selects none of {len(self.entries):,} rollouts{hint}"
        )

    def _text(self, entry: Entry) -> str:
        line = msgspec.json.decode(self.read_bytes(entry), type=_Line)
        return f"{line.prompt}\n{line.response}".lower()

    def group(self, entry: Entry) -> list[Entry]:
        """Return the responses of the same step to the same prompt."""
        place = (entry.kind, entry.step, entry.group)
        return [e for e in self.entries if (e.kind, e.step, e.group) == place]

    def over_steps(self, entry: Entry) -> list[Entry]:
        """Return the responses of all steps to the same prompt."""
        return [e for e in self.entries if (e.kind, e.group) == (entry.kind, entry.group)]

    @cached_property
    def tokenizer(self) -> Any:
        """The run's tokenizer (`tokenizers.Tokenizer`); None where its file is not there."""
        path = next((p for p in self._tokenizer_files() if p.is_file()), None)
        if path is None:
            return None
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(path))

    def _tokenizer_files(self) -> Iterator[Path]:
        yield self.run / "final" / "tokenizer.json"
        if model := run_setting(self.run, "model", "path"):
            yield Path(model).expanduser() / "tokenizer.json"


def _rollout_folder(run: Path) -> Path:
    if not run.is_dir():
        raise ConfigError(f"{run} is not a folder; give the folder of a run")
    if any(_FILE.fullmatch(path.name) for path in run.iterdir()):
        return run
    return Path(run_setting(run, "trainer", "rollout_data_dir") or run / "rollouts")


def run_setting(run: Path, section: str, key: str) -> Any:
    """Return a setting of the run's config.yaml; None where there is none."""
    file = run / "config.yaml"
    if not file.is_file():
        return None
    from omegaconf import OmegaConf

    return OmegaConf.select(OmegaConf.load(file), f"{section}.{key}")


class Filter:
    """A query: conditions such as `step=3 reward>=0.5 length<100 group=12 kind=val`, and text.

    The words that are no conditions are one text, which prompt or response must contain; upper
    and lower case are the same.
    """

    def __init__(self, query: str) -> None:
        words, self._conditions = list[str](), list[tuple[str, str, float | str]]()
        for word in query.split(" "):
            match = _TERM.fullmatch(word)
            value = _value(*match.group(1, 3)) if match else None
            if match is None or value is None:
                words.append(word)
            else:
                self._conditions.append((match[1], match[2], value))
        self.text = " ".join(words).strip().lower()

    def matches(self, entry: Entry) -> bool:
        """Return whether the conditions hold; the text is not compared."""
        return all(
            _OPERATORS[operator](getattr(entry, name), value)
            for name, operator, value in self._conditions
        )


def _value(name: str, text: str) -> float | str | None:
    if name == "kind":
        return text
    try:
        return float(text)
    except ValueError:
        return None
