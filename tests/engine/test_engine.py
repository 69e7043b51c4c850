"""The engine's front: what it refuses, what it counts, how it ends requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.engine.engine import Engine
from forerun.engine.messages import NewRequest
from forerun.engine.scheduler import share_evenly
from forerun.errors import ConfigError, RequestError
from forerun.kernels import native
from forerun.request import FinishReason, Request
from forerun.testing import ScriptedProposer
from tests.tiny_engine import NGRAM, SUFFIX, chain, make_engine, oracle, prompts, run
from tests.tiny_tokenizer import VOCAB_SIZE

needs_extension = pytest.mark.skipif(not native.available(), reason="the CPU extension is not built")

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
        ({"kv_cache_memory_bytes": 4096}, "no request fits; what frees memory: .*--kv-cache-memory 1MiB"),
        ({"kv_cache_memory_bytes": 64 << 10, "max_model_len": 200}, "max_model_len=200 needs"),
        ({"kv_cache_memory_bytes": 1 << 50}, "GiB that are free"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number of at least 1, got 0"),
        ({"max_num_seqs": "4"}, "max_num_seqs must be a whole number of at least 1, got '4'"),
        ({"num_threads": 100_000}, r"num_threads must be in \[1, \d+\] on this machine, got 100000"),
        ({"device": "tpu"}, "device='tpu' is not served: use auto, cpu, cuda"),
        ({"device": "cpu", "dtype": "float16"}, "dtype='float16' is not served on a CPU: use auto or float32"),
        ({"dtype": "int4"}, "dtype='int4' is not served: use auto, float32, bfloat16, float16"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' is not served: use auto, float32, bfloat16"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be above 0 and at most 1, got 1.5"),
        pytest.param(
            {"device": "cuda"},
            "device='cuda' cannot be used: .*PyTorch .*; or use device='cpu'",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there"),
        ),
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
    token_bytes = 8 * 2**20 // 16384
    assert lines[3] == f"KV cache dtype: float32, {token_bytes} bytes per token"


def test_a_bfloat16_cache_holds_twice_the_tokens(tiny_model: Path) -> None:
    wide, narrow = (make_engine(tiny_model, kv_cache_dtype=dtype).info() for dtype in ("float32", "bfloat16"))
    assert narrow.kv_cache_tokens == 2 * wide.kv_cache_tokens
    assert "KV cache dtype: bfloat16, 256 bytes per token" in narrow.log_lines


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "float32"),  # as the weights
        ({"kv_cache_dtype": "bfloat16"}, "bfloat16"),
        pytest.param({"quantization": "int8"}, "bfloat16", marks=needs_extension),
        pytest.param({"quantization": "int8", "kv_cache_dtype": "float32"}, "float32", marks=needs_extension),
    ],
)
def test_the_cache_is_as_narrow_as_asked_or_as_the_weights(
    tiny_model: Path, settings: dict[str, str], expected: str
) -> None:
    lines = make_engine(tiny_model, **settings).info().log_lines
    assert any(line.startswith(f"KV cache dtype: {expected},") for line in lines)


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


def test_drafts_share_the_rows_evenly(tiny_model: Path) -> None:
    """Equal requests draft equally, whatever their place in the batch and however much each was granted."""
    prompt = prompts(2)[1]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (plain,) = run(make_engine(tiny_model), [(prompt, params)])
    continuation = oracle({tuple(prompt): plain.token_ids})
    proposer = ScriptedProposer(lambda request, length: chain(continuation(request, length)))
    engine = make_engine(tiny_model, proposer, length=24, max_num_batched_tokens=40)
    results = run(engine, [(prompt, params)] * 8)
    assert {tuple(r.token_ids) for r in results} == {tuple(plain.token_ids)}
    drafted = [sum(r.drafted) for r in results]
    assert min(drafted) > 10
    assert max(drafted) - min(drafted) <= 6, drafted


@pytest.mark.parametrize(
    ("wanted", "total", "shares"),
    [
        ([], 5, []),
        ([3, 9, 1], 99, [3, 9, 1]),
        ([9, 9, 9], 7, [2, 2, 3]),
        ([1, 9, 9], 7, [1, 3, 3]),
        ([4, 4], 0, [0, 0]),
    ],
)
def test_share_evenly(wanted: list[int], total: int, shares: list[int]) -> None:
    assert share_evenly(wanted, total) == shares


def test_blocks_that_only_a_rejected_draft_needed_come_back(tiny_model: Path) -> None:
    wrong = ScriptedProposer(lambda request, length: chain([3] * length))
    engine = make_engine(tiny_model, wrong, length=64)
    engine.add_request(NewRequest("r", [5] * 20, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), 0))
    for _ in range(6):
        engine.step()
        request = engine.scheduler.running[0]
        assert engine.scheduler.target.num_used == -(-request.num_computed_tokens // 16)


def test_salts_keep_prefixes_apart(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    prompt = prompts(1, shortest=60)[0]
    cached = []
    for place, salt in enumerate(["a", "a", "b", ""]):
        engine.add_request(NewRequest(f"r{place}", prompt, GREEDY, 0, cache_salt=salt))
        while engine.has_work:
            outputs = engine.step().outputs
        cached.append(outputs[0].num_cached_tokens)
    assert cached[0] == cached[2] == cached[3] == 0
    assert cached[1] >= 32


def test_a_prompt_that_comes_several_times_at_once_is_computed_once(tiny_model: Path) -> None:
    """The others wait for its full blocks; what differs, and a prompt without a full block, waits for nobody."""
    engine = make_engine(tiny_model, max_num_batched_tokens=32)
    (prompt,) = prompts(1, shortest=60, longest=60)  # three full blocks of 16 and a rest of 12
    for place in range(4):
        engine.add_request(NewRequest(f"r{place}", prompt, GREEDY, 0, choice=place))
    engine.add_request(NewRequest("other", prompt[:40] + [3] * 20, GREEDY, 0))
    first: dict[str, int] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            first.setdefault(output.request_id, output.num_cached_tokens)
    assert first == {"r0": 0, "r1": 48, "r2": 48, "r3": 48, "other": 32}
    short = [NewRequest(f"s{place}", [5, 6, 7], GREEDY, 0, choice=place) for place in range(4)]
    for new in short:
        engine.add_request(new)
    assert len(engine.step().outputs) == 4


def test_an_abort_of_the_one_that_computes_the_prompt_lets_the_next_go_on(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, max_num_batched_tokens=16)
    (prompt,) = prompts(1, shortest=60, longest=60)
    for place in range(2):
        engine.add_request(NewRequest(f"r{place}", prompt, GREEDY, 0))
    engine.step()
    assert [r.request_id for r in engine.scheduler.running] == ["r0"]
    engine.abort_requests(["r0"])
    engine.step()
    (request,) = engine.scheduler.running
    assert (request.request_id, request.num_cached_tokens, request.num_computed_tokens) == ("r1", 16, 32)
    engine.abort_requests(["r1"])


@pytest.mark.parametrize("ahead", [False, True], ids=["step_by_step", "ahead"])
class TestNumbersThatAreNotFinite:
    """They end the request that has them, and reach no other."""

    BAD = 9  # its embedding is NaN

    def poisoned(self, tiny_model: Path, ahead: bool) -> Engine:
        engine = make_engine(tiny_model, async_scheduling=ahead)
        engine.runner.target.model.embedding = engine.runner.target.model.embedding.clone()  # type: ignore[attr-defined]
        engine.runner.target.model.embedding[self.BAD] = float("nan")  # type: ignore[attr-defined]
        return engine

    def test_end_their_request_with_an_error(self, tiny_model: Path, ahead: bool) -> None:
        (result,) = run(self.poisoned(tiny_model, ahead), [([5, self.BAD, 7], GREEDY)])
        assert result.last.finish_reason is FinishReason.ERROR
        assert "not finite" in (result.last.error or "")
        assert result.token_ids == []

    def test_leave_nothing_in_blocks_that_others_get(self, tiny_model: Path, ahead: bool) -> None:
        prompt = [t for t in prompts(1)[0] if t != self.BAD]
        engine = self.poisoned(tiny_model, ahead)
        (before,) = run(engine, [(prompt, GREEDY)])
        run(engine, [([self.BAD] * 60, GREEDY)] * 4)
        engine.scheduler.target.drop_kept()
        (after,) = run(engine, [(prompt, GREEDY)])
        assert before.last.finish_reason is FinishReason.LENGTH
        assert after.key == before.key


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 2.5),
        ("seed", 1.5),
        ("top_k", 1.5),
        ("logprobs", True),
        ("temperature", "1"),
        ("temperature", None),
        ("top_p", True),
        ("stop", 3),
        ("stop", ["a", 1]),
        ("stop_token_ids", ["a"]),
        ("n", None),
        ("n", 0),
        ("n", 129),
        ("n", 2.0),
        ("n", True),
    ],
)
def test_a_parameter_of_the_wrong_type_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field


def test_parameters_take_what_means_the_same() -> None:
    params = SamplingParams(temperature=1e-45, stop=None, stop_token_ids=None, seed=np.int64(3), top_k=np.int32(4))  # type: ignore[arg-type]
    assert params.temperature == 0.01
    assert (params.stop, params.stop_token_ids) == ((), ())
    assert (type(params.seed), type(params.top_k)) == (int, int)


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

    @pytest.mark.parametrize("prompt", [{"prompt": "x"}, [1.5, 2.0], [{"a": 1}]])
    def test_a_prompt_of_another_kind_is_named(self, tiny_model: Path, prompt: object) -> None:
        llm = LLM(str(tiny_model), kv_cache_memory_bytes=8 << 20)
        with pytest.raises(RequestError, match="must be a text or a list of token ids"):
            llm.generate(prompt, GREEDY)  # type: ignore[arg-type]
        assert len(llm.generate(np.array([5, 6, 7]), GREEDY)) == 1  # type: ignore[arg-type]

    def test_an_unknown_setting_is_named(self, tiny_model: Path) -> None:
        with pytest.raises(ConfigError, match="'max_seqs'"):
            LLM(str(tiny_model), max_seqs=3)
