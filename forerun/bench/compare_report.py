"""The comparison on the terminal and as a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from forerun.bench.compare import CompareJob, Finding, Level, same_texts, verdict
from forerun.bench.html import Page
from forerun.bench.report import number, show_errors, show_table
from forerun.bench.results import errors_grouped
from forerun.bench.stats import METHOD

HEADINGS = ("category", "plain\ntok/s", "tok/s", "ratio", "95 % interval", "accept.\nlength")

TICKS = (0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16)
RATES = "tok/s: output tokens by the wall clock for all prompts, by the time of its own requests for a category."


def _row(finding: Finding) -> tuple[str, ...]:
    ratio, spec = finding.ratio, finding.spec
    interval = "-" if ratio is None or ratio.low is None else f"{ratio.low:.2f} to {ratio.high:.2f}"
    length = "-" if spec is None else number(1 + spec.num_accepted_tokens / max(1, spec.num_drafts))
    speed = "-" if ratio is None else f"{ratio.value:.2f}"
    return finding.category, number(finding.plain_rate), number(finding.rate), speed, interval, length


def _groups(found: Sequence[Finding]) -> dict[tuple[str, int], list[Finding]]:
    groups: dict[tuple[str, int], list[Finding]] = {}
    for finding in found:
        groups.setdefault((finding.arm, finding.concurrency), []).append(finding)
    return groups


def texts_lines(job: CompareJob, levels: Sequence[Level]) -> list[str]:
    """For each configuration whether its answers are plain's."""
    lines = []
    for arm in job.arms[1:]:
        same, total = same_texts(levels, arm.name)
        lines.append(f"{arm.name}: {same} of {total} answers are plain's, letter by letter.")
    return lines


def interruption(job: CompareJob, levels: Sequence[Level]) -> list[str]:
    """One line where not all windows were measured."""
    whole = sum(level.num_windows for level in levels)
    asked = len(job.levels) * len(job.windows)
    return [] if whole == asked else [f"interrupted: {whole} of {asked} windows were measured"]


def show_comparison(console: Console, job: CompareJob, levels: Sequence[Level], found: Sequence[Finding]) -> None:
    """Tables, the verdict, whether the texts are the same, what failed."""
    for (arm, concurrency), group in _groups(found).items():
        title = f"{job.model}: {arm} against plain, {concurrency} at once"
        show_table(console, title, HEADINGS, map(_row, group))
    for line in [RATES, *verdict(found), *texts_lines(job, levels), *interruption(job, levels)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for level in levels:
        for arm in level.runs:
            if errors := errors_grouped(level.outcomes(arm)):
                console.print(f"{arm}, {level.concurrency} at once:", highlight=False, markup=False)
                show_errors(console, errors)


def write_comparison(path: Path, job: CompareJob, levels: Sequence[Level], found: Sequence[Finding]) -> None:
    """The same as a page, each ratio with its interval in a plot."""
    page = Page(f"Speculation on {job.model}")
    page.text("; ".join(f"{arm.name}: {arm.speculative_config or 'no speculation'}" for arm in job.arms))
    for line in [*verdict(found), *texts_lines(job, levels)]:
        page.text(line, css="part" if line.startswith(" ") else "")
    for line in interruption(job, levels):
        page.text(line, css="note")
    for concurrency in dict.fromkeys(finding.concurrency for finding in found):
        _plot(page, found, concurrency)
    for (arm, concurrency), group in _groups(found).items():
        page.text(f"{arm}, {concurrency} at once", tag="h2")
        page.table([heading.replace("\n", " ") for heading in HEADINGS], map(_row, group))
    page.text(f"{METHOD}. {RATES}")
    page.write(path)


def _plot(page: Page, found: Sequence[Finding], concurrency: int) -> None:
    """Each ratio with its interval, on an axis where twice and half are equally far from 1. An interval that says
    little runs out of the picture."""
    traces, shown = [], []
    for (arm, at_once), group in _groups(found).items():
        ratios = [(f.category, f.ratio) for f in group if f.ratio is not None and at_once == concurrency]
        if not ratios:
            continue
        values = [r.value for _, r in ratios]
        above = [(r.high or r.value) - r.value for _, r in ratios]
        below = [r.value - (r.low or r.value) for _, r in ratios]
        errors = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
        names = [category for category, _ in ratios]
        traces.append(page.figures.Scatter(x=names, y=values, error_y=errors, name=arm, mode="markers"))
        shown += values
    if not traces:
        return
    plain = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": {"dash": "dash"}}
    edges = [math.log10(min(1.0, *shown) / 2), math.log10(max(1.0, *shown) * 2)]
    page.plot(
        traces, f"Times plain's speed, {concurrency} at once", "category", "ratio",
        scattermode="group", shapes=[plain], yaxis={"type": "log", "range": edges, "tickvals": TICKS},
    )  # fmt: skip
