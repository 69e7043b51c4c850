"""A report as one HTML file that needs nothing else: figures, plots, errors."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forerun.bench.extras import extra
from forerun.bench.report import COUNTS, PARTS, SPECULATION, number
from forerun.bench.results import METRICS, MS, ReportOptions, chunks_per_second, percentile_name, values_s

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #1c1c1c }}
table {{ border-collapse: collapse; margin: 1em 0 }}
th, td {{ padding: .25em .8em; text-align: right; border-bottom: 1px solid #ddd }}
th:first-child, td:first-child {{ text-align: left }}
.part {{ margin-left: 2em }}
.note {{ background: #fff6dc; padding: .5em 1em; margin: .3em 0 }}
</style><script>{script}</script></head><body><h1>{title}</h1>
{parts}
</body></html>
"""
POINTS = 400  # of a distribution's curve
PLOT_HEIGHT = 360


class Page:
    """Parts of a report in their order."""

    def __init__(self, title: str) -> None:
        extra("plotly", "an HTML report")
        self.figures: Any = extra("plotly.graph_objects", "an HTML report")
        self._title = title
        self._parts: list[str] = []

    def text(self, text: str, *, tag: str = "p", css: str = "") -> None:
        self._parts.append(f'<{tag} class="{css}">{html.escape(text)}</{tag}>')

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        def line(cells: Iterable[object], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(number(cell))}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(line(row, "td") for row in rows)
        self._parts.append(f"<table>{line(headings, 'th') if headings else ''}{body}</table>")

    def plot(self, traces: Sequence[Any], title: str, x: str, y: str, **layout: Any) -> None:
        figure = self.figures.Figure(traces)
        settings = {"title": title, "height": PLOT_HEIGHT, "template": "plotly_white", "margin": {"t": 50, "b": 50}}
        figure.update_layout(**(settings | layout))
        figure.update_xaxes(title=x)
        figure.update_yaxes(title=y)
        self._parts.append(figure.to_html(full_html=False, include_plotlyjs=False))

    def write(self, path: Path) -> None:
        script = extra("plotly.offline", "an HTML report").get_plotlyjs()
        parts = "\n".join(self._parts)
        path.write_text(PAGE.format(title=html.escape(self._title), script=script, parts=parts), encoding="utf-8")


def write_serve_report(path: Path, result: Mapping[str, Any], outcomes: Sequence[Any], options: ReportOptions) -> None:
    """The report of `bench serve`.

    Args:
        result: as `build_result` makes it.
        outcomes: of the same run.
    """
    page = Page(f"Benchmark of {result['model_id']}")
    page.text(_conditions(result))
    for note in result["forerun"]["notes"]:
        page.text(note, css="note")
    page.table((), [(title, result[name]) for name, title in COUNTS.items() if result.get(name) is not None])
    names = ("mean", "median", "std", *map(percentile_name, options.percentiles))
    rows = [(METRICS[m], *(result[f"{name}_{m}_ms"] for name in names)) for m in options.metrics]
    page.table(("milliseconds", *names), rows)
    _speculation(page, result)
    _categories(page, result["forerun"]["by_category"])
    _distributions(page, outcomes, options)
    _timeline(page, outcomes)
    _profile(page, result["forerun"].get("step_profile_ms", {}))
    if errors := result["forerun"]["error_counts"]:
        page.text("Failed requests", tag="h2")
        page.table(("error", "times"), errors.items())
    page.write(path)


def _conditions(result: Mapping[str, Any]) -> str:
    names = ("date", "backend", "num_prompts", "request_rate", "burstiness", "max_concurrency", "label")
    return ", ".join(f"{name} {result[name]}" for name in names if result.get(name) is not None)


def _speculation(page: Page, result: Mapping[str, Any]) -> None:
    if "spec_decode_num_drafts" not in result:
        return
    page.text("Speculative decoding", tag="h2")
    page.table((), [(title, result[name]) for name, title in SPECULATION.items()])
    rates = result["spec_decode_per_position_acceptance_rates"]
    bars = page.figures.Bar(x=list(range(len(rates))), y=[100 * rate for rate in rates])
    page.plot([bars], "Acceptance by position (of all drafts)", "position in the draft", "%")


def _categories(page: Page, categories: Mapping[str, Mapping[str, Any]]) -> None:
    if not categories:
        return
    page.text("By category", tag="h2")
    speeds = [row["output_tokens_per_request_s"] for row in categories.values()]
    page.plot(
        [page.figures.Bar(x=list(categories), y=speeds)], "Tokens per second of request time", "category", "tokens/s"
    )
    lengths = {
        c: row["spec_decode_acceptance_length"] for c, row in categories.items() if "spec_decode_num_drafts" in row
    }
    if lengths:
        bars = page.figures.Bar(x=list(lengths), y=list(lengths.values()))
        page.plot([bars], "Acceptance length", "category", "tokens a step with a draft")


def _distributions(page: Page, outcomes: Sequence[Any], options: ReportOptions) -> None:
    """For each metric: which share of observations is below."""
    page.text("Latencies", tag="h2")
    shares = np.linspace(0, 100, POINTS)
    for metric in options.metrics:
        values = values_s(outcomes, metric)
        if values:
            curve = page.figures.Scatter(x=np.percentile(values, shares) * MS, y=shares, mode="lines")
            page.plot([curve], f"{METRICS[metric]}: {len(values)} observations", "ms", "% at or below")


def _timeline(page: Page, outcomes: Sequence[Any]) -> None:
    """Each request from sending to its last chunk, and chunks a second over the run."""
    done = [outcome for outcome in outcomes if outcome.ok and outcome.ttft_s is not None]
    if not done:
        return
    page.text("Over time", tag="h2")
    start = min(outcome.start for outcome in done)
    places = list(range(len(done)))
    starts = [outcome.start - start for outcome in done]

    def bars(name: str, base: list[float], length: list[float]) -> Any:
        return page.figures.Bar(y=places, x=length, base=base, orientation="h", name=name)

    firsts = [outcome.start - start + outcome.ttft_s for outcome in done]
    traces = [
        bars("to the first token", starts, [outcome.ttft_s for outcome in done]),
        bars("after it", firsts, [outcome.latency_s - outcome.ttft_s for outcome in done]),
    ]
    page.plot(traces, "Requests", "seconds from the start", "request", barmode="overlay", bargap=0.1)
    counts = chunks_per_second(done)
    page.plot(
        [page.figures.Scatter(x=list(range(len(counts))), y=counts, mode="lines+markers")],
        "Chunks in each second",
        "seconds from the start",
        "chunks",
    )


def _profile(page: Page, profile: Mapping[str, Mapping[str, float]]) -> None:
    if not profile:
        return
    page.text("Where the time of a step goes", tag="h2")
    kinds = [f"{kind}: {parts['steps']} steps" for kind, parts in profile.items()]
    traces = [
        page.figures.Bar(y=kinds, x=[parts[part] for parts in profile.values()], orientation="h", name=part)
        for part in PARTS
    ]
    page.plot(traces, "Milliseconds a step", "ms", "", barmode="stack")
