"""Ids to text, token by token, and the judgement where a text ends. No torch here.

A `Detokenizer` belongs to one request. It works in the engine core, so that no token past a stop reaches a cache, a
counter or a client. The cost is linear in what was generated, whatever that is: bytes that never become a character
and stop strings that nearly match included. How long a text may get is the scheduler's business.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forerun.models.tokenizer import Spelling, Tokenizer
from forerun.request import FinishReason, SamplingParams

MAX_UNDECIDED_TOKENS = 8  # most tokens whose text a decoder that is not ours may leave open
REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What stands of the tokens of one step.

    Attributes:
        num_tokens: how many of them, from the first; the token that ended the text is the last one.
        text: new text; it may lag behind the tokens until `finish`.
        finish_reason: STOP when the text has ended, else None.
        stop_reason: the stop string or the stop token id; None for the model's own end token.
    """

    num_tokens: int
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Detokenizer:
    """The text of one request, and whether it has ended.

    Args:
        tokenizer: of the target.
        params: stop strings and ids, `min_tokens`, `ignore_eos`, `skip_special_tokens`, `include_stop_str_in_output`.
            The last one also keeps the text of a stop token, as far as that is not a special token that is left out.
        eos_token_ids: the model's own end tokens.
        strip_leading: apply the tokenizer's rule for the beginning of a text (sentencepiece drops a space). False
            for text that goes on where a prompt ends.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        eos_token_ids: Iterable[int],
        *,
        strip_leading: bool = True,
    ) -> None:
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._keeps_stop = params.include_stop_str_in_output
        skips = params.skip_special_tokens
        self._source: _ByteText | _WindowText
        if tokenizer.spelling is Spelling.OTHER:
            self._source = _WindowText(tokenizer, skips, params.spaces_between_special_tokens)
        else:
            self._source = _ByteText(tokenizer, skips, strip_leading)
        self._stops = [_StopString(stop) for stop in params.stop]
        self._num_unjudged = params.min_tokens  # tokens to come whose text ends no stop string
        self._held = ""  # may be the beginning of a stop string
        self._finished = False

    def push(self, token_ids: Sequence[int]) -> Judgement:
        """Take the tokens of a step in order; nothing after the one that ends the text is looked at."""
        assert not self._finished, "a text that has ended takes no more tokens"
        released: list[str] = []
        for count, token_id in enumerate(token_ids, start=1):
            if token_id in self._eos or token_id in self._stop_ids:
                if self._keeps_stop:
                    self._held += self._source.push(token_id)
                released.append(self.finish())
                reason = None if token_id in self._eos else token_id
                return Judgement(count, "".join(released), FinishReason.STOP, reason)
            text, stop = self._take(self._source.push(token_id))
            self._num_unjudged -= 1
            released.append(text)
            if stop is not None:
                self._finished = True
                return Judgement(count, "".join(released), FinishReason.STOP, stop)
        return Judgement(len(token_ids), "".join(released))

    def finish(self) -> str:
        """No token follows: the text held back. An unfinished character becomes U+FFFD. "" the second time."""
        if self._finished:
            return ""
        self._finished = True
        text, self._held = self._held + self._source.flush(), ""
        return text

    def _take(self, new: str) -> tuple[str, str | None]:
        """The text that is decided now that `new` is known, and the stop string that ended it."""
        if not self._stops or not new:
            return new, None
        text = self._held + new
        for end, character in enumerate(new, start=len(self._held) + 1):
            # All stop strings see every character; the first one to end wins, and the first in the list of those.
            hits = [stop for stop in self._stops if stop.advance(character)]
            if hits and self._num_unjudged <= 0:
                stop = hits[0].text
                self._held = ""
                return text[: end if self._keeps_stop else end - len(stop)], stop
        decided = len(text) - max(stop.matched for stop in self._stops)
        self._held = text[decided:]
        return text[:decided], None


class _StopString:
    """How much of a stop string the text ends with (Knuth, Morris, Pratt): each character is looked at once."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._border = [0] * len(text)  # of each prefix: its longest proper prefix that is also its suffix
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._border[length - 1]
            length += text[i] == text[length]
            self._border[i] = length

    def advance(self, character: str) -> bool:
        """Whether the string ends with this character."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._border[self.matched - 1]
        self.matched += self.text[self.matched] == character
        if self.matched < len(self.text):
            return False
        self.matched = self._border[-1]
        return True


class _ByteText:
    """Text of tokens whose bytes are known: joined, and decoded as they become characters."""

    def __init__(self, tokenizer: Tokenizer, skips_special: bool, strip_leading: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._first_is_bare = strip_leading and tokenizer.first_token_bare
        self._spaces_to_strip = tokenizer.strip_spaces if strip_leading else 0

    def push(self, token_id: int) -> str:
        if self._skips_special and self._tokenizer.is_special(token_id):
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._first_is_bare and data:
            data = self._tokenizer.first_token_bytes(token_id)
            self._first_is_bare = False
        return self._strip(self._decoder.decode(data))

    def flush(self) -> str:
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._spaces_to_strip and text:
            if not text.startswith(" "):
                self._spaces_to_strip = 0
                break
            text = text[1:]
            self._spaces_to_strip -= 1
        return text


class _WindowText:
    """Text through the backend's own decoder, for those that join tokens by rules of their own (WordPiece).

    The last tokens are decoded with and without the new ones; what is longer is new. Text once given is not changed,
    so a rule that reaches further back (a space taken away before a full stop) is not followed.
    """

    def __init__(self, tokenizer: Tokenizer, skips_special: bool, spaces_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._spaces_special = spaces_special
        self._after_special = False
        self._read: list[int] = []  # context: their text has been given
        self._unread: list[int] = []

    def push(self, token_id: int) -> str:
        if self._skips_special and self._tokenizer.is_special(token_id):
            return ""
        self._unread.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._unread) < MAX_UNDECIDED_TOKENS:
            return ""
        self._read, self._unread = self._unread, []
        after_special, self._after_special = self._after_special, self._tokenizer.is_special(token_id)
        bare = after_special and self._after_special and not self._spaces_special
        return text.lstrip(" ") if bare else text

    def flush(self) -> str:
        return self._new_text() if self._unread else ""

    def _new_text(self) -> str:
        before = self._tokenizer.backend_decode(self._read, skip_special_tokens=False)
        after = self._tokenizer.backend_decode(self._read + self._unread, skip_special_tokens=False)
        return after[len(before) :]
