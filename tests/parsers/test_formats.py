"""Names and pairs of tags."""

from __future__ import annotations

import pytest

from forerun.errors import ConfigError
from forerun.parsers.formats import ReasoningFormat, reasoning_format


def test_a_name_or_a_pair_of_tags() -> None:
    assert reasoning_format("qwen3").end == "</think>"
    assert reasoning_format("tags:<r>,</r>") == ReasoningFormat("tags:<r>,</r>", "<r>", "</r>")


@pytest.mark.parametrize("name", ["", "qwen", "tags:", "tags:<r>", "tags:<r>,", "tags:,</r>", "tags:a,a", "tags:a,b,c"])
def test_anything_else_is_refused_with_the_names_that_are_known(name: str) -> None:
    with pytest.raises(ConfigError, match="qwen3, deepseek_r1, or a pair of tags"):
        reasoning_format(name)


def test_only_the_end_of_the_prompt_tells_whether_reasoning_is_closed() -> None:
    think = reasoning_format("qwen3")
    assert think.begins_inside("<|user|>what is </think>?<|assistant|>")
    assert think.begins_inside("<|assistant|><think>\n")
    assert not think.begins_inside("<|assistant|><think>\n\n</think>\n\n")
