"""Nobody learns of another's text by what was cached of it: neither by cached tokens nor by drafts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun.models.tokenizer import load_tokenizer
from forerun.server.settings import ServerSettings
from forerun.spec.config import SpeculativeConfig
from tests.cases.served import build_served
from tests.server.live import LiveServer

SPEC = {
    "method": ["ngram_mod", "suffix"],
    "num_speculative_tokens": 8,
    "ngram_mod_n_match": 3,
    "ngram_mod_n_min": 2,
    "suffix_decoding_max_cached_requests": 100,
}
PROMPT = [7, 11, 13, 17, 19, 23, 29, 31] * 8  # four blocks


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("log") / "core"
    settings = ServerSettings(
        model="fake",
        api_keys=("first", "second"),
        salt_by_api_key=True,
        per_request_spec_decode_metrics="detailed",
    )
    factory = partial(build_served, model=str(tiny_model), log=str(log))
    config = {"speculative_config": SpeculativeConfig.parse(SPEC), "kv_cache_memory_bytes": 8 << 20}
    with LiveServer(settings, factory, load_tokenizer(str(tiny_model)), device="cpu", **config) as live:  # type: ignore[arg-type]
        yield live


def ask(http: httpx.Client, key: str, salt: str | None) -> tuple[int, list[int], str]:
    """Cached tokens, drafted tokens of each step, and the text."""
    body: dict[str, Any] = {
        "prompt": PROMPT,
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
    }
    answer = http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, found["metrics"]["speculative_decoding"]["per_step_drafted"], found["choices"][0]["text"]


def test_a_key_and_a_salt_see_what_was_theirs_and_nothing_else(server: LiveServer) -> None:
    with server.http() as http:
        cached, alone, text = ask(http, "first", None)
        assert cached == 0
        cached, learnt, again = ask(http, "first", None)
        assert cached > 0
        assert learnt != alone  # its own text is drafted from
        assert again == text
        for key, salt in (("second", None), ("first", "salt"), ("second", "salt")):
            assert ask(http, key, salt) == (0, alone, text)
