"""The table of every method and key of `--speculative-config`: what each means and whether it is served.

The only source: `spec/config.py` validates by it, `forerun config`, its JSON schema and docs/speculative-config.md are
rendered from it. Not for rules between keys (those are in `spec/config.py`). No torch here.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.spec.batch_table import read_table
from forerun.spec.refusal import did_you_mean, quoted, refuse, show
from forerun.spec.rules import read_rates
from forerun.spec.spec_tree import BOUNDS as TREE_BOUNDS
from forerun.spec.spec_tree import KEY as TREE_KEY
from forerun.spec.spec_tree import MAX_TOKENS, read_tree

# Of a path in a suffix tree. Text of one token over and over, which any client can send, costs time in proportion:
# 18-35 us a token at 128 (130-260 us at 1024, and 6-10 ms a proposal), see benchmarks/proposers.py.
MAX_TREE_DEPTH = 128


class Status(enum.StrEnum):
    SERVED = "served"
    NOT_YET = "not yet"  # known, refused by name until its part is there
    NEVER = "never"  # refused by name, with the reason


@dataclass(frozen=True)
class Method:
    """A value of `method`. `why` says what a method that is not served waits for, or why it never will be."""

    name: str
    meaning: str
    weights: str  # what is loaded for it
    status: Status = Status.NOT_YET
    why: str = ""


@dataclass(frozen=True)
class Choice:
    """One of the words that a key takes."""

    value: str
    meaning: str
    status: Status = Status.NOT_YET


@dataclass(frozen=True)
class Key:
    """A key: what it takes and what it does.

    Attributes:
        type: the JSON type, "string or array" for `method`.
        default: the value where none is given; None: there is none, or `default_text` says where it comes from.
        minimum, maximum: bounds, both inclusive.
        choices: the words it takes; on a number, words beside it.
        methods: those it belongs to; () for all.
        rules: the rejection_sample_methods it belongs to; () for all.
        whole: it is said once for the whole configuration, not for one of several methods.
        elsewhere: values that are also taken by methods it does not belong to, as they say what holds there anyway.
        no_effect: what is served of it changes nothing: it is checked and not kept.
        why: what a key that is not served waits for, or why it never will be.
        partly: on a key that is served: what of it is not.
        served_values: the only values that are served; () for all within the bounds.
        read: reads and checks a value, where type and bounds do not say all.
        entries: of an object: its keys, all of them whole numbers and required, with their bounds.
    """

    name: str
    type: str
    meaning: str
    default: Any = None
    default_text: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[Choice, ...] = ()
    methods: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    whole: bool = False
    elsewhere: tuple[str, ...] = ()
    no_effect: bool = False
    status: Status = Status.NOT_YET
    why: str = ""
    partly: str = ""
    served_values: tuple[str | int, ...] = ()
    read: Callable[[object], Any] | None = None
    entries: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)

    @property
    def attribute(self) -> str:
        """Its name in `MethodConfig` or `SpeculativeConfig`."""
        return "min_draft_tokens" if self.name == "draft_min_tokens" else self.name

    def belongs_to(self, method: str) -> bool:
        return not self.whole and (not self.methods or method in self.methods)

    @property
    def bounds(self) -> str:
        """The allowed range in words; "" where there is none."""
        if self.type in ("integer", "number"):
            if self.minimum is None:
                return ""
            return f">= {self.minimum}" if self.maximum is None else f"{self.minimum} to {self.maximum}"
        if self.entries:
            return ", ".join(f"{name} {low} to {high}" for name, (low, high) in self.entries.items())
        return ", ".join(choice.value for choice in self.choices if choice.status is not Status.NEVER)

    @property
    def remark(self) -> str:
        """What of it is not served, or why none of it is; "" where all is."""
        if self.status is not Status.SERVED or self.partly:
            return self.partly or self.why
        later = [choice.value for choice in self.choices if choice.status is Status.NOT_YET]
        return f"not served yet: {', '.join(later)}" if later else ""

    @property
    def expected(self) -> str:
        """What a value must be, for a message."""
        article = "an" if self.type[0] in "aeiou" else "a"
        return f"{article} {self.type}" + (f" ({self.bounds})" if self.bounds else "")

    def check(self, value: object) -> Any:
        """The value as the engine reads it: an int for a number becomes a float.

        Raises:
            ConfigError: a wrong type, a value out of range, a word that is unknown or not served.
        """
        checked = self._check_type(value)
        if self.served_values and checked not in self.served_values:
            served = " or ".join(map(show, self.served_values))
            refuse(f"{self.name}={show(value)} is not served yet ({self.why}): leave it out or give {served}")
        return checked

    def _check_type(self, value: object) -> Any:
        if self.read is not None:
            return self.read(value)
        if isinstance(value, str) and self.choices:
            return self._check_choice(value)
        if self.type == "boolean" and isinstance(value, bool):
            return value
        if self.type == "integer" and isinstance(value, int) and not isinstance(value, bool):
            return self._check_range(int(value), value)
        if self.type == "number" and isinstance(value, int | float) and not isinstance(value, bool):
            return self._check_range(as_float(value), value)
        if self.type == "string" and isinstance(value, str) and not self.choices:
            return value
        refuse(f"{self.name} must be {self.expected}, got {show(value)}")

    def _check_range(self, number: Any, given: object) -> Any:
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.maximum is None else self.maximum
        if not (low <= number <= high) or (isinstance(number, float) and not math.isfinite(number)):
            refuse(f"{self.name} must be {self.expected}, got {show(given)}")
        return number

    def _check_choice(self, word: str) -> str:
        choice = next((c for c in self.choices if c.value == word), None)
        if choice is None:
            hint = did_you_mean(word, [c.value for c in self.choices if c.status is not Status.NEVER])
            refuse(f"{self.name} must be {self.expected}, got {show(word)}{hint}")
        if choice.status is Status.NEVER:
            refuse(f"{self.name}={show(word)} is not served: {choice.meaning}")
        if choice.status is Status.NOT_YET:
            served = [c.value for c in self.choices if c.status is Status.SERVED]
            instead = f"; served: {quoted(served)}" if served else f"; give {self.expected}"
            refuse(f"{self.name}={show(word)} is not served yet{instead}")
        return choice.value


def as_float(number: float) -> float:
    """Ints beyond a float's range become infinite, which no key takes."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


