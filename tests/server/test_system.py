"""Keys, figures, lines, and the routes that do not generate."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forerun.errors import ConfigError
from forerun.server.metrics import spec_difference
from forerun.server.settings import ServerSettings
from forerun.server.stats_log import StatsLog, spec_line
from forerun.spec.stats import SpecTotals
from tests.server.fake_engine import ByteTokenizer, fake_factory
from tests.server.live import LiveServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    """Needs a key; has no chat template, no speculation and no statistics."""
    settings = ServerSettings(model="fake", api_keys=("first", "second"), log_stats=False)
    tokenizer = ByteTokenizer(has_chat_template=False)
    with LiveServer(settings, fake_factory(speculation=False), tokenizer) as live:
        yield live


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer first", 200),
        ("bearer second", 200),
        ("Bearer third", 401),
        ("Bearer", 401),
        ("Bearer firstsecond", 401),
        ("Basic first", 401),
        ("first", 401),
    ],
)
def test_paths_under_v1_need_a_key(locked: LiveServer, header: str | None, status: int) -> None:
    headers = {} if header is None else {"Authorization": header}
    with locked.http(headers=headers) as http:
        for response in (http.get("/v1/models"), http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})):
            assert response.status_code == status
            assert status == 200 or response.json() == {"error": "Unauthorized"}
        for path in ("/health", "/version", "/metrics", "/ping"):
            assert http.get(path).status_code == 200
        assert http.get("//v1/models").status_code != 200
        assert http.get("/v1/../v1/models").status_code == status


def test_without_statistics_or_speculation_there_are_no_series(locked: LiveServer) -> None:
    with locked.http() as http:
        assert "vllm:" not in http.get("/metrics").text


def test_without_a_template_chat_is_refused_by_name(locked: LiveServer) -> None:
    with locked.http(headers={"Authorization": "Bearer first"}) as http:
        response = http.post(CHAT, json={"messages": [{"role": "user", "content": "a"}]})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"
        assert http.get("/v1/speculation").json()["speculative_config"] is None


def test_models_version_and_speculation(http: httpx.Client) -> None:
    card = http.get("/v1/models").json()["data"][0]
    assert card["id"] == card["root"] == "fake"
    assert card["max_model_len"] == 512
    assert http.get("/v1/models/alias").json()["id"] == "alias"
    assert http.get("/v1/models/none").status_code == 404
    assert set(http.get("/version").json()) == {"version"}
    http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 9})
    found = http.get("/v1/speculation").json()
    assert found["speculative_config"]["method"] == "ngram"
    assert found["num_speculative_tokens"] == 4
    totals = found["totals"]
    assert totals["mean_acceptance_length"] == 1 + totals["num_accepted_tokens"] / totals["num_drafts"]


def test_tokens_there_and_back(http: httpx.Client) -> None:
    found = http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert found["tokens"] == list("héllo".encode())
    assert found["count"] == 6
    assert found["max_model_len"] == 512
    assert found["token_strs"][0] == "h"
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "héllo"}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()
    assert bytes(chat["tokens"]) == b"a|user\nassistant:"
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}], "tools": tools}).json()
    assert bytes(chat["tokens"]) == b"f|tools\na|user\nassistant:"
    for body in ({}, {"prompt": "a", "messages": []}, {"prompt": 1}):
        assert http.post("/tokenize", json=body).status_code == 400
    for tokens in ([256], [-1], ["a"], "a"):
        assert http.post("/detokenize", json={"tokens": tokens}).status_code == 400


def test_the_openapi_description_names_the_fields(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    schema = paths[COMPLETIONS]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "temperature", "stream_options"} <= schema["properties"].keys()
    assert "$ref" not in str(schema)


def read_metrics(http: httpx.Client) -> dict[str, float]:
    """Sample name and labels that tell samples apart -> value; each has the labels that all have."""
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = dict(sample.labels)
            assert sample.name.startswith("vllm:admission_rejections") or labels.pop("engine") == "0"
            assert labels.pop("model_name") == "fake"
            rest = "".join(f" {v}" for k, v in sorted(labels.items()) if sample.name != "vllm:cache_config_info")
            found[sample.name + rest] = sample.value
    return found


def test_metrics_add_up(http: httpx.Client) -> None:
    before = read_metrics(http)
    http.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 11})
    with http.stream("POST", COMPLETIONS, json={"prompt": "hello", "max_tokens": 11, "stream": True}) as response:
        response.read()
    after = read_metrics(http)
    risen = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    assert risen["vllm:generation_tokens_total"] == 22
    assert risen["vllm:prompt_tokens_total"] == 10
    assert risen["vllm:request_success_total length"] == 2
    assert risen["vllm:time_to_first_token_seconds_count"] == 2
    assert risen["vllm:inter_token_latency_seconds_count"] == 6  # 4 outputs each: 3 + 3 + 3 + 2 tokens
    for name in ("e2e_request_latency", "request_time_per_output_token", "request_queue_time", "request_prefill_time"):
        assert risen[f"vllm:{name}_seconds_count"] == 2
    assert risen["vllm:request_generation_tokens_sum"] == 22
    assert risen["vllm:request_prompt_tokens_sum"] == 10
    assert risen["vllm:spec_decode_num_drafts_total"] == 6
    assert risen["vllm:spec_decode_num_draft_tokens_total"] == 24
    assert risen["vllm:spec_decode_num_accepted_tokens_total"] == 10
    for name in ("generation_tokens", "max_num_generation_tokens"):
        assert risen[f"vllm:request_{name}_sum"] == 22
    assert risen["vllm:request_prefill_kv_computed_tokens_sum"] == 10
    assert risen["vllm:request_params_n_sum"] == 2
    assert risen["vllm:request_num_preemptions_count"] == 2
    assert risen["vllm:iteration_tokens_total_count"] == 8
    assert risen["vllm:iteration_tokens_total_sum"] == 2 * (5 + 3 + 3 + 2)  # the fake's first step gives 3 of 5 rows
    assert risen["vllm:prompt_tokens_by_source_total local_compute"] == 10
    assert after["vllm:prompt_tokens_cached_by_source_total local_cache_hit"] == 0
    assert after["vllm:num_requests_waiting_by_reason capacity"] == 0
    positions = [after[f"vllm:spec_decode_num_accepted_tokens_per_pos_total {i}"] for i in range(4)]
    assert sum(positions) == after["vllm:spec_decode_num_accepted_tokens_total"]
    assert positions == sorted(positions, reverse=True)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"):
        assert f"vllm:{name}" in after
    assert {k: v for k, v in read_metrics(http).items() if "running" not in k} == {
        k: v for k, v in after.items() if "running" not in k
    }


def test_a_prompt_with_n_answers_counts_as_one_request_of_n(http: httpx.Client) -> None:
    before = read_metrics(http)
    assert http.post(COMPLETIONS, json={"prompt": ["a", "b"], "max_tokens": 5, "n": 3}).status_code == 200
    after = read_metrics(http)
    risen = {name: value - before.get(name, 0) for name, value in after.items()}
    assert risen["vllm:request_params_n_count"] == risen["vllm:request_max_num_generation_tokens_count"] == 2
    assert risen["vllm:request_params_n_sum"] == 6
    assert risen["vllm:request_max_num_generation_tokens_sum"] == 10
    assert risen["vllm:request_success_total length"] == risen["vllm:request_generation_tokens_count"] == 6


ENGINE_LINE = re.compile(
    r"Engine 000: Avg prompt throughput: \d+\.\d tokens/s, Avg generation throughput: \d+\.\d tokens/s, "
    r"Running: \d+ reqs, Waiting: \d+ reqs, GPU KV cache usage: \d+\.\d%, Prefix cache hit rate: \d+\.\d%"
)
SPEC_LINE = re.compile(
    r"SpecDecoding metrics: Mean acceptance length: \d+\.\d\d, Accepted throughput: \d+\.\d\d tokens/s, "
    r"Drafted throughput: \d+\.\d\d tokens/s, Accepted: \d+ tokens, Drafted: \d+ tokens, "
    r"Per-position acceptance rate: \d\.\d{3}(, \d\.\d{3}){3}, Avg Draft acceptance rate: \d+\.\d%"
)


PROPOSER_LINE = re.compile(
    r"draft acceptance = 0\.\d{5} \(\d+ accepted / \d+ generated\), mean len = \d+\.\d\d, "
    r"ngram: #drafts = \d+, dur = \d+\.\d ms"
)


def test_periodic_lines_have_the_known_form_and_fall_silent(
    server: LiveServer, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    from forerun.server.metrics import ServerMetrics

    log = StatsLog(server.client, ServerMetrics("fake", server.client), 10.0)
    http.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 30})
    logger = logging.getLogger("forerun.stats")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG, "forerun.stats"):
            start = log._time
            for seconds in (10, 20, 30, 40):
                log.log(start + seconds)
    finally:
        logger.removeHandler(caplog.handler)
    records = [r for i, r in enumerate(caplog.records) if r not in caplog.records[:i]]
    engine = [r for r in records if r.message.startswith("Engine")]
    spec = [r for r in records if r.message.startswith("SpecDecoding")]
    assert all(ENGINE_LINE.fullmatch(r.message) for r in engine)
    assert "generation throughput: 3.0 tokens/s" in engine[0].message
    assert [r.levelname for r in engine] == ["INFO", "INFO", "DEBUG", "DEBUG"]
    assert len(spec) == 1
    assert SPEC_LINE.fullmatch(spec[0].message)
    (own,) = [r.message for r in records if r.message.startswith("draft acceptance")]
    assert PROPOSER_LINE.fullmatch(own)


def test_the_speculation_line_says_what_the_counters_say() -> None:
    before = SpecTotals(10, 40, 10, [8, 2])
    now = SpecTotals(20, 80, 30, [16, 10, 3, 1])
    assert spec_line(spec_difference(now, before, 4), 10.0) == (
        "SpecDecoding metrics: Mean acceptance length: 3.00, Accepted throughput: 2.00 tokens/s, "
        "Drafted throughput: 4.00 tokens/s, Accepted: 20 tokens, Drafted: 40 tokens, "
        "Per-position acceptance rate: 0.800, 0.800, 0.300, 0.100, Avg Draft acceptance rate: 50.0%"
    )


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="disable_log_stats"):
        ServerSettings(model="m", enable_per_request_metrics=True, log_stats=False)
    with pytest.raises(ConfigError, match="api_key"):
        ServerSettings(model="m", api_keys=("",))
