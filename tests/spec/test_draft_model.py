"""The draft model's drafts against transformers' own models: what it drafts, how much of it stands, where it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from forerun.engine.engine import Engine
from forerun.request import SamplingParams
from forerun.spec.proposer import Draft, DraftInputs, Grant, RequestDraft
from tests.methods import MASK_TOKEN, METHODS, DraftModels, K
from tests.tiny_engine import Work, make_engine, prompts, run
from tests.tiny_tokenizer import VOCAB_SIZE

GREEDY: Work = [(p, SamplingParams(temperature=0, max_tokens=41, ignore_eos=True)) for p in prompts(6, seed=5)]


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(model: Any, token_ids: Sequence[int]) -> Tensor:
    """[T, V]"""
    rows: Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return rows


def recorded(engine: Engine) -> list[tuple[list[int], RequestDraft, int]]:
    """(known tokens, draft, granted length) of every request and step, as the engine runs."""
    seen: list[tuple[list[int], RequestDraft, int]] = []
    propose = engine.proposer.propose

    def recording(inputs: DraftInputs, grant: Grant) -> Draft:
        known = {r.request_id: list(r.token_ids) for r in inputs.requests}
        draft = propose(inputs, grant)
        seen.extend((known[i], draft.of(i), grant.lengths[i]) for i in known)
        return draft

    engine.proposer.propose = recording  # type: ignore[method-assign]
    return seen


def greedy_chain(model: Any, known: Sequence[int], length: int) -> list[int]:
    tokens = list(known)
    for _ in range(length):
        tokens.append(int(logits_of(model, tokens)[-1, :VOCAB_SIZE].argmax()))
    return tokens[len(known) :]


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 32, "max_num_seqs": 3}], ids=["wide", "chunks"])
def test_drafts_are_the_draft_models_own_text(
    tiny_model: Path, draft_models: DraftModels, settings: dict[str, Any]
) -> None:
    oracle = load(draft_models.noisy)
    engine = make_engine(tiny_model, METHODS["draft_model"](draft_models), **settings)
    seen = recorded(engine)
    run(engine, GREEDY)
    drafts = [(known, draft.tokens) for known, draft, _ in seen if len(draft)]
    assert len(drafts) > 60
    for known, tokens in drafts[::3]:
        assert tokens == greedy_chain(oracle, known, len(tokens))


def test_a_pard_draft_is_one_pass_over_masks(tiny_model: Path, draft_models: DraftModels) -> None:
    oracle = load(draft_models.parallel)
    engine = make_engine(tiny_model, METHODS["pard"](draft_models))
    seen = recorded(engine)
    run(engine, GREEDY)
    assert len(seen) > 100
    for known, draft, granted in seen[::3]:
        assert len(draft) == granted
        rows = logits_of(oracle, known + [MASK_TOKEN] * (granted - 1))[len(known) - 1 :, :VOCAB_SIZE]
        assert draft.tokens == rows.argmax(-1).tolist()


def test_acceptance_is_that_of_assisted_generation(
    tiny_model: Path, draft_models: DraftModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' generate with the same pair: the same number of accepted tokens at every step."""
    target, assistant = load(tiny_model), load(draft_models.noisy)
    assistant.generation_config.num_assistant_tokens = K
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    matches: list[int] = []
    update = AssistedCandidateGenerator.update_candidate_strategy

    def recording(self: Any, input_ids: Any, scores: Any, num_matches: Any) -> None:
        matches.append(int(num_matches))
        update(self, input_ids, scores, num_matches)

    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", recording)
    results = run(make_engine(tiny_model, METHODS["draft_model"](draft_models)), GREEDY)
    accepted = 0
    for (prompt, _), result in zip(GREEDY, results, strict=True):
        matches.clear()
        ids = torch.tensor([prompt + result.token_ids[:1]])  # ours drafts from the second token on
        out = target.generate(
            ids, assistant_model=assistant, do_sample=False, max_new_tokens=40, eos_token_id=None, pad_token_id=0
        )
        assert out[0, len(prompt) :].tolist() == result.token_ids
        found = result.last.metrics.speculative_decoding
        full = [a for a, d in zip(found["per_step_accepted"], found["per_step_drafted"], strict=True) if d == K]
        assert len(full) >= 8
        assert full == matches[: len(full)]  # the last steps are cut by the length, by each in its own way
        accepted += sum(full)
    assert accepted > 0


