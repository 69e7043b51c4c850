"""Each kind of change to the logits, row by row against a definition in plain Python: any drafts, chains and trees, of
which any path stands; several requests in a step, in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.plan import Plan, ScheduledRequest
from forerun.models.tokenizer import Tokenizer
from forerun.request import FinishReason, Request, SamplingParams
from forerun.sampling.processors import LogitsProcessor, LogitsProcessors
from forerun.sampling.processors.bad_words import BadWords, token_sequences
from forerun.sampling.processors.bias import AllowedTokens, LogitBias
from forerun.sampling.processors.minimum import MinTokens
from forerun.sampling.processors.penalties import Penalties
from forerun.spec.proposer import RequestDraft
from forerun.spec.verifier import RequestVerdict, Verdict
from tests.sampling.rows import EOS, Steps, params

FORBIDDEN = float("-inf")
V = 24
NUMBERS = st.integers(0, 2**31)


class Numbers:
    """A tokenizer whose words are numbers: "3 4" is [3, 4]; a space before a word makes its first token another."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [int(part) for part in text.split()]
        return [ids[0] + 1, *ids[1:]] if text.startswith(" ") else ids


def penalised(request: Request, output: Sequence[int], token_id: int, logit: float) -> float:
    p = request.params
    count = output.count(token_id)
    if count or token_id in request.token_ids[: request.num_prompt_tokens]:
        logit = logit / p.repetition_penalty if logit > 0 else logit * p.repetition_penalty
    return logit - p.frequency_penalty * count - p.presence_penalty * (count > 0)


def biased(request: Request, output: Sequence[int], token_id: int, logit: float) -> float:
    return logit + (request.params.logit_bias or {}).get(token_id, 0.0)


def allowed(request: Request, output: Sequence[int], token_id: int, logit: float) -> float:
    only = request.params.allowed_token_ids
    return logit if only is None or token_id in only else FORBIDDEN


def not_too_early(request: Request, output: Sequence[int], token_id: int, logit: float) -> float:
    ends = token_id == EOS or token_id in request.params.stop_token_ids
    return FORBIDDEN if ends and len(output) < request.params.min_tokens else logit


def not_bad(request: Request, output: Sequence[int], token_id: int, logit: float) -> float:
    for word in request.params.bad_words:
        for sequence in token_sequences(Numbers(), word):
            longer = [*output, token_id]
            if longer[len(longer) - len(sequence) :] == sequence and len(longer) >= len(sequence):
                return FORBIDDEN
    return logit


PENALTIES = [
    params(presence_penalty=0.7, frequency_penalty=-0.4),
    params(repetition_penalty=1.7),
    params(repetition_penalty=0.5, presence_penalty=-2.0),
    params(),
]
KINDS: dict[str, tuple[Callable[[], LogitsProcessor], Callable[..., float], list[SamplingParams]]] = {
    "penalties": (Penalties, penalised, PENALTIES),
    "logit_bias": (LogitBias, biased, [params(logit_bias={3: 5.0, 4: -100}), params(logit_bias={0: 1.5}), params()]),
    "allowed": (
        AllowedTokens,
        allowed,
        [params(allowed_token_ids=(3, 3, 9)), params(allowed_token_ids=range(8)), params()],
    ),
    "min_tokens": (
        MinTokens,
        not_too_early,
        [params(min_tokens=7, stop_token_ids=(5,)), params(min_tokens=2), params(stop_token_ids=(5,))],
    ),
    "bad_words": (
        lambda: BadWords(Numbers()),
        not_bad,
        [params(bad_words=("3", "4 5", "4 6", "7 7 7")), params(bad_words=("9 9",)), params()],
    ),
}


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(seed=NUMBERS)
def test_every_row_is_what_its_own_tokens_make_it(kind: str, trees: bool, seed: int) -> None:
    make, definition, cases = KINDS[kind]
    steps = Steps([make()], cases, seed, V, trees)
    for _ in range(5):
        for request, output, raw, changed in steps.step():
            expected = [definition(request, output, token_id, float(logit)) for token_id, logit in enumerate(raw)]
            torch.testing.assert_close(changed, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    for request in steps.requests:
        steps.pipeline.forget(request.request_id)
    assert not any(
        vars(processor).get(name) for processor in steps.processors for name in vars(processor) if name in STATE
    )


STATE = ("_seen", "_bias", "_allowed", "_ends", "_words")


@settings(max_examples=25, deadline=None)
@given(seed=NUMBERS)
def test_all_kinds_together_work_in_vllms_order(seed: int) -> None:
    case = params(
        presence_penalty=0.5,
        repetition_penalty=1.3,
        logit_bias={3: 2.0, 8: -4.0},
        allowed_token_ids=tuple(range(1, 20)),
        min_tokens=5,
        bad_words=("4 5", "6"),
    )
    order = ("logit_bias", "allowed", "bad_words", "min_tokens", "penalties")
    steps = Steps([KINDS[kind][0]() for kind in order], [case, params(), case], seed, V, trees=True)
    for _ in range(4):
        for request, output, raw, changed in steps.step():
            expected = raw.tolist()
            for kind in order:
                expected = [KINDS[kind][1](request, output, i, logit) for i, logit in enumerate(expected)]
            torch.testing.assert_close(changed, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def one_step(case: SamplingParams, logits: torch.Tensor) -> tuple[LogitsProcessors, Plan, torch.Tensor]:
    request = Request("r", [2, 3], 2, case, seed=0)
    pipeline = LogitsProcessors([AllowedTokens(), LogitBias()])
    pipeline.start(request)
    plan = Plan([ScheduledRequest(request, 1, 1, RequestDraft([4, 5]), samples=True)])
    return pipeline, plan, pipeline.apply(plan, logits)


def test_raw_logits_are_copied_only_where_log_probabilities_need_them() -> None:
    for case, copies in ((params(logit_bias={1: 2.0}), False), (params(logit_bias={1: 2.0}, logprobs=0), True)):
        logits = torch.zeros(3, V)
        _, _, changed = one_step(case, logits)
        assert (changed.data_ptr() != logits.data_ptr()) == copies
        assert bool((logits == 0).all()) == copies
        assert bool((changed[:, 1] == 2).all())
    logits = torch.zeros(3, V)
    assert one_step(params(logprobs=2), logits)[2] is logits, "nobody asks for a change"


def test_a_row_with_nothing_left_is_explained_and_a_broken_one_is_not() -> None:
    logits = torch.zeros(3, V)
    pipeline, plan, changed = one_step(params(allowed_token_ids=(1,)), logits)
    changed[1] = FORBIDDEN
    verdict = Verdict({"r": RequestVerdict([0], [4], 2, finish_reason=FinishReason.ERROR)})
    pipeline.explain(plan, changed, verdict)
    assert "output position 1" in str(verdict.by_request["r"].fault)
    changed[1] = float("nan")
    verdict = Verdict({"r": RequestVerdict([0], [4], 2, finish_reason=FinishReason.ERROR)})
    pipeline.explain(plan, changed, verdict)
    assert verdict.by_request["r"].fault is None


def test_a_bad_word_is_known_bare_and_after_a_space_as_vllm_has_it(tokenizer: Tokenizer) -> None:
    """The second form counts only where it is as long and begins with another token."""
    for word in ("the", " the", "a", "xyz", "é"):
        bare, spaced = (tokenizer.encode(t, add_special_tokens=False) for t in (word.lstrip(), " " + word.lstrip()))
        differs = len(bare) == len(spaced) and bare[0] != spaced[0]
        assert token_sequences(tokenizer, word) == ([bare, spaced] if differs else [bare])
