"""llama.cpp's flags of speculative decoding, as spellings of `--speculative-config`.

The main program passes its arguments through `translate`, which puts JSON in the place of these flags, and a note that
shows it. Names, defaults and the order of types are those of llama.cpp b11434.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.cli.speculation import value_after
from forerun.spec.refusal import did_you_mean, printable, quoted, refuse, show
from forerun.spec.source import FLAG

COMMANDS = ("serve", "generate")
NOTE_FLAG = "--spec-note"

# llama.cpp's types in the order in which it asks them, whatever their order in --spec-type; what each is here, and the
# values that it has where no flag gives others.
_DRAFT = {"num_speculative_tokens": 3}
_TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "ngram-simple": ("ngram", {"num_speculative_tokens": 48, "prompt_lookup_min": 12, "prompt_lookup_max": 12}),
    "ngram-map-k": ("suffix", {}),
    "ngram-map-k4v": ("suffix", {}),
    "ngram-mod": ("ngram_mod", {"num_speculative_tokens": 64, "ngram_mod_n_match": 24, "ngram_mod_n_min": 48}),
    "ngram-cache": ("suffix", {}),
    "draft-simple": ("draft_model", _DRAFT),
    "draft-eagle3": ("eagle3", _DRAFT),
    "draft-mtp": ("mtp", _DRAFT),
    "draft-dflash": ("dflash", _DRAFT),
    "draft-dspark": ("dspark", _DRAFT),
}
_DRAFTS = tuple(name for name in _TYPES if name.startswith("draft-"))
_MAPS = ("ngram-map-k", "ngram-map-k4v")
_COVERED = (*_MAPS, "ngram-cache")
_CACHE_TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Flag:
    """A flag of llama.cpp.

    Attributes:
        names: its spellings, old ones too.
        value: what follows it: a type, or None where nothing does.
        types: the types that it is for; () for none in particular.
        keys: what it sets.
        note: why it changes nothing here; it is accepted.
        refusal: why it is not served.
    """

    names: tuple[str, ...]
    value: type[int] | type[float] | type[str] | None = str
    types: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    note: str = ""
    refusal: str = ""


_PLACING = "the engine places target and draft itself"
_THREADS = "the draft runs on the target's threads: --num-threads"
_SYNTHETIC = "synthetic_acceptance_length", "synthetic_acceptance_rates"

FLAGS = (
    Flag(("--spec-type",)),
    Flag(("--spec-default",), None),
    Flag(("--spec-draft-model", "-md", "--model-draft"), str, _DRAFTS, ("model",)),
    Flag(("--spec-draft-hf", "-hfd", "-hfrd", "--hf-repo-draft"), str, _DRAFTS, ("model",)),
    Flag(
        ("--spec-draft-n-max", "--draft-max", "--draft-n", "--draft"), int, _DRAFTS, ("num_speculative_tokens",)
    ),
    Flag(("--spec-draft-n-min", "--draft-min", "--draft-n-min"), int, _DRAFTS, ("draft_min_tokens",)),
    Flag(("--spec-draft-p-min", "--draft-p-min"), float, _DRAFTS, ("draft_min_prob",)),
    Flag(("--spec-draft-conf-min",), float, ("draft-dspark",), ("dspark_min_confidence",)),
    Flag(("--spec-draft-sampling",), str, _DRAFTS, ("draft_sample_method",)),
    Flag(("--spec-draft-type-k", "-ctkd", "--cache-type-k-draft"), str, _DRAFTS, ("kv_cache_dtype",)),
    Flag(("--spec-draft-type-v", "-ctvd", "--cache-type-v-draft"), str, _DRAFTS, ("kv_cache_dtype",)),
    Flag(("--spec-ngram-mod-n-match",), int, ("ngram-mod",), ("ngram_mod_n_match",)),
    Flag(("--spec-ngram-mod-n-min",), int, ("ngram-mod",), ("ngram_mod_n_min",)),
    Flag(("--spec-ngram-mod-n-max",), int, ("ngram-mod",), ("num_speculative_tokens",)),
    Flag(("--spec-ngram-simple-size-n",), int, ("ngram-simple",), ("prompt_lookup_min", "prompt_lookup_max")),
    Flag(("--spec-ngram-simple-size-m",), int, ("ngram-simple",), ("num_speculative_tokens",)),
    Flag(("--spec-ngram-simple-min-hits",), int, ("ngram-simple",), note="one earlier match is enough here"),
    *(Flag((f"--spec-{name}-size-m",), int, (name,), ("num_speculative_tokens",)) for name in _MAPS),
    *(Flag((f"--spec-{name}-size-n",), int, (name,), note="suffix matches as far as it can") for name in _MAPS),
    *(Flag((f"--spec-{name}-min-hits",), int, (name,), note="suffix weighs a draft by its counts") for name in _MAPS),
    Flag(("--spec-synth-len",), float, keys=_SYNTHETIC[:1]),
    Flag(("--spec-synth-rates",), str, keys=_SYNTHETIC[1:]),
    Flag(("--spec-draft-p-split", "--draft-p-split"), float, _DRAFTS, note="only spec_tree has drafts split"),
    Flag(("--spec-draft-backend-sampling", "--no-spec-draft-backend-sampling"), None, note=_PLACING),
    Flag(("--gpu-layers", "-ngl", "--n-gpu-layers"), str, note=_PLACING),
    Flag(("--spec-draft-ngl", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft"), str, note=_PLACING),
    Flag(("--spec-draft-device", "-devd", "--device-draft"), str, note=_PLACING),
    Flag(("--spec-draft-override-tensor", "-otd", "--override-tensor-draft"), str, note=_PLACING),
    Flag(("--spec-draft-cpu-moe", "-cmoed", "--cpu-moe-draft"), None, note=_PLACING),
    Flag(("--spec-draft-n-cpu-moe", "--spec-draft-ncmoe", "-ncmoed", "--n-cpu-moe-draft"), str, note=_PLACING),
    Flag(("--spec-draft-threads", "-td", "--threads-draft"), str, note=_THREADS),
    Flag(("--spec-draft-threads-batch", "-tbd", "--threads-batch-draft"), str, note=_THREADS),
    *(
        Flag((f"--spec-draft-{part}{batch}", *short, f"--{part}{batch}-draft"), str, note=_THREADS)
        for batch, shorts in (("", ("-Cd", "-Crd")), ("-batch", ("-Cbd", "-Crbd")))
        for part, short in (
            ("cpu-mask", shorts[:1]),
            ("cpu-range", shorts[1:]),
            ("cpu-strict", ()),
            ("prio", ()),
            ("poll", ()),
        )
    ),
    Flag(("--lookup-cache-static", "-lcs"), str, refusal="n-grams are not read from files"),
    Flag(("--lookup-cache-dynamic", "-lcd"), str, refusal="n-grams are not kept in files"),
)  # fmt: skip
_BY_NAME = {name: flag for flag in FLAGS for name in flag.names}
# Ours and vLLM's, which say the same in other words.
_OTHER_WAYS = (FLAG, "-sc", "--spec-method", "--spec-model", "--spec-tokens", "--speculative-model")


@dataclass
class _Given:
    """The flags of a command line: the spelling, its value."""

    types: list[str] = field(default_factory=list)
    flags: dict[Flag, tuple[str, Any]] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)  # as they were written


def translate(arguments: Sequence[str]) -> list[str]:
    """The arguments of `serve` and `generate` with llama.cpp's flags made into one `--speculative-config` JSON, and a
    note for the log that shows it and says what has no effect. Others come back as they are, as does what follows `--`.

    Raises:
        ConfigError: a flag without its value, given twice, with a value that it does not take, or that is not served;
            another way of configuring beside them.
    """
    words = list(arguments)
    if not words or words[0] not in COMMANDS:
        return words
    end = words.index("--") if "--" in words else len(words)
    given, rest = _read(words[:end])
    if not given.words:
        return words
    notes = _notes(given)
    if (config := _config(given)) is not None:
        other = [word for word in rest if word.partition("=")[0].partition(".")[0] in _OTHER_WAYS]
        if other:
            refuse(f"{other[0]} and llama.cpp's {given.words[0]} are mutually exclusive: give one of them")
        text = json.dumps(config)
        notes.insert(0, f"{' '.join(map(printable, given.words))}: llama.cpp's spelling, read as {FLAG} '{text}'")
        rest += [FLAG, text]
    return [*rest, *(word for note in notes for word in (NOTE_FLAG, note)), *words[end:]]


def _read(words: list[str]) -> tuple[_Given, list[str]]:
    """llama.cpp's flags, and all other words."""
    given, rest = _Given(), []
    words = words[::-1]
    while words:
        word = words.pop()
        name, equals, text = word.partition("=")
        flag = _BY_NAME.get(name.replace("_", "-") if name.startswith("--") else name)
        if flag is None:
            rest.append(word)
            continue
        if flag.value is None and equals:
            refuse(f"{name} takes no value, got {show(text)}")
        if flag.value is not None and not equals:
            text = value_after(word, words)
        given.words += [word] if equals or flag.value is None else [word, text]
        if flag.refusal:
            refuse(f"{name} {show(text)} is not served: {flag.refusal}")
        if flag.names[0] == "--spec-type":
            given.types += _read_types(text)
            continue
        if flag in given.flags:
            refuse(f"{given.flags[flag][0]} and {name} are one flag, which is given twice")
        given.flags[flag] = name, _read_value(flag, name, text)
        if name == "--spec-default":
            given.types.append("ngram-mod")
    return given, rest


