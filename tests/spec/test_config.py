"""`SpeculativeConfig`: what is taken, what it resolves to, and the one line that refuses the rest."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.spec.config import MAX_METHODS, MethodConfig, SpeculativeConfig
from forerun.spec.keys import KEYS, METHOD_ALIASES, METHODS, MTP_ALIASES, NOT_METHODS, SERVED_METHODS, Status, keys_of
from forerun.spec.refusal import show
from forerun.spec.schema import json_schema
from forerun.spec.source import MAX_FILE_BYTES

NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5}
SUFFIX: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": 5}
NUMBERS = [KEYS[name] for name in KEYS if KEYS[name].status is Status.SERVED and KEYS[name].minimum is not None]


def refusal(source: Any, **shorthands: Any) -> str:
    """The message, which is one printable line."""
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.parse(source, **shorthands)
    message = str(caught.value)
    assert message.isprintable()
    assert message.startswith("speculative_config: ")
    assert len(message) < 800
    return message


def base_of(name: str) -> dict[str, Any]:
    return NGRAM if not KEYS[name].methods or "ngram" in KEYS[name].methods else SUFFIX


# What is served


@pytest.mark.parametrize(
    ("source", "resolved"),
    [
        (NGRAM, {"prompt_lookup_min": 5, "prompt_lookup_max": 5}),
        (NGRAM | {"prompt_lookup_max": 3}, {"prompt_lookup_min": 3, "prompt_lookup_max": 3}),
        (NGRAM | {"prompt_lookup_min": 7}, {"prompt_lookup_min": 7, "prompt_lookup_max": 7}),
        (NGRAM | {"prompt_lookup_min": 2, "prompt_lookup_max": 4}, {"prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        (NGRAM | {"prompt-lookup-max": 3}, {"prompt_lookup_min": 3, "prompt_lookup_max": 3}),
        (NGRAM | {"model": "ngram"}, {}),
        (NGRAM | {"model": "[ngram]"}, {}),
        ({"model": "[ngram]", "num_speculative_tokens": 5}, {}),
        ({"model": "ngram", "num_speculative_tokens": 5}, {}),
        (NGRAM | {"model": None, "quantization": None, "prompt_lookup_max": None}, {}),
        (NGRAM | {"rejection_sample_method": "standard"}, {"rejection_sample_method": "match"}),
        (NGRAM | {"rejection_sample_method": "match"}, {"rejection_sample_method": "match"}),
        (NGRAM | {"draft_sample_method": "greedy"}, {}),
    ],
)
def test_ngram_resolves_to(source: dict[str, Any], resolved: dict[str, Any]) -> None:
    config = SpeculativeConfig.parse(source)
    defaults = {"prompt_lookup_min": 5, "prompt_lookup_max": 5, "rejection_sample_method": "match"}
    assert config.resolved() == NGRAM | defaults | resolved
    assert config.warnings == ()


def test_suffix_resolves_to_every_key_that_has_an_effect() -> None:
    config = SpeculativeConfig.parse(SUFFIX | {"suffix_decoding_max_spec_factor": 2, "model": "suffix"})
    assert config.resolved() == {
        "method": "suffix",
        "num_speculative_tokens": 5,
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_spec_factor": 2.0,
        "suffix_decoding_min_token_prob": 0.1,
        "suffix_decoding_max_cached_requests": 0,
        "rejection_sample_method": "match",
    }
    assert isinstance(config.suffix_decoding_max_spec_factor, float)
    assert config.warnings == ()


def test_suffix_without_k_takes_the_tree_depth_and_says_so() -> None:
    config = SpeculativeConfig.parse({"method": "suffix", "suffix_decoding_max_tree_depth": 16})
    assert config.num_speculative_tokens == 16
    [warning] = config.warnings
    assert "num_speculative_tokens" in warning
    assert "16" in warning


@pytest.mark.parametrize(
    "keys",
    [
        {"suffix_decoding_max_tree_depth": 1},
        {"suffix_decoding_max_spec_factor": 0},
        {"suffix_decoding_max_spec_factor": 0.01},
        {"num_speculative_tokens": 25},
    ],
)
def test_settings_that_bring_no_drafts_or_no_longer_ones_are_warned_of(keys: dict[str, Any]) -> None:
    [warning] = SpeculativeConfig.parse(SUFFIX | keys).warnings
    assert "suffix_decoding_max_tree_depth" in warning


def test_an_alias_is_taken_with_a_warning() -> None:
    config = SpeculativeConfig.parse(NGRAM | {"method": "ngram_gpu"})
    assert config == SpeculativeConfig.parse(NGRAM)
    assert config.warnings == ('method "ngram_gpu" is called "ngram" here',)


def test_a_configuration_survives_the_way_to_another_process() -> None:
    config = SpeculativeConfig.parse({"method": "suffix"})
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.warnings == config.warnings
    assert hash(copy) == hash(config)


def test_the_fields_are_the_served_keys_that_the_engine_reads() -> None:
    fields = {field.name for field in dataclasses.fields(SpeculativeConfig)} - {"warnings"}
    served = {key.name for key in KEYS.values() if key.status is Status.SERVED}
    assert fields == served - {"model", "draft_sample_method"}


def test_an_object_made_by_hand_is_checked_too() -> None:
    assert SpeculativeConfig(method="ngram", num_speculative_tokens=5) == SpeculativeConfig.parse(NGRAM)
    wrong: dict[str, Any] = {
        "method": "eagle3",
        "num_speculative_tokens": 0,
        "prompt_lookup_min": 6,
        "suffix_decoding_max_cached_requests": 1,
        "rejection_sample_method": "fly",
    }
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=name):
            SpeculativeConfig(**(NGRAM | {name: value}))


def test_no_torch_is_imported() -> None:
    code = "import sys, forerun.spec.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Case C26 and its kin: JSON texts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("{method: ngram}", ["character 2", "double quotes", "shell"]),
        ("{'method': 'ngram'}", ["character 2", "double quotes"]),
        ('{"method":"ngram",}', ["character 18", 'comma before "}"']),
        ('{"method":["ngram",]}', ["character 19", 'comma before "]"']),
        ('{"method":\n"ngram",\n}', ["line 2, character 8", "comma"]),
        ('{"method": "ngram"', ["character 19", "ends"]),
        ('{"method": "ngram"} {}', ["character 21"]),
        ('{\\"method\\": \\"ngram\\"}', ["character 2", "backslashes"]),
        ("[]", ["JSON object", "an array"]),
        ('"ngram"', ["JSON object", "a string", "--spec-method ngram"]),
        ("ngram", ["character 1", "--spec-method ngram"]),
        ("5", ["JSON object", "a number, 5"]),
        ("null", ["JSON object", "null"]),
        ("true", ["JSON object", "a boolean"]),
        ("", ["empty"]),
        (" \n", ["empty"]),
        ("no/such/draft.json", ['"no/such/draft.json" does not exist']),
        ("@no/such/draft", ['"no/such/draft" does not exist']),
        ("no/such/draft", ["character 1", "@FILE"]),
        ("@" + "x" * 5000, ["cannot be read"]),
        ("@.", ["is not a file"]),
        ("@\0", ["\\u0000"]),
        ("[" * 100_000, ["too large"]),
        ('{"num_speculative_tokens": ' + "9" * 5000 + "}", ["too large"]),
        ('{"method":"ngram","num_speculative_token":5}', ['"num_speculative_token"', '"num_speculative_tokens"']),
        ('{"Method":"ngram"}', ['"Method"', '"method"']),
        ('{"spec_tokens":5}', ['"num_speculative_tokens"']),
        ('{"zzzzzz":5}', ['"zzzzzz"', "forerun config"]),
        ('{"":5}', ['unknown key ""']),
        ('{"a\\nb\\u2028\\ud800":5}', ["unknown key"]),
        ('{"method":"eagel3"}', ['"eagel3"', '"eagle3"']),
        ('{"method":"Ngram"}', ['"Ngram"', 'mean "ngram"']),
        ('{"method":"qqqq"}', ['"qqqq"', "known: ", "served: "]),
        ('{"method":"ngram","method":"ngram"}', ["method", "twice"]),
        ('{"draft_load_config":{"a":1,"a":2}}', ['"a"', "twice"]),
        ('{"prompt_lookup_max":3,"prompt-lookup-max":4}', ["prompt_lookup_max", "twice", "3", "4"]),
    ],
)
def test_a_bad_text_is_refused_where_it_is_bad(text: str, parts: list[str]) -> None:
    message = refusal(text)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ({}, ["method is missing", '"ngram", "suffix"']),
        ({"method": "ngram"}, ["num_speculative_tokens is missing", "1 to 1024"]),
        (NGRAM | {"prompt_lookup_min": 6, "prompt_lookup_max": 3}, ["prompt_lookup_min=6", "prompt_lookup_max=3"]),
        (NGRAM | {"suffix_decoding_max_tree_depth": 8}, ["suffix_decoding_max_tree_depth=8", 'belongs to "suffix"']),
        (SUFFIX | {"prompt_lookup_max": 8}, ["prompt_lookup_max=8", 'belongs to "ngram"']),
        (NGRAM | {"parallel_drafting": False}, ["parallel_drafting=false", "draft_model", "not served yet"]),
        (NGRAM | {"draft_min_prob": 0.5}, ["draft_min_prob=0.5", "not served yet"]),
        (NGRAM | {"fly_window_size": 2}, ["fly_window_size=2", "not served yet"]),
        (NGRAM | {"num_speculative_tokens": "auto"}, ['num_speculative_tokens="auto"', "not served yet"]),
        (SUFFIX | {"suffix_decoding_max_cached_requests": 1}, ["cached_requests=1 ", "not served yet", "give 0"]),
        (SUFFIX | {"suffix_decoding_max_cached_requests": -1}, ["cached_requests", ">= 0", "got -1"]),
        (NGRAM | {"model": "org/model"}, ['model="org/model"', '"ngram"', "without a model"]),
        (NGRAM | {"model": 5}, ["model must be a string, got 5"]),
        ({"model": 5}, ["model must be a string, got 5"]),
        ({"model": "org/model"}, ['model="org/model"', '"draft_model"', "not served yet"]),
        ({"model": "package.module.Class"}, ['"custom_class"', "run code"]),
        ({"model": "draft.gguf"}, ['"draft_model"', "not served yet"]),
        ({"model": "suffix"}, ['"method": "suffix"']),
        ({"method": 5}, ["method must be a string", "got 5"]),
        ({"method": {"a": 1}}, ["method must be a string"]),
        ({"method": []}, ["method=[]"]),
        ({"method": ["suffix", "draft_model"]}, ['["suffix", "draft_model"]', "not served yet"]),
        ({"method": ["suffix", "eagel3"]}, ['"eagel3"', '"eagle3"']),
        ({"method": ["suffix", 3]}, ["got 3"]),
        (NGRAM | {"rejection_sample_method": "standart"}, ['"standart"', 'mean "standard"']),
        (NGRAM | {"rejection_sample_method": True}, ["rejection_sample_method", "got true"]),
        (NGRAM | {"tensor_parallel_size": 2}, ["tensor_parallel_size=2", "draft_tensor_parallel_size"]),
        ({5: 5}, ["a key must be a string, got 5"]),
        (5, ["must be a JSON object", "got 5"]),
        (["method"], ["must be a JSON object"]),
        (NGRAM | {"num_speculative_tokens": 10**5000}, ["num_speculative_tokens", "too large to show"]),
        (SUFFIX | {"suffix_decoding_max_spec_factor": 10**400}, ["suffix_decoding_max_spec_factor"]),
    ],
)
def test_a_bad_object_is_refused_by_key_and_value(source: Any, parts: list[str]) -> None:
    message = refusal(source)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("key", NUMBERS, ids=lambda key: key.name)
@pytest.mark.parametrize(
    "value",
    [True, False, "5", "", [], [5], {}, float("nan"), float("inf"), -float("inf"), object(), b"5"],
    ids=lambda value: type(value).__name__,
)
def test_a_number_takes_no_other_type(key: Any, value: object) -> None:
    message = refusal(base_of(key.name) | {key.name: value})
    assert key.name in message
    assert key.expected in message


@pytest.mark.parametrize("key", [key for key in NUMBERS if key.type == "integer"], ids=lambda key: key.name)
@pytest.mark.parametrize("value", [5.0, 0.5, 1e3])
def test_an_int_takes_no_float(key: Any, value: float) -> None:
    assert key.name in refusal(base_of(key.name) | {key.name: value})


@pytest.mark.parametrize("key", NUMBERS, ids=lambda key: key.name)
def test_every_bound_is_the_last_value_that_is_taken(key: Any) -> None:
    step = 1 if key.type == "integer" else 1e-9
    parse, base = SpeculativeConfig.parse, base_of(key.name)
    if key.name == "prompt_lookup_min":
        base = base | {"prompt_lookup_max": 1024}
    assert getattr(parse(base | {key.name: key.minimum}), key.name) == key.minimum
    message = refusal(base | {key.name: key.minimum - step})
    assert key.name in message
    assert key.bounds in message
    if key.maximum is not None:
        assert getattr(parse(base | {key.name: key.maximum}), key.name) == key.maximum
        assert key.bounds in refusal(base | {key.name: key.maximum + step})


# Every name that is known


@pytest.mark.parametrize("name", [m.name for m in METHODS.values() if m.status is not Status.SERVED])
def test_a_method_that_is_not_served_is_refused_by_name(name: str) -> None:
    message = refusal({"method": name, "model": "org/model", "num_speculative_tokens": 3})
    yet = " yet" if METHODS[name].status is Status.NOT_YET else ""
    assert f'method="{name}" is not served{yet} (' in message
    assert 'served: "ngram", "suffix"' in message


def test_all_aliases_of_mtp_are_known() -> None:
    assert len(set(MTP_ALIASES)) == 27
    for alias in MTP_ALIASES:
        assert f'method="{alias}" means "mtp", which is not served yet' in refusal({"method": alias})


@pytest.mark.parametrize("word", NOT_METHODS)
def test_a_word_that_is_no_method_is_refused_with_what_to_write(word: str) -> None:
    assert NOT_METHODS[word] in refusal({"method": word})


@pytest.mark.parametrize("word", ["medusa", "mlp_speculator"])
def test_removed_methods_name_what_replaces_them(word: str) -> None:
    message = refusal({"method": word})
    for replacement in ("eagle3", "mtp", "draft_model"):
        assert replacement in message


@pytest.mark.parametrize("key", [k for k in KEYS.values() if k.status is not Status.SERVED], ids=lambda key: key.name)
def test_a_key_that_is_not_served_is_refused_by_name(key: Any) -> None:
    message = refusal(NGRAM | {key.name: 1})
    assert f"{key.name}=1 " in message
    if key.status is Status.NEVER:
        assert key.why in message
    else:
        assert "not served yet" in message


@pytest.mark.parametrize(
    ("removed", "replacement"),
    [
        ("speculative_token_tree", "spec_tree"),
        ("disable_by_batch_size", "num_speculative_tokens_per_batch_size"),
        ("speculative_disable_by_batch_size", "num_speculative_tokens_per_batch_size"),
        ("acceptance_method", "rejection_sample_method"),
        ("posterior_threshold", "fly"),
        ("posterior_alpha", "fly"),
        ("typical_acceptance_sampler", "fly"),
        ("synthetic_acceptance_rate", "synthetic_acceptance_rates"),
        ("tensor_parallel_size", "draft_tensor_parallel_size"),
    ],
)
def test_a_removed_key_names_its_replacement(removed: str, replacement: str) -> None:
    assert replacement in refusal(NGRAM | {removed: 1})
    assert replacement in KEYS or replacement == "fly"


@pytest.mark.parametrize(
    ("name", "choice"),
    [(key.name, choice) for key in KEYS.values() if key.status is Status.SERVED for choice in key.choices],
    ids=str,
)
def test_every_word_of_a_key_is_served_or_refused_by_name(name: str, choice: Any) -> None:
    if name == "method":
        return  # above
    source = NGRAM | {name: choice.value}
    if choice.status is Status.SERVED:
        SpeculativeConfig.parse(source)
    else:
        message = refusal(source)
        assert f'{name}="{choice.value}" is not served' in message
        assert ("not served yet" in message) == (choice.status is Status.NOT_YET)


def test_the_table_is_sound() -> None:
    for key in KEYS.values():
        assert key.meaning
        assert key.why or key.status is Status.SERVED, key.name
        assert all(method in METHODS for method in key.methods), key.name
        assert key.status is Status.NEVER or key.type.split(" ")[0] in (
            "integer",
            "number",
            "boolean",
            "string",
            "object",
            "array",
        )
    assert all(name in METHODS for name in METHOD_ALIASES.values())
    assert SERVED_METHODS == ("ngram", "suffix")


# Shorthands


def test_shorthands_join_the_object_and_are_enough_alone() -> None:
    parse = SpeculativeConfig.parse
    assert parse(None, spec_method="ngram", spec_tokens=5) == parse(NGRAM)
    assert parse(None, spec_model="[ngram]", spec_tokens=5) == parse(NGRAM)
    assert parse('{"method": "ngram", "prompt_lookup_max": 3}', spec_tokens=5).prompt_lookup_max == 3
    assert parse({"method": None, "num_speculative_tokens": 5}, spec_method="ngram") == parse(NGRAM)


@pytest.mark.parametrize(
    ("shorthands", "flag", "key"),
    [
        ({"spec_method": "ngram"}, "--spec-method", "method"),
        ({"spec_model": "ngram"}, "--spec-model", "model"),
        ({"spec_tokens": 5}, "--spec-tokens", "num_speculative_tokens"),
    ],
)
def test_a_shorthand_excludes_the_same_key(shorthands: dict[str, Any], flag: str, key: str) -> None:
    message = refusal(NGRAM | {"model": "ngram"}, **shorthands)
    assert "mutually exclusive" in message
    assert flag in message
    assert f"{key}=" in message


def test_shorthands_are_checked_as_keys_are() -> None:
    assert "num_speculative_tokens" in refusal(None, spec_method="ngram", spec_tokens=0)
    assert 'method=""' in refusal(None, spec_method="", spec_tokens=5)


# Files


@pytest.mark.parametrize("name", ["draft.json", "draft"])
def test_a_file_is_read(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(json.dumps(NGRAM), encoding="utf-8-sig")
    assert SpeculativeConfig.parse(f"@{file}") == SpeculativeConfig.parse(NGRAM)
    if name.endswith(".json"):
        assert SpeculativeConfig.parse(str(file)) == SpeculativeConfig.parse(NGRAM)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"{method: ngram}", "character 2"),
        (b"", "not JSON"),
        (b"\xff\xfe{}", "UTF-8"),
        (b"[]", "an array"),
        (b" " * (MAX_FILE_BYTES + 1), "larger than"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("draft.json").write_bytes(content)
    message = refusal("@draft.json")
    assert '"draft.json"' in message
    assert part in message


# Whatever comes

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*KEYS, *(name.replace("_", "-") for name in KEYS)]) | st.text(max_size=12)
WORDS = st.sampled_from([*METHODS, *METHOD_ALIASES, *NOT_METHODS, "standard", "match", "fly", "greedy", "[ngram]"])
OBJECTS = st.dictionaries(NAMES, JSON | WORDS | st.integers(0, 30), max_size=5)
BASES = st.sampled_from([{}, NGRAM, SUFFIX, {"method": "suffix"}])
SERVED_OBJECTS = st.builds(
    dict.__or__,
    BASES,
    st.dictionaries(
        st.sampled_from([key.name for key in KEYS.values() if key.status is Status.SERVED]),
        WORDS | st.integers(-1, 30) | st.floats(0, 2) | st.integers(1020, 1030),
        max_size=3,
    ),
)


def parsed(source: Any) -> SpeculativeConfig | None:
    """None where it is refused, which is by one printable line."""
    try:
        return SpeculativeConfig.parse(source)
    except ConfigError as error:
        message = str(error)
    assert message.isprintable()
    return None


def comes_back(config: SpeculativeConfig | None) -> None:
    if config is not None:
        text = config.to_json()
        again = SpeculativeConfig.parse(text)
        assert again == config == SpeculativeConfig.parse(config) == SpeculativeConfig.parse(config.resolved())
        assert again.to_json() == text
        assert json.loads(text) == config.resolved()


@settings(max_examples=300, deadline=None)
@given(base=BASES, more=OBJECTS)
def test_any_object_is_taken_or_refused_in_one_line(base: dict[str, Any], more: dict[str, Any]) -> None:
    config = parsed(base | more)
    assert parsed(json.dumps(base | more)) == config
    comes_back(config)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30) | JSON.map(json.dumps))
def test_any_text_is_taken_or_refused_in_one_line(text: str) -> None:
    comes_back(parsed(text))


@settings(max_examples=300, deadline=None)
@given(source=SERVED_OBJECTS)
def test_what_is_taken_comes_back_equal(source: dict[str, Any]) -> None:
    comes_back(parsed(source))


@settings(max_examples=200, deadline=None)
@given(base=st.sampled_from([NGRAM, SUFFIX]), name=NAMES, value=JSON)
def test_a_refusal_names_the_key_at_fault(base: dict[str, Any], name: str, value: Any) -> None:
    try:
        SpeculativeConfig.parse(base | {name: value})
    except ConfigError as error:
        message = str(error)
    else:
        return
    assert name.replace("-", "_") in message or show(name)[1:-1] in message


# The schema


def valid(schema: dict[str, Any], value: Any) -> bool:
    """As much of JSON schema as ours uses; 5.0 is no integer, as in `parse`."""
    types: dict[str, Callable[[Any], bool]] = {
        "object": lambda v: isinstance(v, dict),
        "string": lambda v: isinstance(v, str),
        "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
        "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    }
    rules: dict[str, Callable[[Any], bool]] = {
        "type": lambda wanted: types[wanted](value),
        "enum": lambda words: value in words,
        "minimum": lambda low: value >= low,
        "maximum": lambda high: value <= high,
        "required": lambda names: all(name in value for name in names),
        "additionalProperties": lambda _: all(name in schema["properties"] for name in value),
        "properties": lambda inner: all(valid(inner[name], value[name]) for name in value if name in inner),
        "anyOf": lambda options: any(valid(option, value) for option in options),
    }
    for word in schema:
        assert word in rules or word in ("$schema", "title", "description", "default"), word
    return all(rules[word](schema[word]) for word in rules if word in schema)


@settings(max_examples=500, deadline=None)
@given(source=SERVED_OBJECTS)
def test_the_schema_takes_what_parse_takes(source: dict[str, Any]) -> None:
    low, high = source.get("prompt_lookup_min"), source.get("prompt_lookup_max")
    if isinstance(low, int) and isinstance(high, int) and low > high:
        return  # the one rule that the schema cannot say
    assert valid(json_schema(), source) == (parsed(source) is not None)


def test_the_schema_is_json() -> None:
    assert json.loads(json.dumps(json_schema())) == json_schema()
    assert json_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"
