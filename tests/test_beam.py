"""Beam search against transformers' and against all continuations; `best_of`, and what else a front does."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun import LLM, SamplingParams
from forerun.beam import BeamSearch, BeamSearchParams
from forerun.errors import ConfigError, RequestError
from forerun.request import FinishReason
from forerun.spec.verifier import TokenLogprobs
from tests.tiny_engine import NGRAM, prompts


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), speculative_config=NGRAM, kv_cache_memory_bytes=2 << 20)


def test_without_end_tokens_the_beams_are_transformers(llm: LLM, tiny_model: Path) -> None:
    hf = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    hf.generation_config.eos_token_id = None
    width, length, asked = 4, 6, prompts(3, seed=9)
    found = llm.beam_search(asked, BeamSearchParams(beam_width=width, max_tokens=length, ignore_eos=True))
    for prompt, output in zip(asked, found, strict=True):
        theirs = hf.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
        )
        assert [sequence.tokens for sequence in output.sequences] == theirs.tolist()


def rows(probabilities: dict[tuple[int, ...], list[float]], width: int) -> list[TokenLogprobs]:
    entries = []
    for row in probabilities.values():
        logprobs = torch.tensor(row).log()
        values, ids = logprobs.topk(min(2 * width, len(row)))
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
        entries.append(TokenLogprobs(top[0][0], top[0][1], 1, top))
    return entries


@pytest.mark.parametrize("penalty", [0.0, 1.0, -1.0])
def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all(penalty: float) -> None:
    """3 tokens, 3 steps; token 2 ends a text. Every continuation is scored by hand."""
    width, steps = 10, 3
    generator = torch.Generator().manual_seed(3)
    table = {
        prefix: torch.rand(3, generator=generator).add(0.05).tolist()
        for n in range(steps)
        for prefix in itertools.product(range(2), repeat=n)
    }
    table = {prefix: [x / sum(row) for x in row] for prefix, row in table.items()}
    params = BeamSearchParams(beam_width=width, max_tokens=steps, length_penalty=penalty)
    search = BeamSearch([9], params, {2}, max_model_len=100)
    while pending := search.pending:
        search.extend(rows({tuple(ids[1:]): table[tuple(ids[1:])] for ids in pending}, width))
    scores = {}
    for n in range(1, steps + 1):
        for tokens in itertools.product(range(3), repeat=n):
            if 2 in tokens[:-1] or (n < steps and tokens[-1] != 2):
                continue
            logprob = sum(float(torch.tensor(table[tokens[:i]][t]).log()) for i, t in enumerate(tokens))
            scores[tokens] = logprob / (1 + n - (tokens[-1] == 2)) ** penalty
    best = sorted(scores, key=lambda tokens: -scores[tokens])[:width]
    assert [tuple(beam.token_ids) for beam in search.best()] == best
    assert all((beam.finish_reason is FinishReason.STOP) == (beam.token_ids[-1] == 2) for beam in search.best())


def test_early_stopping_ends_with_as_many_answers_as_beams() -> None:
    search = BeamSearch([9], BeamSearchParams(beam_width=1, max_tokens=9, early_stopping=True), {2}, 100)
    search.extend([TokenLogprobs(1, -0.1, 1, [(1, -0.1), (2, -2.0)])])
    assert search.pending == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"beam_width": 0}, "n"), ({"beam_width": 11}, "n"), ({"max_tokens": 0}, "max_tokens")]
    + [({"length_penalty": value}, "length_penalty") for value in (float("nan"), 11.0)],
)
def test_what_no_search_can_do_is_refused(fields: dict[str, float], param: str) -> None:
    with pytest.raises(RequestError) as error:
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | fields))  # type: ignore[arg-type]
    assert error.value.param == param


def test_best_of_gives_the_likeliest_of_its_answers(llm: LLM) -> None:
    for prompt in prompts(2, seed=9):
        common = {"temperature": 1.0, "seed": 4, "max_tokens": 8}
        (made,) = llm.generate([prompt], SamplingParams(n=6, logprobs=0, **common))  # type: ignore[arg-type]
        (given,) = llm.generate([prompt], SamplingParams(n=2, best_of=6, **common))  # type: ignore[arg-type]
        best = sorted(made.outputs, key=lambda answer: -(answer.cumulative_logprob or 0))[:2]
        assert [answer.token_ids for answer in given.outputs] == [answer.token_ids for answer in best]
        assert [answer.index for answer in given.outputs] == [0, 1]
        assert given.outputs[0].logprobs is None
    with pytest.raises(RequestError, match="best_of must be at least n"):
        SamplingParams(n=3, best_of=2)


def test_a_long_prompt_is_cut_where_it_is_asked_for(llm: LLM) -> None:
    prompt = prompts(1, shortest=40)[0]
    for fields, kept in (
        ({"truncate_prompt_tokens": 10}, prompt[-10:]),
        ({"truncate_prompt_tokens": 10, "truncation_side": "right"}, prompt[:10]),
        ({"truncate_prompt_tokens": 400}, prompt),
    ):
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, **fields))
        assert output.prompt_token_ids == kept
    (output,) = llm.generate([prompt * 20], SamplingParams(max_tokens=6, truncate_prompt_tokens=-1))
    assert len(output.prompt_token_ids) == 250


def test_a_request_that_forbids_everything_says_so(llm: LLM) -> None:
    params = SamplingParams(allowed_token_ids=(5,), stop_token_ids=(5,), min_tokens=2)
    (output,) = llm.generate([[7, 8]], params)
    assert output.outputs[0].finish_reason is FinishReason.ERROR
    assert "forbid all" in (output.outputs[0].error or "")


def test_the_models_own_sampling_values_hold_where_nothing_is_said(tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    values = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_new_tokens": 3}
    (model / "generation_config.json").write_text(json.dumps(values | {"min_p": None}))
    llm = LLM(str(model), kv_cache_memory_bytes=1 << 20)
    expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)
    assert llm.default_sampling_params == expected
    assert any("temperature 0.6, top_k 20" in line for line in llm.info.log_lines)
    assert LLM(str(model), kv_cache_memory_bytes=1 << 20, generation_config="vllm").info.sampling_defaults == {}
    other = LLM(str(tiny_model), kv_cache_memory_bytes=1 << 20, generation_config=str(model))
    assert other.default_sampling_params == expected
    with pytest.raises(ConfigError, match=r"no .*generation_config\.json"):
        LLM(str(tiny_model), generation_config=str(tmp_path))
    (model / "generation_config.json").write_text(json.dumps({"temperature": -1}))
    with pytest.raises(ConfigError, match="temperature must be in"):
        LLM(str(model))