_HEADS = ("eagle", "eagle3", "mtp", "dflash", "dspark")
_MODELS = ("draft_model", *_HEADS)
_NEEDS_HEAD = "heads of this kind cannot be loaded yet"

_METHODS = (
    Method(
        "ngram",
        "Prompt lookup: find the last tokens of the request earlier in it and copy what followed.",
        "none",
        Status.SERVED,
    ),
    Method(
        "suffix",
        "Suffix tree over the request's own tokens, and over earlier answers where asked for; draft length follows the "
        "length of the match and its counts.",
        "none",
        Status.SERVED,
    ),
    Method(
        "ngram_mod",
        "Hash pool from n-grams to the token that followed; constant memory and time (llama.cpp's ngram-mod).",
        "none",
        Status.SERVED,
    ),
    Method(
        "draft_model",
        "A smaller language model drafts; with parallel_drafting, a PARD model.",
        "a model",
        Status.SERVED,
    ),
    Method(
        "grammar",
        "Tokens that a request's grammar forces are drafted for free.",
        "none",
        why="structured output is not there yet",
    ),
    Method(
        "eagle",
        "EAGLE-1/2 head on the target's last hidden state.",
        "a head",
        Status.SERVED,
    ),
    Method(
        "eagle3",
        "EAGLE-3 head on several hidden states of the target; with parallel_drafting, P-EAGLE.",
        "a head",
        Status.SERVED,
    ),
    Method(
        "mtp",
        "Multi-token-prediction layers of the target's checkpoint, or an assistant.",
        "the target's, or a head",
        why=_NEEDS_HEAD,
    ),
    Method(
        "dflash",
        "Block-diffusion drafter: one pass fills a block of mask tokens.",
        "a head",
        why=_NEEDS_HEAD,
    ),
    Method(
        "dspark",
        "DFlash-like backbone, then a sequential Markov head.",
        "a head, or the target's",
        why=_NEEDS_HEAD,
    ),
    Method(
        "custom_class",
        "A user's class, named by a dotted path.",
        "the user's",
        Status.NEVER,
        "it would run code that a configuration names",
    ),
    Method(
        "extract_hidden_states",
        "Stores the target's hidden states through the KV-cache path.",
        "none",
        Status.NEVER,
        "it is not speculation: it drafts nothing",
    ),
)
METHODS = {method.name: method for method in _METHODS}
SERVED_METHODS = tuple(method.name for method in _METHODS if method.status is Status.SERVED)

