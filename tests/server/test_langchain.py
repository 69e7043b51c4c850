"""LangChain's ChatOpenAI, unmodified, against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forerun.server.settings import ServerSettings
from tests.server.fake_engine import answer_text
from tests.server.live import LiveServer
from tests.server.test_openai_client import CALL

langchain = pytest.importorskip("langchain_openai")
messages = pytest.importorskip("langchain_core.messages")


def weather(city: str) -> str:
    """How the weather is.

    Args:
        city: where.
    """
    return f"!say It is sunny in {city}."


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    settings = ServerSettings(model="fake", tool_call_parser="hermes", enable_auto_tool_choice=True)
    with LiveServer(settings) as live:
        yield live


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def settings(live: LiveServer, request: pytest.FixtureRequest) -> dict[str, Any]:
    return {
        "model": "fake",
        "base_url": f"{live.url}/v1",
        "api_key": "none",
        "max_retries": 0,
        "use_responses_api": request.param,
    }


@pytest.fixture
def model(settings: dict[str, Any]) -> Iterator[Any]:
    with httpx.Client() as client:  # its own ones are never closed
        yield langchain.ChatOpenAI(**settings, http_client=client)


def test_a_conversation_whole_and_streamed(model: Any) -> None:
    short = model.bind(max_tokens=9)
    answer = short.invoke([("system", "be brief"), ("user", "hello")])
    assert answer.text == answer_text(9)
    assert answer.usage_metadata["output_tokens"] == 9
    assert "".join(chunk.text for chunk in short.stream("hello")) == answer_text(9)


def test_a_conversation_async(settings: dict[str, Any]) -> None:
    async def main() -> tuple[str, str]:
        async with httpx.AsyncClient() as client:
            short = langchain.ChatOpenAI(**settings, http_async_client=client).bind(max_tokens=9)
            streamed = [chunk.text async for chunk in short.astream("hello")]
            return (await short.ainvoke("hello")).text, "".join(streamed)

    assert asyncio.run(main()) == (answer_text(9), answer_text(9))


def test_a_tool_is_called_and_its_result_taken(model: Any) -> None:
    from langchain_core.tools import tool

    with_tools = model.bind_tools([tool(weather)])
    history: list[Any] = [messages.HumanMessage(f"!say {CALL}")]
    answer = with_tools.invoke(history)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
    streamed = None
    for chunk in with_tools.stream(history):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [("weather", {"city": "Paris"})]
    history += [answer, tool(weather).invoke(call)]
    assert with_tools.invoke(history).text == "It is sunny in Paris."
