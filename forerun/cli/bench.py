"""`forerun bench`: flags to what `forerun.bench` does. Those of `serve` are vLLM's."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from forerun.bench.client import BACKENDS, CHAT, Target
from forerun.bench.datasets import NAMES, RANDOM_WARNING, DatasetOptions
from forerun.bench.html import write_serve_report
from forerun.bench.load import LoadOptions
from forerun.bench.report import progress_bar, show_result
from forerun.bench.results import DEFAULT_METRICS, METRICS, ReportOptions
from forerun.bench.serve import ServeJob, result_path, run_serve, save, without_details
from forerun.cli import EXIT_INTERRUPTED
from forerun.cli.bench_arguments import VllmCommand, floats, goodput_limits, json_object, pairs
from forerun.cli.generate import say
from forerun.errors import ConfigError

bench = typer.Typer(no_args_is_help=True)

DEFAULT_TEMPERATURE_NOTE = "no --temperature is given: the server's own default applies"


def _panel(title: str) -> Callable[..., Any]:
    def option(help: str, *names: str, metavar: str | None = None) -> Any:
        return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=title)

    return option


_target, _data, _load = _panel("Server"), _panel("Prompts"), _panel("Load")
_sampling, _report = _panel("Sampling"), _panel("Report")

# fmt: off
DatasetName = Annotated[str, _data(f"{', '.join(NAMES)}.")]
DatasetPath = Annotated[Path | None, _data("The file of the dataset.", metavar="FILE")]
NumPrompts = Annotated[int, _data("How many; -1: all of the file, each once.")]
Category = Annotated[str | None, _data("Only this category; mt_bench stands for its eight.", "--spec-bench-category")]
OutputLen = Annotated[int | None, _data("Most tokens of every answer, whatever the dataset says.")]
HtmlFile = Annotated[Path | None, _report("Write a report with plots, in one file.", "--html", metavar="FILE")]


@bench.command(cls=VllmCommand)
def serve(
    backend: Annotated[str, _target(f"{', '.join(BACKENDS)}.")] = "openai",
    base_url: Annotated[str | None, _target("Where the server is, in place of --host and --port.")] = None,
    host: Annotated[str, _target("Address of the server.")] = "127.0.0.1",
    port: Annotated[int, _target("Port of the server.")] = 8000,
    endpoint: Annotated[str, _target("Path of the requests.")] = "/v1/completions",
    model: Annotated[str | None, _target("Name of the model; if not given, the first that the server lists.")] = None,
    served_model_name: Annotated[str | None, _target("Name that requests bear, if not --model.")] = None,
    tokenizer: Annotated[str | None, _target("Where the tokenizer comes from, if not --model.")] = None,
    skip_tokenizer_init: Annotated[bool, _target("Use no tokenizer.", "--skip-tokenizer-init")] = False,
    header: Annotated[list[str] | None, _target("Headers of every request: K=V [K=V ...].")] = None,
    insecure: Annotated[bool, _target("Trust any certificate.", "--insecure")] = False,
    extra_body: Annotated[str | None, _target("Fields of every request.", metavar="JSON")] = None,
    ready_check_timeout_sec: Annotated[float, _target("How long to wait for the server.")] = 0.0,
    dataset_name: DatasetName = "random",
    dataset_path: DatasetPath = None,
    num_prompts: NumPrompts = 1000,
    no_oversample: Annotated[bool, _data("Refuse where there are too few prompts.", "--no-oversample")] = False,
    disable_shuffle: Annotated[bool, _data("Keep the order of the file.", "--disable-shuffle")] = False,
    skip_chat_template: Annotated[bool, _data(
        "For completions: send texts as they are.", "--skip-chat-template")] = False,
    chat_template_kwargs: Annotated[str | None, _data("For the chat template.", metavar="JSON")] = None,
    input_len: Annotated[int | None, _data("In place of --random-input-len.")] = None,
    output_len: OutputLen = None,
    random_input_len: Annotated[int, _data("Tokens a prompt.")] = 1024,
    random_output_len: Annotated[int, _data("Most tokens an answer.")] = 128,
    random_range_ratio: Annotated[float, _data("Lengths vary by so much, 0 to 1.")] = 0.0,
    random_prefix_len: Annotated[int, _data("Tokens before each prompt that all share.")] = 0,
    sharegpt_output_len: Annotated[int | None, _data("If not given, each conversation's own.")] = None,
    custom_output_len: Annotated[int, _data("-1: each line's own output_tokens.")] = 256,
    spec_bench_category: Category = None,
    spec_bench_output_len: Annotated[int, _data("Most tokens an answer.")] = 256,
    request_rate: Annotated[float, _load("Requests per second; inf: all at once.")] = math.inf,
    burstiness: Annotated[float, _load("1: a Poisson process; below: burstier.")] = 1.0,
    max_concurrency: Annotated[int | None, _load("Most requests at once.")] = None,
    ramp_up_strategy: Annotated[str | None, _load("linear or exponential.")] = None,
    ramp_up_start_rps: Annotated[float | None, _load("Requests per second at the start.")] = None,
    ramp_up_end_rps: Annotated[float | None, _load("Requests per second at the end.")] = None,
    num_warmups: Annotated[int, _load("Requests before, of the first prompt, not counted.")] = 0,
    seed: Annotated[int, _load("Of the prompts' choice and order, and of arrival times.")] = 0,
    temperature: Annotated[float | None, _sampling("If not given, the server's default.")] = None,
    top_p: Annotated[float | None, _sampling("Sent as it is.")] = None,
    top_k: Annotated[int | None, _sampling("Sent as it is.")] = None,
    min_p: Annotated[float | None, _sampling("Sent as it is.")] = None,
    frequency_penalty: Annotated[float | None, _sampling("Sent as it is.")] = None,
    presence_penalty: Annotated[float | None, _sampling("Sent as it is.")] = None,
    repetition_penalty: Annotated[float | None, _sampling("Sent as it is.")] = None,
    ignore_eos: Annotated[bool, _sampling("Go on past the end token.", "--ignore-eos")] = False,
    logprobs: Annotated[int | None, _sampling("Ask for so many log-probabilities a token.")] = None,
    percentile_metrics: Annotated[str, _report(f"Of {', '.join(METRICS)}.")] = ",".join(DEFAULT_METRICS),
    metric_percentiles: Annotated[str, _report("With commas between them.")] = "99",
    goodput: Annotated[list[str] | None, _report("Limits in ms: ttft:MS tpot:MS e2el:MS.")] = None,
    save_result: Annotated[bool, _report("Save the result as JSON.", "--save-result")] = False,
    save_detailed: Annotated[bool, _report("And every request.", "--save-detailed")] = False,
    append_result: Annotated[bool, _report("Append it to the file.", "--append-result")] = False,
    result_dir: Annotated[Path | None, _report("Folder of the file.", metavar="DIR")] = None,
    result_filename: Annotated[str | None, _report("Name of the file.", metavar="NAME")] = None,
    metadata: Annotated[list[str] | None, _report("Fields of the result: K=V [K=V ...].")] = None,
    label: Annotated[str | None, _report("Names the run in the result and in its file's name.")] = None,
    html: HtmlFile = None,
    disable_tqdm: Annotated[bool, _report("No progress bar.", "--disable-tqdm")] = False,
    request_id_prefix: Annotated[str | None, _report("If not given, drawn.")] = None,
) -> None:
    """Send prompts to a server of OpenAI's form and measure the answers. Flags are those of `vllm bench serve`.

    The environment variable OPENAI_API_KEY holds the server's key. Ends with exit code 1 where every request failed.
    """
    # fmt: on
    chat = BACKENDS.get(backend) == CHAT
    template = json_object("--chat-template-kwargs", chat_template_kwargs)
    sampling = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "repetition_penalty": repetition_penalty,
        "ignore_eos": ignore_eos or None,
        "chat_template_kwargs": template or None if chat else None,
        **_logprobs(logprobs, chat=chat),
    }
    body = {name: value for name, value in sampling.items() if value is not None}
    job = ServeJob(
        target=Target(
            base_url=base_url or f"http://{f'[{host}]' if ':' in host else host}:{port}",
            endpoint=endpoint,
            backend=backend,
            model="",
            body=body | json_object("--extra-body", extra_body),
            headers=pairs("--header", header or ()),
            verify=not insecure,
            request_id_prefix=f"bench-{uuid.uuid4().hex[:8]}-" if request_id_prefix is None else request_id_prefix,
        ),
        dataset=DatasetOptions(
            name=dataset_name,
            path=dataset_path,
            num_prompts=num_prompts,
            seed=seed,
            shuffle=not disable_shuffle,
            oversample=not no_oversample,
            skip_chat_template=skip_chat_template,
            input_len=input_len,
            output_len=output_len,
            random_input_len=random_input_len,
            random_output_len=random_output_len,
            random_range_ratio=random_range_ratio,
            random_prefix_len=random_prefix_len,
            sharegpt_output_len=sharegpt_output_len,
            custom_output_len=custom_output_len,
            spec_bench_category=spec_bench_category,
            spec_bench_output_len=spec_bench_output_len,
            chat=chat,
            chat_template_kwargs=template,
        ),
        load=LoadOptions(
            request_rate=request_rate,
            burstiness=burstiness,
            max_concurrency=max_concurrency,
            ramp_up_strategy=ramp_up_strategy,
            ramp_up_start_rps=ramp_up_start_rps,
            ramp_up_end_rps=ramp_up_end_rps,
            num_warmups=num_warmups,
            seed=seed,
        ),
        report=ReportOptions(
            metrics=tuple(name.strip() for name in percentile_metrics.split(",")),
            percentiles=floats("--metric-percentiles", metric_percentiles),
            goodput=goodput_limits(goodput or ()),
        ),
        model=model,
        served_model_name=served_model_name,
        tokenizer=tokenizer,
        use_tokenizer=not skip_tokenizer_init,
        ready_timeout_s=ready_check_timeout_sec,
        label=label,
        metadata=pairs("--metadata", metadata or ()),
    )
    wanted = Wanted(save_result, save_detailed, append_result, result_dir, result_filename, html)
    if temperature is None and "temperature" not in job.target.body:
        say(f"note: {DEFAULT_TEMPERATURE_NOTE}")
    _serve(job, wanted, show_bar=not disable_tqdm)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which files `bench serve` writes."""

    save: bool
    detailed: bool
    append: bool
    folder: Path | None
    name: str | None
    html: Path | None

    def __post_init__(self) -> None:
        if self.save or self.append:
            return
        given = {"--save-detailed": self.detailed, "--result-dir": self.folder, "--result-filename": self.name}
        for flag, value in given.items():
            if value:
                raise ConfigError(f"{flag} has no effect without --save-result or --append-result: add one")


def _logprobs(number: int | None, *, chat: bool) -> dict[str, Any]:
    if number is None:
        return {}
    return {"logprobs": True, "top_logprobs": number} if chat else {"logprobs": number}


def _serve(job: ServeJob, wanted: Wanted, *, show_bar: bool) -> None:
    if job.dataset.name == "random":
        say(f"warning: {RANDOM_WARNING}")
    result, outcomes = asyncio.run(run_serve(job, progress_bar(disable=not show_bar)))
    show_result(Console(), result, job.report)
    if wanted.save or wanted.append:
        path = result_path(job, result, wanted.folder, wanted.name)
        save(path, result if wanted.detailed else without_details(result), append=wanted.append)
        say(f"saved {path}")
    if wanted.html is not None:
        write_serve_report(wanted.html, result, outcomes, job.report)
        say(f"wrote {wanted.html}")
    if result["forerun"]["interrupted"]:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not result["completed"]:
        raise typer.Exit(1)