MTP_ALIASES = (
    "deepseek_mtp",
    "dots3_note_mtp",
    "mimo_mtp",
    "mimo_v2_mtp",
    "glm4_moe_mtp",
    "glm4_moe_lite_mtp",
    "glm_ocr_mtp",
    "ernie_mtp",
    "nemotron_h_mtp",
    "exaone_moe_mtp",
    "exaone4_5_mtp",
    "qwen3_next_mtp",
    "qwen4_exp_mtp",
    "qwen3_5_mtp",
    "longcat_flash_mtp",
    "bailing_hybrid_mtp",
    "bailing_hybrid_v3_mtp",
    "minimax_m3_mtp",
    "kimi_k3_mtp",
    "pangu_ultra_moe_mtp",
    "step3p5_mtp",
    "step5_mtp",
    "hy_v3_mtp",
    "hy_v4_mtp",
    "gemma4_mtp",
    "inkling_mtp",
    "glm5_next_mtp",
)
METHOD_ALIASES = {"ngram_gpu": "ngram"} | dict.fromkeys(MTP_ALIASES, "mtp")

_METHOD_GONE = 'removed (vLLM dropped it too): use "eagle3", "mtp" or "draft_model" with a checkpoint of that kind'

# Words that users try and that are no methods here, with what to write.
NOT_METHODS = {
    "medusa": _METHOD_GONE,
    "mlp_speculator": _METHOD_GONE,
    "pard": 'use "draft_model" with "parallel_drafting": true',
    "peagle": 'use "eagle3" with "parallel_drafting": true',
    "dflash2": 'use "dflash": the checkpoint says the rest',
    "xpress": 'use "dflash": the checkpoint says the rest',
    "lilicorr": 'use "dflash": the checkpoint says the rest',
    "none": "leave the speculative configuration out to decode without drafts",
    "[ngram]": 'that is a value of "model": use "method": "ngram"',
    "draft-simple": 'llama.cpp\'s name for "draft_model"',
    "draft-eagle3": 'llama.cpp\'s name for "eagle3"',
    "draft-mtp": 'llama.cpp\'s name for "mtp"',
    "draft-dflash": 'llama.cpp\'s name for "dflash"',
    "draft-dspark": 'llama.cpp\'s name for "dspark"',
    "ngram-simple": 'llama.cpp\'s name for "ngram" with prompt_lookup_min = prompt_lookup_max = n',
    "ngram-mod": 'llama.cpp\'s name for "ngram_mod"',
    "ngram-map-k": 'use "suffix", which covers it',
    "ngram-map-k4v": 'use "suffix", which covers it',
    "ngram-cache": 'use "suffix", which covers it',
}

_NEEDS_PARALLEL = "tensor parallel is not there yet"
_BY_ENGINE = "the engine derives it from the target and from the draft's checkpoint"
_LOSSY_GONE = 'removed from vLLM; what accepts more, at the cost of the text, is rejection_sample_method "fly"'


