"""`bench serve`: one load on one server, from the first look at it to the result."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from forerun.bench import counters
from forerun.bench.client import Outcome, Target, ask, message_of
from forerun.bench.datasets import DatasetOptions, Sample, Tokenizer, load_samples
from forerun.bench.extras import extra
from forerun.bench.load import LoadOptions, Run, run_load
from forerun.bench.results import (
    ReportOptions,
    by_category,
    detail_fields,
    errors_grouped,
    header_fields,
    now_text,
    result_fields,
)
from forerun.errors import ConfigError
from forerun.models.tokenizer import load_tokenizer
from forerun.spec.stats import SpecTotals

if TYPE_CHECKING:
    import httpx

LOOK_AGAIN_S = 0.5
LOOK_LIMIT_S = 10.0  # one look at the server
ACCOUNT_TOLERANCE = 0.01  # of the tokens that the server counted beside ours
FOREIGN_NOTE = (
    "the server generated {server} tokens meanwhile, {ours} of them for this run: others used it, and its counters of "
    "speculation hold theirs too"
)


@dataclass
class Measured:
    """A run with what the server's counters said.

    Attributes:
        spec: what speculation did in all of the run; None where the server does not count it.
        by_category: the same for the requests of a category; None for what cannot be told.
        source: where the figures by category come from, in words.
    """

    run: Run
    spec: SpecTotals | None = None
    by_category: dict[str, SpecTotals | None] = field(default_factory=dict)
    source: str = ""
    notes: list[str] = field(default_factory=list)


async def find_model(http: httpx.AsyncClient, given: str | None, ready_timeout_s: float) -> str:
    """The model to ask for; the server is known to be there afterwards.

    Args:
        given: None: the first that the server lists.
        ready_timeout_s: how long a server may take to answer.
    Raises:
        ConfigError: there is no server, or it does not say which model it serves.
    """
    response = await _look(http, "/v1/models", time.monotonic() + ready_timeout_s)
    if given is not None:
        return given
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ConfigError(
            f"the server at {http.base_url} does not list its models (HTTP {response.status_code}): give --model"
        ) from None


async def _look(http: httpx.AsyncClient, path: str, deadline: float) -> httpx.Response:
    module = extra("httpx", "forerun bench")
    while True:
        try:
            response: httpx.Response = await http.get(path, timeout=LOOK_LIMIT_S)
            if response.status_code in (401, 403):
                raise ConfigError(
                    f"the server at {http.base_url} refuses: HTTP {response.status_code}: put its key into the "
                    "environment variable OPENAI_API_KEY"
                )
            if response.status_code < 500 or time.monotonic() >= deadline:
                return response
        except module.HTTPError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"no server at {http.base_url} ({message_of(str(error)) or type(error).__name__}): start it, or "
                    "give --base-url, --host or --port; --ready-check-timeout-sec waits for one"
                ) from None
        await asyncio.sleep(LOOK_AGAIN_S)


async def measure(
    http: httpx.AsyncClient,
    target: Target,
    samples: Sequence[Sample],
    load: LoadOptions,
    *,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> Measured:
    """Warm up, run the load, and read the server's counters around it.

    Raises:
        ConfigError: not one of the warm-up requests was answered.
    """
    send = functools.partial(ask, http, target)
    await _warm_up(send, samples, load)
    before = await counters.read(http)
    watch = None
    if before.spec is not None and load.max_concurrency == 1 and any(sample.category for sample in samples):
        watch = counters.CategoryCounters(before.spec)

    async def between(outcome: Outcome) -> None:
        if watch is not None and outcome.speculation is None and (now := await counters.read(http)).spec is not None:
            watch.note(outcome.sample.category, now.spec)

    run = await run_load(send, samples, load, done=done, between=None if watch is None else between)
    after = await counters.read(http)
    measured = Measured(run)
    if before.spec is not None and after.spec is not None:
        measured.spec = counters.subtract(after.spec, before.spec)
    _count_by_category(measured, watch)
    _check_account(measured, before, after)
    return measured


async def _warm_up(send: Callable[[Sample, int], Any], samples: Sequence[Sample], load: LoadOptions) -> None:
    """The first prompt, as often as asked for; not counted."""
    if not load.num_warmups:
        return
    once = LoadOptions(max_concurrency=load.max_concurrency)
    warm = await run_load(send, [samples[0]] * load.num_warmups, once)
    if warm.interrupted:
        raise KeyboardInterrupt
    if not any(outcome.ok for outcome in warm.outcomes):
        raise ConfigError(f"no warm-up request was answered: {next(iter(errors_grouped(warm.outcomes)))}")


def _count_by_category(measured: Measured, watch: counters.CategoryCounters | None) -> None:
    outcomes = measured.run.outcomes
    categories = {outcome.sample.category for outcome in outcomes} - {""}
    if not categories or (measured.spec is None and all(outcome.speculation is None for outcome in outcomes)):
        return
    own = {c: counters.from_requests(o for o in outcomes if o.sample.category == c) for c in categories}
    if all(totals is not None for totals in own.values()):
        measured.by_category = own
        measured.source = "the server's metrics of each request"
    elif watch is not None:
        measured.by_category = {c: watch.by_category.get(c) for c in categories}
        measured.source = "/metrics, read between the requests, of which there was one at a time"
    else:
        measured.notes.append(
            "acceptance by category needs --max-concurrency 1, or a server that says what speculation did for each "
            "request: --per-request-spec-decode-metrics summary"
        )


def _check_account(measured: Measured, before: counters.Counters, after: counters.Counters) -> None:
    """Say so where the server's counters hold more than this run."""
    if before.generation_tokens is None or after.generation_tokens is None or measured.run.interrupted:
        return
    server = after.generation_tokens - before.generation_tokens
    ours = sum(outcome.num_tokens for outcome in measured.run.outcomes)
    if all(outcome.ok for outcome in measured.run.outcomes) and server > ours * (1 + ACCOUNT_TOLERANCE):
        measured.notes.append(FOREIGN_NOTE.format(server=server, ours=ours))


