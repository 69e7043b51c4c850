"""Tokens from logits, and verdicts on chains of drafted tokens, without a host wait: what is drawn, and how, is read on
the device, so that a CUDA graph can hold it.

A running request has a *slot*, an index into tables on the device: its parameters (`pack_params`), the position and the
value of its last known tokens. The tokens are those of `distribution.draw` and the verdicts those of the rules `match`
and `synthetic`; where there are Triton's kernels (`kernels.triton_sampling`) the functions here only call them.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from forerun.kernels import cuda
from forerun.request import SamplingParams
from forerun.sampling.noise import MASK, Stream, philox

PARAM_FIELDS = 8
TEMPERATURE, TOP_P, MIN_P, TOP_K, SEED_LOW, SEED_HIGH, CHOICE, NUM_PROMPT_TOKENS = range(PARAM_FIELDS)
MOST_TOP_K = 2**31 - 1


def pack_params(params: SamplingParams, seed: int, choice: int, num_prompt_tokens: int) -> list[int]:
    """A slot's record: how its request is drawn from.

    Args:
        seed: 64 bits, signed or not.
        choice: which answer of the prompt.
        num_prompt_tokens: output position 0 is this position of the sequence.
    Returns:
        PARAM_FIELDS int32 values: temperature (0: greedy), top_p and min_p as the bits of float32, top_k (0: off), the
        seed's low and high word, choice, num_prompt_tokens. A word above 2^31 is its negative twin.
    """
    reals = (params.temperature, params.top_p, params.min_p)
    whole = (min(max(params.top_k, 0), MOST_TOP_K), seed & MASK, seed >> 32 & MASK, choice, num_prompt_tokens)
    return list(struct.unpack("=8i", struct.pack("=3f5I", *reals, *whole)))


def draw_rows(logits: Tensor, slots: Tensor, positions: Tensor, params: Tensor, *, filtered: bool = True) -> Tensor:
    """The token of each row: for greedy ones the first of the largest logits, for others what
    `draw(processed_logprobs(logits), ...)` gives.

    Scores are logits divided by the temperature (float32), plus the noise, in float64: the log-softmax of a row moves
    them all by one number. So the tokens are `draw`'s but for what float32 rounds otherwise: scores that are equal to
    about seven digits, and a token at the edge of top_p.

    Args:
        logits: [R, V] float32, bfloat16 or float16; each row contiguous.
        slots: [R] int64, the row of `params` that each row is drawn with; each exists, those of padding too.
        positions: [R] int64, the output position that each row decides.
        params: [S, PARAM_FIELDS] int32, rows as `pack_params` gives them.
        filtered: whether a row may have min-p, top-k or top-p; without, searches for what they leave are not launched.
    Returns:
        [R] int64. -1 where a row cannot be drawn from: it holds NaN, or its largest logit (divided by the temperature)
        is not finite.
    """
    if cuda.serves(logits):
        drawn: Tensor = cuda.sampling_ops().draw_rows(logits, slots, positions, params, filtered=filtered)
        return drawn
    return plain_draw_rows(logits, slots, positions, params)


def judge(
    drawn: Tensor,
    drafted: Tensor,
    num_rows: Tensor,
    slots: Tensor,
    positions: Tensor,
    last: Tensor,
    params: Tensor,
    rates: Tensor | None = None,
) -> Tensor:
    """Which drafted tokens of each chain stand, and what is emitted; the slots move on by that, in place.

    A drafted token stands if it is what was drawn at its parent's row and all before it stand: the rule `match`. With
    `rates` chance decides instead, and the drafted tokens that stand are emitted, then what was drawn at the row after
    them: the rule `synthetic` for greedy requests. For others `SyntheticVerifier` draws the token after a rejection
    from the residual, without the drafted token; here it is the target's own draw. Both are for benchmarks only.

    Args:
        drawn: [B, W] int64, what `draw_rows` gave for each request's rows: the root, then one a drafted token; those
            from `num_rows` on hold anything.
        drafted: [B, W - 1] int64 (W may be 1); tokens from `num_rows` - 1 on hold anything.
        num_rows: [B] int64, at most W; 0: padding, whose slot is not looked at.
        slots: [B] int64, no two the same.
        positions: [S] int32, of each slot's last known token in the whole sequence.
        last: [S, 2] int32, the token before the last known one, and the last known one.
        params: [S, PARAM_FIELDS] int32.
        rates: [at least W - 1] float64: drafted token i stands by this chance (`SyntheticVerifier.conditional`).
    Returns:
        [B, 2 + W] int32: number of accepted drafted tokens; number of emitted tokens, which is one more, or the same
        where the row after them could not be drawn from; the emitted tokens, and -1 beyond. Padding: 0, 0, -1, ...
    """
    if cuda.serves(drawn):
        verdict: Tensor = cuda.sampling_ops().judge(drawn, drafted, num_rows, slots, positions, last, params, rates)
        return verdict
    return plain_judge(drawn, drafted, num_rows, slots, positions, last, params, rates)


def _reals(records: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Temperature, top_p and min_p [R, 1] float32 of records [R, PARAM_FIELDS]."""
    reals = records[:, TEMPERATURE : MIN_P + 1].contiguous().view(torch.float32)
    return reals[:, :1], reals[:, 1:2], reals[:, 2:]


