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
from forerun.spec.config import MethodConfig, SpeculativeConfig
from forerun.spec.detect import suggested_method
from forerun.spec.keys import KEYS, METHOD_ALIASES, METHODS, MTP_ALIASES, NOT_METHODS, SERVED_METHODS, Status
from forerun.spec.refusal import show
from forerun.spec.schema import json_schema
from forerun.spec.source import MAX_FILE_BYTES
from forerun.spec.spec_tree import BOUNDS, SpecTree

NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5}
SUFFIX: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": 5}
MOD: dict[str, Any] = {"method": "ngram_mod", "num_speculative_tokens": 5}
DRAFT: dict[str, Any] = {"method": "draft_model", "model": "org/model", "num_speculative_tokens": 5}
EAGLE: dict[str, Any] = {"method": "eagle", "model": "org/head", "num_speculative_tokens": 5}
EAGLE3: dict[str, Any] = {"method": "eagle3", "model": "org/head"}
TREE: dict[str, Any] = {"depth": 3, "top_k": 4, "num_draft_tokens": 8}
OF_METHOD = {base["method"]: base for base in (NGRAM, SUFFIX, MOD, DRAFT, EAGLE, EAGLE3)}
FLY = {"rejection_sample_method": "fly"}
SYNTHETIC = {"rejection_sample_method": "synthetic"}
TABLE = "num_speculative_tokens_per_batch_size"
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
    """A configuration to which the key belongs; bounds of one key that depend on another do not bind in it."""
    base = next((OF_METHOD[method] for method in SERVED_METHODS if KEYS[name].belongs_to(method)), NGRAM)
    above = {"prompt_lookup_min": "prompt_lookup_max"} | dict.fromkeys(
        ("ngram_mod_n_min", "draft_min_tokens"), "num_speculative_tokens"
    )
    for rule in KEYS[name].rules:
        base = base | {"rejection_sample_method": rule, "num_speculative_tokens": 1024}
    return base | ({above[name]: 1024} if name in above else {})


def value_of(config: SpeculativeConfig, name: str) -> Any:
    """What a key resolved to."""
    return config.resolved()[name]


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
        "suffix_decoding_max_cached_bytes": 256 << 20,
        "rejection_sample_method": "match",
    }
    assert isinstance(config.methods[0].suffix_decoding_max_spec_factor, float)
    assert config.warnings == ()


def test_a_bound_on_a_cache_that_there_is_not_is_said_to_have_no_effect() -> None:
    bound = SUFFIX | {"suffix_decoding_max_cached_bytes": 1 << 20}
    [warning] = SpeculativeConfig.parse(bound).warnings
    assert "suffix_decoding_max_cached_bytes=1048576 has no effect" in warning
    assert SpeculativeConfig.parse(bound | {"suffix_decoding_max_cached_requests": 1}).warnings == ()


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
    served = [key for key in KEYS.values() if key.status is Status.SERVED and not key.no_effect]
    whole = {key.attribute for key in served if key.whole}
    own = {key.attribute for key in served if not key.whole}
    assert {field.name for field in dataclasses.fields(MethodConfig)} == own | {"method"}
    assert {field.name for field in dataclasses.fields(SpeculativeConfig)} - {"warnings", "methods"} == whole - {
        "method"
    }


@pytest.mark.parametrize(
    ("base", "name", "value"),
    [
        (NGRAM, "method", "mtp"),
        (NGRAM, "num_speculative_tokens", None),
        (NGRAM, "num_speculative_tokens", 0),
        (NGRAM, "prompt_lookup_min", 6),
        (NGRAM, "suffix_decoding_max_cached_requests", 1),
        (NGRAM, "model", "org/model"),
        (DRAFT, "model", None),
        (DRAFT, "model", ""),
        (DRAFT, "kv_cache_dtype", "fp8"),
        (DRAFT, "min_draft_tokens", 6),
        (DRAFT, "draft_sample_method", "greed"),
        (DRAFT, "prompt_lookup_max", 4),
        (MOD | {"ngram_mod_n_min": 5}, "num_speculative_tokens", 4),
        (EAGLE, "model", None),
        (EAGLE, "parallel_drafting", True),
        (EAGLE, "kv_cache_dtype", "float32"),
        (EAGLE3, "spec_tree", {"depth": 3, "top_k": 4}),
        (EAGLE3 | {"spec_tree": TREE}, "num_speculative_tokens", 7),
    ],
)
def test_an_object_made_by_hand_is_checked_too(base: dict[str, Any], name: str, value: Any) -> None:
    assert MethodConfig(**base).method == base["method"]
    with pytest.raises(ConfigError, match=name.replace("min_draft_tokens", "draft_min_tokens")):
        MethodConfig(**(base | {name: value}))


def test_a_whole_made_by_hand_is_checked_too() -> None:
    ngram, drafts = MethodConfig(**NGRAM), MethodConfig(**DRAFT, draft_sample_method="probabilistic")
    assert SpeculativeConfig(methods=(ngram,), rejection_sample_method="standard") == SpeculativeConfig.parse(NGRAM)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("method", {"methods": (), "rejection_sample_method": "match"}),
        ("the same", {"methods": (ngram, ngram), "rejection_sample_method": "match"}),
        ("rejection_sample_method", {"methods": (ngram,), "rejection_sample_method": "flu"}),
        ("synthetic_acceptance_rates", {"methods": (ngram,), "rejection_sample_method": "synthetic"}),
        ("fly_window_size", {"methods": (ngram,), "rejection_sample_method": "match", "fly_window_size": 2}),
        ("rejection_sample_method", {"methods": (drafts,), "rejection_sample_method": "match"}),
        (TABLE, {"methods": (ngram,), "rejection_sample_method": "match", TABLE: ((2, 3, 1),)}),
    ]
    for word, values in wrong:
        with pytest.raises(ConfigError, match=word):
            SpeculativeConfig(**values)