def count_missing_tokens(run: Run, tokenizer: Tokenizer | None) -> list[str]:
    """Count the tokens of answers for which the server sent no usage, and say how."""
    missing = [outcome for outcome in run.outcomes if outcome.ok and outcome.num_output_tokens is None]
    for outcome in missing:
        if tokenizer is not None:
            outcome.num_output_tokens = len(tokenizer.encode(outcome.text, add_special_tokens=False))
        else:
            outcome.num_output_tokens = len(outcome.itls_s) + (outcome.ttft_s is not None)
    if not missing:
        return []
    how = "their text, tokenised again," if tokenizer is not None else "chunks (give --tokenizer for tokens)"
    return [f"the server sent no usage for {len(missing)} answers: {how} was counted instead"]


def build_result(
    header: Mapping[str, Any], measured: Measured, report: ReportOptions, *, num_asked: int
) -> dict[str, Any]:
    """The whole result: vLLM's fields, details included, and ours under `forerun`."""
    run = measured.run
    result = {"date": now_text(), **header, **result_fields(run, report), **detail_fields(run)}
    if measured.spec is not None:
        result |= counters.acceptance(measured.spec)
    notes = list(measured.notes)
    if run.interrupted:
        notes.insert(0, f"interrupted: {len(run.outcomes)} of {num_asked} requests were measured")
    result["forerun"] = {
        "interrupted": run.interrupted,
        "by_category": by_category(run.outcomes, report, measured.by_category),
        "by_category_acceptance_from": measured.source,
        "error_counts": errors_grouped(run.outcomes),
        "goodput_limits_ms": dict(report.goodput),
        "notes": notes,
    }
    return result