def _common_keys() -> Iterable[Key]:
    yield Key(
        "method",
        "string or array",
        "How to draft. A list asks several methods in order: the first draft that is not empty is taken.",
        default_text="from model",
        choices=tuple(Choice(method.name, method.meaning, method.status) for method in _METHODS),
        whole=True,
        status=Status.SERVED,
    )
    yield Key(
        "model",
        "string",
        "The draft model or head: a directory, a GGUF file or a hub id. `ngram` and `[ngram]` mean that method.",
        default_text="draft_model, eagle, eagle3: required",
        methods=_MODELS,
        status=Status.SERVED,
    )
    yield Key(
        "num_speculative_tokens",
        "integer",
        "K: most tokens drafted for a request in a step.",
        default_text="suffix: the tree depth; ngram_mod: 64; eagle, eagle3: num_draft_tokens of spec_tree, else the "
        "checkpoint's own; ngram, draft_model: required",
        minimum=1,
        maximum=MAX_TOKENS,
        choices=(Choice("auto", "as far as it pays"),),
        status=Status.SERVED,
    )
    yield Key(
        "num_speculative_tokens_per_batch_size",
        "array",
        "Ranges [start, end, K] of the number of decoding requests, each with its own K; K = 0 drafts nothing.",
        default_text="none",
        whole=True,
        status=Status.SERVED,
        read=read_table,
    )
    yield Key(
        "rejection_sample_method",
        "string",
        "The rule that decides which drafted tokens stand.",
        default="match",
        default_text="match; standard where a draft is probabilistic",
        choices=(
            Choice("match", "same seed, same text as without drafts", Status.SERVED),
            Choice(
                "standard",
                "accept / residual: same distribution; without probabilistic drafts it is `match`",
                Status.SERVED,
            ),
            Choice(
                "block",
                "block verification: same distribution, never fewer tokens than `standard`; without probabilistic "
                "drafts it is `match`",
                Status.SERVED,
            ),
            Choice(
                "fly",
                "LOSSY: where the target was unsure, a drafted token stands if the tokens after it do (entropy-gated "
                "deferral)",
                Status.SERVED,
            ),
            Choice("synthetic", "for benchmarks only: accepts by chance, the text is not the target's", Status.SERVED),
            Choice("strict", 'removed from vLLM: use "standard" with draft_sample_method "greedy"', Status.NEVER),
            Choice(
                "probabilistic",
                'removed from vLLM: use "standard" with draft_sample_method "probabilistic"',
                Status.NEVER,
            ),
            Choice("rejection_sampler", 'removed from vLLM: use "standard"', Status.NEVER),
            Choice("typical_acceptance_sampler", _LOSSY_GONE, Status.NEVER),
        ),
        whole=True,
        status=Status.SERVED,
    )


