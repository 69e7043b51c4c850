"""Real weights against transformers: what tiny random models could hide."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from forerun.attention.native import NativeAttention
from forerun.attention.reference import ReferenceAttention
from forerun.kernels import native
from forerun.models.builtin import resolve_model
from forerun.models.gguf_file import GgufFile
from forerun.models.loading import load_model
from forerun.models.tokenizer import load_tokenizer

from .tiny import PagedCache, gguf_name, hf_logits

pytestmark = pytest.mark.slow

TEXT = (
    "The river rises in the hills, runs north past three towns and meets the sea at last; {} boats a day go down it. "
)
SIZES = {
    "vocab_size": 262_144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "max_position_embeddings": 32_768,
}


def test_gemma_3_is_that_of_transformers_past_its_window() -> None:
    path = resolve_model("gemma3-270m")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3_text", **SIZES), attn_implementation="eager")
    file = GgufFile(path)
    with torch.no_grad():
        for name, parameter in model.eval().named_parameters():
            rows = parameter.shape[0] if parameter.dim() > 1 else 1
            values = torch.tensor(file.read(gguf_name(name, "gemma3_text"), 0, rows)).view(parameter.shape)
            parameter.copy_(values - 1 if "norm" in name else values)
    tokens = load_tokenizer(str(path)).encode("".join(TEXT.format(i) for i in range(40)))[:1000]
    assert len(tokens) == 1000
    expected = hf_logits(model, tokens)
    backend = NativeAttention if native.available() else ReferenceAttention
    plain = PagedCache(load_model(path, max_positions=1024), backend, 64).logits(tokens)
    assert ((plain - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-4  # measured 6e-6
    packed = PagedCache(load_model(path, max_positions=1024, packed=True), backend, 64).logits(tokens)
    agree = (packed.argmax(-1) == expected.argmax(-1)).float().mean()
    assert agree > 0.93  # activations are rounded to int8; measured 0.97 on prose
