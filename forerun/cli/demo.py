"""`forerun demo`: what speculation brings on this machine, measured, and whether the text is the same, compared."""

from __future__ import annotations

import codecs
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.cli.demo_prompts import DEMO_PROMPTS, DemoPrompt
from forerun.cli.generate import decode_rate, say
from forerun.cli.serve import parse_bytes
from forerun.cli.speculation import (
    SpecMethodOption,
    SpecModelOption,
    SpecTokensOption,
    SpeculativeConfigOption,
    roles_from_options,
)
from forerun.errors import ConfigError
from forerun.request import SamplingParams
from forerun.spec.config import SpeculativeConfig

if TYPE_CHECKING:  # torch comes with them, and the options are judged first
    from forerun.llm import LLM, CompletionOutput
    from forerun.models.tokenizer import Tokenizer

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_SPECULATION = {"method": "suffix", "num_speculative_tokens": 12}
MIN_RUNS = 3
WARM_UP_TOKENS = 8


@dataclass
class Comparison:
    """One prompt, answered in turns without and with speculation."""

    prompt: DemoPrompt
    plain: list[CompletionOutput] = field(default_factory=list)
    drafted: list[CompletionOutput] = field(default_factory=list)

    @property
    def plain_rate(self) -> float:
        return _median_rate(self.plain)

    @property
    def drafted_rate(self) -> float:
        return _median_rate(self.drafted)

    @property
    def speedup(self) -> float:
        return self.drafted_rate / self.plain_rate

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest ratio of a run to the one before it."""
        ratios = [_rate(fast) / _rate(slow) for slow, fast in zip(self.plain, self.drafted, strict=True)]
        return min(ratios), max(ratios)

    @property
    def identical(self) -> bool:
        return all(run.token_ids == self.plain[0].token_ids for run in self.plain + self.drafted)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens for each target pass; passes without a draft count. Every pass ends with a token of the target's own,
        except a last one that ends inside its draft."""
        flags = self.drafted[0].drafted
        return len(flags) / (flags.count(False) + flags[-1])

    @property
    def spec(self) -> dict[str, Any]:
        metrics = self.drafted[0].metrics
        assert metrics is not None
        assert metrics.speculative_decoding is not None
        return metrics.speculative_decoding

    def as_object(self) -> dict[str, Any]:
        return {
            "kind": self.prompt.kind,
            "num_tokens": len(self.plain[0].token_ids),
            "plain_tokens_per_s": [round(_rate(run), 2) for run in self.plain],
            "drafted_tokens_per_s": [round(_rate(run), 2) for run in self.drafted],
            "speedup": round(self.speedup, 3),
            "acceptance_length": self.spec["mean_acceptance_length"],
            "tokens_per_pass": self.tokens_per_pass,
            "num_draft_tokens": self.spec["num_draft_tokens"],
            "num_accepted_draft_tokens": self.spec["num_accepted_draft_tokens"],
            "identical": self.identical,
        }


