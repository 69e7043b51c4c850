"""C16: a draft whose context is shorter than the target's stops drafting for the request that passed it, alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.request import SamplingParams
from tests.cases.conftest import MakeEngine, Reference
from tests.cases.material import prompt_of
from tests.methods import METHODS, DraftModels
from tests.tiny_engine import Work, run

DRAFT_LENGTH = 32
WORK: Work = [
    (prompt_of(9, 20), SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)),
    (prompt_of(51, 6), SamplingParams(temperature=0.8, seed=3, max_tokens=22, ignore_eos=True)),
]


@pytest.mark.parametrize("method", ["draft_model", "pard"])
def test_only_the_long_request_stops_drafting(
    engines: MakeEngine, ref: Reference, draft_models: DraftModels, tiny_model: Path, method: str
) -> None:
    spec = METHODS[method](draft_models) | {"max_model_len": DRAFT_LENGTH}
    engine = engines(None, spec=spec, max_model_len=128)
    warnings = [line for line in engine.info().log_lines if "context is" in line]
    assert len(warnings) == 1
    assert str(DRAFT_LENGTH) in warnings[0]
    assert "128" in warnings[0]

    propose, lengths = engine.proposer.propose, []  # (known tokens, drafted tokens) of the long request

    def recording(inputs, grant):  # type: ignore[no-untyped-def]
        draft = propose(inputs, grant)
        lengths.extend((r.num_tokens, len(draft.of(r.request_id))) for r in inputs.requests if r.request_id == "r0")
        return draft

    engine.proposer.propose = recording  # type: ignore[method-assign]
    results = run(engine, WORK)
    for result, (prompt, params) in zip(results, WORK, strict=True):
        assert result.key == ref(prompt, params).key
    assert all(known + drafted <= DRAFT_LENGTH + 1 for known, drafted in lengths if drafted)
    past = [drafted for known, drafted in lengths if known > DRAFT_LENGTH]
    assert len(past) > 60
    assert not any(past)
    assert any(drafted for known, drafted in lengths if known <= DRAFT_LENGTH)
    long, short = (result.last.metrics.speculative_decoding for result in results)
    assert 0 not in long["per_step_drafted"]
    assert len(long["per_step_drafted"]) <= 12 < 80
    assert sum(short["per_step_drafted"]) > 20