def _history_keys() -> Iterable[Key]:
    """Of the methods that draft from tokens alone."""
    for end, which in (("min", "Fewest"), ("max", "Most")):
        yield Key(
            f"prompt_lookup_{end}",
            "integer",
            f"{which} tokens of the n-gram that is looked up; the longest match between min and max is taken.",
            default=5,
            default_text="the other end, else 5",
            minimum=1,
            maximum=MAX_TOKENS,
            methods=("ngram",),
            status=Status.SERVED,
        )
    yield Key(
        "suffix_decoding_max_tree_depth",
        "integer",
        "Longest path in the suffix tree, tokens: match and draft together. Memory grows with it, and in text that "
        "repeats a short period so does the time for each token: hence the upper bound.",
        default=24,
        minimum=1,
        maximum=MAX_TREE_DEPTH,
        methods=("suffix",),
        status=Status.SERVED,
    )
    yield Key(
        "suffix_decoding_max_spec_factor",
        "number",
        "A match of m tokens drafts at most m times this many.",
        default=1.0,
        minimum=0,
        methods=("suffix",),
        status=Status.SERVED,
    )
    yield Key(
        "suffix_decoding_min_token_prob",
        "number",
        "A draft ends where its probability, estimated by counts in the tree, falls below this.",
        default=0.1,
        minimum=0,
        maximum=1,
        methods=("suffix",),
        status=Status.SERVED,
    )
    yield Key(
        "suffix_decoding_max_cached_requests",
        "integer",
        "Finished answers that drafts may copy from; 0: only the request's own tokens. vLLM's default is 10000.",
        default=0,
        minimum=0,
        methods=("suffix",),
        status=Status.SERVED,
    )
    yield Key(
        "suffix_decoding_max_cached_bytes",
        "integer",
        "Most memory for finished answers, of all cache_salts together; about 150 bytes a token.",
        default=256 << 20,
        minimum=1 << 12,
        maximum=1 << 40,
        methods=("suffix",),
        status=Status.SERVED,
    )
    yield Key(
        "ngram_mod_n_match",
        "integer",
        "Tokens of an n-gram.",
        default=24,
        minimum=1,
        maximum=MAX_TOKENS,
        methods=("ngram_mod",),
        status=Status.SERVED,
    )
    yield Key(
        "ngram_mod_n_min",
        "integer",
        "Shorter drafts are dropped.",
        default=48,
        default_text="48, or K where that is less",
        minimum=0,
        maximum=MAX_TOKENS,
        methods=("ngram_mod",),
        status=Status.SERVED,
    )
    yield Key(
        "ngram_mod_pool_bytes",
        "integer",
        "Size of the pool, bytes.",
        default=16 << 20,
        minimum=64,
        maximum=1 << 32,
        methods=("ngram_mod",),
        status=Status.SERVED,
    )


def _model_keys() -> Iterable[Key]:
    """Of the methods that load weights."""

    def served(name: str, type: str, meaning: str, methods: tuple[str, ...] = _MODELS, **rest: Any) -> Key:
        return Key(name, type, meaning, methods=methods, status=Status.SERVED, **rest)

    yield served(
        "draft_sample_method",
        "string",
        "How a draft model draws its tokens; the drafts of methods without weights are one-hot, which is `greedy`.",
        default="greedy",
        choices=(
            Choice("greedy", "the most likely token: one-hot drafts", Status.SERVED),
            Choice("coupled", "drawn with the target's own noise: same seed, same text", Status.SERVED),
            Choice(
                "probabilistic",
                "drawn from the draft's distribution: goes with every rejection_sample_method but `match`; with "
                "`standard` and `block` same distribution, but not the same text",
                Status.SERVED,
            ),
        ),
        elsewhere=("greedy",),
    )
    yield served(
        "draft_min_prob",
        "number",
        "A draft ends where the draft model's own probability falls below this (llama.cpp's --spec-draft-p-min).",
        default=0.0,
        minimum=0,
        maximum=1,
    )
    yield served(
        "draft_min_tokens",
        "integer",
        "Shorter drafts are not verified (llama.cpp's --spec-draft-n-min).",
        default=0,
        minimum=0,
        maximum=MAX_TOKENS,
    )
    yield served(
        "parallel_drafting",
        "boolean",
        "One pass drafts all K tokens (PARD, P-EAGLE).",
        ("draft_model", "eagle3", "dflash", "dspark"),
        default=False,
    )
    yield served(
        "use_heterogeneous_vocab",
        "boolean",
        "Allow a draft model with another tokenizer; drafts are greedy then.",
        ("draft_model",),
        default=False,
    )
    yield served(
        "quantization",
        "string",
        "How the draft's weights are quantised.",
        default_text="from the checkpoint",
        choices=(Choice("int8", "8 bits a weight, made at load", Status.SERVED),),
    )
    yield served(
        "kv_cache_dtype",
        "string",
        "Type of the draft's KV cache. That of an EAGLE head lies beside the target's and has its type: `auto` only.",
        default_text="the target's",
        choices=(
            Choice("auto", "the target's", Status.SERVED),
            Choice("float32", "4 bytes a number", Status.SERVED),
            Choice("bfloat16", "2 bytes a number", Status.SERVED),
            Choice("float16", "2 bytes a number"),
            Choice("fp8", "1 byte a number"),
        ),
    )
    yield served(
        "max_model_len",
        "integer",
        "Longest context of the draft, tokens; a longer request goes on without its drafts.",
        ("draft_model",),
        default_text="the shorter of the two models",
        minimum=1,
    )
    yield served("revision", "string", "Revision of the draft's hub repository.", default_text="none")
    yield served(
        "draft_tensor_parallel_size",
        "integer",
        "Devices that share the draft: 1 or as many as share the target.",
        default_text="1",
        minimum=1,
        no_effect=True,
        why=_NEEDS_PARALLEL,
        partly=f"only 1 is served: {_NEEDS_PARALLEL}",
        served_values=(1,),
    )
    yield served(
        "draft_lm_head_quantization",
        "string",
        "Quantise the drafter's copy of the output head, which must be one that it shares with the target.",
        ("eagle", "eagle3", "mtp"),
        default_text="none",
        choices=(Choice("fp8", "8 bits", Status.SERVED), Choice("nvfp4", "4 bits", Status.SERVED)),
        partly="checked, without an effect yet: the drafter uses the target's head as it is",
    )
    yield served(
        TREE_KEY,
        "object",
        "Draft a dynamic tree (EAGLE-2) and have its best nodes verified at once. depth: passes of the head after the "
        "first, so a path has up to depth + 1 tokens; top_k: children of a node, and nodes that are expanded in a "
        "pass; num_draft_tokens: nodes that are verified, which is K. All three are required.",
        ("eagle", "eagle3"),
        default_text="none: a chain",
        read=read_tree,
        entries=TREE_BOUNDS,
    )


