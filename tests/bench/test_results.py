"""Figures from outcomes, by independent computation; and that a result has the fields that vLLM's users read."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from forerun.bench.client import Outcome, Target
from forerun.bench.counters import Counters
from forerun.bench.datasets import DatasetOptions, Sample
from forerun.bench.load import LoadOptions, Run
from forerun.bench.results import (
    ReportOptions,
    by_category,
    detail_fields,
    errors_grouped,
    is_good,
    most_at_once,
    result_fields,
    spread_ms,
)
from forerun.bench.serve import (
    Measured,
    ServeJob,
    _check_account,
    build_result,
    count_missing_tokens,
    result_path,
    without_details,
)
from forerun.errors import ConfigError
from forerun.spec.stats import SpecTotals
from tests.server.fake_engine import ByteTokenizer

HEADER = "date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency"
BODY = """duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput
    output_throughput total_token_throughput max_output_tokens_per_s max_concurrent_requests"""
DETAILS = "input_lens output_lens ttfts itls latencies queue_times start_times generated_texts errors"
SPECULATION = """spec_decode_num_drafts spec_decode_draft_tokens spec_decode_accepted_tokens spec_decode_acceptance_rate
    spec_decode_acceptance_length spec_decode_per_position_acceptance_rates"""
LATENCIES = {f"{f}_{m}_ms" for f in ("mean", "median", "std", "p99") for m in ("ttft", "tpot", "itl", "e2el")}


def answered(
    start: float = 0.0, ttft_s: float = 0.1, itls_s: tuple[float, ...] = (), tokens: int = 1, **k: Any
) -> Outcome:
    category = k.pop("category", "")
    return Outcome(
        Sample("p", None, category), start, ttft_s=ttft_s, itls_s=list(itls_s), latency_s=ttft_s + sum(itls_s),
        num_prompt_tokens=10, num_output_tokens=tokens, ended=True, **k,
    )  # fmt: skip


def failed(error: str = "HTTP 500: no") -> Outcome:
    return Outcome(Sample("p"), 0.5, error=error, latency_s=0.1)


OUTCOMES = [
    answered(0.0, 0.1, (0.2, 0.3), 6, category="qa"),
    answered(0.2, 0.4, (0.6,), 3, category="qa"),
    answered(1.5, 0.2, (), 1, category="rag"),
    failed(),
]
RUN = Run(OUTCOMES, duration_s=2.0)


def job(**fields: Any) -> ServeJob:
    target = Target(base_url="", endpoint="/v1/completions", backend="vllm", model="m")
    return ServeJob(target=target, dataset=DatasetOptions(), load=LoadOptions(max_concurrency=4), **fields)


def test_counts_and_throughput() -> None:
    result = result_fields(RUN, ReportOptions())
    expected = {
        "completed": 3, "failed": 1, "duration": 2.0, "total_input_tokens": 30, "total_output_tokens": 10,
        "request_throughput": 1.5, "output_throughput": 5.0, "total_token_throughput": 20.0, "request_goodput": None,
    }  # fmt: skip
    assert {name: result[name] for name in expected} == expected


def test_latencies_by_hand() -> None:
    """TPOT: 0.5 s over 5 tokens, 0.6 s over 2; the answer of one token has none. ITL: all gaps of all answers."""
    result = result_fields(RUN, ReportOptions())
    assert result["mean_ttft_ms"] == pytest.approx((100 + 400 + 200) / 3)
    assert result["median_ttft_ms"] == pytest.approx(200)
    assert result["mean_tpot_ms"] == pytest.approx((100 + 300) / 2)
    assert result["mean_itl_ms"] == pytest.approx((200 + 300 + 600) / 3)
    assert result["mean_e2el_ms"] == pytest.approx((600 + 1000 + 200) / 3)
    assert result["std_itl_ms"] == pytest.approx(statistics.pstdev([200, 300, 600]))


@pytest.mark.parametrize("percentile", [0, 12.5, 50, 90, 99, 100])
def test_percentiles_are_linear_between_observations(percentile: float) -> None:
    values = [0.05, 0.01, 0.04, 0.02, 0.08, 0.03, 0.09]
    place = percentile / 100 * (len(values) - 1)
    below = sorted(values)[int(place)]
    above = sorted(values)[min(int(place) + 1, len(values) - 1)]
    wanted = 1000 * (below + (above - below) * (place - int(place)))
    assert spread_ms(values, [percentile])[f"p{percentile:g}"] == pytest.approx(wanted)


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    limits = {"ttft": 200.0, "tpot": 150.0}
    assert [is_good(outcome, limits) for outcome in OUTCOMES] == [True, False, True, False]
    assert result_fields(RUN, ReportOptions(goodput=limits))["request_goodput"] == 1.0
    assert not is_good(OUTCOMES[0], {"e2el": 599})


def test_peaks_over_time() -> None:
    """Chunks arrive at 0.1 0.3 0.6 | 0.6 1.2 | 1.7: four in the first second, two in the next. The first two requests
    and the failed one overlap between 0.5 and 0.6."""
    result = result_fields(RUN, ReportOptions())
    assert result["max_output_tokens_per_s"] == 4
    assert result["max_concurrent_requests"] == most_at_once(OUTCOMES) == 3


def test_a_result_has_exactly_the_known_fields() -> None:
    measured = Measured(RUN, SpecTotals(4, 10, 5, [3, 2]))
    result = build_result(job().header("org/m", 4), measured, ReportOptions(), num_asked=4)
    fixed = {*HEADER.split(), *BODY.split(), *SPECULATION.split(), *LATENCIES, "forerun"}
    assert result.keys() == fixed | set(DETAILS.split())
    assert without_details(result).keys() == fixed
    assert (result["request_rate"], result["max_concurrency"], result["num_prompts"]) == ("inf", 4, 4)
    assert result["errors"] == ["", "", "", "HTTP 500: no"]


def test_without_counters_there_is_no_speculative_block() -> None:
    result = build_result(job().header("m", 4), Measured(RUN), ReportOptions(), num_asked=4)
    assert not any(name.startswith("spec_decode") for name in result)


def test_the_servers_times_are_kept_where_it_says_them() -> None:
    outcome = answered(metrics={"queue_time_ms": 5.0, "time_to_first_token_ms": 80.0})
    details = detail_fields(Run([outcome, failed()]))
    assert details["server_queue_times"] == [0.005, None]
    assert details["server_ttfts"] == [0.08, None]


def test_figures_by_category() -> None:
    rows = by_category(OUTCOMES, ReportOptions(), {"qa": SpecTotals(2, 8, 4, [2, 2]), "rag": None})
    assert rows["qa"]["output_tokens_per_request_s"] == pytest.approx(9 / 1.6)
    assert rows["qa"]["spec_decode_acceptance_length"] == 3
    assert rows["qa"]["mean_ttft_ms"] == pytest.approx(250)
    assert "spec_decode_num_drafts" not in rows["rag"]
    assert rows.keys() == {"qa", "rag"}


def test_errors_are_grouped_and_none_is_lost() -> None:
    outcomes = [failed("a"), failed("b"), failed("b"), answered()]
    assert errors_grouped(outcomes) == {"b": 2, "a": 1}


def test_an_interruption_is_said() -> None:
    run = Run(OUTCOMES[:2], 1.0, interrupted=True)
    result = build_result(job().header("m", 9), Measured(run), ReportOptions(), num_asked=9)
    assert result["forerun"]["interrupted"]
    assert result["forerun"]["notes"] == ["interrupted: 2 of 9 requests were measured"]


def test_an_answer_without_usage_is_tokenised_again_and_said() -> None:
    def silent() -> Run:
        return Run([Outcome(Sample("p"), ttft_s=0.1, itls_s=[0.1], latency_s=0.2, text="abcde", ended=True)])

    run, tokenizer = silent(), ByteTokenizer()
    (note,) = count_missing_tokens(run, tokenizer)  # type: ignore[arg-type]
    assert (run.outcomes[0].num_output_tokens, "no usage for 1 answers" in note) == (5, True)
    run = silent()
    (note,) = count_missing_tokens(run, None)
    assert (run.outcomes[0].num_output_tokens, "--tokenizer" in note) == (2, True)
    assert count_missing_tokens(Run([answered()]), None) == []


def test_others_on_the_server_are_noticed() -> None:
    measured = Measured(Run([answered(tokens=100)]))
    _check_account(measured, Counters(None, 50), Counters(None, 151))
    assert measured.notes == []
    _check_account(measured, Counters(None, 50), Counters(None, 250))
    assert measured.notes[0].startswith("the server generated 200 tokens meanwhile, 100 of them for this run")


def test_a_saved_result_is_named_as_users_know_it() -> None:
    result = job().header("org/m", 4) | {"date": "20250101-000000"}
    assert result_path(job(), result, None, None).name == "vllm-infqps-concurrency4-m-20250101-000000.json"
    assert result_path(job(label="x"), result, None, None).name.startswith("x-inf")


def test_metadata_may_not_replace_a_figure() -> None:
    with pytest.raises(ConfigError, match="--metadata duration is a field of the result itself"):
        job(metadata={"duration": "long"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metrics": ("ttft", "tps")}, "--percentile-metrics 'tps' is not known"),
        ({"percentiles": (101.0,)}, "--metric-percentiles must be from 0 to 100, got 101"),
        ({"goodput": {"itl": 3.0}}, "--goodput 'itl' is not known: use ttft, tpot, e2el"),
        ({"goodput": {"ttft": -1.0}}, "--goodput ttft must be"),
    ],
)
def test_report_options_out_of_range_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ReportOptions(**options)