def test_no_torch_is_imported() -> None:
    code = (
        "import sys, forerun.spec.config, forerun.spec.control, forerun.spec.schema; sys.exit('torch' in sys.modules)"
    )
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
        ('{"method":"eagle3","model":"h","spec_tree":{"depth":1,"depth":2}}', ["depth", "twice"]),
        ('{"method":"eagle3","model":"h","spec_tree":"{depth:2}"}', ["spec_tree must be an object", '"{depth:2}"']),
        ('{"method":"eagle3","model":"h","spec_tree":{"depth":2}}', ["spec_tree=", "top_k is missing"]),
        ('{"method":"eagle3","model":"h","spectree":{}}', ['"spectree"', 'mean "spec_tree"']),
        ('{"method":"eagle_3","model":"h"}', ['"eagle_3"', 'mean "eagle3"']),
        ('{"method":"peagle","model":"h"}', ['"peagle"', '"eagle3" with "parallel_drafting": true']),
        ('{"method":"draft-eagle3","model":"h"}', ['"draft-eagle3"', 'llama.cpp\'s name for "eagle3"']),
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
        (NGRAM | {"parallel_drafting": False}, ["parallel_drafting=false", "draft_model"]),
        (NGRAM | {"draft_min_prob": 0.5}, ["draft_min_prob=0.5", 'belongs to "draft_model"']),
        (NGRAM | {"draft_sample_method": "coupled"}, ['draft_sample_method="coupled"', 'belongs to "draft_model"']),
        (NGRAM | {"spec_tree": {}}, ["spec_tree={}", 'belongs to "eagle", "eagle3"']),
        (NGRAM | {"fly_window_size": 2}, ["fly_window_size=2", '="match"', '"fly"']),
        (NGRAM | FLY | {"fly_window_size": 5}, ["fly_window_size=5", "above 4"]),
        (NGRAM | FLY | {"fly_window_size": 0}, ["fly_window_size", "got 0"]),
        (NGRAM | FLY | {"fly_entropy_threshold": -0.1}, ["fly_entropy_threshold", ">= 0", "got -0.1"]),
        (NGRAM | FLY | {"fly_entropy_top_k": 0}, ["fly_entropy_top_k", "got 0"]),
        (NGRAM | FLY | {"num_speculative_tokens": 1}, ['"fly"', "num_speculative_tokens=1", "at least 2"]),
        (NGRAM | FLY | {"synthetic_acceptance_length": 2}, ["synthetic_acceptance_length=2", '="fly"', '"synthetic"']),
        (NGRAM | SYNTHETIC, ["synthetic_acceptance_rates or synthetic_acceptance_length is missing"]),
        (
            NGRAM | SYNTHETIC | {"synthetic_acceptance_length": 2, "synthetic_acceptance_rates": [0.5] * 5},
            ["synthetic_acceptance_rates and synthetic_acceptance_length exclude"],
        ),
        (NGRAM | SYNTHETIC | {"synthetic_acceptance_length": 6.5}, ["synthetic_acceptance_length=6.5", "above 6"]),
        (NGRAM | SYNTHETIC | {"synthetic_acceptance_length": 0.5}, ["synthetic_acceptance_length", "got 0.5"]),
        (NGRAM | SYNTHETIC | {"synthetic_acceptance_rates": [0.5] * 4}, ["4 entries", "num_speculative_tokens=5"]),
        (NGRAM | SYNTHETIC | {"synthetic_acceptance_rates": [0.5, 0.6]}, ["rates[1]=0.6", "above", "0.5"]),
        (NGRAM | SYNTHETIC | {"synthetic_acceptance_rates": [1.5]}, ["rates[0]", "0 to 1", "got 1.5"]),
        (NGRAM | SYNTHETIC | {"synthetic_acceptance_rates": 0.5}, ["synthetic_acceptance_rates", "list", "got 0.5"]),
        (NGRAM | {"num_speculative_tokens": "auto"}, ['num_speculative_tokens="auto"', "not served yet"]),
        (SUFFIX | {"suffix_decoding_max_cached_requests": -1}, ["cached_requests", ">= 0", "got -1"]),
        (NGRAM | {"model": "org/model"}, ['model="org/model"', '"ngram"', "without a model"]),
        (NGRAM | {"model": 5}, ["model must be a string, got 5"]),
        ({"model": 5}, ["model must be a string, got 5"]),
        ({"model": "org/model"}, ["num_speculative_tokens is missing", '"draft_model"']),
        ({"method": "draft_model", "num_speculative_tokens": 4}, ["model is missing", '"draft_model"']),
        ({"model": "", "num_speculative_tokens": 4}, ["model is missing", '"draft_model"']),
        (DRAFT | {"draft_min_tokens": 6}, ["draft_min_tokens=6", "num_speculative_tokens=5"]),
        (MOD | {"ngram_mod_n_min": 6}, ["ngram_mod_n_min=6", "num_speculative_tokens=5"]),
        (DRAFT | {"draft_tensor_parallel_size": 2}, ["draft_tensor_parallel_size=2", "tensor parallel", "give 1"]),
        (DRAFT | {"draft_load_config": {}}, ["draft_load_config={}", "the draft's files say", "not served yet"]),
        (DRAFT | {"attention_backend": "FLASH"}, ['attention_backend="FLASH"', "the engine picks", "not served yet"]),
        (DRAFT | {"quantization": "awq"}, ['got "awq"', "quantization", "int8"]),
        (DRAFT | {"kv_cache_dtype": "fp8"}, ['kv_cache_dtype="fp8"', "not served yet", '"float32"']),
        (DRAFT | {"parallel_drafting": 1}, ["parallel_drafting must be a boolean, got 1"]),
        (
            DRAFT | {"parallel_drafting": True, "draft_sample_method": "coupled"},
            ["parallel_drafting=true", 'draft_sample_method="coupled"'],
        ),
        (
            DRAFT | {"use_heterogeneous_vocab": True, "draft_sample_method": "probabilistic"},
            ["use_heterogeneous_vocab=true", 'draft_sample_method="probabilistic"'],
        ),
        (
            DRAFT | {"use_heterogeneous_vocab": True, "parallel_drafting": True},
            ["use_heterogeneous_vocab=true", "parallel_drafting=true"],
        ),
        (
            DRAFT | {"draft_sample_method": "probabilistic", "rejection_sample_method": "match"},
            ['rejection_sample_method="match"', 'draft_sample_method="probabilistic"', '"standard"', "coupled"],
        ),
        (
            DRAFT | {"draft_sample_method": "probabilistic", "rejection_sample_method": "strict"},
            ['rejection_sample_method="strict"', "removed"],
        ),
        ({"model": "package.module.Class"}, ['"custom_class"', "run code"]),
        ({"model": "draft.gguf"}, ['"draft_model"', "num_speculative_tokens"]),
        ({"model": "suffix"}, ['"method": "suffix"']),
        ({"method": 5}, ["method must be a string", "got 5"]),
        ({"method": {"a": 1}}, ["method must be a string"]),
        ({"method": []}, ["method=[]"]),
        ({"method": "suffix,ngram"}, ['"suffix,ngram"', "a list"]),
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
    if key.no_effect:  # another value within the bounds is refused as not served
        assert key.bounds in refusal(base | {key.name: key.minimum - step})
        return
    assert value_of(parse(base | {key.name: key.minimum}), key.name) == key.minimum
    message = refusal(base | {key.name: key.minimum - step})
    assert key.name in message
    assert key.bounds in message
    if key.maximum is not None:
        assert value_of(parse(base | {key.name: key.maximum}), key.name) == key.maximum
        assert key.bounds in refusal(base | {key.name: key.maximum + step})


