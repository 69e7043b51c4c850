"""A guide after tokens on trial is one that never saw them; drafts are cut where the grammar says."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from forerun.models.tokenizer import _byte_level_bytes
from forerun.spec.proposer import RequestDraft
from forerun.structured import compiler as compiler_module
from forerun.structured.compiler import Compiler, Vocabulary
from forerun.structured.guide import MAX_RENEWALS, Guide
from forerun.structured.processor import apply_masks
from forerun.structured.reasoning import EndTag
from forerun.structured.request import StructuredOutputs
from tests.structured.forms import FORMS
from tests.tiny_tokenizer import IM_END, VOCAB_SIZE, tiny_backend

WORDS = -(-VOCAB_SIZE // 32)
TAG = "</think>"


@cache
def tokens() -> list[bytes]:
    spelled = {i: token for token, i in tiny_backend().get_vocab().items()}
    return [spelled[i].encode() if i <= IM_END else _byte_level_bytes(spelled[i]) for i in range(VOCAB_SIZE)]


def encode(text: str) -> list[int]:
    return tiny_backend().encode(text).ids


@cache
def compiler() -> Compiler:
    return Compiler(Vocabulary(tokens(), [0, 1, 2], [IM_END], encode))


def guide(form: str, *, reasoning: bool = False, ignore_eos: bool = False) -> Guide:
    asked, end_tag = StructuredOutputs.parse(FORMS[form][0]), EndTag(TAG, tokens()) if reasoning else None
    return Guide(compiler().matcher(asked), partial(compiler().fresh, asked), end_tag, [IM_END], ignore_eos)


def mask_of(guide: Guide) -> list[int]:
    mask = np.zeros(WORDS, np.int32)
    guide.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def allowed(guide: Guide) -> list[int]:
    return [i for i in mask_of(guide) if i < VOCAB_SIZE]


@settings(max_examples=40, deadline=None)
@given(form=st.sampled_from(sorted(FORMS)), reasoning=st.booleans(), ignore_eos=st.booleans(), data=st.data())
def test_a_rejected_draft_leaves_no_trace(form: str, reasoning: bool, ignore_eos: bool, data: st.DataObject) -> None:
    """The mask after trees of tokens on trial is that of a fresh guide fed with what stands."""
    tried = guide(form, reasoning=reasoning, ignore_eos=ignore_eos)
    stands: list[int] = []
    for _ in range(data.draw(st.integers(1, 8))):
        nodes, parents = [], []
        for place in range(data.draw(st.integers(0, 6))):
            choices = allowed(tried) if data.draw(st.booleans()) else range(VOCAB_SIZE)
            nodes.append(data.draw(st.sampled_from([*choices, IM_END])))
            parents.append(data.draw(st.integers(-1, place - 1)))
        for _ in tried.walk(RequestDraft(nodes, parents=parents)):
            allowed(tried)
        assert tried.num_on_trial == 0
        following = encode(TAG) if reasoning and not tried.constrained and data.draw(st.booleans()) else []
        if not following:
            choices = [i for i in allowed(tried) if i != IM_END]
            following = [data.draw(st.sampled_from(choices))] if choices else []
        if not following:
            break
        tried.commit(following)
        stands += following
        fresh = guide(form, reasoning=reasoning, ignore_eos=ignore_eos)
        fresh.commit(stands)
        assert mask_of(tried) == mask_of(fresh)
        assert tried.forced(8) == fresh.forced(8)
        assert not tried.error


@pytest.mark.parametrize("form", FORMS)
def test_the_end_is_allowed_exactly_where_the_grammar_may_stop(form: str) -> None:
    followed, rng = guide(form), np.random.default_rng(0)
    taken: list[int] = []
    while len(taken) < 200:
        now = allowed(followed)
        text = b"".join(tokens()[i] for i in taken).decode("utf-8", "replace")
        try:
            complete = FORMS[form][1](text)
        except Exception:
            complete = False
        assert (IM_END in now) == complete, text
        now = [i for i in now if i != IM_END]
        if not now:
            return
        taken.append(int(rng.choice(now)))
        followed.commit(taken[-1:])
    raise AssertionError("the text does not end")


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("reasoning", [False, True])
@pytest.mark.parametrize("said", ["", "<", "</thin", "x</think>", "</think>(12", "(12", "(1,23)"])
def test_what_push_takes_is_what_the_mask_allows(said: str, reasoning: bool, ignore_eos: bool) -> None:
    followed = guide("lark", reasoning=reasoning, ignore_eos=ignore_eos)
    if "<" in said and not reasoning:
        return
    followed.commit(encode(said))
    pushed = []
    for token in range(VOCAB_SIZE):
        if followed.push(token):
            pushed.append(token)
            followed.pop()
    assert pushed == allowed(followed)
    assert not followed.error


def test_a_walk_visits_the_nodes_that_can_stand() -> None:
    followed = guide("lark")  # "(" NUM ("," NUM)? ")"
    one, comma, close, bad = (encode(c)[0] for c in "1,)x")
    opened = encode("(")[0]
    #            0       1    2     3      4      5      6    7       8
    nodes = [opened, bad, one, close, comma, IM_END, one, one, IM_END]
    parents = [-1, -1, 0, 2, 2, 3, 5, 1, 2]
    assert sorted(followed.walk(RequestDraft(nodes, parents=parents))) == [-1, 0, 2, 3, 4, 5]


@pytest.mark.parametrize("pieces", [["</think>"], ["<", "/", "think>"], ["x<</think", ">"], ["</think>\n\n"]])
def test_reasoning_ends_where_its_tag_does(pieces: list[str]) -> None:
    vocabulary = [*tokens(), *(piece.encode() for piece in pieces)]
    tag, state = EndTag(TAG, vocabulary), 0
    for place in range(len(pieces)):
        assert state != tag.length
        state = tag.after(state, VOCAB_SIZE + place)
    assert state == tag.length


def test_a_token_that_ends_reasoning_and_begins_an_answer_is_not_drawn() -> None:
    vocabulary = [*tokens(), b"nk>{", b"nk>\n", b">{", b"a>{"]
    tag = EndTag(TAG, vocabulary)
    behind = tag.after(tag.after(0, vocabulary.index(b"<")), vocabulary.index(b"/"))
    for letter in b"thi":
        behind = tag.after(behind, vocabulary.index(bytes([letter])))
    assert tag.joined(behind) == [VOCAB_SIZE]
    assert tag.joined(0) == []


def poison(guide: Guide) -> None:
    """An error that a matcher stays in."""
    guide.matcher.consume_token(IM_END)
    assert guide.matcher.is_error()


def test_a_matcher_that_cannot_go_on_is_replaced() -> None:
    """What other texts used up of what they share is no error of this one, on trial or not."""
    followed = guide("json")
    followed.commit(followed.forced(2))
    before, forced = mask_of(followed), followed.forced(4)
    poison(followed)
    assert mask_of(followed) == before
    poison(followed)
    assert followed.forced(4) == forced
    poison(followed)
    assert followed.push(forced[0])
    behind = mask_of(followed)
    poison(followed)
    assert mask_of(followed) == behind
    followed.pop()
    assert mask_of(followed) == before
    assert not followed.error


def test_an_error_on_trial_is_forgotten_and_one_of_the_text_stays() -> None:
    followed = guide("json")
    before, forced = mask_of(followed), followed.forced(4)
    followed._num_renewals = MAX_RENEWALS - 1
    walk = followed.walk(RequestDraft(forced))
    next(walk), next(walk)
    poison(followed)
    followed._num_renewals = MAX_RENEWALS
    assert mask_of(followed) == []
    assert followed.trial_error
    followed._num_renewals = MAX_RENEWALS - 1
    walk.close()
    assert mask_of(followed) == before
    assert not followed.error
    poison(followed)
    assert mask_of(followed) == []
    assert followed.error


def test_copies_share_states_and_fresh_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one grammar go on after its automaton is full: the limit holds for each text."""
    monkeypatch.setattr(compiler_module, "LIMITS", LLParserLimits(max_lexer_states=2000, verbose_errors=False))
    asked = StructuredOutputs.parse({"regex": "(.*a.{9}){9}"})
    rng = np.random.default_rng(0)
    for _ in range(12):
        followed = Guide(compiler().matcher(asked), partial(compiler().fresh, asked), None, [IM_END])
        for _ in range(12):
            followed.commit([int(rng.choice([i for i in allowed(followed) if i != IM_END]))])
        assert not followed.error


def test_masks_are_applied_to_the_rows_they_are_for() -> None:
    rng = torch.Generator().manual_seed(0)
    for vocab_size in (31, 32, 33, 320, 328):
        logits = torch.randn(5, vocab_size, generator=rng)
        rows, words = torch.tensor([3, 0]), -(-vocab_size // 32)
        masks = torch.randint(-(2**31), 2**31 - 1, (2, words), generator=rng, dtype=torch.int64).to(torch.int32)
        expected = logits.clone()
        for row, mask in zip(rows.tolist(), masks.tolist(), strict=True):
            for i in range(vocab_size):
                if not mask[i // 32] >> i % 32 & 1:
                    expected[row, i] = float("-inf")
        apply_masks(logits, rows.tolist(), masks.numpy())
        assert torch.equal(logits, expected)
