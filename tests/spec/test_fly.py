"""The rule `fly` against its definition in plain Python; what it counts; who may ask for it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.engine.messages import NewRequest
from forerun.request import FinishReason, SamplingParams
from forerun.sampling.batch import SamplingRows
from forerun.spec.config import SpeculativeConfig
from forerun.spec.maths import top_entropy
from forerun.spec.proposer import Draft, RequestDraft
from forerun.spec.registry import make_verifier
from forerun.spec.verifier import RequestVerdict
from forerun.spec.verifiers.fly import FlyVerifier
from forerun.spec.verifiers.match import MatchVerifier
from forerun.spec.verifiers.standard import StandardVerifier
from tests.methods import METHODS, DraftModels
from tests.tiny_engine import Result, finish, make_engine, prompts, run

V = 4
GREEDY, DRAWN = SamplingParams(temperature=0), SamplingParams(temperature=0.7, top_k=3)


def definition(
    tokens: list[int], own: list[int], rows: list[list[float]], possible: list[bool], rule: FlyVerifier
) -> tuple[list[int], list[int], list[int]]:
    """(accepted, loosely accepted, emitted): what the definition says, for what the usual test gives at every row.

    Args:
        own: the usual test's token of each row: the drafted one where it passes.
        rows: the target's probabilities after each row's tokens.
        possible: whether q gives the drafted token.
    """
    n, w = len(tokens), rule.window

    def entropy(row: list[float]) -> float:
        top = sorted(row, reverse=True)[: rule.entropy_top_k]
        return -sum(p * math.log(p) for p in top if p > 0)

    i, loose = 0, []
    while i < n:
        if own[i] == tokens[i]:
            i += 1
            continue
        pending = rows[i][tokens[i]] > 0 and possible[i] and i + w < n and entropy(rows[i]) >= rule.entropy_threshold
        if not pending or any(own[j] != tokens[j] for j in range(i + 1, i + 1 + w)):
            break
        loose.append(i)
        i += 1 + w
    return list(range(i)), loose, [*tokens[:i], own[i]]


def probabilities(logits: Tensor, params: SamplingParams) -> list[float]:
    row = [float(x) / (params.temperature or 1.0) for x in logits]
    least = sorted(row, reverse=True)[params.top_k - 1] if params.top_k > 0 else -math.inf
    weights = [math.exp(x) if x >= least else 0.0 for x in row]
    return [w / sum(weights) for w in weights]


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, V - 1), max_size=7),
    seed=st.integers(0, 10_000),
    params=st.sampled_from([GREEDY, DRAWN]),
    rule=st.builds(FlyVerifier, st.integers(1, 3), st.sampled_from([0.0, 0.5, 0.9, 1.2]), st.integers(1, 5)),
    agrees=st.floats(0, 1),
    with_probs=st.booleans(),
)
def test_it_is_what_its_definition_says(
    tokens: list[int], seed: int, params: SamplingParams, rule: FlyVerifier, agrees: float, with_probs: bool
) -> None:
    """Greedy and drawn, one-hot and probabilistic, on targets that agree with the draft more or less often."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(tokens) + 1, V, generator=generator)
    for place, token in enumerate(tokens):
        if torch.rand(1, generator=generator) < agrees:
            logits[place, token] += 3.0
    q = torch.rand(len(tokens), V, generator=generator).softmax(-1)
    if tokens:
        q[0, tokens[0]] *= seed % 3 > 0  # now and then a token that cannot have been drawn
    draft = RequestDraft(tokens, "t", probs=q if with_probs else None)
    rows = SamplingRows("r", params, seed, 0, 0, len(tokens) + 1, 5)
    if params.greedy:
        own = logits.argmax(-1).tolist()
    else:
        usual = StandardVerifier()
        own = [usual.next_token(row, rows, 5 + place, draft, place - 1) for place, row in enumerate(logits)]
    accepted, loose, emitted = definition(
        tokens,
        own,
        [probabilities(row, params) for row in logits],
        [not with_probs or bool(q[place, token] > 0) for place, token in enumerate(tokens)],
        rule,
    )
    verdict = rule.verify(Draft({"r": draft}), logits, [rows]).by_request["r"]
    assert verdict == RequestVerdict(accepted, emitted, len(tokens), loose=loose)


def test_both_ends_of_a_deferral_occur() -> None:
    """Token 1 stands loosely where the window of two does, and the target's own 0 comes back where it does not."""
    logits = torch.tensor([[1.0, 0.9, 0.8], [0.0, 0.0, 9.0], [0.0, 9.0, 0.0], [9.0, 0.0, 0.0]])
    rows = SamplingRows("r", GREEDY, 0, 0, 0, 4, 0)
    rule = FlyVerifier(2, 0.3, 3)
    stands = rule.verify(Draft({"r": RequestDraft([1, 2, 1], "t")}), logits, [rows]).by_request["r"]
    assert (stands.accepted, stands.loose, stands.token_ids) == ([0, 1, 2], [0], [1, 2, 1, 0])
    falls = rule.verify(Draft({"r": RequestDraft([1, 2, 2], "t")}), logits, [rows]).by_request["r"]
    assert (falls.accepted, falls.loose, falls.token_ids) == ([], [], [0])
    logits[2] = torch.nan
    bad = rule.verify(Draft({"r": RequestDraft([1, 2, 1], "t")}), logits, [rows]).by_request["r"]
    assert (bad.accepted, bad.loose, bad.token_ids, bad.finish_reason) == ([], [], [0], None)
    bad = rule.verify(Draft({"r": RequestDraft([0, 2, 1], "t")}), logits, [rows]).by_request["r"]
    assert (bad.token_ids, bad.finish_reason) == ([0, 2], FinishReason.ERROR)


