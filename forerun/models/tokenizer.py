"""Text to ids and back, from a directory in Hugging Face layout, a .gguf file or a built-in name. No weights are read.

`transformers` reads the files and renders chat templates, `tokenizers` does the work. A byte-level vocabulary inside a
.gguf file of a kind we know is built here, because the general way imports torch and knows fewer ways to split text.
Turning ids into text piece by piece is `engine/detokenizer.py`.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import logging
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.errors import CheckpointError, ConfigError, RequestError
from forerun.memory.heap import trim_heap
from forerun.models.builtin import resolve_model
from forerun.models.confine import DeadlineError, deadline, memory_limit
from forerun.models.gguf_file import GgufFile

logger = logging.getLogger(__name__)

MAX_TEMPLATE_S = 10.0  # a chat template is a program that comes with the model
MAX_TEMPLATE_TEXT = 2**24  # characters
SPACE_MARK = "\u2581"  # how sentencepiece writes a space
_RESERVED_TEMPLATE_KEYS = frozenset(
    {"chat_template", "conversation", "tokenize", "return_tensors", "return_dict", "padding", "truncation"}
)


class Spelling(enum.Enum):
    """How the vocabulary writes bytes; decides how ids become text."""

    BYTE_LEVEL = "byte-level"  # each byte a character of GPT-2's alphabet
    SENTENCEPIECE = "sentencepiece"  # U+2581 for a space, <0xNN> for a byte without a token
    OTHER = "other"  # WordPiece and the like: only the decoder knows how tokens join


def load_tokenizer(model: str, tokenizer: str | None = None) -> Tokenizer:
    """The tokenizer of `model`, or the one that `tokenizer` names: anything that `resolve_model` takes.

    Raises:
        ConfigError: nothing there, or nothing that can be read; one line.
    """
    path = resolve_model(tokenizer if tokenizer is not None else model, weights=False)
    try:
        loaded = _load_gguf(path) if path.is_file() else _load_directory(path)
        trim_heap()
        return loaded
    except ConfigError:
        raise
    except Exception as error:  # transformers raises whatever its readers met: OSError, ValueError, KeyError, ...
        raise CheckpointError(f"no tokenizer could be loaded from {path}: {_one_line(error)}") from error


class Tokenizer:
    """Text to ids and back. Safe to use from several threads.

    Args:
        hf: a `transformers` tokenizer with a fast backend.
        eos_token_ids: every id that ends a text.
        max_template_bytes: most memory that a chat template may take while it runs; None: no limit. To be set in a
            process that needs little otherwise: while a template runs, nobody in it gets more.
    """

    def __init__(self, hf: Any, eos_token_ids: frozenset[int] = frozenset()) -> None:
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            raise CheckpointError(f"{type(hf).__name__} has no fast tokenizer: the model needs a tokenizer.json")
        self.hf = hf
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content for i, token in added.items()}
        self._bytes: dict[int, bytes] = {}
        rules = _decoder_rules(backend.decoder)
        self.spelling = rules.spelling
        self.strip_spaces = rules.strip_spaces
        self.first_token_bare = rules.first_token_bare
        self._rules = rules
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.max_token_bytes = self._longest()
        self.bos_token_id: int | None = hf.bos_token_id
        own = () if hf.eos_token_id is None else (int(hf.eos_token_id),)
        self.eos_token_ids = frozenset(own) | eos_token_ids
        self.max_template_bytes: int | None = None

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    @functools.cached_property
    def template_words(self) -> frozenset[str]:
        """All words of the chat template: what it does not name, it cannot take."""
        template = self.hf.chat_template or ""
        text = "\n".join(template.values()) if isinstance(template, dict) else template
        return frozenset(re.findall(r"\w+", text))

    def use_chat_template(self, template: str) -> None:
        """Render conversations by this template instead of the model's own; before any is rendered.

        Raises:
            ConfigError: it is no Jinja template.
        """
        import jinja2

        try:
            self.hf.apply_chat_template([], chat_template=template, tokenize=False)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is wrong in line {error.lineno}: {_one_line(error)}") from None
        except Exception:  # of a conversation without messages it may say what it likes
            logger.debug("the chat template takes no empty conversation", exc_info=True)
        self.hf.chat_template = template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens written out in the text become their ids. Other threads run meanwhile."""
        try:
            # Of the ways to encode only those for batches give Python's lock away: 500 kB of text take a second.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError("the text is not valid Unicode: it holds half of a surrogate pair", "prompt") from error
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all ids at once. Bytes that are no UTF-8 become U+FFFD; unknown ids have no text."""
        if self.spelling is Spelling.OTHER:
            return self.backend_decode(ids, skip_special_tokens)
        kept = [i for i in ids if self.token_bytes(i) and not (skip_special_tokens and i in self._special)]
        pieces = [self.token_bytes(i) for i in kept]
        if pieces:
            pieces[0] = self.first_token_bytes(kept[0])
        text = b"".join(pieces).decode("utf-8", "replace")
        return text[min(self.strip_spaces, len(text) - len(text.lstrip(" "))) :]

    def backend_decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Ids of a conversation, ready to be continued.

        Raises:
            RequestError: the model has no template, or the template refuses (`param` is "messages" or the field).
        """
        if not self.has_chat_template:
            raise RequestError("this model has no chat template: send a plain prompt instead of messages", "messages")
        if reserved := sorted(_RESERVED_TEMPLATE_KEYS & kwargs.keys()):
            raise RequestError(f"{reserved[0]!r} cannot be set for one request", "chat_template_kwargs")
        memory = (
            contextlib.nullcontext() if self.max_template_bytes is None else memory_limit.at(self.max_template_bytes)
        )
        try:
            with deadline(MAX_TEMPLATE_S), memory:
                text: str = self.hf.apply_chat_template(
                    list(messages),
                    tools=None if tools is None else list(tools),
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tokenize=False,
                    **kwargs,
                )
        except DeadlineError:
            raise RequestError(f"the chat template took longer than {MAX_TEMPLATE_S:g} s", "messages") from None
        except MemoryError:
            raise RequestError("the chat template took more memory than it may", "messages") from None
        except Exception as error:  # a template is a program: what it raises is up to its author
            raise RequestError(f"the chat template refused the messages: {_one_line(error)}", "messages") from error
        if len(text) > MAX_TEMPLATE_TEXT:
            raise RequestError(
                f"the chat template made {len(text)} characters, at most {MAX_TEMPLATE_TEXT} are tokenised", "messages"
            )
        try:
            return self.encode(text, add_special_tokens=False)  # the template writes them itself
        except RequestError as error:
            raise RequestError(str(error), "messages") from error

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token inside a text; b"" for an id that the tokenizer does not define."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def first_token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token that opens a text: some decoders leave its space marks out."""
        if not self.first_token_bare:
            return self.token_bytes(token_id)
        return (self._token(token_id) or "").replace(SPACE_MARK, "").encode()

    def token_text(self, token_id: int) -> str:
        """The token as text; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """A control token: not part of the text unless `skip_special_tokens` is false."""
        return token_id in self._special

    def _longest(self) -> int:
        """Bytes of text that the longest token stands for; what a normalizer drops belongs to none."""
        vocabulary = set(self._backend.get_vocab(with_added_tokens=True)) - set(self._added.values())
        if self.spelling is Spelling.BYTE_LEVEL:
            own = max(map(len, vocabulary), default=0)
        else:
            own = max((len(token.replace(SPACE_MARK, " ").encode()) for token in vocabulary), default=0)
        return max([1, own, *(len(token.encode()) for token in self._added.values())])

    def _token(self, token_id: int) -> str | None:
        if token_id < 0:
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def _spell(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        token = added if added is not None else self._token(token_id)
        if token is None:
            return b""
        if self.spelling is Spelling.BYTE_LEVEL:
            return token.encode() if added is not None else _byte_level_bytes(token)
        if self.spelling is Spelling.SENTENCEPIECE:
            return self._rules.sentencepiece_bytes(token)
        return self.backend_decode([token_id], skip_special_tokens=False).encode()


class _DecoderRules:
    """What a backend's decoder does, as far as it can be done token by token."""

    def __init__(self, steps: list[dict[str, Any]]) -> None:
        self.spelling = Spelling.OTHER
        self.strip_spaces = 0  # spaces removed from the beginning of a text
        self.first_token_bare = False  # space marks of the first token are left out
        self.marks_are_spaces = False
        self.byte_fallback = False
        self._fused = False
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            self.spelling = Spelling.BYTE_LEVEL
        elif kinds and all(self._read(step) for step in steps):
            self.spelling = Spelling.SENTENCEPIECE

    def _read(self, step: dict[str, Any]) -> bool:
        kind = step["type"]
        if kind == "Replace" and step["pattern"] == {"String": SPACE_MARK} and step["content"] == " ":
            self.marks_are_spaces = True
        elif kind == "Metaspace" and step["replacement"] == SPACE_MARK:
            self.marks_are_spaces = True
            self.first_token_bare = step.get("prepend_scheme", "always") != "never"
        elif kind == "ByteFallback":
            self.byte_fallback = True
        elif kind == "Fuse":
            self._fused = True
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0 and self._fused:  # else: of each token
            self.strip_spaces = step["start"]
        else:
            return False
        return True

    def sentencepiece_bytes(self, token: str) -> bytes:
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            with contextlib.suppress(ValueError):
                return bytes([int(token[3:5], 16)])
        return (token.replace(SPACE_MARK, " ") if self.marks_are_spaces else token).encode()