def without_details(result: Mapping[str, Any]) -> dict[str, Any]:
    """What is saved without --save-detailed."""
    details = detail_fields(Run()).keys() | {"server_queue_times", "server_ttfts"}
    return {name: value for name, value in result.items() if name not in details}


@dataclass(frozen=True, kw_only=True)
class ServeJob:
    """All that `bench serve` was asked for.

    Attributes:
        model: names the tokenizer too, unless `tokenizer` does; None: what the server lists first.
        served_model_name: the name that requests bear, where it is another one.
        ready_timeout_s: how long to wait for the server.
        target: with an empty `model`, which is filled in here.
        header: fields that stand before the figures, the user's own among them.
    """

    target: Target
    dataset: DatasetOptions
    load: LoadOptions
    report: ReportOptions = field(default_factory=ReportOptions)
    model: str | None = None
    served_model_name: str | None = None
    tokenizer: str | None = None
    use_tokenizer: bool = True
    ready_timeout_s: float = 0.0
    label: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {"date", *self.header("", 0), *result_fields(Run(), self.report), *detail_fields(Run()), "forerun"}
        for name in self.metadata:
            if name in known:
                raise ConfigError(f"--metadata {name} is a field of the result itself: choose another name")

    def header(self, model: str, num_prompts: int) -> dict[str, Any]:
        return header_fields(
            self.load,
            backend=self.target.backend,
            model=model,
            tokenizer=self.tokenizer or model,
            num_prompts=num_prompts,
            label=self.label,
        )

    def load_tokenizer(self, model: str) -> Tokenizer:
        """
        Raises:
            ConfigError: there is none under that name, or none is wanted.
        """
        if not self.use_tokenizer:
            raise ConfigError(
                "these prompts need a tokenizer: leave --skip-tokenizer-init out, or use --backend openai-chat or "
                "--skip-chat-template with a dataset of texts"
            )
        try:
            return load_tokenizer(self.tokenizer or model)
        except ConfigError as error:
            raise ConfigError(f"these prompts need a tokenizer: give --tokenizer ({error})") from None


async def run_serve(job: ServeJob, bar: Progress) -> tuple[dict[str, Any], list[Outcome]]:
    """The result, details included, and the outcomes that it was made from.

    Raises:
        ConfigError: no server, no prompts, no tokenizer where one is needed.
    """
    async with job.target.connect() as http:
        model = await find_model(http, job.model, job.ready_timeout_s)
        tokenizer = functools.cache(functools.partial(job.load_tokenizer, model))
        samples = load_samples(job.dataset, tokenizer)
        target = replace(job.target, model=job.served_model_name or model)
        with bar:
            task = bar.add_task("requests", total=len(samples))
            measured = await measure(http, target, samples, job.load, done=lambda _: bar.advance(task))
    known = tokenizer() if job.use_tokenizer and (job.tokenizer or tokenizer.cache_info().currsize) else None
    measured.notes += count_missing_tokens(measured.run, known)
    header = {**job.header(model, len(samples)), **job.metadata}
    return build_result(header, measured, job.report, num_asked=len(samples)), measured.run.outcomes


def result_path(job: ServeJob, result: Mapping[str, Any], folder: Path | None, name: str | None) -> Path:
    """Where to save, named as vLLM names it unless a name is given."""
    if name is None:
        label, rate, limit = job.label or job.target.backend, result["request_rate"], job.load.max_concurrency
        concurrency = "" if limit is None else f"-concurrency{limit}"
        name = f"{label}-{rate}qps{concurrency}-{str(result['model_id']).split('/')[-1]}-{result['date']}.json"
    return (folder or Path()) / name


def save(path: Path, result: Mapping[str, Any], *, append: bool) -> None:
    """One JSON object; appended ones stand on lines of their own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w", encoding="utf-8") as file:
        if append and file.tell() > 0:
            file.write("\n")
        json.dump(result, file)
