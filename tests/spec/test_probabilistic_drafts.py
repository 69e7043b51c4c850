"""Drafts drawn from the draft model's own distribution: the text keeps the target's law, through the whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun.request import SamplingParams
from tests.methods import METHODS, DraftModels
from tests.tiny_engine import make_engine, prompts, run

TOP_K, LENGTH, COUNT = 3, 3, 6000
# Power: 27 cells, 6,000 texts: any law that is off by 0.1 in total variation gives a noncentrality of at least
# 4 N d^2 = 240 over 26 degrees of freedom, and is found with probability above 0.999 at this level.
SIGMAS = 4.7534  # of a normal law: exceeded with p = 1e-6


def highest_chi_square(degrees: int) -> float:
    """Exceeded with p = 1e-6; the approximation of Wilson and Hilferty, good to a few parts in a thousand here."""
    share = 2 / (9 * degrees)
    return degrees * (1 - share + SIGMAS * share**0.5) ** 3


def target_law(model_path: Path, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Probability of each continuation of LENGTH tokens under top-k sampling at temperature 1."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in law.items():
            with torch.no_grad():
                logits = model(torch.tensor([prompt + list(text)])).logits[0, -1]
            top = logits.topk(TOP_K)
            for token, share in zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True):
                longer[(*text, token)] = probability * share
        law = longer
    return law


DRAFTERS = ["draft_model", "eagle3"]  # the head knows a part of the target's vocabulary


def probabilistic(method: str, drafts: DraftModels, length: int, **rest: Any) -> dict[str, Any]:
    keys = {"draft_sample_method": "probabilistic", "num_speculative_tokens": length}
    return METHODS[method](drafts) | keys | rest


WAYS = {
    "whole_drafts": {},
    "cut_drafts": {"draft_min_prob": 0.6},
    "block": {"rejection_sample_method": "block"},
}


@pytest.mark.parametrize(
    ("method", "way"),
    [("draft_model", "whole_drafts"), ("draft_model", "block"), ("eagle3", "whole_drafts"), ("eagle3", "cut_drafts")],
)
def test_texts_follow_the_targets_law(tiny_model: Path, draft_models: DraftModels, method: str, way: str) -> None:
    prompt = prompts(1, seed=12)[0][:12]
    spec = probabilistic(method, draft_models, 2, **WAYS[way])
    engine = make_engine(tiny_model, spec, max_num_seqs=256, max_num_batched_tokens=2048)
    params = SamplingParams(temperature=1.0, top_k=TOP_K, max_tokens=LENGTH, ignore_eos=True)
    results = run(engine, [(prompt, params)] * COUNT, check=False)
    spec_stats = engine.stats().spec
    assert 0.2 < spec_stats.num_accepted_tokens / spec_stats.num_draft_tokens < 0.98, "accepted and rejected both occur"

    law = target_law(tiny_model, prompt)
    counts = dict.fromkeys(law, 0)
    for result in results:
        counts[tuple(result.token_ids)] += 1  # KeyError: a text that the target never says
    statistic, cells, rest_seen, rest_expected = 0.0, 0, 0, 0.0
    for text, probability in law.items():
        expected = probability * COUNT
        if expected < 10:
            rest_seen, rest_expected = rest_seen + counts[text], rest_expected + expected
            continue
        statistic += (counts[text] - expected) ** 2 / expected
        cells += 1
    if rest_expected > 10:
        statistic += (rest_seen - rest_expected) ** 2 / rest_expected
        cells += 1
    assert cells > 10
    assert statistic < highest_chi_square(cells - 1)


@pytest.mark.parametrize("method", DRAFTERS)
def test_greedy_requests_say_what_they_say_anyway(tiny_model: Path, draft_models: DraftModels, method: str) -> None:
    work = [(prompt, SamplingParams(temperature=0, max_tokens=30)) for prompt in prompts(5)]
    spec = probabilistic(method, draft_models, 4)
    engine = make_engine(tiny_model, spec)
    expected = run(make_engine(tiny_model), work, together=False)
    assert [r.key for r in run(engine, work)] == [r.key for r in expected]


@pytest.mark.parametrize("method", DRAFTERS)
def test_a_seed_gives_the_same_text_again(tiny_model: Path, draft_models: DraftModels, method: str) -> None:
    work = [(prompt, SamplingParams(temperature=1.0, max_tokens=30, seed=4)) for prompt in prompts(5)]
    spec = probabilistic(method, draft_models, 4)
    first, again = (run(make_engine(tiny_model, spec), work) for _ in range(2))
    assert [r.key for r in first] == [r.key for r in again]