# Every name that is known


@pytest.mark.parametrize("name", [m.name for m in METHODS.values() if m.status is not Status.SERVED])
def test_a_method_that_is_not_served_is_refused_by_name(name: str) -> None:
    message = refusal({"method": name, "model": "org/model", "num_speculative_tokens": 3})
    yet = " yet" if METHODS[name].status is Status.NOT_YET else ""
    assert f'method="{name}" is not served{yet} (' in message
    assert 'served: "ngram", "suffix", "ngram_mod", "draft_model", "eagle", "eagle3"' in message


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
    source = base_of(name) | {name: choice.value}
    if choice.value == "synthetic":
        source |= {"synthetic_acceptance_length": 2}
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
    assert SERVED_METHODS == ("ngram", "suffix", "ngram_mod", "draft_model", "eagle", "eagle3")


# Several methods


@pytest.mark.parametrize(
    ("source", "methods"),
    [
        ({"method": ["suffix"], "num_speculative_tokens": 5}, [SUFFIX]),
        ({"method": ["suffix", "ngram"], "num_speculative_tokens": 5}, [SUFFIX, NGRAM]),
        ({"method": ["ngram", "suffix"], "num_speculative_tokens": 5}, [NGRAM, SUFFIX]),
        ({"method": ["suffix", "draft_model"], "model": "org/model", "num_speculative_tokens": 5}, [SUFFIX, DRAFT]),
        ({"method": [SUFFIX, DRAFT]}, [SUFFIX, DRAFT]),
        ({"method": [SUFFIX | {"num_speculative_tokens": 9}, DRAFT]}, [SUFFIX | {"num_speculative_tokens": 9}, DRAFT]),
        # A member's own key wins over the flat one.
        ({"method": ["suffix", {"method": "ngram", "num-speculative-tokens": 3}], "num_speculative_tokens": 5},
         [SUFFIX, NGRAM | {"num_speculative_tokens": 3}]),
        # A flat key goes to each member that it belongs to, and to no other.
        ({"method": [SUFFIX, NGRAM], "prompt_lookup_max": 3}, [SUFFIX, NGRAM | {"prompt_lookup_max": 3}]),
        ({"method": [SUFFIX, DRAFT], "draft_sample_method": "coupled"},
         [SUFFIX, DRAFT | {"draft_sample_method": "coupled"}]),
        ({"method": [NGRAM | {"prompt_lookup_max": 2}, NGRAM]}, [NGRAM | {"prompt_lookup_max": 2}, NGRAM]),
        ({"method": [{"model": "org/model", "num_speculative_tokens": 5}, NGRAM]}, [DRAFT, NGRAM]),
        ({"method": [NGRAM | {"model": "[ngram]"}, DRAFT]}, [NGRAM, DRAFT]),
        ({"method": [SUFFIX, NGRAM], "draft_sample_method": "greedy"}, [SUFFIX, NGRAM]),
    ],
)  # fmt: skip
def test_a_list_asks_its_members_in_their_order(source: dict[str, Any], methods: list[dict[str, Any]]) -> None:
    config = SpeculativeConfig.parse(source)
    assert config.methods == tuple(SpeculativeConfig.parse(method).methods[0] for method in methods)
    assert config.num_speculative_tokens == max(method["num_speculative_tokens"] for method in methods)
    comes_back(config)


