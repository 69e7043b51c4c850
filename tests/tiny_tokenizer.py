"""A byte-level tokenizer of 320 ids for tests: 3 special tokens, 256 bytes, 61 merges, and a chat template.

    folder = save_tiny_tokenizer(tmp_path)         # Hugging Face layout: tokenizer.json, tokenizer_config.json, ...
    tokenizer = load_tokenizer(str(folder))

Ids: `ENDOFTEXT` 0, `IM_START` 1, `IM_END` 2 (the end token), then the bytes, then the merges.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 320
ENDOFTEXT, IM_START, IM_END = 0, 1, 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = (
    "the server drafts tokens and the target model keeps those that it would have said itself. "
    "def add(first, second):\n    return first + second\n"
    "A draft is a guess; a wrong guess costs time and never correctness. serving serving serving user assistant system"
)


def tiny_backend() -> Tokenizer:
    """The `tokenizers` object; the same merges each time."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS],
        show_progress=False,
    )
    backend.train_from_iterator([_TEXT], trainer)
    assert backend.get_vocab_size() == VOCAB_SIZE
    return backend


def save_tiny_tokenizer(
    folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, backend: Tokenizer | None = None
) -> Path:
    """Write the tokenizer's files into `folder` (made if missing), beside whatever lies there; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (backend or tiny_backend()).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[IM_START],
        "eos_token": SPECIAL_TOKENS[IM_END],
        "unk_token": SPECIAL_TOKENS[ENDOFTEXT],
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder
