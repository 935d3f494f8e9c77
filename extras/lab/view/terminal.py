"""The rollouts of a run in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, ItemGrid, VerticalScroll
from textual.markup import escape
from textual.widgets import Collapsible, DataTable, Footer, Input, Static

from hybridengine.lab.view.detail import COLORS, Color, Detail, detail_of, text_of_token
from hybridengine.lab.view.rollouts import Entry, RolloutIndex

_PLUS, _MINUS = (37, 99, 235), (217, 84, 12)
_SHADES = 12  # of a colour, so that neighbours share a style
_MOST = 64  # responses beside each other
_COLUMNS = ("step", "group", "reward", "tokens", "advantage", "response")


class RolloutApp(App[None]):
    """A list of the responses that a filter selects, and the chosen one with coloured tokens."""

    CSS = """
    #filter { height: 3; border: round $primary; }
    #list { width: 40%; overflow-x: hidden; border: round $primary-darken-2; }
    #detail { border: round $primary-darken-2; padding: 0 1; }
    #legend { height: 1; color: $text-muted; padding: 0 2; }
    ItemGrid { height: auto; grid-gutter: 1 2; }
    .card { height: auto; border-left: thick $primary-darken-3; padding: 0 0 0 1; }
    .card.chosen { border-left: thick $accent; }
    Collapsible { border: none; padding: 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("slash", "focus_filter", "Filter"),
        ("c", "next_color", "Colour"),
        ("g", "show('group')", "Group"),
        ("s", "show('steps')", "All steps"),
        ("f", "fold", "Fold"),
        ("q", "quit", "Quit"),
    ]

    def __init__(self, index: RolloutIndex, query: str = "") -> None:
        super().__init__()
        self._index, self._query, self._mode = index, query, ""
        self._shown: Sequence[Entry] = ()
        self._chosen: Entry | None = None
        self._colors = cycle([*COLORS.values(), None])
        self._color: Color | None = next(self._colors)

    def compose(self) -> ComposeResult:
        hint = "step=3 reward>=0.5 length<100 group=12 kind=val some text"
        yield Input(self._query, placeholder=hint, id="filter")
        with Horizontal():
            yield DataTable[Text](id="list", cursor_type="row", zebra_stripes=True)
            yield VerticalScroll(id="detail")
        yield Static(id="legend")
        yield Footer()

    def on_mount(self) -> None:
        self.title = f"rollouts of {self._index.run.name}"
        table = self.query_one(DataTable)
        for name in _COLUMNS:
            table.add_column(name)
        self._select()
        table.focus()

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        self._query, self._chosen = event.value, None
        self._select()
        await self._draw()
        self.query_one(DataTable).focus()

    async def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if event.cursor_row < len(self._shown):
            self._chosen = self._shown[event.cursor_row]
            await self._draw()

    def action_focus_filter(self) -> None:
        self.query_one(Input).focus()

    async def action_next_color(self) -> None:
        self._color = next(self._colors)
        await self._draw()

    async def action_show(self, mode: str) -> None:
        """Show the group, or the prompt at all steps; again: the response alone."""
        self._mode = "" if self._mode == mode else mode
        await self._draw()

    def action_fold(self) -> None:
        """Fold all turns, or unfold them if all are folded."""
        boxes = list(self.query(Collapsible))
        fold = not all(box.collapsed for box in boxes)
        for box in boxes:
            box.collapsed = fold

    def _select(self) -> None:
        self._shown = self._index.select(self._query)
        table = self.query_one(DataTable)
        table.clear()
        table.add_rows(map(_table_row, self._shown))
        count = f"{len(self._shown):,} of {len(self._index.entries):,}"
        self.query_one(Input).border_title = escape(f"{self.title} · {count}")

    def _related(self, entry: Entry) -> list[Entry]:
        if self._mode == "group":
            return self._index.group(entry)[:_MOST]
        return self._index.over_steps(entry)[:_MOST] if self._mode == "steps" else [entry]

    async def _draw(self) -> None:
        entry, detail = self._chosen, self.query_one("#detail", VerticalScroll)
        await detail.remove_children()
        if entry is None:
            return
        related = self._related(entry)
        cards = [self._card(e, is_chosen=e is entry and len(related) > 1) for e in related]
        first = detail_of(self._index.read(related[0]))
        prompt = Collapsible(Static(Text(first.prompt)), title="prompt", collapsed=bool(self._mode))
        width = 36 if self._mode else None
        await detail.mount(prompt, ItemGrid(*cards, min_column_width=width))
        self.query_one("#legend", Static).update(self._legend(first))

    def _legend(self, detail: Detail) -> Text:
        color = self._color
        if color is None:
            return Text("no colour")
        ends = ((f" {x:g} ", _style(color.strength(x))) for x in (color.low, color.high))
        legend = Text(" … ").join(Text(*end) for end in ends) + Text(f"  {color.label}")
        return legend if color.name in detail.values else legend + Text(" (not in this file)")

    def _card(self, entry: Entry, is_chosen: bool) -> VerticalScroll:
        detail = detail_of(self._index.read(entry))
        head = Text.assemble((f"{entry.kind} {entry.step}", "bold"), f"  group {entry.group}")
        head.append(
            f"  reward {entry.reward:.4g}", "bold green" if entry.reward > 0 else "bold red"
        )
        head.append(f"  {entry.length} tokens  {entry.finish_reason}")
        if entry.advantage is not None:
            head.append(f"  advantage {entry.advantage:+.3f}")
        parts: list[Static | Collapsible] = []
        for part in detail.parts:
            text = Static(self._colored(detail, part.start, part.end))
            is_only = len(detail.parts) == 1
            folded = Collapsible(text, title=escape(part.title), collapsed=not part.is_model)
            parts.append(text if is_only else folded)
        if detail.results:
            pairs = [f"{name.replace('_', ' ')} {value}" for name, value in detail.results.items()]
            parts.append(Static(Text("  ".join(pairs))))
        return VerticalScroll(
            Static(head), *parts, classes="card chosen" if is_chosen else "card", can_focus=False
        )

    def _colored(self, detail: Detail, start: int, end: int) -> Text:
        color, text = self._color, Text()
        values = detail.values.get(color.name) if color is not None else None
        for k in range(start, end):
            token = text_of_token(self._index.tokenizer, detail.token_ids[k])
            style = ""
            if color is not None and values is not None and math.isfinite(values[k]):
                style = _style(color.strength(values[k]))
            text.append(token, style)
        return text


def _table_row(entry: Entry) -> tuple[Text, ...]:
    advantage = "" if entry.advantage is None else f"{entry.advantage:+.2f}"
    step = f"{entry.step}" if entry.kind == "step" else f"val {entry.step}"
    numbers = (step, f"{entry.group}", f"{entry.reward:.3g}", f"{entry.length}", advantage)
    return tuple(map(Text, (*numbers, entry.preview[:40])))


def _style(strength: float) -> str:
    """Return a style whose background is stronger the larger the value is, up to 1."""
    shade = round(abs(strength) * _SHADES) / _SHADES
    if not shade:
        return ""
    full = _PLUS if strength > 0 else _MINUS
    red, green, blue = (round(30 + (x - 30) * shade) for x in full)
    return f"white on rgb({red},{green},{blue})"
