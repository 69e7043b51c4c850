"""Grammars compiled for one tokenizer, kept by content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from forerun.errors import RequestError
from forerun.structured.grammar import grammar_text
from forerun.structured.request import FIELD, StructuredOutputs

MAX_KEPT = 32  # compiled grammars, each of up to some 40 MB
# Bounds of what one grammar may cost, in llguidance's units. Its own defaults let a step of an ambiguous grammar take
# 0.3 s and the automaton of an expression some 400 MB.
LIMITS = LLParserLimits(
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class Vocabulary:
    """A tokenizer as llguidance wants to see it.

    Args:
        tokens: the bytes of each id; b"" for one that is not defined.
        special_ids: those that are no part of a text.
        eos_ids: those that end one.
        encode: text to ids.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Collection[int],
        eos_ids: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special_ids)
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = None
        self._encode = encode
        self.eos_ids = list(eos_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("texts only")
        return self._encode(text)

    @property
    def special_tokens(self) -> dict[str, int]:
        return {self.tokens[i].decode("utf-8", "replace"): i for i in self.special_token_ids if self.tokens[i]}


class Compiler:
    """Makes matchers. The same grammar is compiled once while it is among the last `MAX_KEPT` that were asked for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.eos_ids)
        self._special_tokens = vocabulary.special_tokens
        self._kept: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()

    def matcher(self, asked: StructuredOutputs) -> LLMatcher:
        """A matcher of its own, at the beginning of the text.

        Raises:
            RequestError: the grammar is wrong, or costs more than `LIMITS` allow.
        """
        matcher = self._kept.get(asked)
        if matcher is None:
            matcher = self._kept[asked] = self._compile(asked)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(asked)
        return matcher.deep_copy()

    def fresh(self, asked: StructuredOutputs) -> LLMatcher:
        """One that shares nothing with those made before: copies share the states of their automaton, and their bound.
        Those to come will not be copies of the old one either."""
        self._kept.pop(asked, None)
        return self._compile(asked)

    def _compile(self, asked: StructuredOutputs) -> LLMatcher:
        try:
            text = grammar_text(asked, self._special_tokens)
        except ValueError as error:
            raise refusal(asked, str(error)) from None
        matcher = LLMatcher(self.tokenizer, text, log_level=0, limits=LIMITS)
        trial = matcher.deep_copy()
        if not trial.is_error():
            trial.compute_bitmask()
        if trial.is_error():
            raise refusal(asked, trial.get_error())
        if trial.is_stopped() and not trial.is_accepting():
            raise refusal(asked, "no text matches it")
        return matcher


def refusal(asked: StructuredOutputs, reason: str) -> RequestError:
    """`reason` in one line, as the fault of what was asked."""
    first = " ".join(reason.replace("<non-verbose/>", "").split())
    return RequestError(f"{FIELD}.{asked.kind} cannot be used: {first[:300]}", f"{FIELD}.{asked.kind}")