def test_a_draft_ends_where_the_model_is_unsure(tiny_model: Path, draft_models: DraftModels) -> None:
    oracle = load(draft_models.noisy)
    engine = make_engine(tiny_model, METHODS["draft_model_min_prob"](draft_models))
    seen = recorded(engine)
    run(engine, GREEDY)
    lengths = [len(draft) for _, draft, _ in seen]
    assert 0 in lengths
    assert K in lengths
    assert set(lengths) - {0, K}
    for known, draft, granted in seen[::3]:
        tokens = greedy_chain(oracle, known, min(granted, len(draft) + 1))
        assert draft.tokens == tokens[: len(draft)]
        probs = logits_of(oracle, known + tokens)[len(known) - 1 : -1, :VOCAB_SIZE].softmax(-1)
        own = [float(row[token]) for row, token in zip(probs, tokens, strict=True)]
        assert all(p >= 0.5 for p in own[: len(draft)])
        assert len(draft) == granted or own[len(draft)] < 0.5
        together = torch.tensor(own[: len(draft)]).cumprod(0)
        assert torch.allclose(torch.tensor(draft.confidence or []), together, atol=1e-5)


def test_coupled_drafts_stand_more_often_than_greedy_ones(tiny_model: Path, draft_models: DraftModels) -> None:
    """At temperature 1, with the target's noise: arXiv 2408.07978 bounds it by (1 - TV) / (1 + TV) from below."""
    work = [(p, SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)) for p in prompts(12, seed=8)]
    rate: dict[str, float] = {}
    for method in ("draft_model", "draft_model_coupled"):
        engine = make_engine(tiny_model, METHODS[method](draft_models))
        run(engine, work)
        spec = engine.stats().spec
        rate[method] = spec.num_accepted_tokens / spec.num_draft_tokens
    assert rate["draft_model_coupled"] > rate["draft_model"] + 0.05


def test_a_shared_vocabulary_under_other_ids_drafts_as_well(tiny_model: Path, draft_models: DraftModels) -> None:
    """The draft is the target with its ids shuffled: all that it drafts is right, in target ids."""
    engine = make_engine(tiny_model, METHODS["draft_model_renamed"](draft_models))
    run(engine, GREEDY)
    spec = engine.stats().spec
    assert spec.num_accepted_tokens == spec.num_draft_tokens > 100
    assert any("share 320 tokens, 100.0%" in line for line in engine.info().log_lines)


def test_one_pass_a_position_covers_the_batch(tiny_model: Path, draft_models: DraftModels) -> None:
    """K passes of the draft model a step, however many requests there are; none where nobody drafts."""
    engine = make_engine(tiny_model, METHODS["draft_model"](draft_models))
    (member,) = engine.proposer.members  # type: ignore[attr-defined]
    paged = member.proposer._paged
    passes: list[int] = []
    forward = paged.forward
    paged.forward = lambda segments: passes.append(len(segments)) or forward(segments)
    counts: list[int] = []
    propose: Callable[..., Draft] = engine.proposer.propose

    def counting(inputs: DraftInputs, grant: Grant) -> Draft:
        before = len(passes)
        draft = propose(inputs, grant)
        counts.append(len(passes) - before)
        assert len(passes) - before == max(grant.lengths.values(), default=0)
        return draft

    engine.proposer.propose = counting  # type: ignore[method-assign]
    run(engine, GREEDY)
    assert max(counts) == K
    assert max(passes) == len(GREEDY)
    before = len(passes)
    run(engine, GREEDY, max_draft_tokens=0)
    assert len(passes) == before


def test_requests_choose_among_the_methods(tiny_model: Path, draft_models: DraftModels) -> None:
    engine = make_engine(tiny_model, METHODS["suffix_then_draft_model"](draft_models))
    for method in ("suffix", "draft_model"):
        before = {name: spec.num_draft_tokens for name, spec in engine.stats().spec_by_proposer.items()}
        run(engine, GREEDY, draft_methods=(method,))
        after = {name: spec.num_draft_tokens for name, spec in engine.stats().spec_by_proposer.items()}
        grown = {name for name in after if after[name] > before.get(name, 0)}
        assert grown == {method}


def test_a_short_draft_is_dropped_where_a_minimum_is_set(tiny_model: Path, draft_models: DraftModels) -> None:
    spec = METHODS["draft_model_min_prob"](draft_models) | {"draft_min_tokens": 3}
    engine = make_engine(tiny_model, spec)
    seen = recorded(engine)
    run(engine, GREEDY)
    assert {len(draft) for _, draft, _ in seen} == {0, 3, 4}
