"""Which request fields are known, and what becomes of those that are not served yet.

Every name of OpenAI's and vLLM's API is here or in `models.py`. A field that is not served passes at a value that asks
for nothing, and is refused by name at any other: never accepted and ignored.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from forerun.errors import RequestError

Neutral = tuple[Any, ...]  # values, beside null, at which a field asks for nothing

_SAMPLING: dict[str, Neutral] = {
    "logits_processors": ([],),
    "repetition_detection": (),
    "watermarking": (),
    "priority": (0,),
}

_GRAMMAR: dict[str, Neutral] = {
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
}

_ANSWER: dict[str, Neutral] = {
    "return_tokens_as_token_ids": (False,),
    "return_prompt_text": (False,),
    "return_weight_versions": (False,),
    "stream_interval": (1,),
    "session_id": (),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
}

_COMPLETION_ONLY: dict[str, Neutral] = {"suffix": ("",), "prompt_embeds": ()}

_CHAT_ONLY: dict[str, Neutral] = {
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # nothing to choose from, since tools are refused
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "include_reasoning": (True,),
    "verbosity": (),
    "add_special_tokens": (False,),  # the template writes them
    "moderation": (),
    "documents": ([],),
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}

COMPLETION_NOT_SERVED = {**_SAMPLING, **_GRAMMAR, **_ANSWER, **_COMPLETION_ONLY}
CHAT_NOT_SERVED = {**_SAMPLING, **_GRAMMAR, **_ANSWER, **_CHAT_ONLY}
MESSAGE_NOT_SERVED: dict[str, Neutral] = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "audio": (),
    "refusal": (),
    "reasoning": (),
    "reasoning_content": (),
    "annotations": ([],),
}


def served_fields(
    content: Mapping[str, Any], served: Iterable[str], not_served: Mapping[str, Neutral], where: str = ""
) -> dict[str, Any]:
    """The fields that are served; null counts as absent.

    Raises:
        RequestError: a field that nobody knows, or one that is not served and asks for something.
    """
    served = set(served)
    kept: dict[str, Any] = {}
    for name, value in content.items():
        if name in served:
            if value is not None:
                kept[name] = value
        elif name not in not_served:
            raise _unknown(name, served | not_served.keys(), where)
        elif value is not None and not any(_equal(value, neutral) for neutral in not_served[name]):
            raise _not_served(name, value, not_served[name], where)
    return kept


_repr = reprlib.Repr()
_repr.maxlevel = 3
_repr.maxstring = _repr.maxlong = _repr.maxother = 80


def shorten(value: Any, limit: int = 80) -> str:
    """A value as shown in a message; it may be large, and only its beginning is looked at."""
    text = repr(value[:limit]) if isinstance(value, str) else _repr.repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def _equal(value: Any, neutral: Any) -> bool:
    """1 and 1.0 are one value, 1 and true are not."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _unknown(name: str, known: set[str], where: str) -> RequestError:
    nearest = difflib.get_close_matches(name[:100], known, n=1)
    hint = f": did you mean {nearest[0]!r}?" if nearest else ""
    path = f"{where}{name[:100]}"
    return RequestError(f"unknown field {path!r}{hint}", path)


def _not_served(name: str, value: Any, neutral: Neutral, where: str) -> RequestError:
    path = f"{where}{name}"
    harmless = f" or send {' or '.join(map(repr, neutral))}" if neutral else ""
    return RequestError(f"{path}={shorten(value)} is not served yet: leave it out{harmless}", path)