def demo(
    model: Annotated[str, typer.Argument(help="A model with a chat template.")] = DEFAULT_MODEL,
    speculative_config: SpeculativeConfigOption = None,
    spec_method: SpecMethodOption = None,
    spec_model: SpecModelOption = None,
    spec_tokens: SpecTokensOption = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate for a prompt.", min=2)] = 64,
    runs: Annotated[int, typer.Option(help="Runs of each kind; the median counts.", min=MIN_RUNS)] = MIN_RUNS,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token each time.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of all draws, with a temperature.")] = 0,
    num_threads: Annotated[int | None, typer.Option(help="Threads; if not given, PyTorch's choice.")] = None,
    kv_cache_memory: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Memory for KV blocks; if not given, a quarter of what is free.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Answer four kinds of prompts without and with speculation, and compare speed and tokens.

    Ends with exit code 1 where a token differs.
    """
    target, spec, notes = roles_from_options(
        model,
        speculative_config=speculative_config,
        spec_method=spec_method,
        spec_model=spec_model,
        spec_tokens=spec_tokens,
    )
    spec = spec or SpeculativeConfig.parse(DEFAULT_SPECULATION)
    for warning in notes:
        say(f"warning: {warning}")
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    cache_bytes = parse_bytes("--kv-cache-memory", kv_cache_memory)

    progress = Console(stderr=True)
    with progress.status(f"loading {model}"):
        from forerun.llm import LLM

        llm = LLM(target, speculative_config=spec, kv_cache_memory_bytes=cache_bytes, num_threads=num_threads)
        spec = SpeculativeConfig.parse(llm.info.speculative_config)  # K may be that of a checkpoint
    if not llm.tokenizer.has_chat_template:
        raise ConfigError(f"model {model!r} has no chat template, which the demo's prompts need: give another model")
    with progress.status("warming up") as status:
        comparisons = []
        for prompt in DEMO_PROMPTS:
            comparisons.append(compare(llm, prompt, params, runs, lambda doing: status.update(doing)))

    identical = all(comparison.identical for comparison in comparisons)
    if as_json:
        rows = [comparison.as_object() for comparison in comparisons]
        typer.echo(json.dumps({"model": model, "speculative_config": spec.resolved(), "prompts": rows}))
    else:
        show(Console(), model, spec, params, runs, comparisons, llm.tokenizer)
    if not identical:
        raise typer.Exit(1)


def compare(llm: LLM, prompt: DemoPrompt, params: SamplingParams, runs: int, tell: Callable[[str], None]) -> Comparison:
    """Answer one prompt in turns, so that a machine that slows down slows both."""
    comparison = Comparison(prompt)
    tell(f"{prompt.kind}: reading the prompt")
    few = SamplingParams(temperature=params.temperature, seed=params.seed, max_tokens=WARM_UP_TOKENS)
    llm.chat(prompt.messages, few)  # what only a first time costs, and the prompt, belong to neither side
    for run in range(runs):
        for speculation, results in ((False, comparison.plain), (True, comparison.drafted)):
            tell(f"{prompt.kind}: run {run + 1} of {runs} {'with' if speculation else 'without'} speculation")
            (result,) = llm.chat(prompt.messages, params, speculation=speculation)
            results.append(result.outputs[0])
    return comparison


def show(
    console: Console,
    model: str,
    spec: SpeculativeConfig,
    params: SamplingParams,
    runs: int,
    comparisons: list[Comparison],
    tokenizer: Tokenizer,
) -> None:
    drawn = "greedy" if params.greedy else f"temperature {params.temperature}, seed {params.seed}"
    console.print(
        f"{model}, {' then '.join(spec.method_names)} with at most {spec.num_speculative_tokens} drafted tokens a "
        f"step; {drawn}.\n"
        f"One request at a time; median of {runs} runs each, in turns; tokens/s after the first token (no prefill).",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_table(comparisons))
    for line in verdicts(comparisons):
        console.print(line, highlight=False, soft_wrap=True)
    best = max(comparisons, key=lambda comparison: comparison.tokens_per_pass)
    console.print(_coloured(best, tokenizer, colours=console.is_terminal), soft_wrap=True)


def verdicts(comparisons: list[Comparison]) -> list[str]:
    """What the figures say, in words; what does not pay as plainly as what does."""
    lines = []
    different = [c.prompt.kind for c in comparisons if not c.identical]
    if different:
        lines.append(f"Token ids DIFFER for {', '.join(different)}: speculation changed the text, which it must not.")
    else:
        num_runs = sum(len(c.plain) + len(c.drafted) for c in comparisons)
        lines.append(f"Token ids compared over {num_runs} runs: identical with and without speculation.")
    for c in sorted(comparisons, key=lambda c: -c.speedup):
        low, high = c.spread
        between = f"{c.speedup:.2f} times the speed ({low:.2f} to {high:.2f} over the runs)"
        if not c.spec["num_draft_tokens"]:
            lines.append(f"{c.prompt.kind}: nothing was drafted, so nothing is gained: {between}.")
        elif c.speedup < 1:
            lines.append(f"{c.prompt.kind}: drafting does not pay here: {between}.")
        elif low < 1:
            lines.append(f"{c.prompt.kind}: {between}; not clearly faster.")
        else:
            lines.append(f"{c.prompt.kind}: {between}.")
    return lines


def _table(comparisons: list[Comparison]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("prompt", no_wrap=True)
    for heading in ("tokens", "tok/s\nplain", "tok/s\ndrafted", "ratio", "accept.\nlength", "tokens\na pass"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("accepted\n/ drafted", justify="right", no_wrap=True)
    table.add_column("same\nids", no_wrap=True)
    for c in comparisons:
        table.add_row(
            c.prompt.kind,
            str(len(c.plain[0].token_ids)),
            f"{c.plain_rate:.1f}",
            f"{c.drafted_rate:.1f}",
            Text(f"{c.speedup:.2f}x", style="green" if c.speedup >= 1 else "red"),
            f"{c.spec['mean_acceptance_length']:.2f}",
            f"{c.tokens_per_pass:.2f}",
            f"{c.spec['num_accepted_draft_tokens']} / {c.spec['num_draft_tokens']}",
            Text("yes", style="green") if c.identical else Text("NO", style="bold red"),
        )
    return table


def _coloured(comparison: Comparison, tokenizer: Tokenizer, *, colours: bool) -> Text:
    """The text with accepted draft tokens in green, or between brackets where there are no colours."""
    how = "in green" if colours else "between ⟦ and ⟧"
    text = Text(f"\nThe text for {comparison.prompt.kind}; drafted and accepted tokens {how}:\n\n", style="bold")
    answer = comparison.drafted[0]
    inside = False
    for piece, drafted in pieces(answer, tokenizer):
        if not colours and drafted != inside:
            text.append("⟦" if drafted else "⟧", style="not bold")
            inside = drafted
        text.append(piece, style="not bold green" if drafted else "not bold")
    if inside and not colours:
        text.append("⟧", style="not bold")
    return text


def pieces(answer: CompletionOutput, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """The text token by token with its mark; a character split over tokens goes to the one that completes it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    shown = []
    for token_id, drafted in zip(answer.token_ids, answer.drafted, strict=True):
        if tokenizer.is_special(token_id):
            continue
        if piece := decoder.decode(tokenizer.token_bytes(token_id)):
            shown.append((piece, drafted))
    return shown


def _rate(answer: CompletionOutput) -> float:
    assert answer.metrics is not None
    rate = decode_rate(len(answer.token_ids), answer.metrics)
    if rate is None:
        raise ConfigError("the model ended its answer at once: there is nothing to measure; give another model")
    return rate


def _median_rate(answers: list[CompletionOutput]) -> float:
    return statistics.median(_rate(answer) for answer in answers)
