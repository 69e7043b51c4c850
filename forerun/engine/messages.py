"""What crosses the process boundary between the front and the engine core, as msgspec structs."""

from __future__ import annotations

from typing import Any

import msgspec

from forerun.request import FinishReason, SamplingParams
from forerun.spec.stats import SpecTotals
from forerun.spec.verifier import TokenLogprobs


class NewRequest(msgspec.Struct, tag="new"):
    """A tokenised request. `seed` is always set: the front draws one where the user gave none. So are the bounds on
    drafts: the front reads them from `params.speculative_config`, which the engine does not look at."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    choice: int = 0
    cache_salt: str = ""
    max_draft_tokens: int | None = None  # 0 switches drafting off for this request
    draft_methods: tuple[str, ...] | None = None  # the methods that may draft for it; None: all
    rejection_sample_method: str = ""  # the rule that judges its drafts; "": the server's


class Abort(msgspec.Struct, tag="abort"):
    """Stop these requests and free what they hold; unknown ids are ignored."""

    request_ids: list[str]


class Shutdown(msgspec.Struct, tag="shutdown"):
    """End the core. Requests still running are aborted."""


class RequestMetrics(msgspec.Struct):
    """Times in seconds on the engine's clock, sent with the last output of a request."""

    queue_time_s: float = 0.0  # scheduled - arrival
    time_to_first_token_s: float = 0.0  # first token - first scheduled
    generation_time_s: float = 0.0  # last token - first token
    num_preemptions: int = 0
    speculative_decoding: dict[str, Any] | None = None  # SpecStats.as_dict(detailed=True); None without speculation


class RequestOutput(msgspec.Struct):
    """What one step brought for one request: new tokens and new text, never repeated.

    `text` may lag behind `token_ids`: bytes of an unfinished character and a possible beginning of a stop string are
    held back until they are decided. Joined over all outputs it is the whole text.
    `drafted[i]` says that new token i was drafted and accepted (False: drawn by the target).
    """

    request_id: str
    token_ids: list[int] = []
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    drafted: list[bool] = []
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first output: of the prompt's tokens but the first
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None  # with the last output
    error: str | None = None  # with FinishReason.ERROR; a bad request names the field in `error_param`
    error_param: str | None = None
    bad_request: bool = False  # the request is at fault, not the engine


GAUGES = ("num_requests_running", "num_requests_waiting", "num_blocks_used", "num_blocks", "proposer_bytes")


class EngineStats(msgspec.Struct):
    """Gauges now and counters since the start. Counters never fall while the core lives."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_blocks_used: int = 0  # blocks held by requests; blocks kept only for prefix hits are free
    num_blocks: int = 0
    prompt_tokens: int = 0  # of admitted requests, cached ones included
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0
    num_steps: int = 0
    num_steps_ahead: int = 0  # of them, those launched before the one before was read
    num_rows: int = 0  # rows through the target, drafted ones included
    step_time_s: float = 0.0
    draft_time_s: float = 0.0  # of it, spent proposing and observing; on a GPU all are times of the host
    forward_time_s: float = 0.0  # of it, spent in the target's pass
    verify_time_s: float = 0.0  # of it, spent judging drafts and drawing tokens
    draft_time_by_proposer: dict[str, float] = {}
    not_drafted: dict[str, int] = {}  # (request, step) pairs that decoded without a draft, by reason; see spec/stats.py
    proposer_bytes: int = 0  # state that the proposer holds now
    spec: SpecTotals = msgspec.field(default_factory=SpecTotals)
    spec_by_proposer: dict[str, SpecTotals] = {}

    def counters(self) -> EngineStats:
        """These figures with gauges at 0."""
        return msgspec.structs.replace(self, **dict.fromkeys(GAUGES, 0))

    def after(self, past: EngineStats) -> EngineStats:
        """These figures where `past` was counted before."""
        names = [name for name in self.__struct_fields__ if name not in (*GAUGES, "spec", "spec_by_proposer")]
        counted = {name: _added(getattr(past, name), getattr(self, name)) for name in names}
        by_proposer = dict(past.spec_by_proposer)
        for name, totals in self.spec_by_proposer.items():
            by_proposer[name] = totals.after(by_proposer.get(name, SpecTotals()))
        return msgspec.structs.replace(self, **counted, spec=self.spec.after(past.spec), spec_by_proposer=by_proposer)

    @property
    def kv_cache_usage(self) -> float:
        return self.num_blocks_used / self.num_blocks if self.num_blocks else 0.0


def _added(past: Any, now: Any) -> Any:
    """The sum of two counters, or of two tables of counters."""
    if isinstance(now, dict):
        return past | {name: past.get(name, 0) + count for name, count in now.items()}
    return past + now


class StepOutput(msgspec.Struct, tag="step"):
    """All that one step brought."""

    outputs: list[RequestOutput]
    stats: EngineStats


class EngineInfo(msgspec.Struct, tag="ready"):
    """Sent once when the core is ready to serve."""

    model: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    kv_cache_tokens: int
    vocab_size: int
    dtype: str
    device: str
    load_time_s: float
    speculative_config: dict[str, Any] | None = None  # the resolved configuration; None without speculation
    num_spec_tokens: int = 0  # K, 0 without speculation
    spec_methods: tuple[str, ...] = ()  # names of the loaded methods, in the order in which they are asked
    eos_token_ids: tuple[int, ...] = ()  # the model's own end tokens
    sampling_defaults: dict[str, Any] = {}  # the model's, for fields that a request leaves out
    rejection_sample_method: str = "match"
    lossless: str = "path"  # what that rule promises, see `spec/rules.py`
    exact_rows: bool = True  # whether the target's rows have the same bits in any company
    log_lines: list[str] = []  # what start-up said, for the front's log


class EngineFailed(msgspec.Struct, tag="failed"):
    """The core could not start, or died of an exception. `message` is one line; `config` marks a user's mistake."""

    message: str
    config: bool = False


FrontMessage = NewRequest | Abort | Shutdown
CoreMessage = StepOutput | EngineInfo | EngineFailed
