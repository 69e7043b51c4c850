"""What is counted of drafts that were made, and of those that were not."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.engine.messages import NewRequest
from forerun.request import SamplingParams
from tests.tiny_engine import NGRAM, SUFFIX, Result, finish, make_engine, prompts, run


@pytest.mark.parametrize("spec", [NGRAM, SUFFIX], ids=["ngram", "suffix"])
def test_every_decoding_step_of_a_request_has_a_draft_or_a_reason(tiny_model: Path, spec: dict[str, object]) -> None:
    engine = make_engine(tiny_model, spec)
    work = [(prompt, SamplingParams(temperature=0, max_tokens=12)) for prompt in prompts(6)]
    results = run(engine, work)
    stats = engine.stats()
    num_decoding = sum(len(result.outputs) - 1 for result in results)  # the prompt's last row gives the first token
    assert stats.spec.num_drafts + sum(stats.not_drafted.values()) == num_decoding
    assert stats.not_drafted["nothing_found"] > 0
    assert stats.not_drafted["off"] == 0
    (time_s,) = stats.draft_time_by_proposer.values()
    assert 0 < time_s <= stats.draft_time_s
    assert stats.draft_time_s + stats.forward_time_s + stats.verify_time_s <= stats.step_time_s


def test_reasons_not_to_draft(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, NGRAM)
    results = {"off": Result(), "end": Result()}
    off, end = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (5, 2))
    engine.add_request(NewRequest("off", [5, 6] * 8, off, 0, max_draft_tokens=0))
    engine.add_request(NewRequest("end", [5, 6] * 8, end, 0))
    finish(engine, results)
    assert engine.stats().not_drafted == {"off": 4, "at_end": 1, "no_room": 0, "nothing_found": 0}
    engine = make_engine(tiny_model, NGRAM, max_num_batched_tokens=2)  # a prompt that waits takes half of the rows
    run(engine, [([5, 6] * 8, off), ([5, 6] * 30, off)])
    assert engine.stats().not_drafted["no_room"] > 0


def test_without_speculation_no_draft_is_missed(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    run(engine, [([5, 6] * 8, SamplingParams(temperature=0, max_tokens=4))])
    assert engine.stats().not_drafted == {}
    assert engine.stats().draft_time_by_proposer == {}
