"""What is judged before weights are read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.errors import ConfigError
from forerun.llm import LLM
from tests.tiny_engine import save_tiny_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer, tiny_backend


def larger_tokenizer(folder: Path) -> Path:
    backend = tiny_backend()
    backend.add_tokens([f"<extra {i}>" for i in range(5)])
    return save_tiny_tokenizer(folder, backend=backend)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_with_both_numbers(
    tiny_model: Path, tmp_path: Path
) -> None:
    other = larger_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match=rf"{VOCAB_SIZE + 5} ids .* {VOCAB_SIZE}:"):
        LLM(str(tiny_model), tokenizer=str(other), kv_cache_memory_bytes=8 << 20)


def test_a_tokenizer_with_fewer_ids_than_the_model_is_served(tmp_path: Path) -> None:
    padded = save_tiny_target(tmp_path / "padded", vocab_size=VOCAB_SIZE + 64)
    assert LLM(str(padded), kv_cache_memory_bytes=8 << 20).generate("the server")[0].outputs[0].token_ids


def test_the_tokenizer_of_a_directory_does_not_import_torch(tiny_model: Path) -> None:
    assert json.loads((tiny_model / "config.json").read_text())["model_type"] == "llama"
    check = (
        "import sys; from forerun.models.tokenizer import load_tokenizer; "
        f"tokenizer = load_tokenizer({str(tiny_model)!r}); "
        "tokenizer.apply_chat_template([{'role': 'user', 'content': 'a'}]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], timeout=60, check=False).returncode == 0
