"""From logits to tokens to verdicts as Triton kernels; their plain twins, and what they promise, are in
`sampling.slots`.

Every launch serves a step that mixes all kinds of rows: what a row asks for is read on the device, from its slot's
record of eight 32-bit words (`sampling.slots.pack_params`). Nothing that changes from step to step is compiled in.

The *floor* of a row is the least scaled logit (divided by the temperature) that min-p, top-k and top-p keep. Searches
run over logits as they are, and what they find is scaled: division keeps their order. A row is seldom searched itself:
the k-th largest of the maxima of groups of entries is a bound that at least k entries reach, and likewise for a mass.
What reaches the bound is collected, and the search runs over that. Where it is too much, as in flat distributions or
for a top_k in the thousands, one program searches the row after all, which takes it many passes.

Entries further below the largest than noise can lift them (REACH) are never drawn: a floor below them may be any. Their
share of the mass, 1e-6 at most, may be left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROBES = 8  # thresholds that a pass of a search tries
SEARCH_BLOCK = 2048  # entries that a search holds at once
PART = 4096  # entries of a row's part where floors are looked for
GROUPS = 128  # of a part: their maxima bound what is kept
ROOM = 128  # entries of a part that may be collected
REACH = 27.0  # nats below the likeliest token: noise lifts by 26.1 at most
PROGRAMS = 1056  # of a launch over parts: eight for each multiprocessor of a large GPU
DRAW_BLOCK = 2048  # entries of a part where tokens are drawn

# No kernel may call an argument `params`: Triton 3.6 then takes a dictionary of its own for it.
NEAR = 0.001  # nats from the best score in float32, a hundred times its errors: what is as near is looked at in float64


@triton.jit
def _real(records, slot, fields, place: tl.constexpr):
    return tl.load(records + slot * fields + place).to(tl.float32, bitcast=True)


@triton.jit
def _word(records, slot, fields, place: tl.constexpr):
    return tl.load(records + slot * fields + place).to(tl.uint32, bitcast=True)


@triton.jit
def _philox(counter, position, choice, last: tl.constexpr, seed_low, seed_high):
    """As `sampling.noise.philox`: four uint32 words of each first counter word [N] uint32."""
    c1 = tl.zeros_like(counter) + position.to(tl.uint32)
    c2 = tl.zeros_like(counter) + choice
    c3 = tl.zeros_like(counter) + last
    return tl.philox_impl(counter, c1, c2, c3, seed_low, seed_high, 10)


@triton.jit
def _asked(records, slot, fields, WIDTH: tl.constexpr):
    """Temperature, top_p, min_p and top_k of a slot, whether top_k leaves anything out, and whether any of them may."""
    temperature, top_p, min_p = (
        _real(records, slot, fields, 0),
        _real(records, slot, fields, 1),
        _real(records, slot, fields, 2),
    )
    top_k = tl.load(records + slot * fields + 3)
    by_rank = (top_k > 0) & (top_k < WIDTH)
    return temperature, top_p, min_p, top_k, by_rank, (temperature > 0.0) & (by_rank | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def _weigh(
    row, probes, low, high, peak, rate,
    MASS: tl.constexpr, WIDTH: tl.constexpr, PROBES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One pass over a row.

    Returns:
        [PROBES] float32, of the entries that are at least a probe: their number, or with MASS the sum of their
        exp((entry - peak) * rate); the least entry that is at least `low`; the largest one below `high`.
    """
    weights = tl.zeros([PROBES, BLOCK], tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    below = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(row + columns, mask=columns < WIDTH, other=float("-inf")).to(tl.float32)
        weight = tl.full([BLOCK], 1.0, tl.float32)
        if MASS:
            weight = tl.exp((values - peak) * rate)
        weights += tl.where(values[None, :] >= probes[:, None], weight[None, :], 0.0)
        least = tl.minimum(least, tl.where(values >= low, values, float("inf")))
        below = tl.maximum(below, tl.where(values < high, values, float("-inf")))
    return tl.sum(weights, 1), tl.min(least, 0), tl.max(below, 0)


@triton.jit
def _search(
    row, need, low, high, peak, rate,
    MASS: tl.constexpr, WIDTH: tl.constexpr, PROBES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest entry from `low` to `high` such that the entries from it on are `need` many, or have this mass;
    `low` where all from there on are not enough. `high` is the row's largest entry.

    Each pass tries probes from end to end of the interval and moves both ends to entries that there are: it ends when
    one is left, after few passes, at the latest when every entry has been an end.
    """
    places = tl.arange(0, PROBES)
    while low < high:
        probes = tl.minimum(low + (high - low) * (places.to(tl.float32) / (PROBES - 1)), high)
        probes = tl.where(places == PROBES - 1, high, probes)
        weights, least, below = _weigh(row, probes, low, high, peak, rate, MASS, WIDTH, PROBES, BLOCK)
        enough = weights >= need
        missed = tl.min(tl.where(enough, float("inf"), probes), 0)
        if missed > low:
            low = tl.maximum(tl.max(tl.where(enough, probes, low), 0), least)
            high = tl.minimum(missed, below)
        else:
            high = low
    return low


@triton.jit
def _mass(row, floor, peak, temperature, rate, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of exp((entry - peak) * rate) over the entries whose scaled logit is at least `floor`."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(row + columns, mask=columns < WIDTH, other=float("-inf")).to(tl.float32)
        scaled = tl.div_rn(values, tl.zeros_like(values) + temperature)
        total += tl.where(scaled >= floor, tl.exp((values - peak) * rate), 0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["spans"], do_not_specialize_on_alignment=["slots"])
def _scan_groups(
    logits, slots, records, maxima, sums, stride, fields, spans,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Of each part of a row the maxima of its groups, and the sum of exp((entry - largest of the part) / temperature).

    A program does the parts `span`, `span` + spans, ...: results do not depend on how many programs share a row.
    """
    number, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + number).to(tl.int64)
    temperature, _, _, _, _, filtered = _asked(records, slot, fields, WIDTH)
    if filtered:
        rate = 1.0 / temperature
        while part < PARTS:
            columns = part * PART + tl.arange(0, PART)
            row = logits + number * stride
            values = tl.load(row + columns, mask=columns < WIDTH, other=float("-inf")).to(tl.float32)
            peak = tl.max(values, 0)
            weights = tl.where(values > float("-inf"), tl.exp((values - peak) * rate), 0.0)
            of_groups = tl.max(tl.reshape(values, [PART // GROUPS, GROUPS]), 0)
            tl.store(maxima + (number * PARTS + part) * GROUPS + tl.arange(0, GROUPS), of_groups)
            tl.store(sums + number * PARTS + part, tl.sum(weights, 0))
            part += spans


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _find_bounds(
    slots, records, maxima, sums, bounds, fields,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, MORE_PARTS: tl.constexpr, GROUPS: tl.constexpr, REACH: tl.constexpr,
    PROBES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each row: a logit that no kept and drawable entry is below; the largest logit; the whole mass."""
    number = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + number).to(tl.int64)
    temperature, top_p, min_p, top_k, by_rank, filtered = _asked(records, slot, fields, WIDTH)
    if filtered:
        rate = 1.0 / temperature
        own = maxima + number * PARTS * GROUPS
        parts = tl.arange(0, MORE_PARTS)[:, None]
        groups = tl.load(own + parts * GROUPS + tl.arange(0, GROUPS)[None, :], mask=parts < PARTS, other=float("-inf"))
        peaks = tl.max(groups, 1)
        peak = tl.max(peaks, 0)
        places = tl.arange(0, MORE_PARTS)
        of_parts = tl.load(sums + number * PARTS + places, mask=places < PARTS, other=0.0)
        total = tl.sum(tl.where(of_parts > 0.0, of_parts * tl.exp((peaks - peak) * rate), 0.0), 0)
        low = peak - REACH * temperature
        bound = low
        if min_p > 0.0:
            depth = tl.log(min_p.to(tl.float64)).to(tl.float32) * temperature
            bound = tl.maximum(bound, peak + depth - 1e-6 * (tl.abs(peak) - depth))  # scaling rounds
        if by_rank:
            need = top_k.to(tl.float32)
            least = _search(own, need, low, peak, peak, rate, False, PARTS * GROUPS, PROBES, BLOCK)
            bound = tl.maximum(bound, least)
        elif min_p == 0.0:
            need = top_p * total
            bound = _search(own, need, low, peak, peak, rate, True, PARTS * GROUPS, PROBES, BLOCK)
        tl.store(bounds + number * 3, bound)
        tl.store(bounds + number * 3 + 1, peak)
        tl.store(bounds + number * 3 + 2, total)


@triton.jit(do_not_specialize=["spans"], do_not_specialize_on_alignment=["slots"])
def _collect(
    logits, slots, records, bounds, counts, found, stride, fields, spans,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Of each part of a row the entries that are not below the row's bound, in order, as many as there is room for,
    then minus infinity; and their number."""
    number, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + number).to(tl.int64)
    _, _, _, _, _, filtered = _asked(records, slot, fields, WIDTH)
    if filtered:
        bound = tl.load(bounds + number * 3)
        while part < PARTS:
            columns = part * PART + tl.arange(0, PART)
            row = logits + number * stride
            values = tl.load(row + columns, mask=columns < WIDTH, other=float("-inf")).to(tl.float32)
            taken = ((values >= bound) & (columns < WIDTH)).to(tl.int32)
            place = tl.cumsum(taken, 0) - 1
            count = tl.sum(taken, 0)
            own = found + (number * PARTS + part) * ROOM
            room = tl.arange(0, ROOM)
            tl.store(own + place, values, mask=(taken > 0) & (place < ROOM))
            tl.store(own + room, float("-inf"), mask=room >= count)
            tl.store(counts + number * PARTS + part, count)
            part += spans


@triton.jit
def _floor_of(
    row, peak, total, temperature, top_p, min_p, top_k, by_rank,
    REACH: tl.constexpr, WIDTH: tl.constexpr, PROBES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The floor that is found among these entries; `total` is the mass of all where only top_p is asked for."""
    rate = 1.0 / temperature
    low = peak - REACH * temperature
    floor = tl.full([], float("-inf"), tl.float32)
    if min_p > 0.0:
        floor = tl.div_rn(peak, temperature) + tl.log(min_p.to(tl.float64)).to(tl.float32)
    if by_rank:
        need = top_k.to(tl.float32)
        least = _search(row, need, low, peak, peak, rate, False, WIDTH, PROBES, BLOCK)
        floor = tl.maximum(floor, tl.div_rn(least, temperature))
    if top_p < 1.0:
        if by_rank | (min_p > 0.0):
            total = _mass(row, floor, peak, temperature, rate, WIDTH, BLOCK)
        least = _search(row, top_p * total, low, peak, peak, rate, True, WIDTH, PROBES, BLOCK)
        floor = tl.maximum(floor, tl.div_rn(least, temperature))
    return floor


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _find_floors(
    logits, slots, records, bounds, counts, found, floors, stride, fields,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, MORE_PARTS: tl.constexpr, ROOM: tl.constexpr, REACH: tl.constexpr,
    PROBES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The floor of each row: among the entries that were collected, or where they had no room in the row itself."""
    number = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + number).to(tl.int64)
    temperature, top_p, min_p, top_k, by_rank, filtered = _asked(records, slot, fields, WIDTH)
    floor = tl.full([], float("-inf"), tl.float32)
    if filtered:
        peak = tl.load(bounds + number * 3 + 1)
        total = tl.load(bounds + number * 3 + 2)
        places = tl.arange(0, MORE_PARTS)
        most = tl.max(tl.load(counts + number * PARTS + places, mask=places < PARTS, other=0), 0)
        if most <= ROOM:
            floor = _floor_of(
                found + number * PARTS * ROOM, peak, total, temperature, top_p, min_p, top_k, by_rank,
                REACH, PARTS * ROOM, PROBES, BLOCK,
            )  # fmt: skip
        else:
            floor = _floor_of(
                logits + number * stride, peak, total, temperature, top_p, min_p, top_k, by_rank,
                REACH, WIDTH, PROBES, BLOCK,
            )  # fmt: skip
    tl.store(floors + number, floor)


@triton.jit
def _waits(words):
    """-log of the uniform numbers of words, float32, within 1e-5 of themselves: near 1 such a number is taken by its
    distance from 1."""
    near = (words.to(tl.float32) + 0.5) * 2.0**-32
    rest = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.0**-32
    series = rest * (1.0 + rest * (0.5 + rest * (0.33333334 + rest * 0.25)))
    return tl.where(rest < 0.015625, series, -tl.log(near))


@triton.jit
def _score(value, token, position, choice, seed_low, seed_high):
    """Of one token: its scaled logit plus its noise, as `sampling.noise.gumbel` has it; float64."""
    counter = (token // 4).to(tl.uint32)
    w0, w1, w2, w3 = _philox(counter, position, choice, 0, seed_low, seed_high)
    place = token % 4
    word = tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))
    uniform = (word.to(tl.float64) + 0.5) * 2.0**-32
    return value.to(tl.float64) - tl.log(-tl.log(uniform))


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "floors"])
def _best_of_parts(
    logits, slots, positions, records, floors, scores, tokens, stride, fields, parts,
    WIDTH: tl.constexpr, FILTERED: tl.constexpr, NEAR: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """Of each part of a row the best score, and the first token that has it: the row's width where no token can be
    drawn, -1 where there is an entry that is not a number or infinite.

    Which tokens may be the best is found in float32. These few (nearly always one) get their score in float64.
    """
    BLOCK: tl.constexpr = 4 * COUNTERS
    number, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + number).to(tl.int64)
    temperature = _real(records, slot, fields, 0)
    floor = tl.load(floors + number) if FILTERED else float("-inf")
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(logits + number * stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    values = tl.div_rn(values, tl.zeros_like(values) + tl.where(temperature > 0.0, temperature, 1.0))
    broken = tl.max(tl.where(values < float("inf"), 0, 1), 0)
    values = tl.where(values >= floor, values, float("-inf"))
    largest = tl.max(values, 0)
    score = largest.to(tl.float64)
    token = tl.min(tl.where((values == largest) & (values > float("-inf")), columns, WIDTH), 0)
    if (temperature > 0.0) & (token < WIDTH) & (broken == 0):
        seed_low, seed_high = _word(records, slot, fields, 4), _word(records, slot, fields, 5)
        choice = _word(records, slot, fields, 6)
        position = tl.load(positions + number)
        counters = (part * COUNTERS + tl.arange(0, COUNTERS)).to(tl.uint32)
        w0, w1, w2, w3 = _philox(counters, position, choice, 0, seed_low, seed_high)
        words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
        rough = tl.exp(values - largest) / _waits(words)  # the exponential of a score, but for a factor
        best = tl.max(rough, 0)
        near = best * (1.0 - NEAR)
        score = tl.full([], float("-inf"), tl.float64)
        token = tl.full([], 0, tl.int32) + WIDTH
        while best >= near:
            here = tl.min(tl.where(rough == best, columns, WIDTH), 0)
            value = tl.max(tl.where(columns == here, values, float("-inf")), 0)
            own = _score(value, here, position, choice, seed_low, seed_high)
            token = tl.where((own > score) | ((own == score) & (here < token)), here, token)
            score = tl.maximum(own, score)
            rough = tl.where(columns == here, 0.0, rough)
            best = tl.max(rough, 0)
    tl.store(scores + number * parts + part, score)
    tl.store(tokens + number * parts + part, tl.where(broken > 0, -1, token))


@triton.jit(do_not_specialize_on_alignment=["drawn"])
def _join(scores, tokens, drawn, parts, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    exists = places < parts
    of_parts = tl.load(scores + number * parts + places, mask=exists, other=float("-inf"))
    firsts = tl.load(tokens + number * parts + places, mask=exists, other=WIDTH)
    token = tl.min(tl.where(of_parts == tl.max(of_parts, 0), firsts, WIDTH), 0)
    whole = (tl.min(firsts, 0) >= 0) & (token < WIDTH)
    tl.store(drawn + number, tl.where(whole, token, -1).to(tl.int64))


def _launch_floors(logits: Tensor, slots: Tensor, params: Tensor) -> Tensor:
    """[R] float32, the floor of each row; minus infinity where nothing is left out."""
    num_rows, width = logits.shape
    parts = triton.cdiv(width, PART)
    spans = min(parts, triton.cdiv(PROGRAMS, num_rows))
    device, stride, fields = logits.device, logits.stride(0), params.stride(0)
    floors, sums, maxima, bounds, found = (
        torch.empty(num_rows, size, dtype=torch.float32, device=device)
        for size in (1, parts, parts * GROUPS, 3, parts * ROOM)
    )
    counts = torch.empty(num_rows, parts, dtype=torch.int32, device=device)
    of_row = {"WIDTH": width, "PARTS": parts}
    of_search = {
        "MORE_PARTS": triton.next_power_of_2(parts), "REACH": REACH, "PROBES": PROBES, "BLOCK": SEARCH_BLOCK,
        "num_warps": 16,
    }  # fmt: skip
    _scan_groups[(num_rows, spans)](
        logits, slots, params, maxima, sums, stride, fields, spans, **of_row, PART=PART, GROUPS=GROUPS, num_warps=8
    )
    _find_bounds[(num_rows,)](slots, params, maxima, sums, bounds, fields, **of_row, GROUPS=GROUPS, **of_search)
    _collect[(num_rows, spans)](
        logits, slots, params, bounds, counts, found, stride, fields, spans, **of_row, PART=PART, ROOM=ROOM, num_warps=8
    )
    _find_floors[(num_rows,)](
        logits, slots, params, bounds, counts, found, floors, stride, fields, **of_row, ROOM=ROOM, **of_search
    )
    return floors


def draw_rows(logits: Tensor, slots: Tensor, positions: Tensor, params: Tensor, *, filtered: bool = True) -> Tensor:
    """As `slots.draw_rows`: six launches, or two where nothing is filtered out."""
    num_rows, width = logits.shape
    drawn = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return drawn
    floors = _launch_floors(logits, slots, params) if filtered else logits  # which is not looked at then
    parts = triton.cdiv(width, DRAW_BLOCK)
    scores = torch.empty(num_rows, parts, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(num_rows, parts, dtype=torch.int32, device=logits.device)
    _best_of_parts[(num_rows, parts)](
        logits, slots, positions, params, floors, scores, tokens, logits.stride(0), params.stride(0), parts,
        WIDTH=width, FILTERED=filtered, NEAR=NEAR, COUNTERS=DRAW_BLOCK // 4, num_warps=4,
    )  # fmt: skip
    _join[(num_rows,)](scores, tokens, drawn, parts, WIDTH=width, BLOCK=triton.next_power_of_2(parts), num_warps=1)
    return drawn


@triton.jit
def _uniform(place, position, choice, seed_low, seed_high):
    """As `sampling.noise.uniform` of the stream ACCEPT (2), at places [N]."""
    word = 2 | (place.to(tl.uint32) << 8)
    zero = tl.zeros_like(word)
    first, second, _, _ = tl.philox_impl(
        zero, zero + position.to(tl.uint32), zero + choice, word, seed_low, seed_high, 10
    )
    bits = (first.to(tl.int64) << 21) | (second.to(tl.int64) >> 11)
    return bits.to(tl.float64) * 2.0**-53


_SMALL = ["drawn", "drafted", "num_rows", "slots", "positions", "last", "rates", "verdict"]


@triton.jit(
    do_not_specialize=["places", "drawn_stride", "drafted_stride", "last_stride"],
    do_not_specialize_on_alignment=_SMALL,
)
def _judge(
    drawn, drafted, num_rows, slots, positions, last, records, rates, verdict,
    places, drawn_stride, drafted_stride, last_stride, fields,
    BY_CHANCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    rows = tl.load(num_rows + number)
    place = tl.arange(0, BLOCK)
    out = verdict + number * (2 + places)
    if rows == 0:
        tl.store(out, 0)
        tl.store(out + 1, 0)
        tl.store(out + 2 + place, -1, mask=place < places)
        return
    slot = tl.load(slots + number).to(tl.int64)
    position = tl.load(positions + slot)
    is_draft = place < rows - 1
    own = tl.load(drawn + number * drawn_stride + place, mask=place < rows, other=-1).to(tl.int32)
    guess = tl.load(drafted + number * drafted_stride + place, mask=is_draft, other=-1).to(tl.int32)
    stands = is_draft & (own >= 0) & (own == guess)
    if BY_CHANCE:
        root = position + 1 - tl.load(records + slot * fields + 7)
        seed_low, seed_high = _word(records, slot, fields, 4), _word(records, slot, fields, 5)
        number_drawn = _uniform(place, root, _word(records, slot, fields, 6), seed_low, seed_high)
        stands = is_draft & (guess >= 0) & (number_drawn < tl.load(rates + place, mask=is_draft, other=0.0))
    accepted = tl.min(tl.where(stands, BLOCK, place), 0)
    end = tl.max(tl.where(place == accepted, own, -1), 0)
    emitted = accepted + tl.where(end >= 0, 1, 0)
    tokens = tl.where(place < accepted, guess, tl.where(place == accepted, own, -1))
    tl.store(out, accepted)
    tl.store(out + 1, emitted)
    tl.store(out + 2 + place, tokens, mask=place < places)
    if emitted > 0:
        before = tl.load(last + slot * last_stride + 1)
        if emitted > 1:
            before = tl.max(tl.where(place == emitted - 2, tokens, -1), 0)
        tl.store(positions + slot, position + emitted)
        tl.store(last + slot * last_stride, before)
        tl.store(last + slot * last_stride + 1, tl.max(tl.where(place == emitted - 1, tokens, -1), 0))


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
    """As `slots.judge`: one launch."""
    num_requests, places = drawn.shape
    verdict = torch.empty(num_requests, 2 + places, dtype=torch.int32, device=drawn.device)
    if num_requests == 0:
        return verdict
    _judge[(num_requests,)](
        drawn, drafted, num_rows, slots, positions, last, params, params if rates is None else rates, verdict,
        places, drawn.stride(0), drafted.stride(0), last.stride(0), params.stride(0),
        BY_CHANCE=rates is not None, BLOCK=triton.next_power_of_2(places), num_warps=1,
    )  # fmt: skip
    return verdict
