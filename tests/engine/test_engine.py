"""The engine's front: what it refuses, what it counts, how it ends requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.engine.messages import NewRequest
from forerun.errors import ConfigError, RequestError
from forerun.request import FinishReason, Request
from forerun.testing import ScriptedProposer
from tests.tiny_engine import NGRAM, SUFFIX, chain, make_engine, oracle, prompts, run
from tests.tiny_tokenizer import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([5] * 300, "300 tokens, but max_model_len is 256"),
        ([5] * 256, "256 tokens, but max_model_len is 256"),
        ([5, VOCAB_SIZE], f"token id {VOCAB_SIZE} is outside"),
        ([5, -1], "token id -1 is outside"),
    ],
)
def test_refuses_a_prompt_that_cannot_be_served(tiny_model: Path, prompt: list[int], message: str) -> None:
    engine = make_engine(tiny_model)
    with pytest.raises(RequestError, match=message) as caught:
        engine.add_request(NewRequest("r", prompt, GREEDY, 0))
    assert caught.value.param == "prompt"
    assert not engine.has_work


def test_refuses_an_id_that_is_in_use(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    engine.add_request(NewRequest("a", [5, 6], GREEDY, 0))
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request(NewRequest("a", [5, 7], GREEDY, 0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 300}, "max_model_len=300 .* 256 positions"),
        ({"kv_cache_memory_bytes": 4096}, "lower --max-model-len or raise --kv-cache-memory"),
        ({"kv_cache_memory_bytes": 64 << 10, "max_model_len": 200}, "max_model_len=200 needs"),
        ({"kv_cache_memory_bytes": 1 << 50}, "GiB that are free"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"device": "cuda"}, "'cuda' is not served yet"),
        ({"dtype": "float16"}, "'float16' is not served"),
    ],
)
def test_refuses_settings_in_one_line(tiny_model: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_engine(tiny_model, **settings)
    assert "\n" not in str(caught.value)


def test_length_is_cut_to_what_the_cache_holds(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, kv_cache_memory_bytes=64 << 10)
    info = engine.info()
    assert info.max_model_len == info.kv_cache_tokens < 256
    (result,) = run(engine, [([5] * 10, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))])
    assert len(result.token_ids) == info.max_model_len - 10
    assert result.last.finish_reason is FinishReason.LENGTH


def test_start_up_says_what_memory_goes_where(tiny_model: Path) -> None:
    lines = make_engine(tiny_model).info().log_lines
    assert lines[0].startswith("Model loading took 0.00 GiB memory and ")
    assert lines[1] == "Available KV cache memory: 0.01 GiB"
    assert lines[2] == "CPU KV cache size: 16,384 tokens, Maximum concurrency for 256 tokens per request: 64.00x"


def test_an_abort_frees_everything_at_once(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, SUFFIX)
    idle_bytes = engine.proposer.state_bytes
    for place, prompt in enumerate(prompts(4)):
        engine.add_request(NewRequest(f"r{place}", prompt, GREEDY, 0))
    for _ in range(3):
        engine.step()
    assert engine.proposer.state_bytes > idle_bytes + 200
    engine.abort_requests(["r0", "r1", "r2", "r3", "nobody"])
    assert not engine.has_work
    assert engine.scheduler.target.num_used == 0
    assert engine.proposer.state_bytes < idle_bytes + 200, "only the emptied table of requests may remain"
    engine.scheduler.check_integrity()


def test_counters_of_speculation_add_up(tiny_model: Path) -> None:
    """C29: 41 tokens, K = 4, every draft right: 1 token from the prefill and 8 steps of 5."""
    prompt = prompts(1)[0]
    params = SamplingParams(temperature=0, max_tokens=41, ignore_eos=True)
    (plain,) = run(make_engine(tiny_model), [(prompt, params)])
    continuation = oracle({tuple(prompt): plain.token_ids})

    def script(request: Request, length: int) -> object:
        return chain(continuation(request, length))

    engine = make_engine(tiny_model, ScriptedProposer(script), length=4)  # type: ignore[arg-type]
    (result,) = run(engine, [(prompt, params)])
    assert result.key == plain.key
    totals = engine.stats().spec
    assert totals.num_drafts == 8
    assert totals.num_draft_tokens == totals.num_accepted_tokens == 32
    assert totals.num_accepted_tokens_per_pos == [8, 8, 8, 8]
    assert engine.stats().generation_tokens == 41
    assert result.drafted == [False] + [True, True, True, True, False] * 8


def test_speculation_can_be_switched_off_for_one_request(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, SUFFIX)
    prompt = prompts(2)[1]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    engine.add_request(NewRequest("off", prompt, params, 0, max_draft_tokens=0))
    engine.add_request(NewRequest("on", prompt, params, 0))
    figures = {}
    while engine.has_work:
        for output in engine.step().outputs:
            if output.metrics:
                figures[output.request_id] = output.metrics.speculative_decoding
    assert figures["off"]["num_draft_tokens"] == 0
    assert figures["on"]["num_draft_tokens"] > 0


class TestLLM:
    def test_generates_and_says_how(self, tiny_model: Path) -> None:
        llm = LLM(str(tiny_model), speculative_config=NGRAM, kv_cache_memory_bytes=8 << 20)
        plain = LLM(str(tiny_model), kv_cache_memory_bytes=8 << 20)
        texts = ["serving serving serving serving serving serving", "a draft is a guess"]
        params = SamplingParams(temperature=0, max_tokens=24, logprobs=2, ignore_eos=True)
        for drafted, expected in zip(llm.generate(texts, params), plain.generate(texts, params), strict=True):
            answer = drafted.outputs[0]
            assert answer.token_ids == expected.outputs[0].token_ids
            assert answer.text == expected.outputs[0].text
            assert len(answer.logprobs or []) == 24
            assert answer.finish_reason == "length"
            assert answer.metrics is not None
            assert answer.metrics.speculative_decoding is not None
            assert answer.metrics.speculative_decoding["num_spec_tokens"] == 5
            assert expected.metrics is not None
            assert expected.metrics.speculative_decoding is None
        assert llm.stats.spec.num_draft_tokens > 0

    def test_a_seed_that_was_drawn_gives_the_text_again(self, tiny_model: Path) -> None:
        llm = LLM(str(tiny_model), kv_cache_memory_bytes=8 << 20)
        first, second = llm.generate(["hello", "hello"], SamplingParams(max_tokens=20))
        assert first.seed != second.seed
        assert first.outputs[0].token_ids != second.outputs[0].token_ids
        (again,) = llm.generate("hello", SamplingParams(max_tokens=20, seed=first.seed))
        assert again.outputs[0].token_ids == first.outputs[0].token_ids

    def test_chat_uses_the_template(self, tiny_model: Path) -> None:
        llm = LLM(str(tiny_model), kv_cache_memory_bytes=8 << 20)
        (answer,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
        text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert answer.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)

    def test_nothing_stays_behind_a_bad_prompt(self, tiny_model: Path) -> None:
        llm = LLM(str(tiny_model), kv_cache_memory_bytes=8 << 20)
        with pytest.raises(RequestError, match="outside the vocabulary"):
            llm.generate([[5, 6], [9999]], GREEDY)
        assert not llm.engine.has_work
        with pytest.raises(RequestError, match="2 prompts but 1 sampling_params"):
            llm.generate(["a", "b"], [GREEDY])

    def test_an_unknown_setting_is_named(self, tiny_model: Path) -> None:
        with pytest.raises(ConfigError, match="'max_seqs'"):
            LLM(str(tiny_model), max_seqs=3)