def _later_keys() -> Iterable[Key]:
    def later(name: str, type: str, meaning: str, why: str, methods: tuple[str, ...] = (), **rest: Any) -> Key:
        return Key(name, type, meaning, why=why, methods=methods, whole=not methods, **rest)

    yield later(
        "enable_adaptive_verification",
        "boolean",
        "Verify only those drafts that are worth their cost.",
        "drafting as far as it pays is not there yet",
        default=False,
    )
    yield later(
        "draft_load_config",
        "object",
        "How the draft's weights are loaded.",
        "the draft's files say how they are read, as the target's do",
        _MODELS,
        default_text="the target's",
    )
    yield later(
        "attention_backend",
        "string",
        "Attention of the draft.",
        "the engine picks one for target and draft alike",
        _MODELS,
        default_text="auto",
    )
    yield later(
        "use_local_argmax_reduction",
        "boolean",
        "Each device takes the argmax of its part of the vocabulary.",
        _NEEDS_PARALLEL,
        _MODELS,
        default=False,
    )
    yield later(
        "index_share_for_mtp_iteration",
        "boolean",
        "Use the sparse-attention indices of the first step again.",
        _NEEDS_HEAD,
        ("mtp",),
        default_text="from the checkpoint",
    )
    yield later(
        "dspark_draft_topk",
        "integer",
        "Candidates that get a Markov bias; up to the draft vocabulary.",
        _NEEDS_HEAD,
        ("dspark",),
        default_text="from the checkpoint",
        minimum=1,
    )
    yield later(
        "dspark_min_confidence",
        "number",
        "A draft ends where its predicted acceptance falls below this (llama.cpp's --spec-draft-conf-min).",
        _NEEDS_HEAD,
        ("dspark",),
        default=0.0,
        minimum=0,
        maximum=1,
    )
    yield later(
        "xpress_topc",
        "integer",
        "Candidates that XPress refines; 0: the whole vocabulary.",
        _NEEDS_HEAD,
        ("dflash",),
        default_text="from the checkpoint (512)",
        minimum=0,
    )


