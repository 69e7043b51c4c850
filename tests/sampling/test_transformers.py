"""Where transformers' logits processors have the same definition, ours gives the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor as TheirProcessor,
)
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from forerun.request import SamplingParams
from forerun.sampling.distribution import processed_logprobs
from forerun.sampling.processors import LogitsProcessor
from forerun.sampling.processors.bad_words import BadWords
from forerun.sampling.processors.bias import LogitBias
from forerun.sampling.processors.minimum import MinTokens
from forerun.sampling.processors.penalties import Penalties
from tests.sampling.rows import EOS, Steps, params
from tests.sampling.test_processors import Numbers

V = 24


@pytest.mark.parametrize(
    ("ours", "case", "theirs", "with_prompt"),
    [
        (Penalties(), params(repetition_penalty=1.4), RepetitionPenaltyLogitsProcessor(1.4), True),
        (Penalties(), params(repetition_penalty=0.6), RepetitionPenaltyLogitsProcessor(0.6), True),
        (LogitBias(), params(logit_bias={3: 2.5, 7: -9}), SequenceBiasLogitsProcessor([[[3], 2.5], [[7], -9.0]]), True),
        (
            BadWords(Numbers()),
            params(bad_words=("3", "4 5", "6 6 7")),
            NoBadWordsLogitsProcessor([[3], [4], [4, 5], [5, 5], [6, 6, 7], [7, 6, 7]], eos_token_id=EOS),
            False,  # theirs counts the prompt, ours (vLLM's) the output alone
        ),
        (MinTokens(), params(min_tokens=6), MinNewTokensLengthLogitsProcessor(0, 6, EOS, device="cpu"), False),
    ],
    ids=["repetition", "repetition_below_1", "logit_bias", "bad_words", "min_tokens"],
)
def test_our_rows_are_theirs(
    ours: LogitsProcessor, case: SamplingParams, theirs: TheirProcessor, with_prompt: bool
) -> None:
    steps = Steps([ours], [case], seed=1, vocab_size=V, trees=True)
    for _ in range(12):
        for request, output, raw, changed in steps.step():
            before = (request.token_ids[: request.num_prompt_tokens] if with_prompt else []) + output
            expected = theirs(torch.tensor([before], dtype=torch.long), raw[None].clone())[0]
            torch.testing.assert_close(changed, expected)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
def test_min_p_is_theirs_after_temperature_and_before_top_p(temperature: float, min_p: float) -> None:
    logits = torch.randn(50, 200, generator=torch.Generator().manual_seed(0)) * 3
    ids = torch.zeros(1, 1, dtype=torch.long)

    def theirs(row: Tensor, top_p: float) -> Tensor:
        for warper in (TemperatureLogitsWarper(temperature), MinPLogitsWarper(min_p), TopPLogitsWarper(top_p)):
            row = warper(ids, row)
        return row.log_softmax(-1)

    for top_p in (1.0, 0.7):
        for row in logits:
            ours = processed_logprobs(row, SamplingParams(temperature=temperature, min_p=min_p, top_p=top_p))
            torch.testing.assert_close(ours, theirs(row[None], top_p)[0])
