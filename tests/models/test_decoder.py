"""The decoder against Hugging Face's classes, and the exactness of its rows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.attention.native import NativeAttention
from forerun.attention.reference import ReferenceAttention
from forerun.errors import ConfigError
from forerun.kernels import native
from forerun.models.decoder import Decoder, attention_spec
from forerun.models.loading import load_model

from .tiny import (
    FAMILIES,
    FULL,
    SLIDING,
    CausalCache,
    PagedCache,
    attend_to_self,
    chunks,
    hf_logits,
    hf_model,
    save_hf,
)

TOKENS = [5, 17, 3, 80, 41, 41, 9, 63, 2, 11, 90, 33, 7, 7, 54, 28, 70]
TOLERANCE = 1e-4  # float32 sums in another order, relative to the largest logit; measured 1e-6

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MSCALE = YARN | {"mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 16, "beta_slow": 2, "truncate": False}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-no-gqa": ("llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("llama", {"head_dim": 32}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": MSCALE}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-llama3": ("qwen3", {"rope_parameters": LLAMA3}),
    "qwen2-upper-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3-listed-windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": [FULL, SLIDING, FULL]},
    ),
    "mistral": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-window-of-one": ("mistral", {"sliding_window": 1, "head_dim": 32}),
    "gemma2": ("gemma2", {}),
    "gemma2-untied-uncapped": (
        "gemma2",
        {"tie_word_embeddings": True, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2-all-full": ("gemma2", {"layer_types": [FULL]}),
    "gemma2-biases": ("gemma2", {"attention_bias": True}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-tied": ("gemma3_text", {"tie_word_embeddings": True}),
    "gemma3-capped": ("gemma3_text", {"final_logit_softcapping": 2.0}),
    "gemma3-default-layers": ("gemma3_text", {"layer_types": None, "num_hidden_layers": 7}),
    "phi3": ("phi3", {}),
    "phi3-whole-heads": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "olmo2": ("olmo2", {}),
    "olmo2-biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "olmo2-one-kv-head": ("olmo2", {"num_key_value_heads": 1}),
    "granite": ("granite", {}),
    "granite-tied-biases": ("granite", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-unnormalised": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "qwen3-moe-some-dense": ("qwen3_moe", {"mlp_only_layers": [0], "decoder_sparse_step": 1}),
    "qwen3-moe-every-other": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3-moe-windows": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9}),
    "qwen3-moe-all-chosen": ("qwen3_moe", {"num_experts_per_tok": 6}),
}


def logits_of(decoder: Decoder, token_ids: list[int]) -> Tensor:
    positions = list(range(len(token_ids)))
    attend = CausalCache(attention_spec(decoder.config)).at(positions)
    output = decoder.forward(torch.tensor(token_ids), torch.tensor(positions), attend)
    return decoder.logits(output.hidden)


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[name]
    model = hf_model(family, **overrides)
    tokens = TOKENS * 3  # past the original context of the stretched ropes
    ours = logits_of(load_model(save_hf(model, tmp_path)), tokens)
    assert ours.dtype == torch.float32
    assert relative_difference(ours, hf_logits(model, tokens)) < TOLERANCE


BACKENDS = [ReferenceAttention, *([NativeAttention] if native.available() else [])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cached_text_in_chunks_is_that_of_transformers(family: str, backend: Any, tmp_path: Path) -> None:
    """Through a backend's own windows, caps and scales; chunk by chunk with the bits of one pass."""
    model = hf_model(family)
    decoder = load_model(save_hf(model, tmp_path))
    tokens = (TOKENS * 7)[:110]
    whole = PagedCache(decoder, backend).logits(tokens)
    for length in (1, 5, 12, 13, 21, 110):
        assert relative_difference(whole[:length], hf_logits(model, tokens[:length])) < TOLERANCE
    for sizes in ([1], [3, 1, 30, 7], [64, 2]):
        cache = PagedCache(decoder, backend)
        pieces = [cache.logits(part, start) for part, start in chunks(tokens, itertools.cycle(sizes))]
        assert torch.equal(torch.cat(pieces), whole)


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    model = hf_model(request.param, hidden_size=72, intermediate_size=200, vocab_size=101, num_attention_heads=6)
    return load_model(save_hf(model, tmp_path_factory.mktemp(request.param)))


