"""`SpeculativeConfig`: what `--speculative-config` resolves to, or one line that says why it does not. No torch here.

The keys and their bounds stand in `spec/keys.py`, the reading of text in `spec/source.py`; here are the rules between
keys and how flat keys, lists of methods and objects in them become one `MethodConfig` a proposer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from forerun.spec.batch_table import Table, clamp
from forerun.spec.detect import suggested_method
from forerun.spec.keys import (
    KEYS,
    METHOD_ALIASES,
    METHODS,
    NOT_METHODS,
    SERVED_METHODS,
    Key,
    Status,
    keys_of,
)
from forerun.spec.method_rules import check_rules, complete_rule, fill_defaults, rule_keys
from forerun.spec.refusal import did_you_mean, quoted, refuse, show, within
from forerun.spec.rules import LOSSLESS, NO, NOTICES, acceptance_rates
from forerun.spec.source import EXAMPLE, read_object
from forerun.spec.spec_tree import SpecTree

SHORTHANDS = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}
MAX_METHODS = 8

# A dotted path as vLLM reads one: two or more identifiers, no slash and no scheme.
_DOTTED_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_OF_ATTRIBUTE = {key.attribute: key for key in KEYS.values()}


def _default(name: str) -> Any:
    return KEYS[name].default


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """One proposer: every value is resolved, and one that is served, whichever way the object was made.

    A value of another method's key stays at its default.

    Attributes:
        method: one of the served methods.
        num_speculative_tokens: K, most tokens drafted for a request in a step. None: the checkpoint's own, until
            `heads.complete` has read it (eagle, eagle3; never with a spec_tree). `max_draft_tokens` is K once it is
            known.
        prompt_lookup_min, prompt_lookup_max: length of the n-gram that is looked up (ngram).
        suffix_decoding_max_tree_depth: longest path in the tree, tokens (suffix).
        suffix_decoding_max_spec_factor: a match of m tokens drafts at most m times this many (suffix).
        suffix_decoding_min_token_prob: a draft ends where its estimated probability falls below this (suffix).
        suffix_decoding_max_cached_requests: finished answers that drafts may copy from (suffix).
        suffix_decoding_max_cached_bytes: most memory for them (suffix).
        ngram_mod_n_match: tokens of an n-gram (ngram_mod).
        ngram_mod_n_min: shorter drafts are dropped (ngram_mod).
        ngram_mod_pool_bytes: size of the pool (ngram_mod).
        model, revision: the draft's directory, GGUF file or hub id, and the revision there (draft_model, eagle,
            eagle3, as all that follow without a method).
        quantization: "int8", or None: as stored.
        kv_cache_dtype: of the draft's cache; None: the target's (draft_model).
        max_model_len: longest context of the draft, tokens; None: what its checkpoint says (draft_model).
        draft_sample_method: "greedy", "coupled" or "probabilistic".
        draft_min_prob: a draft ends where the draft's own probability falls below this.
        parallel_drafting: one pass drafts all K tokens (draft_model, eagle3).
        use_heterogeneous_vocab: the draft may have another tokenizer (draft_model).
        min_draft_tokens: drafts of fewer tokens are not verified; the key is `draft_min_tokens`.
        draft_lm_head_quantization: "fp8" or "nvfp4", without an effect yet (eagle, eagle3).
        spec_tree: the tree that is drafted; None: a chain (eagle, eagle3).

    Raises:
        ConfigError: a value that is wrong, not served or of another method, or values that contradict each other.
    """

    method: str
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int = _default("prompt_lookup_min")
    prompt_lookup_max: int = _default("prompt_lookup_max")
    suffix_decoding_max_tree_depth: int = _default("suffix_decoding_max_tree_depth")
    suffix_decoding_max_spec_factor: float = _default("suffix_decoding_max_spec_factor")
    suffix_decoding_min_token_prob: float = _default("suffix_decoding_min_token_prob")
    suffix_decoding_max_cached_requests: int = _default("suffix_decoding_max_cached_requests")
    suffix_decoding_max_cached_bytes: int = _default("suffix_decoding_max_cached_bytes")
    ngram_mod_n_match: int = _default("ngram_mod_n_match")
    ngram_mod_n_min: int = _default("ngram_mod_n_min")
    ngram_mod_pool_bytes: int = _default("ngram_mod_pool_bytes")
    model: str | None = None
    revision: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    max_model_len: int | None = None
    draft_sample_method: str = _default("draft_sample_method")
    draft_min_prob: float = _default("draft_min_prob")
    parallel_drafting: bool = _default("parallel_drafting")
    use_heterogeneous_vocab: bool = _default("use_heterogeneous_vocab")
    min_draft_tokens: int = _default("draft_min_tokens")
    draft_lm_head_quantization: str | None = None
    spec_tree: SpecTree | None = None

    def __post_init__(self) -> None:
        if self.method not in SERVED_METHODS:
            refuse(f"method={show(self.method)} is not served; served: {quoted(SERVED_METHODS)}")
        for f in fields(self):
            key, value = _OF_ATTRIBUTE[f.name], getattr(self, f.name)
            if key.belongs_to(self.method):
                if value is not None:
                    object.__setattr__(self, f.name, key.check(value))
            elif f.name != "method" and value != f.default:
                _refuse_foreign(key, value, [self.method])
        if self.kv_cache_dtype == "auto":
            object.__setattr__(self, "kv_cache_dtype", None)
        if self.spec_tree is not None and self.num_speculative_tokens is None:
            object.__setattr__(self, "num_speculative_tokens", self.spec_tree.num_draft_tokens)
        check_rules(self)

    @property
    def max_draft_tokens(self) -> int:
        """K, once it is known."""
        assert self.num_speculative_tokens is not None, "complete() must come first"
        return self.num_speculative_tokens

    def resolved(self) -> dict[str, Any]:
        """Every key that has an effect, as JSON values; without K where it is not known yet."""
        values: dict[str, Any] = {"method": self.method}
        for key in keys_of(self.method):
            value = None if key.no_effect else getattr(self, key.attribute)
            if value is not None:
                values[key.name] = value.as_json() if isinstance(value, SpecTree) else value
        return values


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How to draft, resolved.

    Make one with `parse`. `resolved` gives it back as a dict, and `parse` of that gives an equal object.

    Attributes:
        methods: the proposers in the order in which they are asked: a request takes the first draft that is not empty.
        rejection_sample_method: "match", or where a draft is probabilistic "standard" or "block"; or a lossy one.
        num_speculative_tokens_per_batch_size: ranges (start, end, K) of the number of decoding requests, without gaps;
            beyond the last the last K holds. (): K whatever the number.
        fly_window_size, fly_entropy_threshold, fly_entropy_top_k: see `FlyVerifier`; None under another rule, and the
            window until K is known.
        synthetic_acceptance_rates, synthetic_acceptance_length: the one that was given; None under another rule.
        warnings: what the user should know about how it was resolved; not part of equality.

    Raises:
        ConfigError: a value that is wrong or not served, or values that contradict each other.
    """

    methods: tuple[MethodConfig, ...]
    rejection_sample_method: str
    num_speculative_tokens_per_batch_size: Table = ()
    fly_window_size: int | None = None
    fly_entropy_threshold: float | None = None
    fly_entropy_top_k: int | None = None
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None
    warnings: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not 1 <= len(self.methods) <= MAX_METHODS:
            refuse(f"method must name 1 to {MAX_METHODS} methods, got {len(self.methods)}")
        for place, member in enumerate(self.methods):
            if member in self.methods[:place]:
                first = self.methods.index(member)
                refuse(f"method[{place}] is the same as method[{first}], {show(member.resolved())}: leave one out")
        rule = KEYS["rejection_sample_method"].check(self.rejection_sample_method)
        object.__setattr__(self, "rejection_sample_method", self._rule(rule))
        complete_rule(self)
        if self.num_speculative_tokens_per_batch_size:
            table = KEYS["num_speculative_tokens_per_batch_size"].check(self.num_speculative_tokens_per_batch_size)
            warnings: list[str] = []
            if self.is_complete:
                table, warnings = clamp(table, self.num_speculative_tokens)
            object.__setattr__(self, "num_speculative_tokens_per_batch_size", table)
            object.__setattr__(self, "warnings", (*self.warnings, *warnings))

    def _rule(self, rule: str) -> str:
        if LOSSLESS[rule] == NO:
            return rule
        probabilistic = any(member.draft_sample_method == "probabilistic" for member in self.methods)
        if rule == "match" and probabilistic:
            refuse(
                'rejection_sample_method="match" does not go with draft_sample_method="probabilistic", whose drafts it '
                'cannot judge: give "standard" or "block", or draft_sample_method="coupled"'
            )
        # One-hot drafts: all three accept the same, and match keeps the text
        return rule if probabilistic else "match"

    @property
    def is_complete(self) -> bool:
        """Whether K of all methods is known; if not, `heads.complete` reads it from the checkpoints."""
        return all(member.num_speculative_tokens is not None for member in self.methods)

    @property
    def num_speculative_tokens(self) -> int:
        """K: the largest of the methods', once it is known."""
        return max(member.max_draft_tokens for member in self.methods)

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """Of the rule `synthetic`: chances that the first 1, 2, ... K drafted tokens all stand."""
        if self.synthetic_acceptance_length is not None:
            return acceptance_rates(self.synthetic_acceptance_length, self.num_speculative_tokens)
        return self.synthetic_acceptance_rates or ()

    @property
    def method_names(self) -> tuple[str, ...]:
        """The methods' names in their order, each once."""
        return tuple(dict.fromkeys(member.method for member in self.methods))

    @classmethod
    def parse(
        cls,
        source: str | Mapping[str, Any] | SpeculativeConfig | None,
        *,
        spec_method: str | None = None,
        spec_model: str | None = None,
        spec_tokens: int | None = None,
    ) -> SpeculativeConfig:
        """Read, check and resolve a configuration.

        Args:
            source: JSON text; `@FILE`, or a name that ends in `.json`, of a file that holds it; or the object itself.
                `-` in the name of a key reads as `_`; null reads as not given.
            spec_method, spec_model, spec_tokens: shorthands for the keys `method`, `model` and
                `num_speculative_tokens`; each excludes the key in `source`.
        Raises:
            ConfigError: one line that names the key, the value, the allowed range or the position in the text, and
                the nearest valid name where something looks like a typo.
        """
        if isinstance(source, SpeculativeConfig):
            source = source.resolved()
        given = known_keys(read_object({} if source is None else source))
        for flag, value in (
            ("--spec-method", spec_method),
            ("--spec-model", spec_model),
            ("--spec-tokens", spec_tokens),
        ):
            add_shorthand(given, flag, value)
        return _resolve(given)

    def resolved(self) -> dict[str, Any]:
        """Every key that has an effect, as JSON values; `parse` reads it back."""
        members = [member.resolved() for member in self.methods]
        whole: dict[str, Any] = {"rejection_sample_method": self.rejection_sample_method}
        for name in rule_keys(self.rejection_sample_method):
            if (value := getattr(self, name)) is not None:
                whole[name] = list(value) if isinstance(value, tuple) else value
        if table := self.num_speculative_tokens_per_batch_size:
            whole["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in table]
        return (members[0] if len(members) == 1 else {"method": members}) | whole

    def to_json(self) -> str:
        """`resolved` as one line, for logs."""
        return json.dumps(self.resolved())


# -- from known keys to an object


@dataclass
class _Member:
    """One method as it was given: where it stands ("" alone), its name, its own keys."""

    place: str
    method: str
    own: dict[str, Any]


def _resolve(given: dict[str, Any]) -> SpeculativeConfig:
    warnings: list[str] = []
    flat = {name: value for name, value in given.items() if not KEYS[name].whole}
    members = _members(given.get("method"), flat, warnings)
    names = list(dict.fromkeys(member.method for member in members))
    for name, value in flat.items():
        _check_owner(KEYS[name], value, names)
        # Checked here too, so that a value is named as it was given, before another key takes its default from it.
        flat[name] = KEYS[name].check(value)
    whole = {name: value for name, value in given.items() if KEYS[name].whole and name != "method"}
    for name, value in whole.items():
        _check_served(KEYS[name], value, names)
        whole[name] = KEYS[name].check(value)
    methods = []
    for member in members:
        said: list[str] = []
        with within(member.place):
            methods.append(_method_config(member, flat, said))
        warnings += [f"{member.place}: {warning}" if member.place else warning for warning in said]
    if "rejection_sample_method" not in whole:
        whole["rejection_sample_method"] = _default_rule(methods, warnings)
    if (notice := NOTICES.get(whole["rejection_sample_method"])) is not None:
        warnings.append(notice)
    return SpeculativeConfig(methods=tuple(methods), warnings=tuple(warnings), **whole)


def _members(method: object, flat: Mapping[str, Any], warnings: list[str]) -> list[_Member]:
    """What `method` names: a word, or a list of words and objects; nothing leaves it to the model."""
    if not isinstance(method, list | tuple):
        return [_Member("", _resolve_method(method, flat.get("model"), warnings), {})]
    if not 1 <= len(method) <= MAX_METHODS:
        refuse(f"method={show(method)} must name 1 to {MAX_METHODS} methods; served: {quoted(SERVED_METHODS)}")
    members = []
    for place, entry in enumerate(method):
        with within(f"method[{place}]"):
            own = known_keys(entry) if isinstance(entry, Mapping) else {"method": entry}
            name = _resolve_method(own.pop("method", None), own.get("model", flat.get("model")), warnings)
            for key, value in own.items():
                if KEYS[key].whole:
                    refuse(f'{key}={show(value)} holds for all methods: write it beside "method"')
                _check_owner(KEYS[key], value, [name])
            members.append(_Member(f"method[{place}]", name, own))
    return members


def _method_config(member: _Member, flat: dict[str, Any], warnings: list[str]) -> MethodConfig:
    """A member's own keys over the flat ones that belong to it, with its method's defaults."""
    values = {name: value for name, value in (flat | member.own).items() if KEYS[name].belongs_to(member.method)}
    values = {KEYS[name].attribute: KEYS[name].check(value) for name, value in values.items()}
    values = {name: value for name, value in values.items() if not _OF_ATTRIBUTE[name].no_effect}
    fill_defaults(member.method, values, warnings)
    if (model := values.get("model")) is not None:
        _warn_of_name(member.method, model, warnings)
    return MethodConfig(method=member.method, **values)


def _default_rule(methods: Sequence[MethodConfig], warnings: list[str]) -> str:
    if all(method.draft_sample_method != "probabilistic" for method in methods):
        return "match"
    warnings.append(
        'draft_sample_method "probabilistic": rejection_sample_method "standard" is taken, which keeps the '
        "distribution of the text and not the text: a seed may give another one than without drafts"
    )
    return "standard"


# -- which method


def _resolve_method(method: object, model: object, warnings: list[str]) -> str:
    """The served method that `method`, or else `model`, names."""
    if method is None:
        return _method_of_model(model)
    name = _method_name(method)
    if name != method:
        if METHODS[name].status is not Status.SERVED:
            refuse(f'method={show(method)} means "{name}", which {unserved(name)}')
        warnings.append(f'method "{method}" is called "{name}" here')
    if METHODS[name].status is not Status.SERVED:
        refuse(f'method="{name}" {unserved(name)}')
    return name


def unserved(name: str) -> str:
    """Why a method is not served, to follow its name."""
    method = METHODS[name]
    yet = " yet" if method.status is Status.NOT_YET else ""
    return f"is not served{yet} ({method.why}); served: {quoted(SERVED_METHODS)}"


def _method_name(word: object) -> str:
    """A word, possibly an alias, as the name of a method that is known."""
    if not isinstance(word, str):
        refuse(f"method must be a string, one of {quoted(SERVED_METHODS)}, or a list of them, got {show(word)}")
    if word in METHODS:
        return word
    if word in METHOD_ALIASES:
        return METHOD_ALIASES[word]
    if word in NOT_METHODS:
        refuse(f"method={show(word)} is not served: {NOT_METHODS[word]}; served: {quoted(SERVED_METHODS)}")
    if "," in word:
        refuse(f'method={show(word)} is no method: write a list of them, such as ["suffix", "ngram"]')
    hint = did_you_mean(word, (*METHODS, *METHOD_ALIASES))
    refuse(f"method={show(word)} is unknown; served: {quoted(SERVED_METHODS)}{hint or '; known: ' + quoted(METHODS)}")


def _method_of_model(model: object) -> str:
    if model is None:
        refuse(f"method is missing; served: {quoted(SERVED_METHODS)}; for example {EXAMPLE}")
    if not isinstance(model, str):
        refuse(f"model must be a string, got {show(model)}")
    if model in ("ngram", "[ngram]"):
        return "ngram"
    if model in METHODS:
        refuse(f'model={show(model)} is the name of a method: use "method": "{model}"')
    if _DOTTED_PATH.fullmatch(model) and not model.endswith((".gguf", ".safetensors")):
        refuse(f'model={show(model)} without a method means "custom_class", which {unserved("custom_class")}')
    method, reason = suggested_method(model) or ("draft_model", "")
    if METHODS[method].status is not Status.SERVED:
        refuse(f'model={show(model)} without a method means "{method}" (by {reason}), which {unserved(method)}')
    return method


def _warn_of_name(method: str, model: str, warnings: list[str]) -> None:
    """A method that is given stays, whatever the model's name says."""
    suggested, reason = suggested_method(model) or (method, "")
    if suggested != method:
        warnings.append(f'method "{method}" is kept for model {show(model)}, though {reason} suggests "{suggested}"')


# -- which key goes where


def _takes(methods: Sequence[str]) -> str:
    """What would be taken instead, for a message."""
    if len(methods) > 1:
        return f"method {quoted(methods)}: `forerun config` lists what each takes"
    own = [key.name for key in keys_of(methods[0]) if not key.no_effect]
    whole = [key.name for key in KEYS.values() if key.whole and key.status is Status.SERVED and key.name != "method"]
    return f'method "{methods[0]}" takes {", ".join(own + whole)}'


def _refuse_foreign(key: Key, value: object, methods: Sequence[str]) -> NoReturn:
    yet = "" if key.status is Status.SERVED else " and is not served yet"
    refuse(f"{key.name}={show(value)} belongs to {quoted(key.methods)}{yet}; {_takes(methods)}")


def _check_owner(key: Key, value: object, methods: Sequence[str]) -> None:
    """A key must belong to one of the methods, or say what holds for them anyway."""
    if not any(key.belongs_to(method) for method in methods):
        if key.name == "model":
            _check_word(value, methods)
        elif value not in key.elsewhere:
            _refuse_foreign(key, value, methods)
    _check_served(key, value, methods)


def _check_served(key: Key, value: object, methods: Sequence[str]) -> None:
    if key.status is Status.NOT_YET:
        refuse(f"{key.name}={show(value)} is not served yet ({key.why}); {_takes(methods)}")


def _check_word(model: object, methods: Sequence[str]) -> None:
    """vLLM takes the method's own word as `model` where nothing is loaded."""
    if not isinstance(model, str):
        refuse(f"model must be a string, got {show(model)}")
    if model not in methods and not (model == "[ngram]" and "ngram" in methods):
        refuse(
            f"model={show(model)} does not go with method {quoted(methods)}, which drafts without a model: leave it out"
        )


def known_keys(given: Mapping[Any, Any]) -> dict[str, Any]:
    """The object with `-` in names read as `_` and without nulls.

    Raises:
        ConfigError: a key that is unknown, given twice, or never served.
    """
    known: dict[str, Any] = {}
    for name, value in given.items():
        if not isinstance(name, str):
            refuse(f"a key must be a string, got {show(name)}")
        key = KEYS.get(name.replace("-", "_"))
        if key is None:
            hint = did_you_mean(name, (k.name for k in KEYS.values() if k.status is not Status.NEVER))
            if (flag := "--" + name.replace("_", "-")) in SHORTHANDS:
                hint = f'; did you mean "{SHORTHANDS[flag]}"?'
            refuse(f"unknown key {show(name)} (value {show(value)}){hint or '; `forerun config` lists the keys'}")
        if key.name in known:
            refuse(f"the key {key.name} is given twice: {show(known[key.name])} and {show(value)}")
        if key.status is Status.NEVER and value is not None:
            refuse(f"{key.name}={show(value)} is not served: {key.why}")
        known[key.name] = value
    return {name: value for name, value in known.items() if value is not None}


def add_shorthand(given: dict[str, Any], flag: str, value: object, key: str = "") -> None:
    """Put a flag's value into the object, under the flag's own key unless another is named; None: not given.

    Raises:
        ConfigError: the key is there already.
    """
    key = key or SHORTHANDS[flag]
    if value is None:
        return
    if key in given:
        refuse(f"{flag} {show(value)} and {key}={show(given[key])} are mutually exclusive: give one of them")
    given[key] = value
