"""The sampling parameters that are checked, as data: a parameter joins by a line."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.request import SamplingParams

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

TEMPERATURE = 0.8
NUM_WORDS = 4
NUM_ALLOWED = 200


@dataclass(frozen=True)
class Material:
    """What the model says to the check's prompts without speculation: so that a parameter finds something to change.

    Attributes:
        common: ids that it says and reads, most often said first.
        words: texts of tokens that it says often.
        stop: texts from the middle of its answers.
    """

    common: list[int]
    words: list[str]
    stop: list[str]

    @classmethod
    def of(cls, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Material:
        said, read = (Counter(itertools.chain.from_iterable(texts)) for texts in (answers, prompts))
        common = [token for token, _ in said.most_common()]
        common += [token for token in read if token not in said]
        words = [text for token in common if (text := tokenizer.decode([token])).strip()]
        middles = [tokenizer.decode(answer[len(answer) // 2 :][:2]) for answer in answers[:2]]
        return cls(common, words[4 : 4 + NUM_WORDS] or words or ["a"], [text for text in middles if text] or ["\n"])


@dataclass(frozen=True)
class Parameter:
    """A sampling parameter at work.

    Attributes:
        name: of its field.
        fields: what to set, beside the temperature.
        shapes: whether it changes the distribution, so that a law is to be checked.
        at_zero: whether it does something at temperature 0.
    """

    name: str
    fields: Callable[[Material], dict[str, Any]]
    shapes: bool = True
    at_zero: bool = True

    def params(self, material: Material, **others: Any) -> SamplingParams:
        """`others` are what the check needs; the parameter's own fields win."""
        return SamplingParams(**({"temperature": TEMPERATURE} | others | self.fields(material)))


_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("temperature", lambda m: {"temperature": 0.6}, at_zero=False),
    Parameter("top_k", lambda m: {"top_k": 3}, at_zero=False),
    Parameter("top_p", lambda m: {"top_p": 0.8}, at_zero=False),
    Parameter("min_p", lambda m: {"min_p": 0.1}, at_zero=False),
    Parameter("presence_penalty", lambda m: {"presence_penalty": 1.5}),
    Parameter("frequency_penalty", lambda m: {"frequency_penalty": 1.0}),
    Parameter("repetition_penalty", lambda m: {"repetition_penalty": 1.3}),
    Parameter("logit_bias", lambda m: {"logit_bias": {m.common[0]: -3.0, m.common[1]: 2.0, m.common[-1]: 5.0}}),
    Parameter("allowed_token_ids", lambda m: {"allowed_token_ids": m.common[:NUM_ALLOWED]}),
    Parameter("bad_words", lambda m: {"bad_words": m.words}),
    Parameter("min_tokens", lambda m: {"min_tokens": 8, "stop_token_ids": m.common[:3]}),
    Parameter("stop", lambda m: {"stop": m.stop}, shapes=False),
    Parameter(
        "include_stop_str_in_output", lambda m: {"stop": m.stop, "include_stop_str_in_output": True}, shapes=False
    ),
    Parameter("stop_token_ids", lambda m: {"stop_token_ids": m.common[3:5]}, shapes=False),
    Parameter("ignore_eos", lambda m: {"ignore_eos": True}, shapes=False),
    Parameter("skip_special_tokens", lambda m: {"skip_special_tokens": False, "ignore_eos": True}, shapes=False),
    Parameter("max_tokens", lambda m: {"max_tokens": 7}, shapes=False),
    Parameter("logprobs", lambda m: {"logprobs": 3}, shapes=False),
    Parameter("logprob_token_ids", lambda m: {"logprob_token_ids": m.common[:3]}, shapes=False),
    Parameter("prompt_logprobs", lambda m: {"prompt_logprobs": 1}, shapes=False),
    Parameter("truncate_prompt_tokens", lambda m: {"truncate_prompt_tokens": 8}, shapes=False),
    Parameter("n", lambda m: {"n": 2}, shapes=False),
    Parameter("best_of", lambda m: {"best_of": 2}, shapes=False),
    Parameter("structured_outputs", lambda m: {"structured_outputs": {"json": _SCHEMA}}, shapes=False),
)