def test_members_stand_in_the_resolved_configuration_and_what_holds_for_all_beside_them() -> None:
    source = {"method": [SUFFIX, NGRAM], "rejection_sample_method": "standard", TABLE: [[1, 2, 5]]}
    resolved = SpeculativeConfig.parse(source).resolved()
    members = resolved.pop("method")
    assert [member["method"] for member in members] == ["suffix", "ngram"]
    assert resolved == {"rejection_sample_method": "match", TABLE: [[1, 2, 5]]}
    assert not any(key in member for member in members for key in resolved)


def test_a_list_of_one_resolves_to_that_method_alone() -> None:
    assert SpeculativeConfig.parse({"method": [NGRAM]}).resolved() == SpeculativeConfig.parse(NGRAM).resolved()


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ({"method": ["suffix", "suffix"]}, ["method[1] is the same as method[0]"]),
        ({"method": [NGRAM, SUFFIX, NGRAM]}, ["method[2] is the same as method[0]"]),
        ({"method": ["suffix", "ngram"]}, ["method[1]: num_speculative_tokens is missing"]),
        ({"method": [SUFFIX, NGRAM | {"prompt_lookup_min": 0}]}, ["method[1]: prompt_lookup_min must be", "got 0"]),
        ({"method": [SUFFIX, NGRAM], "prompt_lookup_min": 0}, ["speculative_config: prompt_lookup_min must be"]),
        (
            {"method": [NGRAM | {"prompt_lookup_max": 3}, SUFFIX], "prompt_lookup_min": 4},
            ["method[0]: prompt_lookup_min=4", "prompt_lookup_max=3"],
        ),
        ({"method": [SUFFIX | {"prompt_lookup_min": 1}, NGRAM]}, ["method[0]: prompt_lookup_min=1 belongs to"]),
        ({"method": [SUFFIX, NGRAM], "draft_min_prob": 0.5}, ["draft_min_prob=0.5 belongs to", '"suffix", "ngram"']),
        ({"method": [SUFFIX, NGRAM], "model": "x"}, ['model="x"', '"suffix", "ngram"']),
        ({"method": [SUFFIX | {"model": "x"}, DRAFT]}, ['method[0]: model="x"', '"suffix"']),
        ({"method": [SUFFIX, NGRAM | {"rejection_sample_method": "match"}]}, ["method[1]: ", "holds for all"]),
        ({"method": [SUFFIX, NGRAM | {TABLE: [[1, 2, 3]]}]}, ["method[1]: ", TABLE, "holds for all"]),
        ({"method": [SUFFIX, {"metod": "ngram"}]}, ["method[1]: unknown key", '"method"']),
        ({"method": [SUFFIX, {"method": ["ngram"]}]}, ["method[1]: method must be a string", '["ngram"]']),
        ({"method": [SUFFIX, {}]}, ["method[1]: method is missing"]),
        ({"method": [SUFFIX, "mtp"]}, ['method[1]: method="mtp" is not served yet']),
        ({"method": [SUFFIX, "eagle3"]}, ['method[1]: model is missing: method "eagle3"']),
        (
            {"method": ["suffix", EAGLE3 | {"spec_tree": TREE}], "num_speculative_tokens": 16},
            ["method[1]: num_speculative_tokens=16", "num_draft_tokens=8"],
        ),
        ({"method": [SUFFIX, "deepseek_mtp"]}, ['method[1]: method="deepseek_mtp" means "mtp"']),
        ({"method": [SUFFIX, 3]}, ["method[1]: method must be a string", "got 3"]),
        ({"method": [SUFFIX, None]}, ["method[1]: method is missing"]),
        ({"method": ["suffix", "eagel3"]}, ['method[1]: method="eagel3"', '"eagle3"']),
        ({"method": ["suffix"] * 9}, ["1 to 8 methods"]),
        ({"method": [{"model": "org/dflash"}], "num_speculative_tokens": 4}, ['method[0]: model="org/dflash"']),
        ({"method": [DRAFT | {"draft_sample_method": "probabilistic"}, NGRAM], "rejection_sample_method": "match"},
         ['rejection_sample_method="match"', '"probabilistic"']),
    ],
)  # fmt: skip
def test_a_bad_list_is_refused_where_it_is_bad(source: Any, parts: list[str]) -> None:
    message = refusal(source)
    for part in parts:
        assert part in message


def test_a_warning_of_a_member_says_which() -> None:
    [warning] = SpeculativeConfig.parse({"method": [NGRAM, "suffix"]}).warnings
    assert warning.startswith("method[1]: num_speculative_tokens is not given")


# Draft models


def test_a_draft_model_resolves_to_every_key_that_has_an_effect() -> None:
    given = DRAFT | {
        "revision": "abc",
        "quantization": "int8",
        "kv_cache_dtype": "float32",
        "max_model_len": 512,
        "draft_sample_method": "coupled",
        "draft_min_prob": 0.25,
        "draft_min_tokens": 2,
    }
    resolved = SpeculativeConfig.parse(given | {"draft_tensor_parallel_size": 1}).resolved()
    rest = {"parallel_drafting": False, "use_heterogeneous_vocab": False, "rejection_sample_method": "match"}
    assert resolved == given | rest


