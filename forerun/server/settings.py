"""What the HTTP side is told at start; flags of `forerun serve` bear the same names."""

from __future__ import annotations

import math
import ssl
from dataclasses import dataclass, field
from typing import Literal

from forerun.errors import ConfigError
from forerun.parsers.formats import ReasoningFormat, reasoning_format
from forerun.parsers.tools import ToolFormat, tool_format

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
SpecDecodeMetrics = Literal["none", "summary", "detailed"]


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the HTTP side.

    Attributes:
        model: the model as given on the command line; the default served name.
        served_model_names: names that requests may use; the first is reported. (): the model as given.
        api_keys: accepted keys, printable ASCII without spaces; (): everybody may use the server.
        salt_by_api_key: caches are kept apart by key, as if each key's requests bore a `cache_salt` of their own.
        allowed_origins: web pages that browsers let use the server (CORS); "*" for all, (): none.
        allowed_methods, allowed_headers, allow_credentials: what they may send.
        max_body_bytes: most bytes of a request body; more is HTTP 413.
        max_prompts: most prompts of a request.
        max_messages: most messages of a conversation, parts of their contents included.
        max_text_bytes: most bytes of text to be tokenised for a request, over all its prompts or messages. A text that
            cannot be as short as max_model_len tokens is refused whatever this says.
        chat_template: renders conversations in place of the model's own.
        reasoning_parser: how the model marks its reasoning, so that answers hold it apart; None: it does not.
        tool_call_parser: how the model writes tool calls; None: requests cannot offer tools.
        enable_auto_tool_choice: with a `tool_call_parser`, the model may choose to call tools.
        exclude_tools_when_tool_choice_none: tools that must not be called are not shown to the model.
        enable_force_include_usage: every stream ends with its usage, asked for or not.
        enable_prompt_tokens_details: a usage says how many of the prompt's tokens were cached.
        return_tokens_as_token_ids: log-probabilities name tokens by their ids, as `token_id:5`.
        stream_interval: tokens that a chunk of a stream waits for, after the first; a request may ask for more.
        max_stored_response_bytes: memory for responses that `/v1/responses` keeps; 0: it keeps none.
        enable_per_request_metrics: times of a request in its answer.
        per_request_spec_decode_metrics: what speculation did for a request, in its answer.
        log_stats: the periodic lines and the metrics under `vllm:` names.
        log_stats_interval_s: seconds between the periodic lines.
    """

    model: str
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    salt_by_api_key: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    max_body_bytes: int = 16 * 2**20
    max_prompts: int = 1024
    max_messages: int = 4096
    max_text_bytes: int = 4 * 2**20
    chat_template: str | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    exclude_tools_when_tool_choice_none: bool = False
    enable_force_include_usage: bool = False
    enable_prompt_tokens_details: bool = True
    return_tokens_as_token_ids: bool = False
    stream_interval: int = 1
    max_stored_response_bytes: int = 64 * 2**20
    enable_per_request_metrics: bool = False
    per_request_spec_decode_metrics: SpecDecodeMetrics = "none"
    log_stats: bool = True
    log_stats_interval_s: float = 10.0

    def __post_init__(self) -> None:
        if self.enable_per_request_metrics and not self.log_stats:
            raise ConfigError("enable_per_request_metrics cannot be combined with disable_log_stats: drop one of them")
        for name in ("max_body_bytes", "max_prompts", "max_messages", "max_text_bytes", "stream_interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_stored_response_bytes < 0:
            raise ConfigError(f"max_stored_response_bytes must be at least 0, got {self.max_stored_response_bytes}")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError("enable_auto_tool_choice needs a tool_call_parser: say how the model writes tool calls")
        _ = self.reasoning, self.tools  # the names are known
        if not self.log_stats_interval_s > 0:
            raise ConfigError(f"log_stats_interval must be above 0 seconds, got {self.log_stats_interval_s}")
        for place, key in enumerate(self.api_keys, 1):  # which one is said by its place: a key is not shown
            if not key or not all("!" <= character <= "~" for character in key):
                raise ConfigError(f"api_key {place} must be printable ASCII without spaces, and not empty")
        if self.salt_by_api_key and not self.api_keys:
            raise ConfigError("salt_by_api_key needs api keys: give --api-key, --api-key-file or FORERUN_API_KEY")
        if self.allow_credentials and not self.allowed_origins:
            raise ConfigError("allow_credentials needs allowed_origins")

    @property
    def reasoning(self) -> ReasoningFormat | None:
        return None if self.reasoning_parser is None else reasoning_format(self.reasoning_parser)

    @property
    def tools(self) -> ToolFormat | None:
        return None if self.tool_call_parser is None else tool_format(self.tool_call_parser)

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_model_names or (self.model,)

    @property
    def model_name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, kw_only=True)
class WebSettings:
    """Where and how the web server listens.

    Attributes:
        host, port: address; port 0 takes any free one.
        uds: path of a Unix socket to listen on, in the place of host and port.
        ssl_keyfile, ssl_certfile: of TLS, in PEM form; the key may be in the certificate's file. None: plain HTTP.
        ssl_ca_certs: whom clients' certificates must be signed by.
        ssl_cert_reqs: whether clients need one: 0 no, 1 it is judged if given, 2 yes.
        max_connections: most connections at a time; one more gets HTTP 503 and is closed.
        receive_timeout_s: most time that a request, head and body, may take to arrive; then HTTP 408.
        send_timeout_s: most time that a client may take nothing of an answer that waits; then the connection is cut.
        keep_alive_timeout_s: how long a connection is kept without a request.
        shutdown_timeout_s: how long running answers may go on after a signal to stop; a second signal cuts them off.
        log_level: of uvicorn.
        access_log: one line a request.
        root_path: prefix that a proxy in front has taken off the path.
    """

    host: str = "0.0.0.0"
    port: int = 8000
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    max_connections: int = 4096
    receive_timeout_s: float = 120.0
    send_timeout_s: float = 60.0
    keep_alive_timeout_s: int = 5
    shutdown_timeout_s: int = 20
    log_level: str = "info"
    access_log: bool = True
    root_path: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
        for name in ("shutdown_timeout", "keep_alive_timeout"):
            if getattr(self, f"{name}_s") < 0:
                raise ConfigError(f"{name} must be at least 0 seconds, got {getattr(self, f'{name}_s')}")
        for name in ("receive_timeout", "send_timeout"):
            if not 0 < getattr(self, f"{name}_s") < math.inf:
                raise ConfigError(f"{name} must be above 0 seconds, got {getattr(self, f'{name}_s')}")
        if self.max_connections < 1:
            raise ConfigError(f"max_connections must be at least 1, got {self.max_connections}")
        self._check_tls()
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"uvicorn_log_level={self.log_level!r} is none of {', '.join(LOG_LEVELS)}")

    def _check_tls(self) -> None:
        """Judged before anything is loaded."""
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} needs ssl_certfile")
            return
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"ssl_cert_reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password=_no_password)
            if self.ssl_ca_certs is not None:
                context.load_verify_locations(self.ssl_ca_certs)
        except (OSError, ValueError) as error:  # of which ssl.SSLError is one
            files = ", ".join(filter(None, (self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)))
            raise ConfigError(f"TLS cannot use ssl_certfile, ssl_keyfile or ssl_ca_certs ({files}): {error}") from None


def _no_password() -> str:
    """OpenSSL would ask at the terminal."""
    raise ValueError("the key has a password: decrypt it first")