def _read_types(text: str) -> list[str]:
    types = [name.strip() for name in text.split(",")]
    for name in types:
        if name != "none" and name not in _TYPES:
            hint = did_you_mean(name.replace("-", "_"), [known.replace("-", "_") for known in _TYPES]).replace("_", "-")
            refuse(f"--spec-type {show(name)} is unknown; llama.cpp has none, {', '.join(_TYPES)}{hint}")
    return types


def _read_value(flag: Flag, name: str, text: str) -> Any:
    if flag.keys == ("kv_cache_dtype",):
        if text not in _CACHE_TYPES:
            refuse(f"{name} {show(text)} is not served: a draft's cache is one of {', '.join(_CACHE_TYPES)}")
        return _CACHE_TYPES[text]
    if flag.names[0] == "--spec-draft-hf" and ":" in text:
        refuse(f"{name} {show(text)}: a file of a repository is not chosen by its type: name it with -md")
    if flag.keys == _SYNTHETIC[1:]:
        return [_number(float, name, part) for part in text.split(",")]
    return text if flag.value in (None, str) or flag.note else _number(flag.value, name, text)


def _number(kind: Any, name: str, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        refuse(f"{name} takes {'an integer' if kind is int else 'a number'}, got {show(text)}")


def _chosen(given: _Given) -> list[str]:
    """The types that draft, in llama.cpp's order."""
    if "none" in given.types and set(given.types) != {"none"}:
        refuse(f"--spec-type none excludes the others, got {quoted(given.types)}")
    return [name for name in _TYPES if name in given.types]


def _is_used(flag: Flag, given: _Given) -> bool:
    """Whether the types that draft include one of the flag's; a draft's own are decided by its model where none is."""
    types = _chosen(given)
    if not given.types and _model(given) is not None:
        types = list(_DRAFTS)
    return not flag.types or any(name in flag.types for name in types)


def _model(given: _Given) -> str | None:
    named = [(name, value) for flag, (name, value) in given.flags.items() if flag.keys == ("model",)]
    if len(named) > 1:
        refuse(f"{named[0][0]} {show(named[0][1])} and {named[1][0]} {show(named[1][1])} both name a draft: give one")
    return named[0][1] if named else None


def _config(given: _Given) -> dict[str, Any] | None:
    """The JSON that the flags mean; None where nothing drafts."""
    members: dict[str, dict[str, Any]] = {}
    for name in _chosen(given):
        method, defaults = _TYPES[name]
        members[method] = {"method": method} | defaults | members.get(method, {}) | _keys(given, (name,))
    if not given.types and _model(given) is not None:
        members[""] = _DRAFT | _keys(given, _DRAFTS)  # without a method the model's name decides
    if not members:
        return None
    whole = {key: value for flag, (_, value) in given.flags.items() if not flag.types for key in flag.keys}
    if any(key in whole for key in _SYNTHETIC):
        whole["rejection_sample_method"] = "synthetic"
    (first, *others) = members.values()
    return (first if not others else {"method": [first, *others]}) | whole


def _keys(given: _Given, types: tuple[str, ...]) -> dict[str, Any]:
    """What the flags set that are for one of the types."""
    keys: dict[str, Any] = {}
    for flag, (name, value) in given.flags.items():
        for key in flag.keys if any(kind in flag.types for kind in types) else ():
            if key in keys and keys[key] != value:
                refuse(f"{name}: the draft's cache has one type for keys and values, got {keys[key]} and {value}")
            keys[key] = value
    return keys


def _notes(given: _Given) -> list[str]:
    """What is accepted without an effect, and what stands for another method."""
    notes = []
    covered = [name for name in _COVERED if name in given.types]
    if covered:
        notes.append(f"--spec-type {','.join(covered)}: suffix is taken, which finds what they find")
    for flag, (name, value) in given.flags.items():
        if flag.note:
            notes.append(f"{name} {value}".rstrip() + f" has no effect: {flag.note}")
        elif flag.keys == ("model",) and not _is_used(flag, given) and "none" not in given.types:
            refuse(f"{name} {show(value)} is used by no type of {quoted(given.types)}: add draft-simple to --spec-type")
        elif not _is_used(flag, given):
            whose = "a draft model or head" if flag.types == _DRAFTS else flag.types[0]
            notes.append(f"{name} {value} has no effect: it is for {whose}, and none drafts here")
    return notes


def flag_rows() -> list[tuple[str, str]]:
    """For the documentation: each flag with what it is here."""
    methods = {name: method for name, (method, _) in _TYPES.items()}
    rows = [("--spec-type " + name, f"`method` `{method}`") for name, method in methods.items()]
    rows.append(("--spec-type none", "no speculation"))
    rows.append(("--spec-default", "as `--spec-type ngram-mod`"))
    for flag in FLAGS[2:]:
        keys = ", ".join(f"`{key}`" for key in flag.keys)
        rows.append(
            (", ".join(flag.names), keys or (f"no effect: {flag.note}" if flag.note else f"refused: {flag.refusal}"))
        )
    return [(f"`{names.replace(', ', '`, `')}`", meaning) for names, meaning in rows]
