"""C19: an empty prompt is refused by name or answered, the same with speculation as without, and the next request is
served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers.processors import TemplateProcessing

from forerun import LLM
from forerun.engine.messages import NewRequest
from forerun.errors import RequestError
from forerun.models.tokenizer import Tokenizer, load_tokenizer
from forerun.request import SamplingParams
from forerun.server.app import create_app
from forerun.server.settings import ServerSettings
from tests.cases.conftest import SPECS, MakeEngine, Reference, Serve
from tests.cases.material import CHAT, COMPLETIONS, DISTINCT, complete
from tests.server.live import LiveServer
from tests.tiny_tokenizer import IM_START, SPECIAL_TOKENS, save_tiny_tokenizer, tiny_backend

METHODS = ["plain", "ngram", "suffix", "self"]
EMPTY: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": [""]}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": [[5, 6], []]}, "prompt"),
    (CHAT, {"messages": []}, "messages"),
]
SERVED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": [IM_START]}),
    (COMPLETIONS, {"prompt": SPECIAL_TOKENS[IM_START]}),
    (CHAT, {"messages": [{"role": "user", "content": ""}]}),
]
BODY = {"temperature": 0, "seed": 1, "max_tokens": 12, "return_token_ids": True}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_without_tokens_is_400_that_names_the_field(
    method: str, stream: bool, serve: Serve, ref: Reference
) -> None:
    """C19 over HTTP: the tokenizer adds no begin token, so every one of these has no token at all."""
    with serve(method).http() as http:
        for path, body, field in EMPTY:
            response = http.post(path, json=BODY | body | {"stream": stream})
            assert response.status_code == 400, body
            error = response.json()["error"]
            assert error["param"] == field
            assert field in error["message"]
            normal = complete(http, DISTINCT[0], max_tokens=8)
            assert normal.token_ids == ref(DISTINCT[0], max_tokens=8).token_ids


@pytest.mark.parametrize("method", METHODS[1:])
def test_the_shortest_prompts_are_answered_as_without_speculation(method: str, serve: Serve) -> None:
    """C19 over HTTP: only the begin token, and a chat whose content is empty."""
    with serve("plain").http() as plain, serve(method).http() as http:
        for path, body in SERVED:
            expected = plain.post(path, json=BODY | body)
            assert expected.status_code == 200
            answer = http.post(path, json=BODY | body)
            assert answer.status_code == 200
            assert answer.json()["choices"] == expected.json()["choices"]


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that puts a begin token before every text."""
    backend = tiny_backend()
    name = SPECIAL_TOKENS[IM_START]
    backend.post_processor = TemplateProcessing(single=f"{name} $A", special_tokens=[(name, IM_START)])
    folder: Path = save_tiny_tokenizer(tmp_path_factory.mktemp("bos") / "tokenizer", backend=backend)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.encode("") == [IM_START]
    return tokenizer


def post_with(tokenizer: Tokenizer, server: LiveServer, body: dict[str, Any]) -> httpx.Response:
    """A request to the app over the server's engine, with another tokenizer in front."""

    async def post() -> httpx.Response:
        app = create_app(server.client, tokenizer, ServerSettings(model="tiny", log_stats=False))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await asyncio.wait_for(http.post(COMPLETIONS, json=BODY | body), 20)

    return server.call(post)


@pytest.mark.parametrize("method", METHODS)
def test_a_begin_token_makes_an_empty_text_a_prompt(
    method: str, serve: Serve, ref: Reference, beginning: Tokenizer
) -> None:
    """C19 with a tokenizer that has a begin token: "" is a prompt of one token; lists without ids stay empty."""
    server = serve(method)
    for prompt in ("", [""]):
        response = post_with(beginning, server, {"prompt": prompt})
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["token_ids"] == ref([IM_START], max_tokens=12).token_ids
    for prompt in ([], [[]]):
        response = post_with(beginning, server, {"prompt": prompt})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("method", [None, "ngram", "suffix", "self"])
def test_the_engine_and_the_offline_front_refuse_a_prompt_without_tokens(
    method: str | None, engines: MakeEngine, tiny_model: Path
) -> None:
    """C19 below the server: RequestError names the field, and nothing is left behind."""
    engine = engines(method)
    with pytest.raises(RequestError, match="prompt is empty") as caught:
        engine.add_request(NewRequest("r", [], SamplingParams(), 0))
    assert caught.value.param == "prompt"
    if method == "self":
        return
    llm = LLM(str(tiny_model), speculative_config=SPECS.get(method or ""), kv_cache_memory_bytes=1 << 20)
    for prompts in ("", [[1, 2], []]):
        with pytest.raises(RequestError, match="prompt is empty"):
            llm.generate(prompts)
    assert not llm.engine.has_work
    assert len(llm.generate("the")[0].outputs[0].token_ids) > 0
