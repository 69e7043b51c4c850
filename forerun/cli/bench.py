"""`forerun bench`: flags to what `forerun.bench` does. Those of `serve` are vLLM's."""

from __future__ import annotations

import asyncio
import math
import signal
import string
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from forerun.bench.client import BACKENDS, CHAT, Target
from forerun.bench.compare import PLAIN, Arm, CompareJob, as_object, findings, measure, split, start_servers
from forerun.bench.compare_report import show_comparison, write_comparison
from forerun.bench.datasets import NAMES, RANDOM_WARNING, DatasetOptions, load_samples
from forerun.bench.html import write_serve_report
from forerun.bench.load import LoadOptions
from forerun.bench.offline import OfflineRun, profile_object, run_offline
from forerun.bench.report import progress_bar, show_profile, show_result
from forerun.bench.results import DEFAULT_METRICS, METRICS, ReportOptions, header_fields
from forerun.bench.serve import ServeJob, build_result, result_path, run_serve, save, without_details
from forerun.cli import EXIT_INTERRUPTED
from forerun.cli.bench_arguments import VllmCommand, counts, floats, goodput_limits, json_object, pairs
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
from forerun.models.tokenizer import load_tokenizer
from forerun.request import SamplingParams

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
InputLen = Annotated[int | None, _data("Tokens a random prompt; other datasets have their own lengths.")]
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
    input_len: InputLen = None,
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


# fmt: off
@bench.command()
def compare(
    model: Annotated[str, typer.Argument(help="As for `forerun serve`.")],
    serve_arguments: Annotated[list[str] | None, typer.Argument(
        help="After --: flags of `forerun serve` for every server.", metavar="[-- SERVE FLAGS]")] = None,
    speculative_config: Annotated[list[str] | None, typer.Option(
        "--speculative-config", "-sc", metavar="JSON", help="A configuration to compare; may be repeated.")] = None,
    max_concurrency: Annotated[str, _load("Requests at once: 1,4,16.", metavar="N[,N...]")] = "1",
    windows: Annotated[int, _load("Sets of prompts that every server answers in turn.")] = 5,
    num_warmups: Annotated[int | None, _load(
        "Requests before each level, not counted; if not given, as many as the level has at once.")] = None,
    backend: Annotated[str, _data("openai-chat, or openai for completions of the bare prompts.")] = CHAT,
    dataset_name: DatasetName = "spec_bench",
    dataset_path: DatasetPath = None,
    num_prompts: NumPrompts = 120,
    spec_bench_category: Category = None,
    input_len: InputLen = None,
    output_len: OutputLen = 128,
    temperature: Annotated[float, _sampling("0 takes the most likely token each time.")] = 0.0,
    seed: Annotated[int, _sampling("Of the prompts' choice and order, and of every answer.")] = 0,
    ignore_eos: Annotated[bool, _sampling("Go on past the end token.", "--ignore-eos")] = False,
    output_json: Annotated[Path | None, _report("Write the result as JSON.", metavar="FILE")] = None,
    html: HtmlFile = None,
    disable_tqdm: Annotated[bool, _report("No progress bar.", "--disable-tqdm")] = False,
) -> None:
    """Is speculation worth it here? Plain decoding and each configuration answer the same prompts in turns.

    Says where each helps, where it does not, and where the measurement does not let one say. A server is started for
    plain decoding and for each configuration: all of them must fit into memory.
    """
    # fmt: on
    arms = _arms(model, speculative_config or ())
    chat = BACKENDS.get(backend) == CHAT
    dataset = DatasetOptions(
        name=dataset_name,
        path=dataset_path,
        num_prompts=num_prompts,
        seed=seed,
        input_len=input_len,
        output_len=output_len,
        spec_bench_category=spec_bench_category,
        skip_chat_template=True,
        chat=chat,
    )
    body: dict[str, Any] = {"temperature": temperature, "seed": seed}
    if ignore_eos:
        body["ignore_eos"] = True
    if dataset.name == "random":
        say(f"warning: {RANDOM_WARNING}")
    endpoint = "/v1/chat/completions" if chat else "/v1/completions"
    job = CompareJob(
        model=model,
        arms=arms,
        levels=counts("--max-concurrency", max_concurrency),
        windows=split(load_samples(dataset, lambda: load_tokenizer(model)), windows, seed),
        target=Target(base_url="", endpoint=endpoint, backend=backend, model=model, body=body),
        serve_arguments=_cache_arguments(serve_arguments or [], len(arms)),
        num_warmups=num_warmups,
    )
    _compare(job, output_json, html, show_bar=not disable_tqdm)


