"""Results on the terminal: the table, what failed, what to know about the figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from forerun.bench.results import METRICS, ReportOptions, percentile_name

PARTS = ("draft", "target", "verify", "host")  # of a step
MOST_ERRORS = 10  # different ones that are shown
COUNTS = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Duration (s)",
    "total_input_tokens": "Input tokens",
    "total_output_tokens": "Output tokens",
    "request_throughput": "Requests/s",
    "request_goodput": "Good requests/s",
    "output_throughput": "Output tokens/s",
    "total_token_throughput": "Tokens/s, input included",
    "max_output_tokens_per_s": "Most chunks in a second",
    "max_concurrent_requests": "Most requests at once",
}
SPECULATION = {
    "spec_decode_acceptance_rate": "Acceptance rate (%)",
    "spec_decode_acceptance_length": "Acceptance length",
    "spec_decode_num_drafts": "Drafts",
    "spec_decode_draft_tokens": "Draft tokens",
    "spec_decode_accepted_tokens": "Accepted tokens",
}


def progress_bar(*, disable: bool) -> Progress:
    """A bar on stderr; none where that is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=disable or not console.is_terminal,
        transient=True,
    )


def number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def show_table(console: Console, title: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Names at the left, figures at the right, under a line that says what they are. No headings: two columns."""
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), show_header=bool(headings))
    table.add_column(headings[0] if headings else "", no_wrap=True)
    for heading in headings[1:] or ("",):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(number(cell)) for cell in row))
    console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
    console.print(table)


def show_result(console: Console, result: Mapping[str, Any], options: ReportOptions) -> None:
    """Counts, latencies, speculation, categories, errors and notes."""
    counts = [(title, result[name]) for name, title in COUNTS.items() if result.get(name) is not None]
    show_table(console, f"Benchmark of {result['model_id']}", (), counts)
    names = ("mean", "median", "std", *map(percentile_name, options.percentiles))
    latencies = [(METRICS[m], *(result[f"{name}_{m}_ms"] for name in names)) for m in options.metrics]
    show_table(console, "Milliseconds", ("", *names), latencies)
    if "spec_decode_num_drafts" in result:
        rates = result["spec_decode_per_position_acceptance_rates"]
        positions = [(f"  Position {position} (%)", 100 * rate) for position, rate in enumerate(rates)]
        rows = [(title, result[name]) for name, title in SPECULATION.items()]
        show_table(console, "Speculative Decoding", (), [*rows, *positions])
    if categories := result["forerun"]["by_category"]:
        _show_categories(console, categories, options)
        if source := result["forerun"]["by_category_acceptance_from"]:
            console.print(f"Acceptance by category: {source}.", highlight=False, soft_wrap=True)
    show_errors(console, result["forerun"]["error_counts"])
    for note in result["forerun"]["notes"]:
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def _show_categories(console: Console, categories: Mapping[str, Mapping[str, Any]], options: ReportOptions) -> None:
    metrics = [metric for metric in ("ttft", "tpot", "e2el") if metric in options.metrics]
    headings = ["", "done", "tokens", "tok/\nreq. s", *(f"median\n{m} ms" for m in metrics)]
    names = ["completed", "total_output_tokens", "output_tokens_per_request_s", *(f"median_{m}_ms" for m in metrics)]
    if any("spec_decode_num_drafts" in row for row in categories.values()):
        headings += ["accept.\n%", "accept.\nlength"]
        names += ["spec_decode_acceptance_rate", "spec_decode_acceptance_length"]
    rows = [(category, *(row.get(name, "-") for name in names)) for category, row in categories.items()]
    show_table(console, "By category", headings, rows)


def show_profile(console: Console, profile: Mapping[str, Mapping[str, float]]) -> None:
    """Where the time of a step goes, for steps that only decode and for those with a part of a prompt."""
    for kind, parts in profile.items():
        about = "that only decode" if kind == "decode" else "that compute a part of a prompt"
        rows = [
            (name, f"{parts[name]:.3f}", f"{100 * parts[name] / max(1e-12, parts['step']):.1f}")
            for name in (*PARTS, "step")
        ]
        show_table(console, f"{number(parts['steps'])} steps {about}", ("", "ms a step", "%"), rows)


def show_errors(console: Console, counts: Mapping[str, int]) -> None:
    """Each message with how often it came."""
    if not counts:
        return
    total = sum(counts.values())
    console.print(f"{total} request{'s'[: total != 1]} failed:", style="bold red", highlight=False)
    for message, count in list(counts.items())[:MOST_ERRORS]:
        console.print(f"  {count} x {message}", style="red", highlight=False, markup=False, soft_wrap=True)
    if len(counts) > MOST_ERRORS:
        console.print(f"  and {len(counts) - MOST_ERRORS} other messages", style="red", highlight=False)
