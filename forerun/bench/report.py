"""Results on the terminal: the table, what failed, what to know about the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from forerun.bench.results import METRICS, ReportOptions, percentile_name

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
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def plain_table(title: str, headings: Sequence[str] = ()) -> Table:
    """Names at the left, figures at the right."""
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, show_header=bool(headings))
    table.add_column(headings[0] if headings else "", no_wrap=True)
    for heading in headings[1:] or ("",):
        table.add_column(heading, justify="right")
    return table


def show_result(console: Console, result: Mapping[str, Any], options: ReportOptions) -> None:
    """Counts, latencies, speculation, categories, errors and notes."""
    counts = plain_table(f"Benchmark of {result['model_id']}")
    for name, title in COUNTS.items():
        if result.get(name) is not None:
            counts.add_row(title, number(result[name]))
    console.print(counts)
    names = ("mean", "median", "std", *map(percentile_name, options.percentiles))
    latencies = plain_table("Milliseconds", ("", *names))
    for metric in options.metrics:
        latencies.add_row(METRICS[metric], *(number(result[f"{name}_{metric}_ms"]) for name in names))
    console.print(latencies)
    if "spec_decode_num_drafts" in result:
        console.print(_speculation(result))
    if categories := result["forerun"]["by_category"]:
        console.print(_categories(categories, options))
        if source := result["forerun"]["by_category_acceptance_from"]:
            console.print(f"Acceptance by category: {source}.", highlight=False, soft_wrap=True)
    show_errors(console, result["forerun"]["error_counts"])
    for note in result["forerun"]["notes"]:
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def _speculation(result: Mapping[str, Any]) -> Table:
    table = plain_table("Speculative Decoding")
    for name, title in SPECULATION.items():
        table.add_row(title, number(result[name]))
    for position, rate in enumerate(result["spec_decode_per_position_acceptance_rates"]):
        table.add_row(f"  Position {position} (%)", number(100 * rate))
    return table


def _categories(categories: Mapping[str, Mapping[str, Any]], options: ReportOptions) -> Table:
    metrics = [metric for metric in ("ttft", "tpot", "e2el") if metric in options.metrics]
    headings = ["Category", "done", "tokens", "tokens/\nrequest s", *(f"median\n{m} ms" for m in metrics)]
    speculation = any("spec_decode_num_drafts" in row for row in categories.values())
    if speculation:
        headings += ["accept.\nrate %", "accept.\nlength"]
    table = plain_table("By category", headings)
    for category, row in categories.items():
        figures = [row["completed"], row["total_output_tokens"], row["output_tokens_per_request_s"]]
        figures += [row[f"median_{metric}_ms"] for metric in metrics]
        if speculation:
            figures += [row.get(name, "-") for name in ("spec_decode_acceptance_rate", "spec_decode_acceptance_length")]
        table.add_row(category, *map(number, figures))
    return table


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