def _arms(model: str, configs: Sequence[str]) -> list[Arm]:
    """Plain and each configuration, judged before anything is started."""
    if not configs:
        raise ConfigError("bench compare needs --speculative-config, once for each configuration to compare")
    arms = [Arm(PLAIN)]
    for place, text in enumerate(configs):
        _, spec, notes = roles_from_options(model, speculative_config=text)
        assert spec is not None
        for note in notes:
            say(f"warning: {note}")
        length = spec.num_speculative_tokens
        letter = string.ascii_uppercase[place % 26] * (1 + place // 26)
        arms.append(Arm(f"{letter} {'+'.join(spec.method_names)}{f' K={length}' if length else ''}", text))
    return arms


def _cache_arguments(arguments: Sequence[str], num_arms: int) -> list[str]:
    """The servers' flags with one that shares the memory between them, unless the user has said how."""
    from forerun.engine.device import cuda_obstacle
    from forerun.memory.budget import kv_cache_bytes

    names = [word.partition("=")[0] for word in arguments]
    if any(name.startswith("--kv-cache-memory") for name in names):
        return list(arguments)
    on_cpu = any(word.removeprefix("--device=") == "cpu" for word in arguments)
    if not on_cpu and cuda_obstacle() is None:
        raise ConfigError(
            f"{num_arms} servers share one GPU: say how much memory each may take for its KV cache: "
            "-- --kv-cache-memory 8GiB"
        )
    return [*arguments, "--kv-cache-memory", str(kv_cache_bytes(None) // num_arms)]


def _compare(job: CompareJob, output_json: Path | None, html: Path | None, *, show_bar: bool) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the servers end with us
    with ExitStack() as stack:
        bar = stack.enter_context(progress_bar(disable=not show_bar))
        total = sum(map(len, job.windows)) * len(job.arms) * len(job.levels)
        task = bar.add_task("", total=total)
        servers = start_servers(job, stack, lambda doing: bar.update(task, description=doing))
        levels = asyncio.run(
            measure(
                job,
                {name: server.url for name, server in servers.items()},
                done=lambda _: bar.advance(task),
                tell=lambda doing: bar.update(task, description=doing),
            )
        )
    found = findings(level for level in levels if level.num_windows)
    show_comparison(Console(), job, levels, found)
    if output_json is not None:
        save(output_json, as_object(job, levels, found), append=False)
        say(f"wrote {output_json}")
    if html is not None:
        write_comparison(html, job, levels, found)
        say(f"wrote {html}")
    if any(run.interrupted for level in levels for runs in level.runs.values() for run in runs):
        raise typer.Exit(EXIT_INTERRUPTED)
    if not any(finding.ratio for finding in found):
        raise typer.Exit(1)


# fmt: off
@bench.command()
def offline(
    model: Annotated[str, typer.Argument(help="A directory in Hugging Face layout, a .gguf file or a built-in name.")],
    speculative_config: SpeculativeConfigOption = None,
    spec_method: SpecMethodOption = None,
    spec_model: SpecModelOption = None,
    spec_tokens: SpecTokensOption = None,
    batch_invariant: BatchInvariantOption = False,
    dataset_name: DatasetName = "spec_bench",
    dataset_path: DatasetPath = None,
    num_prompts: NumPrompts = 40,
    spec_bench_category: Category = None,
    input_len: InputLen = None,
    output_len: OutputLen = 128,
    skip_chat_template: Annotated[bool, _data("Complete the bare prompts.", "--skip-chat-template")] = False,
    max_concurrency: Annotated[int, _load("Most requests at once.")] = 16,
    num_warmups: Annotated[int, _load("Requests before, of the first prompt, not counted.")] = 1,
    temperature: Annotated[float, _sampling("0 takes the most likely token each time.")] = 0.0,
    seed: Annotated[int, _sampling("Of the prompts' choice and order, and of every answer.")] = 0,
    ignore_eos: Annotated[bool, _sampling("Go on past the end token.", "--ignore-eos")] = False,
    device: Annotated[str, _target("cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    dtype: Annotated[str, _target("auto, float32; on a GPU also bfloat16 and float16.")] = "auto",
    num_threads: Annotated[int | None, _target("Threads of the CPU's kernels.")] = None,
    kv_cache_memory: Annotated[str | None, _target("Memory for KV blocks.", metavar="BYTES")] = None,
    output_json: Annotated[Path | None, _report("Write the result as JSON.", metavar="FILE")] = None,
    html: HtmlFile = None,
    disable_tqdm: Annotated[bool, _report("No progress bar.", "--disable-tqdm")] = False,
) -> None:
    """Measure `LLM` in this process, and where the time of its steps goes: draft, target, verify, host."""
    # fmt: on
    target, spec, notes = roles_from_options(
        model, speculative_config=speculative_config, spec_method=spec_method, spec_model=spec_model,
        spec_tokens=spec_tokens,
    )  # fmt: skip
    for note in notes:
        say(f"warning: {note}")
    dataset = DatasetOptions(
        name=dataset_name,
        path=dataset_path,
        num_prompts=num_prompts,
        seed=seed,
        input_len=input_len,
        output_len=output_len,
        spec_bench_category=spec_bench_category,
        skip_chat_template=True,  # `run_offline` applies it
    )
    load = LoadOptions(max_concurrency=max_concurrency, num_warmups=num_warmups)
    params = SamplingParams(temperature=temperature, seed=seed, ignore_eos=ignore_eos)
    cache_bytes = parse_bytes("--kv-cache-memory", kv_cache_memory)
    if dataset.name == "random":
        say(f"warning: {RANDOM_WARNING}")

    from forerun.llm import LLM

    llm = LLM(
        target,
        speculative_config=spec,
        device=device,
        dtype=dtype,
        batch_invariant=batch_invariant,
        num_threads=num_threads,
        kv_cache_memory_bytes=cache_bytes,
        max_num_seqs=max_concurrency,
    )
    samples = load_samples(dataset, lambda: llm.tokenizer)
    chat = not skip_chat_template and dataset.name != "random"
    if chat and not llm.tokenizer.has_chat_template:
        raise ConfigError(f"model {model!r} has no chat template: give --skip-chat-template")
    with progress_bar(disable=disable_tqdm) as bar:
        task = bar.add_task("requests", total=len(samples))
        run = run_offline(
            llm, samples, params, concurrency=max_concurrency, num_warmups=load.num_warmups, chat=chat,
            done=lambda _: bar.advance(task),
        )  # fmt: skip
    header = header_fields(load, backend="offline", model=model, tokenizer=model, num_prompts=len(samples))
    result = build_result(header, run.measured, ReportOptions(), num_asked=len(samples))
    _finish_offline(run, result, output_json, html)


def _finish_offline(run: OfflineRun, result: dict[str, Any], output_json: Path | None, html: Path | None) -> None:
    report = ReportOptions()
    result["forerun"]["step_profile_ms"] = profile_object(run.profile)
    if run.profiled_apart:
        result["forerun"]["notes"].append(
            "the profile is of a second run that waits for the GPU after each part, which makes its steps slower"
        )
    show_result(Console(), result, report)
    show_profile(Console(), result["forerun"]["step_profile_ms"])
    if output_json is not None:
        save(output_json, without_details(result), append=False)
        say(f"wrote {output_json}")
    if html is not None:
        write_serve_report(html, result, run.measured.run.outcomes, report)
        say(f"wrote {html}")
    if run.measured.run.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not result["completed"]:
        raise typer.Exit(1)