def _rule_keys() -> Iterable[Key]:
    """Of one rejection_sample_method."""

    def served(name: str, type: str, meaning: str, rule: str, **rest: Any) -> Key:
        return Key(name, type, meaning, rules=(rule,), whole=True, status=Status.SERVED, **rest)

    yield served(
        "fly_window_size",
        "integer",
        "Drafted tokens that must stand after a deferral; below K.",
        "fly",
        default_text="min(6, K - 1)",
        minimum=1,
        maximum=MAX_TOKENS - 1,
    )
    yield served("fly_entropy_threshold", "number", "Least entropy of a deferral, nats.", "fly", default=0.3, minimum=0)
    yield served(
        "fly_entropy_top_k",
        "integer",
        "Most likely tokens that the entropy is summed over.",
        "fly",
        default=3,
        minimum=1,
        maximum=1 << 20,
    )
    yield served(
        "synthetic_acceptance_rates",
        "array",
        "Entry i: chance that the first i + 1 drafted tokens all stand. K entries from 0 to 1, none above the one "
        "before.",
        "synthetic",
        default_text="none",
        read=read_rates,
    )
    yield served(
        "synthetic_acceptance_length",
        "number",
        "Mean tokens of a step with a draft of K; at most K + 1. In place of the rates.",
        "synthetic",
        default_text="none",
        minimum=1,
        maximum=MAX_TOKENS + 1,
    )


def _never_keys() -> Iterable[Key]:
    def never(name: str, why: str, type: str = "", meaning: str = "Removed from vLLM.") -> Key:
        return Key(name, type, meaning, status=Status.NEVER, why=why)

    yield never(
        "tensor_parallel_size",
        "the target's is a setting of the server, the draft's is draft_tensor_parallel_size",
        "integer",
        "Mistaken in vLLM too.",
    )
    yield never(
        "enforce_eager",
        "graphs are a setting of the whole engine, not of the draft",
        "boolean",
        "No CUDA graphs for the draft.",
    )
    yield never(
        "moe_backend",
        "the engine picks kernels by shape and device, for target and draft alike",
        "string",
        "Kernels of the draft's experts.",
    )
    yield never(
        "code_revision", "code that comes with a checkpoint is not run", "string", "Revision of the draft's code."
    )
    yield never(
        "disable_padded_drafter_batch",
        "draft batches are never padded: each request has its own length",
        "boolean",
        "No padding of the drafter's batch.",
    )
    for name in ("disable_eagle_block_drop", "disable_lookahead_block_hashes"):
        yield never(
            name,
            "blocks carry how far the draft's cache is filled: nothing is dropped and hashes need no look-ahead",
            "boolean",
            "How the last block of a prefix hit is treated.",
        )
    for name in ("target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config"):
        yield never(name, _BY_ENGINE, "object", "Filled in by vLLM's engine.")
    yield never("speculative_token_tree", "use spec_tree")
    for name in ("disable_by_batch_size", "speculative_disable_by_batch_size"):
        yield never(name, "use num_speculative_tokens_per_batch_size with K = 0")
    yield never("acceptance_method", "use rejection_sample_method")
    for name in ("posterior_threshold", "posterior_alpha", "typical_acceptance_sampler"):
        yield never(name, _LOSSY_GONE)
    yield never(
        "synthetic_acceptance_rate",
        "use synthetic_acceptance_rates or synthetic_acceptance_length",
    )


_TABLE = (*_common_keys(), *_history_keys(), *_model_keys(), *_rule_keys(), *_later_keys(), *_never_keys())
KEYS = {key.name: key for key in _TABLE}


def keys_of(method: str) -> tuple[Key, ...]:
    """The served keys that belong to a method alone, without those of the whole configuration."""
    return tuple(key for key in KEYS.values() if key.status is Status.SERVED and key.belongs_to(method))