def test_a_row_has_the_same_bits_in_any_company(decoder: Decoder) -> None:
    tokens, positions = torch.tensor(TOKENS), torch.arange(len(TOKENS)) * 5
    alone = [decoder.forward(tokens[i : i + 1], positions[i : i + 1], attend_to_self) for i in range(len(TOKENS))]
    hidden = torch.cat([output.hidden for output in alone])
    logits = torch.cat([decoder.logits(output.hidden) for output in alone])
    for num_rows in range(1, len(TOKENS) + 1):
        rows = torch.arange(len(TOKENS)).roll(num_rows)[:num_rows]
        output = decoder.forward(tokens[rows], positions[rows], attend_to_self)
        assert torch.equal(output.hidden, hidden[rows])
        assert torch.equal(decoder.logits(output.hidden), logits[rows])


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8, 9, 16])
def test_a_sequence_has_the_same_bits_in_any_chunks(decoder: Decoder, chunk: int) -> None:
    whole = logits_of(decoder, TOKENS)
    cache = CausalCache(attention_spec(decoder.config))
    pieces = []
    for start in range(0, len(TOKENS), chunk):
        tokens = TOKENS[start : start + chunk]
        positions = list(range(start, start + len(tokens)))
        output = decoder.forward(torch.tensor(tokens), torch.tensor(positions), cache.at(positions))
        pieces.append(decoder.logits(output.hidden))
    assert torch.equal(torch.cat(pieces), whole)


def test_positions_may_repeat_and_come_in_any_order(decoder: Decoder) -> None:
    tokens, positions = torch.tensor([4, 9, 4, 30]), torch.tensor([7, 2, 7, 2])
    hidden = decoder.forward(tokens, positions, attend_to_self).hidden
    assert torch.equal(hidden[0], hidden[2])
    swapped = decoder.forward(tokens.flip(0), positions.flip(0), attend_to_self).hidden
    assert torch.equal(swapped.flip(0), hidden)


def test_logits_can_be_had_as_they_are_computed(tmp_path: Path) -> None:
    decoder = load_model(save_hf(hf_model("llama"), tmp_path), torch.bfloat16)
    hidden = torch.randn(3, decoder.config.hidden_size).bfloat16()
    computed = decoder.logits(hidden, dtype=None)
    assert computed.dtype == torch.bfloat16
    assert torch.equal(decoder.logits(hidden), computed.float())


def test_no_rows_give_no_rows(decoder: Decoder) -> None:
    nothing = torch.tensor([], dtype=torch.int64)
    hidden = decoder.forward(nothing, nothing, lambda layer, inputs: inputs.heads()[0]).hidden
    assert decoder.logits(hidden).shape == (0, decoder.config.vocab_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_the_hidden_states_of_transformers(family: str, tmp_path: Path) -> None:
    model = hf_model(family)
    decoder = load_model(save_hf(model, tmp_path))
    last = decoder.config.num_layers
    with torch.no_grad():
        states = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    positions = list(range(len(TOKENS)))
    taps = [(0, False), (1, False), (last - 1, False), (last, False), (last, True)]
    attend = CausalCache(attention_spec(decoder.config)).at(positions)
    output = decoder.forward(torch.tensor(TOKENS), torch.tensor(positions), attend, taps)
    assert set(output.taps) == set(taps)
    for j in (0, 1, last - 1):
        assert relative_difference(output.taps[j, False], states[j][0]) < TOLERANCE
    # transformers gives the last state after the norm only.
    assert relative_difference(output.taps[last, True], states[last][0]) < TOLERANCE
    assert torch.equal(output.taps[last, True], output.hidden)
    with torch.no_grad():
        normed = model.model.norm(output.taps[last, False])
    assert relative_difference(normed, states[last][0]) < TOLERANCE


@pytest.mark.parametrize("tap", [(-1, False), (4, False), (1, True), (0, True)])
def test_a_tap_that_does_not_exist_is_refused(decoder: Decoder, tap: tuple[int, bool]) -> None:
    token = torch.tensor([1])
    with pytest.raises(ConfigError, match="does not exist"):
        decoder.forward(token, token, attend_to_self, [tap])


def test_bfloat16_weights_compute_in_bfloat16(tmp_path: Path) -> None:
    model = hf_model("llama")
    decoder = load_model(save_hf(model, tmp_path), dtype=torch.bfloat16)
    assert decoder.dtype == torch.bfloat16
    ours = logits_of(decoder, TOKENS)
    assert ours.dtype == torch.float32
    assert relative_difference(ours, hf_logits(model, TOKENS)) < 0.1  # 8 bits of mantissa, three layers