def test_trees_are_judged_without_deferrals() -> None:
    draft = RequestDraft([1, 2, 0, 1], "t", parents=[-1, 0, 1, 2])
    for seed in range(30):
        logits = torch.randn(5, V, generator=torch.Generator().manual_seed(seed))
        rows = SamplingRows("r", DRAWN, seed, 0, 0, 5, 0)
        both = [rule.verify(Draft({"r": draft}), logits, [rows]) for rule in (FlyVerifier(1, 0, 3), MatchVerifier())]
        assert both[0] == both[1]


def test_entropy_is_of_the_likeliest_tokens_as_they_are() -> None:
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125])
    assert top_entropy(probs, 1) == pytest.approx(0.5 * math.log(2))
    assert top_entropy(probs, 9) == pytest.approx(1.75 * math.log(2))
    assert top_entropy(torch.tensor([1.0, 0.0]), 2) == 0.0


# -- in the engine


def fly(drafts: DraftModels, **keys: Any) -> dict[str, Any]:
    loose = {"fly_window_size": 1, "fly_entropy_threshold": 0.0}
    return (
        METHODS["draft_model"](drafts) | {"model": str(drafts.noisy), "rejection_sample_method": "fly"} | loose | keys
    )


def test_loosely_accepted_tokens_are_counted_everywhere(tiny_model: Path, draft_models: DraftModels) -> None:
    engine = make_engine(tiny_model, fly(draft_models))
    assert (engine.info().rejection_sample_method, engine.info().lossless) == ("fly", "no")
    work = [(p, SamplingParams(temperature=t, max_tokens=40)) for p in prompts(6) for t in (0, 0.8)]
    results = run(engine, work)
    told = [r.last.metrics.speculative_decoding for r in results if r.last.metrics]
    counted = sum(spec["num_loosely_accepted_tokens"] for spec in told if spec)
    stats = engine.stats()
    assert (
        counted
        == stats.spec.num_loosely_accepted_tokens
        == stats.spec_by_proposer["draft_model"].num_loosely_accepted_tokens
    )
    assert counted > 0
    assert {(spec["rejection_sample_method"], spec["lossless"]) for spec in told if spec} == {("fly", "no")}
    plain = run(make_engine(tiny_model), work)
    assert [r.token_ids for r in results] != [r.token_ids for r in plain]


def test_each_request_of_a_batch_has_its_own_rule(tiny_model: Path, draft_models: DraftModels) -> None:
    """Those that ask for `match` say what they say without drafts; the others what they say where all are fly's."""
    work = [(p, SamplingParams(temperature=t, max_tokens=30)) for p in prompts(6) for t in (0, 0.8)]
    plain, loose = run(make_engine(tiny_model), work), run(make_engine(tiny_model, fly(draft_models)), work)
    engine = make_engine(tiny_model, fly(draft_models))
    results = {f"r{place}": Result() for place in range(len(work))}
    for place, (prompt, params) in enumerate(work):
        rule = "match" if place % 3 else ""
        engine.add_request(NewRequest(f"r{place}", prompt, params, place, rejection_sample_method=rule))
    finish(engine, results)
    for place, result in enumerate(results.values()):
        assert result.token_ids == (plain if place % 3 else loose)[place].token_ids
        spec = result.last.metrics and result.last.metrics.speculative_decoding
        assert spec is not None
        assert spec["lossless"] == ("path" if place % 3 else "no")
    assert engine.stats().spec.num_loosely_accepted_tokens > 0


@pytest.mark.parametrize("rule", ["match", "standard", "block", "fly"])
def test_a_verifier_has_the_rules_that_requests_may_ask_for(rule: str) -> None:
    given = {"method": "draft_model", "model": "org/model", "num_speculative_tokens": 4}
    sampled = {"draft_sample_method": "greedy" if rule == "match" else "probabilistic"}
    verifier = make_verifier(SpeculativeConfig.parse(given | sampled | {"rejection_sample_method": rule}))
    assert verifier.name == rule
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(1))
    draft = Draft({"r": RequestDraft([1, 2], "t", probs=torch.full((2, V), 0.25))})
    for asked, alone in (("match", MatchVerifier()), ("standard", StandardVerifier())):
        for seed in range(20):
            rows = SamplingRows("r", DRAWN, seed, 0, 0, 3, 0, asked)
            assert verifier.verify(draft, logits, [rows]) == alone.verify(draft, logits, [rows])