def test_auto_and_null_leave_a_draft_to_its_checkpoint_and_target() -> None:
    [method] = SpeculativeConfig.parse(DRAFT | {"kv_cache_dtype": "auto", "quantization": None}).methods
    assert method == MethodConfig(**DRAFT)
    assert method.kv_cache_dtype is None


def test_probabilistic_drafts_take_the_standard_rule_and_say_what_that_keeps() -> None:
    given = DRAFT | {"draft_sample_method": "probabilistic"}
    config = SpeculativeConfig.parse(given)
    assert config.rejection_sample_method == "standard"
    [warning] = config.warnings
    assert "distribution" in warning
    assert "seed" in warning
    asked = SpeculativeConfig.parse(given | {"rejection_sample_method": "standard"})
    assert asked == config
    assert asked.warnings == ()
    one_of_two = SpeculativeConfig.parse({"method": [SUFFIX, given]})
    assert one_of_two.rejection_sample_method == "standard"
    assert SpeculativeConfig.parse(given | {"rejection_sample_method": "block"}).rejection_sample_method == "block"


@pytest.mark.parametrize("sampled", ["greedy", "coupled"])
@pytest.mark.parametrize("rule", ["match", "standard", "block", None])
def test_other_drafts_are_matched(sampled: str, rule: str | None) -> None:
    given = DRAFT | {"draft_sample_method": sampled, "rejection_sample_method": rule}
    config = SpeculativeConfig.parse(given)
    assert config.rejection_sample_method == "match"
    assert config.warnings == ()


def test_ngram_mod_has_llama_cpps_defaults() -> None:
    [method] = SpeculativeConfig.parse({"method": "ngram_mod"}).methods
    assert (method.num_speculative_tokens, method.ngram_mod_n_match, method.ngram_mod_n_min) == (64, 24, 48)
    [short] = SpeculativeConfig.parse({"method": "ngram_mod", "num_speculative_tokens": 16}).methods
    assert short.ngram_mod_n_min == 16


# Lossy rules


def test_fly_resolves_to_its_keys() -> None:
    config = SpeculativeConfig.parse(NGRAM | FLY)
    keys = {"fly_window_size": 4, "fly_entropy_threshold": 0.3, "fly_entropy_top_k": 3}
    assert {name: value_of(config, name) for name in keys} == keys
    comes_back(config)
    assert value_of(SpeculativeConfig.parse(NGRAM | FLY | {"num_speculative_tokens": 30}), "fly_window_size") == 6
    given = {"fly_window_size": 1, "fly_entropy_threshold": 0, "fly_entropy_top_k": 9}
    config = SpeculativeConfig.parse({"method": [SUFFIX, NGRAM]} | FLY | given)
    assert {name: value_of(config, name) for name in given} == given


def test_the_window_of_fly_waits_for_the_k_of_a_checkpoint() -> None:
    config = SpeculativeConfig.parse(EAGLE3 | FLY)
    assert config.fly_window_size is None
    comes_back(config)
    [method] = config.methods
    known = dataclasses.replace(config, methods=(dataclasses.replace(method, num_speculative_tokens=3),))
    assert known.fly_window_size == 2


@pytest.mark.parametrize(
    ("keys", "rates"),
    [
        ({"synthetic_acceptance_length": 1}, (0, 0, 0, 0, 0)),
        ({"synthetic_acceptance_length": 3.25}, (1, 1, 0.25, 0, 0)),
        ({"synthetic_acceptance_length": 6}, (1, 1, 1, 1, 1)),
        ({"synthetic_acceptance_rates": [1, 0.5, 0.5, 0, 0]}, (1, 0.5, 0.5, 0, 0)),
    ],
)
def test_synthetic_keeps_what_was_given_and_knows_its_rates(keys: dict[str, Any], rates: tuple[float, ...]) -> None:
    config = SpeculativeConfig.parse(NGRAM | SYNTHETIC | keys)
    assert config.acceptance_rates == pytest.approx(rates)
    assert config.resolved().items() >= keys.items()
    comes_back(config)


@pytest.mark.parametrize("rule", [FLY, SYNTHETIC | {"synthetic_acceptance_length": 2}])
def test_lossy_rules_look_along_chains(rule: dict[str, Any]) -> None:
    message = refusal(EAGLE3 | {"spec_tree": TREE} | rule)
    assert rule["rejection_sample_method"] in message
    assert "spec_tree" in message


# Heads


def test_a_head_resolves_to_every_key_that_has_an_effect() -> None:
    given = EAGLE3 | {
        "num_speculative_tokens": 4,
        "revision": "main",
        "quantization": "int8",
        "draft_sample_method": "coupled",
        "draft_min_prob": 0.25,
        "draft_min_tokens": 2,
        "draft_lm_head_quantization": "fp8",
    }
    config = SpeculativeConfig.parse(given | {"draft_tensor_parallel_size": 1, "kv_cache_dtype": "auto"})
    assert config.resolved() == given | {"parallel_drafting": False, "rejection_sample_method": "match"}
    [warning] = config.warnings
    assert 'draft_lm_head_quantization="fp8" has no effect yet' in warning
    comes_back(config)


