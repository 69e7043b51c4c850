"""`forerun check lossless`: whether speculation keeps its promise, on the user's own models."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.check.report import Check, Outcome, Report, Row, check_expectation
from forerun.cli.generate import say
from forerun.cli.serve import parse_bytes
from forerun.cli.speculation import (
    BatchInvariantOption,
    SpecMethodOption,
    SpecModelOption,
    SpecTokensOption,
    SpeculativeConfigOption,
    roles_from_options,
)
from forerun.errors import ConfigError
from forerun.spec.rules import LOSSLESS

if TYPE_CHECKING:  # torch comes with it, and the options are judged first
    from forerun.check.lossless import Effort

_STYLES = {Outcome.FAILED: "bold red", Outcome.DIFFERS: "yellow", Outcome.NOTHING: "yellow"}


class What(enum.StrEnum):
    LOSSLESS = "lossless"


def check(
    what: Annotated[What, typer.Argument(help="lossless: the text, or its distribution, is the target's own.")],
    model: Annotated[str, typer.Argument(help="A directory in Hugging Face layout, a .gguf file or a built-in name.")],
    speculative_config: SpeculativeConfigOption = None,
    spec_method: SpecMethodOption = None,
    spec_model: SpecModelOption = None,
    spec_tokens: SpecTokensOption = None,
    batch_invariant: BatchInvariantOption = False,
    num_prompts: Annotated[int | None, typer.Option(help="Of the check's own; if not given, 6.", min=1)] = None,
    thorough: Annotated[bool, typer.Option("--thorough", help="More prompts, longer answers, more draws.")] = False,
    expect_lossy: Annotated[
        bool, typer.Option("--expect-lossy", help="Count what a lossy rule changes, instead of failing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    tokenizer: Annotated[str | None, typer.Option(help="Where the tokenizer comes from, if not the model.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus output, tokens.")] = None,
    kv_cache_memory: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Memory for KV blocks; if not given, a quarter of what is free.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32; on a GPU also bfloat16 and float16.")] = "auto",
    num_threads: Annotated[int | None, typer.Option(help="Threads; if not given, PyTorch's choice.")] = None,
) -> None:
    """Check that speculation keeps its promise: answers with drafts beside answers without, and the law of the draws.

    Ends with exit code 1 where a check fails, where nothing was drafted, and for a rule that is lossy by design.
    """
    target, spec, notes = roles_from_options(
        model,
        speculative_config=speculative_config,
        spec_method=spec_method,
        spec_model=spec_model,
        spec_tokens=spec_tokens,
    )
    for note in notes:
        say(f"warning: {note}")
    if spec is None:
        raise ConfigError("nothing to check without speculation: give --speculative-config")
    check_expectation(spec.rejection_sample_method, LOSSLESS[spec.rejection_sample_method], expect_lossy)
    cache_bytes = parse_bytes("--kv-cache-memory", kv_cache_memory)

    progress = Console(stderr=True)
    with progress.status(f"loading {model}") as status:
        from forerun.check.lossless import check_lossless
        from forerun.llm import LLM

        llm = LLM(
            target,
            speculative_config=spec,
            tokenizer=tokenizer,
            device=device,
            dtype=dtype,
            batch_invariant=batch_invariant,
            max_model_len=max_model_len,
            kv_cache_memory_bytes=cache_bytes,
            num_threads=num_threads,
        )
        report = check_lossless(llm, _effort(thorough, num_prompts), expect_lossy=expect_lossy, tell=status.update)
    if as_json:
        typer.echo(json.dumps(report.as_object(), ensure_ascii=False))
    else:
        show(Console(), report)
    if not report.passed:
        raise typer.Exit(1)


def _effort(thorough: bool, num_prompts: int | None) -> Effort:
    from forerun.check.lossless import QUICK, THOROUGH

    effort = THOROUGH if thorough else QUICK
    return effort if num_prompts is None else dataclasses.replace(effort, num_prompts=num_prompts)


def show(console: Console, report: Report) -> None:
    laws = [row for row in report.rows if row.check is Check.LAW]
    for rows in ([row for row in report.rows if row.check is not Check.LAW], laws):
        if rows:
            console.print(_table(rows))
    for row in report.rows:
        if row.detail and row.outcome is not Outcome.NOTHING:
            line = f"{row.outcome}: {row.check}, {row.parameter}, drafts {row.proposer}: {row.detail}."
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for sentence in (*report.words, f"{report.model}, {report.seconds:.0f} s."):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def _table(rows: list[Row]) -> Table:
    """Of token rows or of laws: these have a p-value, and find a total variation instead of a share of tokens."""
    law = rows[0].check is Check.LAW
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("check", "drafts", "parameter", "result"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "draws" if law else "tokens",
        "accepted\n/ drafted",
        *(["p"] if law else []),
        "finds\nTV" if law else "finds",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.check,
            row.proposer,
            row.parameter,
            Text(row.outcome, style=_STYLES.get(row.outcome, "green")),
            str(row.num_tokens),
            f"{'-' if row.check is Check.ROWS else row.num_accepted} / {row.num_drafted}",
            *([f"{row.p_value:.2g}"] if row.p_value is not None else []),
            _finds(row),
        )
    return table


def _finds(row: Row) -> str:
    if row.detectable is None:
        return "-"
    return f"{row.detectable:.3f}" if row.check is Check.LAW else f"{100 * row.detectable:.1f} %"
