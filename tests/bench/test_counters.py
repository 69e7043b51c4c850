"""The speculative block, from /metrics as a server says it and from what it says of each request."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.bench.client import Outcome
from forerun.bench.counters import CategoryCounters, acceptance, from_requests, parse, subtract
from forerun.bench.datasets import Sample
from forerun.spec.stats import SpecTotals

PAGE = """# HELP vllm:spec_decode_num_drafts_total Drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.7e9
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafted}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {second}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {first}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} 900.0
"""
BEFORE = PAGE.format(drafts=100.0, drafted=200.0, accepted=50.0, first=40.0, second=10.0)
AFTER = PAGE.format(drafts=110.0, drafted=220.0, accepted=59.0, first=46.0, second=13.0)


def spec_of(text: str) -> SpecTotals:
    spec = parse(text).spec
    assert spec is not None
    return spec


def test_the_block_is_the_difference_of_two_readings() -> None:
    """10 drafts of 20 tokens, 9 accepted: 6 at the first position, 3 at the second."""
    assert acceptance(subtract(spec_of(AFTER), spec_of(BEFORE))) == {
        "spec_decode_acceptance_rate": pytest.approx(45.0),
        "spec_decode_acceptance_length": pytest.approx(1.9),
        "spec_decode_num_drafts": 10,
        "spec_decode_draft_tokens": 20,
        "spec_decode_accepted_tokens": 9,
        "spec_decode_per_position_acceptance_rates": [0.6, 0.3],
    }


def test_several_engines_are_added_up() -> None:
    second = "\n".join(
        line.replace('engine="0"', 'engine="1"') for line in BEFORE.splitlines() if not line.startswith("#")
    )
    by_name = sorted(BEFORE.splitlines() + second.splitlines(), key=lambda line: line.lstrip("# TYPEHL").split("{")[0])
    assert spec_of("\n".join(by_name) + "\n").num_drafts == 200


def test_a_server_that_counts_no_drafts_has_no_block() -> None:
    counters = parse("# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total 5\n")
    assert counters.spec is None
    assert counters.generation_tokens == 5


def test_nothing_drafted_is_no_division_by_zero() -> None:
    block = acceptance(SpecTotals())
    assert (block["spec_decode_acceptance_rate"], block["spec_decode_acceptance_length"]) == (0, 1)


def outcome(spec: dict[str, Any] | None, *, ended: bool = True) -> Outcome:
    metrics = {} if spec is None else {"speculative_decoding": spec}
    return Outcome(Sample("", None, "qa"), ended=ended, metrics=metrics)


def test_requests_add_up_to_the_same_block() -> None:
    """Histogram: 2 steps accepted 0, 1 accepted 1, 3 accepted 2. Position 0 stood 4 times, position 1 3 times."""
    spec = {
        "num_spec_steps": 6,
        "num_draft_tokens": 12,
        "num_accepted_draft_tokens": 7,
        "acceptance_histogram": [2, 1, 3],
    }
    totals = from_requests([outcome(spec), outcome(spec), outcome(None, ended=False)])
    assert totals == SpecTotals(12, 24, 14, [8, 6])


def test_one_completed_request_without_figures_leaves_the_sum_unknown() -> None:
    assert from_requests([outcome(None)]) is None


def test_readings_between_requests_are_credited_to_their_category() -> None:
    watch = CategoryCounters(SpecTotals(1, 5, 2, [2]))
    watch.note("qa", SpecTotals(2, 10, 5, [3, 2]))
    watch.note("rag", SpecTotals(4, 20, 5, [3, 2]))
    watch.note("qa", SpecTotals(5, 22, 6, [4, 2]))
    assert watch.by_category == {"qa": SpecTotals(2, 7, 4, [2, 2]), "rag": SpecTotals(2, 10, 0, [0, 0])}
