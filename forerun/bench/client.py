"""One streaming request to a server of OpenAI's form, and what came back when.

Definitions are those of vLLM's client, so that figures compare: time to first token is from sending to the first chunk
with text; inter-token latencies are the gaps between the chunks after it, of which each may carry several tokens;
latency is up to the last chunk. Tokens are counted by the usage chunk, not by chunks.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from forerun.bench.datasets import Sample
from forerun.bench.extras import extra
from forerun.errors import ConfigError

if TYPE_CHECKING:
    import httpx

CHAT, COMPLETIONS = "openai-chat", "openai"
BACKENDS = {"openai": COMPLETIONS, "vllm": COMPLETIONS, "openai-chat": CHAT}
MAX_ERROR_LENGTH = 300  # characters of a server's message that are kept
TEXT_FIELDS = ("content", "reasoning", "reasoning_content", "refusal")


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where to ask, and what every request says.

    Attributes:
        model: the name that requests bear.
        body: fields of every request, beside prompt, length and streaming.
        skip_template: beside `headers`, see `connect`.
        request_id_prefix: before the number of a request, in the header X-Request-Id.
    """

    base_url: str
    endpoint: str
    backend: str
    model: str
    body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    verify: bool = True
    request_id_prefix: str = "bench-"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"--backend {self.backend!r} is not served: use {', '.join(BACKENDS)}")
        if self.chat != self.endpoint.rstrip("/").endswith("chat/completions"):
            wanted = "chat/completions" if self.chat else "completions"
            raise ConfigError(
                f"--backend {self.backend} speaks to an endpoint that ends in /{wanted}, got {self.endpoint!r}: "
                "give another --endpoint or --backend"
            )

    @property
    def chat(self) -> bool:
        return BACKENDS[self.backend] == CHAT

    @property
    def _here(self) -> bool:
        return urlsplit(self.base_url).hostname in ("127.0.0.1", "localhost", "::1")

    def connect(self) -> httpx.AsyncClient:
        """A client for all requests, without limits on connections or time: the load is what `load.py` says."""
        module = extra("httpx", "forerun bench")
        headers = dict(self.headers)
        if key := os.environ.get("OPENAI_API_KEY"):
            headers.setdefault("Authorization", f"Bearer {key}")
        try:
            client: httpx.AsyncClient = module.AsyncClient(
                base_url=self.base_url,
                headers=headers,
                verify=self.verify and self.base_url.startswith("https"),  # certificates take 50 ms to load
                timeout=None,
                limits=module.Limits(max_connections=None, max_keepalive_connections=None),
                trust_env=not self._here,  # no proxy of the environment stands before a server of this machine
            )
        except (module.InvalidURL, ValueError) as error:
            raise ConfigError(f"{self.base_url!r} cannot be asked: {error}") from None
        return client

    def content(self, sample: Sample) -> bytes:
        """The body of a request."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.chat:
            body["messages"] = [{"role": "user", "content": sample.prompt}]
        else:
            body["prompt"] = sample.prompt
        if sample.output_len is not None:
            body["max_completion_tokens" if self.chat else "max_tokens"] = sample.output_len
        return json.dumps(body | dict(self.body)).encode()


@dataclass(slots=True)
class Outcome:
    """What came of a request. Times are in seconds; `start` is on the clock of `time.perf_counter`.

    Attributes:
        queue_s: how long it waited for a place under `--max-concurrency` before it was sent.
        ttft_s: None where no chunk had text.
        num_output_tokens: None where the server did not say.
        error: "" where the answer came to its end.
        metrics: what the server said of this request, as vLLM's `metrics` object.
    """

    sample: Sample
    start: float = 0.0
    queue_s: float = 0.0
    ttft_s: float | None = None
    itls_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    text: str = ""
    error: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    ended: bool = False

    @property
    def ok(self) -> bool:
        return self.ended and not self.error

    @property
    def num_tokens(self) -> int:
        return self.num_output_tokens or 0

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first one; None with fewer than two."""
        if self.num_tokens < 2 or self.ttft_s is None:
            return None
        return (self.latency_s - self.ttft_s) / (self.num_tokens - 1)

    @property
    def speculation(self) -> Mapping[str, Any] | None:
        return self.metrics.get("speculative_decoding")

    def take(self, event: Mapping[str, Any], elapsed_s: float) -> None:
        """Account for one event of the stream, which arrived so long after the request was sent."""
        if "error" in event:
            self.error = message_of(event)
            return
        if usage := event.get("usage"):
            self.num_prompt_tokens = usage.get("prompt_tokens")
            self.num_output_tokens = usage.get("completion_tokens")
        self.metrics = event.get("metrics") or self.metrics
        for choice in event.get("choices") or ():
            text = choice_text(choice)
            self.text += text
            if self.ttft_s is not None:
                self.itls_s.append(elapsed_s - self.latency_s)
            elif text:
                self.ttft_s = elapsed_s
            self.latency_s = elapsed_s
            self.ended |= choice.get("finish_reason") is not None


def choice_text(choice: Mapping[str, Any]) -> str:
    """The new text of a chunk, thoughts and the arguments of tool calls included."""
    if "delta" not in choice:
        return choice.get("text") or ""
    delta = choice["delta"] or {}
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    parts = [delta.get(name) for name in TEXT_FIELDS]
    parts += [call.get(name) for call in calls for name in ("name", "arguments")]
    return "".join(part for part in parts if part)


def message_of(answer: object) -> str:
    """The message of a server's error body, in one line."""
    error = answer.get("error", answer) if isinstance(answer, Mapping) else answer
    text = error.get("message", error) if isinstance(error, Mapping) else error
    return " ".join(str(text).split())[:MAX_ERROR_LENGTH]


async def ask(http: httpx.AsyncClient, target: Target, sample: Sample, number: int) -> Outcome:
    """Send one request and follow its answer to the end. What goes wrong stands in the outcome's `error`."""
    httpx = extra("httpx", "forerun bench")
    headers = {"Content-Type": "application/json", "X-Request-Id": f"{target.request_id_prefix}{number}"}
    content = target.content(sample)
    outcome = Outcome(sample, time.perf_counter())
    try:
        async with http.stream("POST", target.endpoint, content=content, headers=headers) as response:
            if response.status_code != 200:
                outcome.error = f"HTTP {response.status_code}: {_error_text(await response.aread())}"
                return outcome
            async for data in events(response.aiter_bytes()):
                if data == b"[DONE]":
                    outcome.ended = True
                    break
                outcome.take(msgspec.json.decode(data), time.perf_counter() - outcome.start)
    except httpx.HTTPError as error:
        outcome.error = f"{type(error).__name__}: {error}".removesuffix(": ")
    except (msgspec.DecodeError, AttributeError, TypeError) as error:
        outcome.error = f"an event that cannot be read: {error}"
    if not outcome.ended and not outcome.error:
        outcome.error = "the stream ended before the answer did"
    return outcome


def _error_text(body: bytes) -> str:
    try:
        return message_of(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return message_of(body.decode(errors="replace")) or "no body"


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, as soon as each is complete; other fields and comments are skipped."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()