def _key(records: Tensor) -> tuple[Tensor, Tensor]:
    """The generator's key, words [R, 1] of records [R, PARAM_FIELDS] int64."""
    return records[:, SEED_LOW : SEED_LOW + 1] & MASK, records[:, SEED_HIGH : SEED_HIGH + 1] & MASK


def plain_draw_rows(logits: Tensor, slots: Tensor, positions: Tensor, params: Tensor) -> Tensor:
    """As `draw_rows`, in plain torch; it needs some fifty bytes for every logit."""
    width = logits.shape[1]
    records = params[slots]
    temperature, _, _ = _reals(records)
    greedy = temperature == 0
    values = logits.float() / torch.where(greedy, 1.0, temperature)
    kept = values.masked_fill(values < _floors(values, records), float("-inf"))
    records = records.long()
    counters = torch.arange(-(-width // 4), device=logits.device).unsqueeze(0)  # four tokens share one
    choice = records[:, CHOICE : CHOICE + 1]
    words = philox((counters, positions.unsqueeze(1), choice, Stream.TARGET.word(0)), _key(records))
    own = torch.stack(words, dim=2).flatten(1)[:, :width]
    noise = -torch.log(-torch.log((own.double() + 0.5) / 2.0**32))
    scores = torch.where(greedy, values.double(), kept.double() + noise)
    return torch.where(values.amax(-1).isfinite(), scores.argmax(-1), -1)


def _floors(values: Tensor, records: Tensor) -> Tensor:
    """[R, 1], the least of the scaled logits [R, V] that min_p, top_k and top_p keep."""
    width = values.shape[1]
    _, top_p, min_p = _reals(records)
    top_k = records[:, TOP_K : TOP_K + 1].long()
    ordered = values.sort(-1, descending=True).values
    rank = torch.where(top_k > 0, top_k.clamp(max=width), width)
    likely = ordered[:, :1] + min_p.double().log().float()  # minus infinity where it is off
    floors = torch.maximum(likely, ordered.gather(1, rank - 1))
    kept = ordered.masked_fill(ordered < floors, float("-inf"))
    reached = (kept.double().softmax(-1).cumsum(-1) < top_p).sum(-1, keepdim=True).clamp(max=width - 1)
    return torch.where(top_p < 1, torch.maximum(floors, ordered.gather(1, reached)), floors)


def plain_judge(
    drawn: Tensor,
    drafted: Tensor,
    num_rows: Tensor,
    slots: Tensor,
    positions: Tensor,
    last: Tensor,
    params: Tensor,
    rates: Tensor | None = None,
) -> Tensor:
    """As `judge`, in plain torch. Waits for the device."""
    used = num_rows > 0
    place = torch.arange(drawn.shape[1], device=drawn.device).unsqueeze(0)
    own = drawn.masked_fill(place >= num_rows.unsqueeze(1), -1)
    guess = torch.nn.functional.pad(drafted, (0, 1)).masked_fill(place >= num_rows.unsqueeze(1) - 1, -1)
    if rates is None:
        stands = own == guess
    else:
        uniform = _accept_numbers(slots * used, place, positions, params)
        stands = uniform < torch.nn.functional.pad(rates, (0, 1))[: drawn.shape[1]]
    accepted = (stands & (guess >= 0)).long().cumprod(-1).sum(-1, keepdim=True)
    end = own.gather(1, accepted)
    tokens = torch.where(place < accepted, guess, torch.where(place == accepted, own, -1))
    emitted = accepted + (end >= 0)
    known = torch.cat((last[slots * used].long(), tokens), dim=1)  # the two that were known, then what is emitted
    own_slots = slots[used]
    positions[own_slots] += emitted[used, 0].to(positions.dtype)
    last[own_slots] = known.gather(1, torch.cat((emitted, emitted + 1), dim=1))[used].to(last.dtype)
    return torch.cat((accepted, emitted, tokens), dim=1).int()


def _accept_numbers(slots: Tensor, place: Tensor, positions: Tensor, params: Tensor) -> Tensor:
    """`noise.uniform` of the stream ACCEPT at each slot's root and each place [1, W]: [B, W] float64."""
    records = params[slots].long()
    root = positions[slots].long().unsqueeze(1) + 1 - records[:, NUM_PROMPT_TOKENS:]
    words = int(Stream.ACCEPT) | place << 8
    choice = records[:, CHOICE : CHOICE + 1]
    first, second, _, _ = philox((torch.zeros_like(place), root, choice, words), _key(records))
    return (first << 21 | second >> 11).double() / 2.0**53