@pytest.mark.parametrize("more", [{}, {"parallel_drafting": True}, {"draft_min_tokens": 3}, {TABLE: [[1, 2, 900]]}])
def test_a_heads_k_may_be_left_to_its_checkpoint(more: dict[str, Any]) -> None:
    config = SpeculativeConfig.parse(EAGLE3 | more)
    assert not config.is_complete
    assert config.methods[0].num_speculative_tokens is None
    assert "num_speculative_tokens" not in config.resolved()
    assert config.warnings == ()  # the table is cut once K is known
    comes_back(config)
    k = dataclasses.replace(config.methods[0], num_speculative_tokens=3)
    complete = dataclasses.replace(config, methods=(k,))
    assert complete.is_complete
    assert complete.num_speculative_tokens == 3
    assert complete.num_speculative_tokens_per_batch_size == (((1, 2, 3),) if more.keys() == {TABLE} else ())
    assert len(complete.warnings) == (more.keys() == {TABLE})


def test_a_method_of_a_list_is_incomplete_for_the_whole() -> None:
    config = SpeculativeConfig.parse({"method": [SUFFIX, EAGLE3]})
    assert not config.is_complete
    assert config.methods[0].max_draft_tokens == 5
    comes_back(config)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("k", [{}, {"num_speculative_tokens": 8}])
def test_a_tree_says_k(method: str, k: dict[str, int]) -> None:
    config = SpeculativeConfig.parse({"method": method, "model": "org/head", "spec-tree": TREE} | k)
    [member] = config.methods
    assert member.spec_tree == SpecTree(depth=3, top_k=4, num_draft_tokens=8)
    assert config.num_speculative_tokens == 8
    assert config.resolved()["spec_tree"] == TREE
    assert MethodConfig(method=method, model="org/head", spec_tree=member.spec_tree) == member
    comes_back(config)


@pytest.mark.parametrize("name", TREE)
@pytest.mark.parametrize("value", [True, "5", 5.0, None, [], {}, -1, 0, 10**6])
def test_a_tree_takes_whole_numbers_within_bounds(name: str, value: Any) -> None:
    message = refusal(EAGLE3 | {"spec_tree": TREE | {name: value}})
    low, high = BOUNDS[name]
    assert f"spec_tree.{name} must be an integer ({low} to {high}), got {show(value)}" in message


@pytest.mark.parametrize("name", TREE)
def test_every_bound_of_a_tree_is_the_last_value_that_is_taken(name: str) -> None:
    wide = {"depth": 16, "top_k": 32, "num_draft_tokens": 1}
    low, high = BOUNDS[name]
    for value in (low, high):
        [method] = SpeculativeConfig.parse(EAGLE3 | {"spec_tree": wide | {name: value}}).methods
        assert getattr(method.spec_tree, name) == value
    for value in (low - 1, high + 1):
        assert f"got {value}" in refusal(EAGLE3 | {"spec_tree": wide | {name: value}})


@pytest.mark.parametrize(("depth", "top_k", "nodes"), [(1, 1, 2), (16, 1, 17), (3, 4, 52), (1, 31, 992)])
def test_a_tree_has_no_more_drafts_than_nodes(depth: int, top_k: int, nodes: int) -> None:
    tree = {"depth": depth, "top_k": top_k, "num_draft_tokens": nodes}
    assert SpeculativeConfig.parse(EAGLE3 | {"spec_tree": tree}).num_speculative_tokens == nodes
    message = refusal(EAGLE3 | {"spec_tree": tree | {"num_draft_tokens": nodes + 1}})
    for part in (f"num_draft_tokens={nodes + 1} must not be above {nodes}", f"depth={depth}", f"top_k={top_k}"):
        assert part in message


@pytest.mark.parametrize(
    ("tree", "parts"),
    [
        (5, ["spec_tree must be an object", "got 5"]),
        ("x", ['got "x"']),
        ([3, 4, 8], ["got [3, 4, 8]"]),
        ({}, ["spec_tree={}", "depth is missing"]),
        ({"depth": 3, "top_k": 4}, ["num_draft_tokens is missing"]),
        (TREE | {"topk": 4}, ['unknown key "topk"', 'mean "top_k"']),
        (TREE | {"zzz": 4}, ['unknown key "zzz"', '"depth", "top_k", "num_draft_tokens"']),
        (TREE | {5: 4}, ["unknown key 5"]),
        (TREE | {"top-k": 5}, ["top_k is given twice: 4 and 5"]),
    ],
)
def test_a_bad_tree_is_refused_by_what_is_wrong_with_it(tree: Any, parts: list[str]) -> None:
    message = refusal(EAGLE3 | {"spec_tree": tree})
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ({"num_speculative_tokens": 7}, ["num_speculative_tokens=7", "num_draft_tokens=8"]),
        ({"parallel_drafting": True}, ["parallel_drafting=true", "spec_tree"]),
        ({"draft_sample_method": "coupled"}, ['draft_sample_method="coupled"', "spec_tree"]),
        ({"draft_sample_method": "probabilistic"}, ['draft_sample_method="probabilistic"', "spec_tree"]),
        ({"draft_min_prob": 0.5}, ["draft_min_prob=0.5", "spec_tree"]),
        ({"draft_min_tokens": 9}, ["draft_min_tokens=9", "num_speculative_tokens=8"]),
    ],
)
def test_a_tree_excludes_what_only_chains_can_do(more: dict[str, Any], parts: list[str]) -> None:
    message = refusal(EAGLE3 | {"spec_tree": TREE} | more)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ({"model": None}, ["model is missing"]),
        ({"model": ""}, ["model is missing"]),
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens", "1 to 1024", "got 0"]),
        ({"num_speculative_tokens": 2, "draft_min_tokens": 3}, ["draft_min_tokens=3", "num_speculative_tokens=2"]),
        ({"kv_cache_dtype": "bfloat16"}, ['kv_cache_dtype="bfloat16"', "the target's", '"auto"']),
        ({"kv_cache_dtype": "fp8"}, ['kv_cache_dtype="fp8"', "not served yet"]),
        ({"quantization": "fp8"}, ["quantization", "int8", 'got "fp8"']),
        ({"max_model_len": 64}, ["max_model_len=64", 'belongs to "draft_model"']),
        ({"use_heterogeneous_vocab": True}, ["use_heterogeneous_vocab=true", 'belongs to "draft_model"']),
        ({"draft_lm_head_quantization": "int4"}, ["draft_lm_head_quantization", "fp8, nvfp4", 'got "int4"']),
        ({"draft_tensor_parallel_size": 0}, ["draft_tensor_parallel_size", ">= 1", "got 0"]),
        ({"draft_tensor_parallel_size": 2}, ["draft_tensor_parallel_size=2", "give 1"]),
        ({"draft_sample_method": "probabilistic", "rejection_sample_method": "match"}, ['"match"', '"standard"']),
        ({"draft_sample_method": "probabilistic", "draft_min_tokens": 1}, ["draft_min_tokens=1", '"probabilistic"']),
    ],
)
def test_a_bad_head_is_refused_by_key_and_value(method: str, more: dict[str, Any], parts: list[str]) -> None:
    message = refusal({"method": method, "model": "org/head"} | more)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("sampled", ["coupled", "probabilistic"])