def _decoder_rules(decoder: Any) -> _DecoderRules:
    if decoder is None:
        return _DecoderRules([])
    state = json.loads(decoder.__getstate__())
    return _DecoderRules(state["decoders"] if state["type"] == "Sequence" else [state])


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES_OF_CHARACTERS = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTES_OF_CHARACTERS[character] for character in token)
    except KeyError:  # not written in the alphabet: the decoder takes it as it stands
        return token.encode()


# ---- Hugging Face layout ------------------------------------------------------------------------------------------


def _load_directory(folder: Path) -> Tokenizer:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise CheckpointError(f"no tokenizer in {folder}: there is no tokenizer.json (name another with --tokenizer)")
    with _quiet_transformers():
        # A tokenizer.json says everything; the class that goes with the model's type would be built again from parts of
        # it, and the search for that class imports torch, which takes a front twice the time to start.
        if (folder / "tokenizer.json").is_file() or not (folder / "config.json").is_file():
            from transformers import PreTrainedTokenizerFast

            hf = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        else:
            from transformers import AutoTokenizer

            hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    eos: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        eos |= _eos_ids_of(folder / name)
        if eos:  # a generation config has the last word; config.json stands in where there is none
            break
    return Tokenizer(hf, frozenset(eos))


def _eos_ids_of(path: Path) -> set[int]:
    if not path.is_file():
        return set()
    try:
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a JSON object: {_one_line(error)}") from error
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(i, int) for i in ids):
        raise CheckpointError(f"{path}: eos_token_id must be an integer or a list of them, got {eos!r}")
    return set(ids)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Loading says much that no user can act on; what is wrong is raised. Levels are put back afterwards."""
    noisy = logging.getLogger("transformers")
    level = noisy.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        noisy.setLevel(logging.ERROR)
        try:
            yield
        finally:
            noisy.setLevel(level)


# ---- GGUF ---------------------------------------------------------------------------------------------------------

_GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is cut before merges apply, by `tokenizer.ggml.pre`; patterns apply one after the other.
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "gpt2"), (_GPT2_SPLIT,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", _GPT2_SPLIT)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), (_WORD_SPLIT % r"\p{N}{1,3}",)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_WORD_SPLIT % r"\p{N}",)),
}
_PRE_WITH_BOS = frozenset({"llama-bpe", "llama3", "llama-v3"})  # where the file does not say
_PRE_WITH_NFC = frozenset({"qwen2", "deepseek-r1-qwen"})
_CONTROL, _USER_DEFINED = 3, 4  # values of `tokenizer.ggml.token_type`
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def _load_gguf(path: Path) -> Tokenizer:
    metadata = GgufFile(path).metadata
    if "tokenizer.ggml.tokens" not in metadata:
        raise CheckpointError(f"{path} holds no tokenizer: name one with --tokenizer")
    byte_level = metadata.get("tokenizer.ggml.model") == "gpt2"
    with _quiet_transformers():
        if byte_level and metadata.get("tokenizer.ggml.pre") in _SPLITS and "tokenizer.ggml.merges" in metadata:
            hf = _byte_level_tokenizer(metadata)
        else:
            hf = _through_transformers(path)
    if not hf.chat_template and (template := metadata.get("tokenizer.chat_template")):
        hf.chat_template = template
    ends = [metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    return Tokenizer(hf, frozenset(int(i) for i in ends if i is not None))


def _through_transformers(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    # In a folder of its own, for transformers would prefer a tokenizer.json that lies beside the file.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.gguf").symlink_to(path.absolute())
        return PreTrainedTokenizerFast.from_pretrained(folder, gguf_file="model.gguf", local_files_only=True)


def _byte_level_tokenizer(metadata: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    tokens = list(metadata["tokenizer.ggml.tokens"])
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    pre: str = metadata["tokenizer.ggml.pre"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    if pre in _PRE_WITH_NFC:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    whole = [
        (token, kind == _CONTROL)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, special in whole if special]
    )
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token, special in whole if not special])

    def named(key: str) -> str | None:
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return None if token_id is None else tokens[token_id]

    bos = named("bos")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", pre in _PRE_WITH_BOS):
        bos_id = metadata["tokenizer.ggml.bos_token_id"]
        backend.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, bos_id)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:300] or type(error).__name__
