"""vLLM's command line of `bench`, read as it is: lists after one flag, and flags that are not ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from typer.core import TyperCommand

from forerun.cli.flags import repeat_flags
from forerun.errors import ConfigError

_PLOTS = "--html FILE draws the requests over time and the distribution of every latency"
_LORA = "adapters are not served: give the name of a served model with --model"
_CODE = "tokenizers are read without running anyone's code: leave it out"
_AUDIO = "only text is sent: use random, sharegpt, custom or spec_bench"
_HUB = "save the data set as JSON lines with `prompt` and use --dataset-name custom"

# flag of vLLM's `bench serve` that is not served -> what to do; a name that ends in - stands for all that begin so
NOT_SERVED: Mapping[str, str] = {
    "--plot-timeline": _PLOTS,
    "--timeline-itl-thresholds": _PLOTS,
    "--plot-dataset-stats": _PLOTS,
    "--profile": "`forerun bench offline` shows where the time of a step goes",
    "--lora-modules": _LORA,
    "--lora-assignment": _LORA,
    "--use-beam-search": "beam search is not served: leave it out",
    "--self-timed": "arrival times come from --request-rate, --burstiness or --ramp-up-strategy",
    "--probe-request-rate": "run it again with other values of --request-rate",
    "--trust-remote-code": _CODE,
    "--tokenizer-mode": _CODE,
    "--no-stream": "times of tokens need streaming: leave it out",
    "--logprobs-mode": "send it with --extra-body",
    "--hf-": _HUB,
    "--speed-bench-": _HUB,
    "--blazedit-": _HUB,
    "--asr-": _AUDIO,
    "--random-mm-": _AUDIO,
    "--custom-image-": _AUDIO,
    "--custom-audio-": _AUDIO,
    "--random-batch-size": "every request bears one prompt: leave it out",
    "--random-rerank-": _AUDIO,
    "--prefix-repetition-": "use --dataset-name random with --random-prefix-len: one prefix, shared by all",
    "--burstgpt-": "use --request-rate and --burstiness",
    "--timed-trace-": "arrival times come from --request-rate, --burstiness or --ramp-up-strategy",
}
LISTS = ("--header", "--metadata", "--goodput")


class VllmCommand(TyperCommand):
    """A command that takes vLLM's flags: those with several values, and a refusal by name for those not served."""

    lists: ClassVar[tuple[str, ...]] = LISTS

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for word in args:
            if word == "--":
                break
            refuse(word.partition("=")[0])
        return super().parse_args(ctx, repeat_flags(args, self.lists))


def refuse(flag: str) -> None:
    """Raises ConfigError, with what to do, where it is a flag of vLLM's that is not served."""
    for name, advice in NOT_SERVED.items():
        if flag == name or (name.endswith("-") and flag.startswith(name)):
            raise ConfigError(f"{flag} is not served: {advice}")


def pairs(flag: str, words: Sequence[str], separator: str = "=") -> dict[str, str]:
    """NAME=VALUE words as a mapping.

    Raises:
        ConfigError: a word without a name or separator.
    """
    found = {}
    for word in words:
        name, between, value = word.partition(separator)
        if not name.strip() or not between:
            raise ConfigError(f"{flag} takes NAME{separator}VALUE, got {word!r}")
        found[name.strip()] = value.strip()
    return found


def floats(flag: str, text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag} takes numbers with commas between them, got {text!r}") from None


def counts(flag: str, text: str) -> tuple[int, ...]:
    """Whole numbers of at least 1 with commas between them, each once."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) >= 1 for word in words):
        raise ConfigError(f"{flag} takes whole numbers of at least 1 with commas between them, got {text!r}")
    return tuple(dict.fromkeys(map(int, words)))


def json_object(flag: str, text: str | None) -> dict[str, Any]:
    """A JSON object; {} where nothing is given."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} must be a JSON object, got {text:.60}")
    return value


def goodput_limits(words: Sequence[str]) -> dict[str, float]:
    """`ttft:100 tpot:50` as metric -> milliseconds."""
    limits = {}
    for name, value in pairs("--goodput", words, ":").items():
        try:
            limits[name] = float(value)
        except ValueError:
            raise ConfigError(f"--goodput {name} must be milliseconds, got {value!r}") from None
    return limits
