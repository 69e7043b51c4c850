"""What was measured, as lines on the screen while it is measured, as JSON and as tables for the docs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Figure = Mapping[str, float]

# vLLM 0.26.0 on such a card (H200, PyTorch 2.11, 2026-11-29), in a run of its own: milliseconds a token and request
VLLM = {
    "plain": {1: 5.18, 4: 5.29, 16: 5.72, 64: 7.49, 128: 10.9, 256: 18.5},
    "eagle3": {1: 2.94, 4: 2.89, 16: 3.21, 64: 5.27, 128: 8.89, 256: 17.6},
}
AT_MOST = {("plain", 1): 5.1, ("eagle3", 1): 2.6}  # where more is asked for than the peer's figure
VERIFY_AT_MOST = 1.05
STARTUP_AT_MOST_S = 60.0
SPREAD_WIDTH = len("00.00 (00.00-00.00)")


def target_ms(part: str, batch: int) -> float | None:
    return AT_MOST.get((part, batch), VLLM[part].get(batch))


def met(value: float, limit: float | None) -> bool | None:
    return None if limit is None else value <= limit


def number(digits: int) -> Callable[[Any], str]:
    return lambda value: f"{value:,.{digits}f}"


def with_spread(figure: Figure) -> str:
    """Median (lowest-highest)."""
    return "{median:.2f} ({low:.2f}-{high:.2f})".format(**figure)


def yes_or_missed(value: bool) -> str:
    return "yes" if value else "MISSED"


def yes_or_no(value: bool) -> str:
    return "yes" if value else "NO"


class Column(NamedTuple):
    """key: of a row's value. show: makes text of it; a missing one or None is shown as "-". least_width: on screens."""

    key: str
    title: str
    show: Callable[[Any], str] = str
    least_width: int = 6

    def text(self, row: Mapping[str, Any]) -> str:
        value = row.get(self.key)
        return "-" if value is None else self.show(value)

    @property
    def width(self) -> int:
        return max(len(self.title), SPREAD_WIDTH if self.show is with_spread else self.least_width)


class Table:
    """Rows that are printed as they come."""

    def __init__(self, title: str, columns: Sequence[Column], save: Callable[[], None] = lambda: None) -> None:
        self.title = title
        self.columns = columns
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._save = save

    def add(self, **row: Any) -> None:
        if not self.rows:
            print(f"\n{self.title}\n{self._line(column.title for column in self.columns)}")
        self.rows.append(row)
        print(self._line(column.text(row) for column in self.columns), flush=True)
        self._save()

    def note(self, line: str) -> None:
        """A line below the table."""
        self.notes.append(line)
        print(line, flush=True)
        self._save()

    def _line(self, cells: Any) -> str:
        return "  ".join(cell.rjust(column.width) for cell, column in zip(cells, self.columns, strict=True))

    def markdown(self) -> str:
        lines = [self.title, ""]
        if self.rows:
            lines += [_cells(column.title for column in self.columns), _cells("---" for _ in self.columns)]
            lines += [_cells(column.text(row) for column in self.columns) for row in self.rows]
            lines += [""] if self.notes else []
        return "\n".join([*lines, *(f"- {note}" for note in self.notes)])


def _cells(texts: Any) -> str:
    return f"| {' | '.join(text.replace('|', '/') for text in texts)} |"


class Report:
    """All tables of a run. Files are written anew with every row: a run that is cut leaves what it had.

    Attributes:
        about: the machine and the settings.
        failures: what did not run, or did not pass, a line each.
    """

    def __init__(self, about: Mapping[str, Any], json_file: Path | None, markdown_file: Path | None) -> None:
        self.about = dict(about)
        self.tables: dict[str, Table] = {}
        self.failures: list[str] = []
        self._started = time.perf_counter()
        self._json_file = json_file
        self._markdown_file = markdown_file
        print(" ".join(f"{key}={value}" for key, value in about.items()), flush=True)

    def table(self, name: str, title: str, columns: Sequence[Column]) -> Table:
        self.tables[name] = Table(title, columns, self.save)
        return self.tables[name]

    def learn(self, **values: Any) -> None:
        """Something of the machine that was measured."""
        self.about |= values
        print(" ".join(f"{key}={value}" for key, value in values.items()), flush=True)

    def end(self) -> None:
        """Say what was missed and what failed, and write the files."""
        missed = sum(row.get("met") is False for table in self.tables.values() for row in table.rows)
        self.about["took_s"] = round(time.perf_counter() - self._started)
        print(f"\ntook {self.about['took_s']} s; targets missed: {missed}; failed: {len(self.failures)}", flush=True)
        for line in self.failures:
            print(f"FAILED: {line}", flush=True)
        self.save()

    def fail(self, line: str) -> None:
        self.failures.append(line)
        print(f"FAILED: {line}", flush=True)
        self.save()

    def save(self) -> None:
        if self._json_file:
            self._json_file.write_text(json.dumps(self.as_dict()))
        if self._markdown_file:
            self._markdown_file.write_text("\n\n".join(table.markdown() for table in self.tables.values()) + "\n")

    def as_dict(self) -> dict[str, Any]:
        parts = {name: {"rows": table.rows, "notes": table.notes} for name, table in self.tables.items()}
        return {"benchmark": "gpu", **self.about, "parts": parts, "failures": self.failures}