def test_drafts_of_one_pass_are_greedy(sampled: str) -> None:
    message = refusal(EAGLE3 | {"parallel_drafting": True, "draft_sample_method": sampled})
    assert "parallel_drafting=true" in message
    assert f'draft_sample_method="{sampled}"' in message
    assert 'belongs to "draft_model", "eagle3"' in refusal(EAGLE | {"parallel_drafting": True})


# Which method a model means


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("org/qwen-0.5b", "draft_model"),
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("yuhuili/EAGLE-LLaMA3-Instruct-8B", "eagle"),
        ("z-lab/Qwen3-4B-DFlash/", "dflash"),
        ("org/dspark_qwen3_4b", "dspark"),
        ("eagle3-experiments/qwen-0.5b", "draft_model"),  # a folder's name says nothing of the model
    ],
)
def test_the_last_part_of_a_path_says_what_a_model_is(model: str, method: str) -> None:
    given = {"model": model, "num_speculative_tokens": 4}
    if method in SERVED_METHODS:
        config = SpeculativeConfig.parse(given)
        assert config.methods[0].method == method
        assert config.warnings == ()
    else:
        assert f'without a method means "{method}"' in refusal(given)


@pytest.mark.parametrize(
    ("content", "method"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "draft_model"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"architectures": ["DFlash2DraftModel"]}, "dflash"),
        ({"architectures": ["MuseGlimmerAssistantModel"]}, "dflash"),
        ({"architectures": ["Qwen3DSparkModel"]}, "dspark"),
        ({"model_type": "deepseek_mtp"}, "mtp"),
        ({"model_type": "eagle"}, "eagle"),
        ({"speculators_model_type": "peagle", "architectures": ["X"]}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 40}, "eagle3"),
        ({"speculators_model_type": "mtp"}, "mtp"),
        ({"architectures": 5, "model_type": []}, "draft_model"),
        ([], "draft_model"),
    ],
)
def test_the_config_of_a_model_says_what_its_name_does_not(tmp_path: Path, content: Any, method: str) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    assert (suggested_method(str(folder)) or ("draft_model",))[0] == method
    config = SpeculativeConfig.parse(DRAFT | {"model": str(folder)})
    assert config.methods[0].method == "draft_model"  # given, so kept
    assert [f'suggests "{method}"' in warning for warning in config.warnings] == [True] * (method != "draft_model")


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000])
def test_a_config_that_cannot_be_read_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert suggested_method(str(tmp_path)) is None


def test_a_method_that_is_given_is_kept_with_a_warning() -> None:
    config = SpeculativeConfig.parse(DRAFT | {"model": "org/EAGLE3-head"})
    assert config.resolved()["method"] == "draft_model"
    [warning] = config.warnings
    for part in ('"draft_model" is kept', '"org/EAGLE3-head"', '"eagle3" in its name'):
        assert part in warning


# The table of lengths by batch size: case C28


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ([[1, 4, 5], [8, 16, 2], [32, 64, 0]], [[1, 7, 5], [8, 31, 2], [32, 64, 0]]),
        ([[8, 16, 2], [1, 7, 5]], [[1, 7, 5], [8, 16, 2]]),
        ([[1, 1, 0]], [[1, 1, 0]]),
        ([(1, 2, 3)], [[1, 2, 3]]),
    ],
)
def test_a_table_is_sorted_and_its_gaps_are_closed(given: Any, resolved: Any) -> None:
    config = SpeculativeConfig.parse(NGRAM | {TABLE: given})
    assert config.resolved()[TABLE] == resolved
    assert config.warnings == ()
    comes_back(config)


