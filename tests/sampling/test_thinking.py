"""`thinking_token_budget`: the end tag is written where the budget ends, whatever is drafted there."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.engine.engine import Engine
from forerun.errors import ConfigError, RequestError
from forerun.models.tokenizer import Tokenizer
from forerun.parsers.formats import reasoning_format
from forerun.request import Request, SamplingParams
from forerun.sampling.processors.thinking import ThinkingBudget
from tests.sampling.rows import Steps, params
from tests.tiny_engine import NGRAM, make_engine, prompts, run

TAGS = "tags:<t>,</t>"  # no token of the tiny tokenizer's own: several tokens each
V = 320


@pytest.fixture(scope="module")
def end(tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode("</t>", add_special_tokens=False)
    assert len(ids) > 1
    return ids


def forced(tokenizer: Tokenizer, end: list[int], request: Request, output: list[int]) -> int | None:
    """The definition: once the budget is used up and no tag has ended, the rest of the tag."""
    budget = request.params.thinking_token_budget
    text = b"".join(map(tokenizer.token_bytes, output))
    if budget is None or len(output) < budget or b"</t>" in text:
        return None
    begun = max(n for n in range(len(end)) if output[len(output) - n :] == end[:n])
    return end[begun]


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_free_or_forced_as_its_own_tokens_say(tokenizer: Tokenizer, end: list[int], seed: int) -> None:
    """Drafts often hold pieces of the tag, whole ones and beginnings, before the budget and after it."""
    cases = [params(thinking_token_budget=budget) for budget in (0, 1, 4, 9)] + [params()]
    steps = Steps([ThinkingBudget(tokenizer, reasoning_format(TAGS))], cases, seed, V, trees=True)
    few = [*end, *end, 40, 50]
    steps.tokens = lambda count: (end if steps.random.random() < 0.2 else steps.random.choices(few, k=6))[:count]
    seen = set()
    for _ in range(6):
        for request, output, raw, changed in steps.step():
            token_id = forced(tokenizer, end, request, output)
            seen.add(token_id)
            if token_id is None:
                assert bool((changed == raw).all())
            else:
                assert changed.isfinite().nonzero().flatten().tolist() == [token_id]
    assert None in seen
    assert len(seen & set(end)) > 1, "the tag's first token and one in its middle"


@pytest.fixture(scope="module")
def engines(tiny_model: Path) -> list[Engine]:
    return [make_engine(tiny_model, spec, reasoning_parser=TAGS) for spec in (None, NGRAM)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_tag_stands_where_the_budget_ends_with_drafts_and_without(
    engines: list[Engine], end: list[int], temperature: float
) -> None:
    work = [
        (prompt, SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True, thinking_token_budget=budget))
        for prompt in prompts(3, seed=4)
        for budget in (0, 1, 7, 23, -1)
    ]
    plain, drafted = (run(engine, work) for engine in engines)
    assert [r.key for r in plain] == [r.key for r in drafted]
    for (_, case), result in zip(work, plain, strict=True):
        if (budget := case.thinking_token_budget) is not None:
            assert result.token_ids[budget : budget + len(end)] == end[: 24 - budget]
        assert result.token_ids.count(end[-1]) < 24


def test_a_prompt_that_has_closed_its_reasoning_is_left_alone(engines: list[Engine], end: list[int]) -> None:
    prompt = prompts(1, seed=4)[0]
    budget, none = (SamplingParams(temperature=0, max_tokens=8, thinking_token_budget=b) for b in (0, None))
    for engine in engines:
        one, other = run(engine, [(prompt + end, budget), (prompt + end, none)])
        assert one.key == other.key


def test_a_budget_needs_the_tags(tiny_model: Path) -> None:
    with pytest.raises(RequestError, match="--reasoning-parser") as error:
        run(make_engine(tiny_model), [([5], params(thinking_token_budget=3))])
    assert error.value.param == "thinking_token_budget"
    with pytest.raises(ConfigError, match="reasoning-parser"):
        make_engine(tiny_model, reasoning_parser="nobody's")
