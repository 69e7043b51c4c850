"""Token equality: the same requests without speculation, then with the drafts of each proposer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forerun.check.chi_square import POWER
from forerun.check.report import Check, Outcome, Row
from forerun.check.teacher import Context, top_two
from forerun.request import Request, SamplingParams
from forerun.spec.proposer import RequestDraft
from forerun.testing import ScriptedProposer

if TYPE_CHECKING:
    from forerun.llm import LLM, CompletionOutput, RequestOutput

REHEARSED = "rehearsed"
WRONG_SHARE = 0.3
NEAR_TIES = {"float32": 1e-3}  # of a device whose rows are not exact, by dtype
NEAR_TIE = 0.25  # in 16 bits
TOKENS_A_NEAR_TIE = 1000


@dataclass(frozen=True)
class Case:
    """One request of the check. Its seed is its own, so that it can be told from all others."""

    check: Check
    parameter: str
    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Served:
    """All cases served at once, by the same engine."""

    cases: Sequence[Case]
    outputs: list[RequestOutput]


def serve(llm: LLM, cases: Sequence[Case], method: str | None = None, *, speculation: bool = True) -> Served:
    """In one mixed batch. method: the one that may draft; None: all of them."""
    chosen = None if method is None else {"method": method}
    params = [replace(case.params, speculative_config=chosen) for case in cases]
    return Served(cases, llm.generate([case.prompt for case in cases], params, speculation=speculation))


@contextmanager
def rehearsed(llm: LLM, plain: Served) -> Iterator[None]:
    """Drafts from the answers themselves, every third token or so wrong: whatever the model and its proposers, drafted
    tokens are accepted and rejected at all places."""
    answers = {(o.seed, choice.index): choice.token_ids for o in plain.outputs for choice in o.outputs}
    vocab_size, rng = llm.info.vocab_size, random.Random(0)

    def script(request: Request, length: int) -> RequestDraft:
        start = request.num_output_tokens
        tokens = answers.get((request.seed, request.choice), [])[start : start + length]
        wrong = [rng.random() < WRONG_SHARE for _ in tokens]
        return RequestDraft(
            [rng.randrange(vocab_size) if w else token for token, w in zip(tokens, wrong, strict=True)], REHEARSED
        )

    proposer, llm.engine.proposer = llm.engine.proposer, ScriptedProposer(script)
    try:
        yield
    finally:
        llm.engine.proposer = proposer


def compare(llm: LLM, plain: Served, drafted: Served, proposer: str, *, lossy: bool = False) -> list[Row]:
    """One row a parameter. lossy: differences are what the rule is for."""
    tallies: dict[tuple[Check, str], _Tally] = {}
    for case, expected, found in zip(plain.cases, plain.outputs, drafted.outputs, strict=True):
        row = Row(case.check, proposer, case.parameter, Outcome.SAME)
        tally = tallies.setdefault((case.check, case.parameter), _Tally(row))
        if expected.prompt_logprobs != found.prompt_logprobs:
            tally.differences.append(Difference("log-probabilities of the prompt differ", near_tie=not is_exact(llm)))
        for one, other in zip(expected.outputs, found.outputs, strict=True):
            tally.count(one, other)
            if (difference := first_difference(one, other)) is not None:
                tally.differences.append(_judged(llm, case, expected.seed, one, other, difference))
    return [tally.row_of(lossy) for tally in tallies.values()]


@dataclass(frozen=True)
class Difference:
    """An answer that is not what it is without speculation: `what` in words, and whether a near tie explains it."""

    what: str
    near_tie: bool = False


def first_difference(one: CompletionOutput, other: CompletionOutput) -> str | None:
    """What differs between two answers that must be the same; the tokens are looked at first."""
    if one.token_ids != other.token_ids:
        return "tokens"
    if (one.text, one.finish_reason, one.stop_reason) != (other.text, other.finish_reason, other.stop_reason):
        return "text or end"
    return "log-probabilities" if one.logprobs != other.logprobs else None


def _judged(
    llm: LLM, case: Case, seed: int, one: CompletionOutput, other: CompletionOutput, difference: str
) -> Difference:
    kind = "greedy" if case.params.greedy else f"seed {seed}, choice {one.index}"
    where = f"{difference} differ ({kind}, prompt {llm.tokenizer.decode(case.prompt[-8:])!r})"
    exact = is_exact(llm)
    if difference != "tokens":
        return Difference(where, near_tie=not exact and difference == "log-probabilities")
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    shorter = min(len(one.token_ids), len(other.token_ids))
    place = next((place for place, (a, b) in enumerate(pairs) if a != b), shorter)
    said = [_spell(llm, answer.token_ids[place : place + 1]) for answer in (one, other)]
    where += f" at token {place}: {said[0]} without drafts, {said[1]} with them"
    if place == shorter:
        return Difference(where)
    context = Context(case.prompt, case.params, tuple(one.token_ids[:place]), seed, one.index)
    gap, best = top_two(llm.engine, context)
    where += f"; the target's two best there are {_spell(llm, best[:1])} and {_spell(llm, best[1:])}, {gap:.2g} apart"
    return Difference(where, near_tie=not exact and gap < NEAR_TIES.get(llm.info.dtype, NEAR_TIE))


def is_exact(llm: LLM) -> bool:
    """Whether a row's bits do not depend on the rows beside it."""
    return llm.info.exact_rows


def _spell(llm: LLM, ids: Sequence[int]) -> str:
    return repr(llm.tokenizer.decode(ids, skip_special_tokens=False)) if ids else "the end"


class _Tally:
    """What is known of one parameter."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.differences: list[Difference] = []
        self.num_answers = 0
        self.num_judged = 0  # tokens that steps with a draft brought

    def count(self, one: CompletionOutput, other: CompletionOutput) -> None:
        self.num_answers += 1
        self.row.num_tokens += len(one.token_ids)
        spec = other.metrics.speculative_decoding if other.metrics else None
        if spec is not None:
            self.row.num_drafted += spec["num_draft_tokens"]
            self.row.num_accepted += spec["num_accepted_draft_tokens"]
            self.num_judged += spec["num_accepted_draft_tokens"] + spec["num_spec_steps"]

    def row_of(self, lossy: bool) -> Row:
        row, ties = self.row, [d for d in self.differences if d.near_tie]
        others = [d for d in self.differences if not d.near_tie]
        if others:
            row.outcome = Outcome.DIFFERS if lossy else Outcome.FAILED
            row.detail = f"{len(others)} of {self.num_answers} answers; {others[0].what}"
        elif len(ties) > -(-row.num_tokens // TOKENS_A_NEAR_TIE):
            row.outcome = Outcome.FAILED
            row.detail = f"{len(ties)} near ties in {row.num_tokens} tokens, more than 1 in 1,000; {ties[0].what}"
        elif ties:
            row.detail = f"a near tie: {ties[0].what}"
        if self.num_judged:
            row.detectable = 1 - (1 - POWER) ** (1 / self.num_judged)
        elif row.outcome is Outcome.SAME:
            row.outcome, row.detail = Outcome.NOTHING, "0 tokens drafted: nothing was shown by this row"
        return row