def test_a_table_is_clamped_with_a_warning() -> None:
    config = SpeculativeConfig.parse(NGRAM | {TABLE: [[1, 4, 9], [5, 8, 2]]})
    assert config.resolved()[TABLE] == [[1, 4, 5], [5, 8, 2]]
    [warning] = config.warnings
    assert "K=9 for 1 to 4 requests" in warning
    assert "num_speculative_tokens=5" in warning
    comes_back(config)


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        ([[1, 8, 5], [8, 16, 2]], ["[1, 8, 5]", "[8, 16, 2]", "overlap"]),
        ([[8, 16, 2], [1, 9, 5]], ["[1, 9, 5]", "[8, 16, 2]", "overlap"]),
        ([[1, 2, 3], [1, 2, 3]], ["[1, 2, 3]", "overlap"]),
        ([[2, 4, 5]], ["must begin at 1", "[2, 4, 5]"]),
        ([[0, 4, 5]], [f"{TABLE}[0]=[0, 4, 5]", "start", "got 0"]),
        ([[1, 2, 5], [8, 3, 1]], [f"{TABLE}[1]=[8, 3, 1]", "start must not be above end"]),
        ([[1, 2, -1]], [f"{TABLE}[0]=[1, 2, -1]", "K must be 0", "got -1"]),
        ([[1, 2, "5"]], ["K must be an integer", '"5"']),
        ([[1, 2.0, 5]], ["end must be an integer", "2.0"]),
        ([[True, 2, 5]], ["start must be an integer", "true"]),
        ([[1, 2]], [f"{TABLE}[0]=[1, 2]", "[start, end, K]"]),
        ([5], [f"{TABLE}[0]=5", "[start, end, K]"]),
        ([], ["got []"]),
        ({}, ["got {}"]),
        ("1-4:5", ['got "1-4:5"', "list of"]),
        (True, ["got true"]),
        ([[1, 2, 3]] * 2000, ["1 to 1024 ranges"]),
    ],
)
def test_a_bad_table_is_refused_by_its_entry_or_the_two_ranges(table: Any, parts: list[str]) -> None:
    message = refusal(NGRAM | {TABLE: table})
    assert TABLE in message
    for part in parts:
        assert part in message


# Shorthands


def test_shorthands_join_the_object_and_are_enough_alone() -> None:
    parse = SpeculativeConfig.parse
    assert parse(None, spec_method="ngram", spec_tokens=5) == parse(NGRAM)
    assert parse(None, spec_model="[ngram]", spec_tokens=5) == parse(NGRAM)
    assert parse('{"method": "ngram", "prompt_lookup_max": 3}', spec_tokens=5).methods[0].prompt_lookup_max == 3
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
PLAIN: list[dict[str, Any]] = [{}, {"method": "suffix"}, {"model": "org/model"}, {"model": "org/eagle3"}]
ALONE = st.sampled_from([*OF_METHOD.values(), *PLAIN])
LISTS = st.lists(
    st.sampled_from([*OF_METHOD.values(), "ngram", "suffix", "draft_model", "eagle3"]), min_size=1, max_size=3
)
TREES = st.just(TREE) | st.dictionaries(st.sampled_from([*TREE, "width"]), st.integers(-1, 40), min_size=2)
BASES = ALONE | st.builds(lambda members: {"method": members}, LISTS)
TABLES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20), st.integers(-1, 9)).map(list), max_size=3)
SERVED_OBJECTS = st.builds(
    dict.__or__,
    BASES,
    st.dictionaries(
        st.sampled_from([key.name for key in KEYS.values() if key.status is Status.SERVED]),
        WORDS | st.booleans() | st.integers(-1, 30) | st.floats(0, 2) | st.integers(1020, 1030) | TABLES | TREES,
        max_size=4,
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
@given(base=st.sampled_from([*OF_METHOD.values()]), name=NAMES, value=JSON)
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
        "array": lambda v: isinstance(v, list),
        "boolean": lambda v: isinstance(v, bool),
        "string": lambda v: isinstance(v, str),
        "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
        "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    }
    rules: dict[str, Callable[[Any], bool]] = {
        "type": lambda wanted: types[wanted](value),
        "enum": lambda words: value in words,
        "items": lambda inner: not isinstance(value, list) or all(valid(inner, item) for item in value),
        "minItems": lambda low: not isinstance(value, list) or len(value) >= low,
        "maxItems": lambda high: not isinstance(value, list) or len(value) <= high,
        "minimum": lambda low: value >= low,
        "maximum": lambda high: value <= high,
        "required": lambda names: all(name in value for name in names),
        "additionalProperties": lambda _: all(name in schema["properties"] for name in value),
        "properties": lambda inner: all(valid(inner[name], value[name]) for name in value if name in inner),
        "anyOf": lambda options: any(valid(option, value) for option in options),
    }
    for word in schema:
        assert word in rules or word in ("$schema", "title", "description", "default"), word
    return all(rules[word](schema[word]) for word in rules if word in schema)  # the type is judged first


# What the schema cannot say, by the words of the refusals.
BETWEEN_KEYS = (
    "must not be above",
    "overlap",
    "must begin at 1",
    f"{TABLE}[",  # an end below the start, or start and end of 0
    "is missing",
    "exclude each other",
    "does not go with",
    "such drafts are greedy",
    "is the same as",
    "belongs to",  # a flat key of a list
    "is the name of a method",
    'without a method means "',
)


@settings(max_examples=600, deadline=None)
@given(source=SERVED_OBJECTS)
def test_the_schema_takes_what_parse_takes(source: dict[str, Any]) -> None:
    refused = ""
    try:
        SpeculativeConfig.parse(source)
    except ConfigError as error:
        refused = str(error)
    if valid(json_schema(), source):
        assert not refused or any(words in refused for words in BETWEEN_KEYS), refused
    else:
        assert refused


def test_the_schema_is_json() -> None:
    assert json.loads(json.dumps(json_schema())) == json_schema()
    assert json_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"
