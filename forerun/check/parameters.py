"""The sampling parameters that are checked, as data: a parameter joins by a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.request import SamplingParams

if TYPE_CHECKING:
    from forerun.llm import LLM

TEMPERATURE = 0.8
NUM_COMMON = 8
NUM_ALLOWED = 200


@dataclass(frozen=True)
class Material:
    """What the model says to the check's prompts without speculation: so that a parameter finds something to change.

    Attributes:
        common: ids that it says most often, most often first.
        word: a text that it says, for stops.
        words: texts of single common tokens.
        end: its first end token, or a common id where it has none.
    """

    common: list[int]
    word: str
    words: list[str]
    end: int

    @classmethod
    def of(cls, llm: LLM, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Material:
        counts = Counter(token for answer in answers for token in answer)
        common = [token for token, _ in counts.most_common()]
        vocabulary = Counter(common + [token for prompt in prompts for token in prompt])
        common += [token for token in vocabulary if token not in counts]
        ends = sorted(llm.tokenizer.eos_token_ids)
        decode = llm.tokenizer.decode
        texts = [text for token in common[: 4 * NUM_COMMON] if (text := decode([token])).strip()]
        longest = max(answers, key=len)
        word = decode(list(longest[len(longest) // 2 : len(longest) // 2 + 2]))
        return cls(common, word or "\n", texts or ["a"], ends[0] if ends else common[0])


@dataclass(frozen=True)
class Parameter:
    """A sampling parameter at work.

    Attributes:
        name: of its field.
        fields: what to set, beside the temperature.
        shapes: whether it changes the distribution, so that a law is to be checked.
    """

    name: str
    fields: Callable[[Material], dict[str, Any]]
    shapes: bool = True

    def params(self, material: Material, **others: Any) -> SamplingParams:
        """`others` are what the check needs; the parameter's own fields win."""
        return SamplingParams(**({"temperature": TEMPERATURE} | others | self.fields(material)))


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("temperature", lambda m: {"temperature": 0.6}),
    Parameter("top_k", lambda m: {"top_k": 3}),
    Parameter("top_p", lambda m: {"top_p": 0.8}),
    Parameter("stop", lambda m: {"stop": m.word}, shapes=False),
    Parameter("stop_token_ids", lambda m: {"stop_token_ids": m.common[3:5]}, shapes=False),
    Parameter(
        "include_stop_str_in_output", lambda m: {"stop": m.word, "include_stop_str_in_output": True}, shapes=False
    ),
    Parameter("ignore_eos", lambda m: {"ignore_eos": True}, shapes=False),
    Parameter("skip_special_tokens", lambda m: {"skip_special_tokens": False, "ignore_eos": True}, shapes=False),
    Parameter("max_tokens", lambda m: {"max_tokens": 7}, shapes=False),
    Parameter("logprobs", lambda m: {"logprobs": 3}, shapes=False),
    Parameter("n", lambda m: {"n": 3}, shapes=False),
)
