"""The heads against their published definitions, written down in numpy (`definition.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from forerun.attention import AttentionInputs
from forerun.kernels import native
from forerun.models.decoder import Decoder, attention_spec
from forerun.models.heads import Head, load_head

from ..tiny import CausalCache, attend_to_self
from .definition import Array, Definition, Row
from .tiny_heads import (
    HIDDEN,
    SlotCache,
    Tensors,
    as_midlayer,
    definition,
    eagle,
    eagle3,
    random,
    save,
    save_gguf,
    with_extras,
)

TOKENS = [5, 17, 3, 80, 41, 41, 9, 63, 2, 11, 90, 33]
K = 4
TOLERANCE = 2e-5  # float32 against float64, relative to the largest value; measured 1e-6

Built = tuple[dict[str, Any], Tensors]

VARIANTS: dict[str, Built] = {
    "eagle": eagle(1),
    "eagle-no-bias": eagle(2, bias=False),
    "eagle-2-layers-theta": eagle(3, num_hidden_layers=2, rope_theta=500.0),
    "eagle3": eagle3(4),
    "eagle3-residual": eagle3(5, norm_before_residual=True),
    "eagle3-norm-output": eagle3(6, norm_output=True),
    "eagle3-norm-before-fc": eagle3(7, norm_before_fc=True),
    "eagle3-fc-norm": eagle3(8, fc_norm=True, norm_output=True, norm_before_residual=True),
    "eagle3-2-layers-head-dim": eagle3(9, num_hidden_layers=2, head_dim=24),
    "eagle3-full-vocabulary": eagle3(10, draft_vocab_size=None, rope_theta=500.0),
    "eagle3-2-states": eagle3(11, num_states=2, eagle_aux_hidden_state_layer_ids=[3, 8]),
    "eagle3-narrow": eagle3(12, hidden_size=32, target_hidden_size=HIDDEN),
    "eagle3-head-norms-biases": with_extras(eagle3(13)),
}


def load(name: str, target: Decoder, path: Path, **kwargs: Any) -> Head:
    config, tensors = VARIANTS[name]
    return load_head(save(path / name, config, tensors), target, **kwargs)


def target_states(target: Decoder, head: Head, tokens: Sequence[int]) -> list[Tensor]:
    """[T, Ht] for each tap of the head."""
    positions = list(range(len(tokens)))
    taps = head.config.taps
    output = target.forward(
        torch.tensor(tokens), torch.tensor(positions), CausalCache(attention_spec(target.config)).at(positions), taps
    )
    return [output.taps[tap] for tap in taps]


def combined(oracle: Definition, states: Sequence[Tensor]) -> list[Array]:
    return [oracle.combine([state[i].double().numpy() for state in states]) for i in range(len(states[0]))]


def assert_close(ours: Tensor, theirs: Sequence[Array]) -> None:
    expected = np.stack(theirs)
    difference = np.abs(ours.double().numpy() - expected).max() / np.abs(expected).max()
    assert difference < TOLERANCE, difference


def prefill(head: Head, states: Sequence[Tensor], tokens: Sequence[int], cache: SlotCache) -> Any:
    """Rows (t_{i+1}, state of i) for all tokens but the last, whose state is not known."""
    count = len(tokens) - 1
    positions = torch.arange(count)
    hidden = head.combine([state[:count] for state in states])
    return head.forward(torch.tensor(tokens[1:]), hidden, positions, cache.at(positions))


@pytest.mark.parametrize("name", VARIANTS)
def test_states_and_logits_of_a_prompt_are_those_of_the_definition(name: str, target: Decoder, tmp_path: Path) -> None:
    head = load(name, target, tmp_path)
    oracle = definition(*VARIANTS[name], target)
    states = target_states(target, head, TOKENS)
    output = prefill(head, states, TOKENS, SlotCache(head.config.layers))
    rows = [Row(TOKENS[i + 1], state, i, range(i + 1)) for i, state in enumerate(combined(oracle, states)[:-1])]
    fed_back, logits = oracle.run(rows)
    assert_close(output.hidden, fed_back)
    assert_close(head.logits(output.normed), logits)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_greedy_chain_is_that_of_the_definition(name: str, target: Decoder, tmp_path: Path) -> None:
    """Each draft is fed back as a target id, with the state of the row that drafted it, at the next position."""
    head = load(name, target, tmp_path)
    config, tensors = VARIANTS[name]
    oracle = definition(config, tensors, target)
    states = target_states(target, head, TOKENS)
    last = len(TOKENS) - 2  # the last row with a target state

    cache = SlotCache(head.config.layers)
    output = prefill(head, states, TOKENS, cache)
    state = output.hidden[-1:]
    logits = [head.logits(output.normed[-1:])]
    drafts = [int(head.target_ids(logits[-1].argmax(-1)))]
    for step in range(1, K):
        position = torch.tensor([last + step])
        output = head.forward(torch.tensor(drafts[-1:]), state, position, cache.at(position))
        state = output.hidden
        logits.append(head.logits(output.normed))
        drafts.append(int(head.target_ids(logits[-1].argmax(-1))))

    rows = [Row(TOKENS[i + 1], s, i, range(i + 1)) for i, s in enumerate(combined(oracle, states)[: last + 1])]
    offsets = tensors.get("d2t", torch.zeros(len(logits[0][0]), dtype=torch.int64)).tolist()
    expected, expected_logits = [], []
    for step in range(K):
        fed_back, all_logits = oracle.run(rows)
        draft = int(np.argmax(all_logits[-1]))
        expected.append(draft + offsets[draft])
        expected_logits.append(all_logits[-1])
        rows.append(Row(expected[-1], fed_back[-1], last + 1 + step, range(len(rows) + 1)))
    assert drafts == expected
    assert_close(torch.cat(logits), expected_logits)


def test_heads_are_given_the_states_that_transformers_calls_so(
    target: Decoder, target_path: Path, tmp_path: Path
) -> None:
    """EAGLE: what comes out of the final norm. EAGLE-3: what enters layers 2, N/2 and N-3."""
    model = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32).model
    with torch.no_grad():
        found = model(torch.tensor([TOKENS]), output_hidden_states=True)
    for name, expected in (
        ("eagle", [found.last_hidden_state]),
        ("eagle3", [found.hidden_states[layer] for layer in (2, 4, 5)]),
    ):
        states = target_states(target, load(name, target, tmp_path), TOKENS)
        for state, theirs in zip(states, expected, strict=True):
            assert (state - theirs[0]).abs().max() < TOLERANCE * theirs.abs().max()


def test_the_rows_of_a_tree_share_a_position_and_see_their_own_path(target: Decoder, tmp_path: Path) -> None:
    head = load("eagle3", target, tmp_path)
    oracle = definition(*VARIANTS["eagle3"], target)
    states = target_states(target, head, TOKENS)
    known = len(TOKENS) - 1
    branches = [7, 50]
    outputs = []
    for token in branches:
        cache = SlotCache(head.config.layers)
        feedback = prefill(head, states, TOKENS, cache).hidden[-1:]
        position = torch.tensor([known])
        output = head.forward(torch.tensor([token]), feedback, position, cache.at(position))
        outputs.append(head.logits(output.normed))
    rows = [Row(TOKENS[i + 1], s, i, range(i + 1)) for i, s in enumerate(combined(oracle, states)[:known])]
    feedback = oracle.run(rows)[0][-1]
    prefix = list(range(known))
    rows += [Row(token, feedback, known, [*prefix, known + i]) for i, token in enumerate(branches)]
    assert_close(torch.cat(outputs), oracle.run(rows)[1][known:])


@pytest.mark.parametrize("norms", [{}, {"norm_before_fc": True}, {"fc_norm": True}])
def test_parallel_rows_are_those_of_the_definition(norms: dict[str, bool], target: Decoder, tmp_path: Path) -> None:
    """P-EAGLE: one pass of the new rows and K - 1 rows of the mask token and the learned state."""
    config, tensors = eagle3(20, num_hidden_layers=2, **norms)
    config |= {"mask_token_id": 13}
    tensors["mask_hidden"] = random(torch.Generator().manual_seed(3), 1, 1, 3 * HIDDEN)
    head = load_head(save(tmp_path, config, tensors), target)
    assert head.mask_state is not None
    assert head.config.mask_token_id == 13
    states = target_states(target, head, TOKENS)
    known = len(TOKENS) - 1
    hidden = torch.cat((head.combine([s[:known] for s in states]), head.mask_state.expand(K - 1, -1)))
    positions = torch.arange(known + K - 1)
    token_ids = torch.tensor(TOKENS[1:] + [13] * (K - 1))
    output = head.forward(token_ids, hidden, positions, SlotCache(head.config.layers).at(positions))

    oracle = definition(config, tensors, target)
    mask = oracle.combine(list(tensors["mask_hidden"].flatten().double().numpy().reshape(3, -1)))
    pairs = [*zip(TOKENS[1:], combined(oracle, states)[:known], strict=True), *[(13, mask)] * (K - 1)]
    rows = [Row(token, state, i, range(i + 1)) for i, (token, state) in enumerate(pairs)]
    assert_close(head.logits(output.normed), oracle.run(rows)[1])


FILLED = ["eagle", "eagle-2-layers-theta", "eagle3", "eagle3-2-layers-head-dim", "eagle3-head-norms-biases"]


@pytest.mark.parametrize("name", FILLED)
@pytest.mark.parametrize("packed", [False, True])
def test_fill_leaves_the_bits_that_forward_does(name: str, packed: bool, target: Decoder, tmp_path: Path) -> None:
    if packed and not native.available():
        pytest.skip("needs the CPU extension")
    head = load(name, target, tmp_path, packed=packed, quantization="int8" if packed else None)
    states = target_states(target, head, TOKENS)
    ran, filled = SlotCache(head.config.layers), SlotCache(head.config.layers)
    prefill(head, states, TOKENS, ran)
    for start, end in ((0, 1), (1, 4), (4, len(TOKENS) - 1)):
        positions = torch.arange(start, end)
        hidden = head.combine([state[start:end] for state in states])
        filled.at(positions)
        head.fill(torch.tensor(TOKENS[start + 1 : end + 1]), hidden, positions, filled, filled.write)
    for one, other in zip(ran.rows, filled.rows, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[p][part], other[p][part]) for p in one for part in (0, 1))


def test_fill_of_one_layer_attends_to_nothing(target: Decoder, tmp_path: Path) -> None:
    def attend(*_: object) -> Tensor:
        raise AssertionError("attended")

    head = load("eagle3", target, tmp_path)
    written: list[tuple[int, ...]] = []

    def write(layer: int, inputs: AttentionInputs) -> None:
        written.append((layer, inputs.num_heads, *inputs.heads()[1].shape))

    head.fill(torch.tensor([3, 4]), torch.randn(2, HIDDEN), torch.arange(2), attend, write)
    assert written == [(0, 0, 2, 2, 16)]


@pytest.mark.parametrize("name", ["eagle", "eagle3-fc-norm", "eagle3-2-layers-head-dim"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_row_has_the_same_bits_in_any_company(name: str, packed: bool, target: Decoder, tmp_path: Path) -> None:
    if packed and not native.available():
        pytest.skip("needs the CPU extension")
    head = load(name, target, tmp_path, packed=packed, quantization="int8" if packed else None)
    tokens, positions = torch.tensor(TOKENS), torch.arange(len(TOKENS)) * 2
    states = [torch.randn(len(TOKENS), HIDDEN, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    states = states[: len(head.config.taps)]

    def run(rows: Tensor) -> tuple[Tensor, Tensor]:
        hidden = head.combine([state[rows] for state in states])
        output = head.forward(tokens[rows], hidden, positions[rows], attend_to_self)
        return output.hidden, head.logits(output.normed)

    alone = [run(torch.tensor([row])) for row in range(len(TOKENS))]
    hidden, logits = (torch.cat(parts) for parts in zip(*alone, strict=True))
    for num_rows in (2, 5, 8, 9, 12):
        rows = torch.arange(len(TOKENS)).roll(num_rows)[:num_rows]
        found = run(rows)
        assert torch.equal(found[0], hidden[rows])
        assert torch.equal(found[1], logits[rows])


def test_forward_leaves_its_arguments_alone(target: Decoder, tmp_path: Path) -> None:
    for name in ("eagle", "eagle3", "eagle3-residual"):
        head = load(name, target, tmp_path)
        hidden = torch.randn(3, HIDDEN)
        before = hidden.clone()
        head.forward(torch.tensor([1, 2, 3]), hidden, torch.arange(3), attend_to_self)
        assert torch.equal(hidden, before)


def test_no_rows_give_no_rows(target: Decoder, tmp_path: Path) -> None:
    nothing = torch.tensor([], dtype=torch.int64)
    for name in ("eagle", "eagle3"):
        head = load(name, target, tmp_path)
        hidden = head.combine([torch.empty(0, HIDDEN)] * len(head.config.taps))
        output = head.forward(nothing, hidden, nothing, lambda layer, inputs: inputs.heads()[0])
        assert head.logits(output.normed).shape == (0, head.config.draft_vocab_size)
        head.fill(nothing, hidden, nothing, lambda *_: torch.empty(0), lambda layer, inputs: None)


def test_all_forms_of_a_checkpoint_give_the_same_head(target: Decoder, tmp_path: Path) -> None:
    config, tensors = VARIANTS["eagle3"]
    layers = {key: value for key, value in config.items() if key not in ("architectures", "draft_vocab_size")}
    switches = dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False)
    nested = {"speculators_model_type": "eagle3", "draft_vocab_size": config["draft_vocab_size"]} | switches
    nested |= {"transformer_layer_config": layers}
    paths = [
        save(tmp_path / "flat", config, as_midlayer(tensors)),
        save(tmp_path / "prefixed", config, {f"model.{name}": tensor for name, tensor in tensors.items()}),
        save(tmp_path / "pickled", config, as_midlayer(tensors), pickled=True),
        save(tmp_path / "speculators", nested, tensors),
        save_gguf(tmp_path / "head.gguf", config, tensors),
    ]
    heads = [load_head(path, target) for path in paths]
    states = target_states(target, heads[0], TOKENS)
    outputs = [prefill(head, states, TOKENS, SlotCache(head.config.layers)) for head in heads]
    first, expected = heads[0], outputs[0]
    for head, output in zip(heads, outputs, strict=True):
        assert head.config.taps == ((2, False), (4, False), (5, False))
        assert torch.equal(output.hidden, expected.hidden)
        assert torch.equal(head.logits(output.normed), first.logits(expected.normed))
        ids = torch.arange(head.config.draft_vocab_size)
        assert torch.equal(head.target_ids(ids), ids + tensors["d2t"])
