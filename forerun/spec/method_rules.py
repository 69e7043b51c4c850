"""Each method's and each verification rule's defaults, and the rules between keys. No torch here.

Not for bounds of one key: see `spec/keys.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from forerun.spec.keys import KEYS
from forerun.spec.refusal import refuse, show
from forerun.spec.rules import RATES

if TYPE_CHECKING:
    from forerun.spec.config import MethodConfig, SpeculativeConfig

NGRAM_MOD_TOKENS = 64  # K of `ngram_mod` where none is given: llama.cpp's --spec-ngram-mod-n-max
FLY_WINDOW = 6  # tokens, where K leaves room for them
HEADS = ("eagle", "eagle3")  # methods whose checkpoint may say K, see `spec/heads.py`


def fill_defaults(method: str, values: dict[str, Any], warnings: list[str]) -> None:
    """Put what a method takes where nothing is given into its values, by attribute.

    Raises:
        ConfigError: something must be given.
    """
    if method in _FILL:
        _FILL[method](values, warnings)
    if "num_speculative_tokens" not in values and method not in HEADS:
        _refuse_missing_tokens(method)


def check_rules(config: MethodConfig) -> None:
    """Judge keys against each other.

    Raises:
        ConfigError: two that contradict each other, or one that is missing.
    """
    if config.num_speculative_tokens is None and config.method not in HEADS:
        _refuse_missing_tokens(config.method)
    _RULES[config.method](config)


def _refuse_missing_tokens(method: str) -> None:
    refuse(f'num_speculative_tokens is missing: method "{method}" needs {KEYS["num_speculative_tokens"].expected}')


def _default(name: str) -> Any:
    return KEYS[name].default


# -- defaults


def _fill_ngram(values: dict[str, Any], warnings: list[str]) -> None:
    low, high = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    values["prompt_lookup_min"] = low or high or _default("prompt_lookup_min")
    values["prompt_lookup_max"] = high or low or _default("prompt_lookup_max")


def _fill_suffix(values: dict[str, Any], warnings: list[str]) -> None:
    def value(name: str) -> Any:
        return values.get(name, _default(name))

    depth = value("suffix_decoding_max_tree_depth")
    if "num_speculative_tokens" not in values:
        values["num_speculative_tokens"] = depth
        warnings.append(f"num_speculative_tokens is not given: {depth}, the depth of the suffix tree, is taken")
    # Match and draft share a path of the tree: m tokens of match leave depth - m for the draft.
    if depth == 1 or (depth - 1) * value("suffix_decoding_max_spec_factor") + 1e-6 < 1:
        warnings.append(
            f"suffix_decoding_max_tree_depth={depth} with suffix_decoding_max_spec_factor="
            f"{value('suffix_decoding_max_spec_factor')} leaves no room for a draft: nothing will be drafted"
        )
    elif values["num_speculative_tokens"] > depth:
        warnings.append(
            f"num_speculative_tokens={values['num_speculative_tokens']} is more than "
            f"suffix_decoding_max_tree_depth={depth} lets a draft have: at most {depth - 1} tokens"
        )
    if "suffix_decoding_max_cached_bytes" in values and not value("suffix_decoding_max_cached_requests"):
        warnings.append(
            f"suffix_decoding_max_cached_bytes={values['suffix_decoding_max_cached_bytes']} has no effect without "
            "suffix_decoding_max_cached_requests"
        )


def _fill_ngram_mod(values: dict[str, Any], warnings: list[str]) -> None:
    k = values.setdefault("num_speculative_tokens", NGRAM_MOD_TOKENS)
    values.setdefault("ngram_mod_n_min", min(_default("ngram_mod_n_min"), k))


def _fill_draft_model(values: dict[str, Any], warnings: list[str]) -> None:
    _require_model("draft_model", values)


def _fill_head(values: dict[str, Any], warnings: list[str]) -> None:
    if (kind := values.get("draft_lm_head_quantization")) is not None:
        warnings.append(
            f"draft_lm_head_quantization={show(kind)} has no effect yet: the drafter uses the target's head as it is"
        )


_FILL: dict[str, Callable[[dict[str, Any], list[str]], None]] = {
    "ngram": _fill_ngram,
    "suffix": _fill_suffix,
    "ngram_mod": _fill_ngram_mod,
    "draft_model": _fill_draft_model,
    "eagle": _fill_head,
    "eagle3": _fill_head,
}


def _require_model(method: str, values: Mapping[str, Any]) -> None:
    if not values.get("model"):
        refuse(f'model is missing: method "{method}" needs the draft\'s directory, GGUF file or hub id')


# -- rules


def _no_rules(config: MethodConfig) -> None:
    pass


def _check_not_above(config: MethodConfig, low: str, high: str) -> None:
    low_value, high_value = getattr(config, KEYS[low].attribute), getattr(config, KEYS[high].attribute)
    if high_value is not None and low_value > high_value:
        refuse(f"{low}={low_value} must not be above {high}={high_value}")


def _check_weights(config: MethodConfig) -> None:
    """What holds for draft models and heads alike."""
    _require_model(config.method, {"model": config.model})
    _check_not_above(config, "draft_min_tokens", "num_speculative_tokens")
    for name in ("parallel_drafting", "use_heterogeneous_vocab"):
        if getattr(config, name) and config.draft_sample_method != "greedy":
            refuse(
                f'{name}=true does not go with draft_sample_method="{config.draft_sample_method}": such drafts are '
                "greedy"
            )
    if config.min_draft_tokens and config.draft_sample_method == "probabilistic":
        refuse(
            f'draft_min_tokens={config.min_draft_tokens} does not go with draft_sample_method="probabilistic": which '
            "drafts are dropped would depend on what was drawn, and the text would lose the target's law"
        )


def _check_draft_model(config: MethodConfig) -> None:
    _check_weights(config)
    if config.parallel_drafting and config.use_heterogeneous_vocab:
        refuse("parallel_drafting=true and use_heterogeneous_vocab=true exclude each other: leave one out")


def _check_head(config: MethodConfig) -> None:
    _check_weights(config)
    if config.kv_cache_dtype is not None:
        refuse(
            f'kv_cache_dtype={show(config.kv_cache_dtype)} does not go with method "{config.method}": the cache of a '
            'head lies beside the target\'s and has its type: leave it out or give "auto"'
        )
    if config.spec_tree is not None:
        _check_tree(config)


def _check_tree(config: MethodConfig) -> None:
    assert config.spec_tree is not None
    for name in ("parallel_drafting", "draft_sample_method", "draft_min_prob"):
        if (value := getattr(config, name)) != _default(name):
            refuse(
                f"{name}={show(value)} does not go with spec_tree, whose nodes are the most probable of their pass and "
                "need the pass before them: leave one out"
            )
    if config.num_speculative_tokens != config.spec_tree.num_draft_tokens:
        refuse(
            f"num_speculative_tokens={show(config.num_speculative_tokens)} does not go with spec_tree.num_draft_tokens="
            f"{config.spec_tree.num_draft_tokens}: with a tree they are the same, so leave num_speculative_tokens out"
        )


_RULES: dict[str, Callable[[MethodConfig], None]] = {
    "ngram": lambda config: _check_not_above(config, "prompt_lookup_min", "prompt_lookup_max"),
    "suffix": _no_rules,
    "ngram_mod": lambda config: _check_not_above(config, "ngram_mod_n_min", "num_speculative_tokens"),
    "draft_model": _check_draft_model,
    "eagle": _check_head,
    "eagle3": _check_head,
}


# -- keys of a rejection_sample_method

_RULE = "rejection_sample_method"
_LENGTH = "synthetic_acceptance_length"


def rule_keys(rule: str) -> tuple[str, ...]:
    return tuple(key.name for key in KEYS.values() if rule in key.rules)


def complete_rule(config: SpeculativeConfig) -> None:
    """Check the keys of the configuration's rule, and fill in what is not given and known by now.

    Raises:
        ConfigError: a key of another rule, one that is missing, or values that contradict each other.
    """
    rule, values = config.rejection_sample_method, {}
    for key in KEYS.values():
        if key.rules and (value := getattr(config, key.name)) is not None:
            if rule not in key.rules:
                refuse(
                    f'{key.name}={show(value)} does not go with {_RULE}="{rule}", but with "{key.rules[0]}": leave it '
                    "out or give that"
                )
            values[key.name] = key.check(value)
    if rule not in _COMPLETE:
        return
    if any(member.spec_tree is not None for member in config.methods):
        refuse(f'{_RULE}="{rule}" does not go with spec_tree: it looks along a chain')
    _COMPLETE[rule](values, config.num_speculative_tokens if config.is_complete else None)
    for name, value in values.items():
        object.__setattr__(config, name, value)


def _complete_fly(values: dict[str, Any], num_tokens: int | None) -> None:
    for name in ("fly_entropy_threshold", "fly_entropy_top_k"):
        values.setdefault(name, _default(name))
    if num_tokens is None:
        return
    if num_tokens < 2:
        refuse(f'{_RULE}="fly" does not go with num_speculative_tokens={num_tokens}: it takes at least 2')
    window = values.setdefault("fly_window_size", min(FLY_WINDOW, num_tokens - 1))
    if window >= num_tokens:
        refuse(f"fly_window_size={window} must not be above {num_tokens - 1}, num_speculative_tokens - 1")


def _complete_synthetic(values: dict[str, Any], num_tokens: int | None) -> None:
    rates, length = values.get(RATES), values.get(_LENGTH)
    if rates is None and length is None:
        refuse(f'{RATES} or {_LENGTH} is missing: {_RULE}="synthetic" needs one of them')
    if rates is not None and length is not None:
        refuse(f"{RATES} and {_LENGTH} exclude each other: leave one out")
    if num_tokens is None:
        return
    if rates is not None and len(rates) != num_tokens:
        refuse(
            f"{RATES}={show(rates)} does not go with num_speculative_tokens={num_tokens}: it has {len(rates)} entries, "
            "and must have one for each drafted token"
        )
    if length is not None and length > num_tokens + 1:
        refuse(f"{_LENGTH}={length} must not be above {num_tokens + 1}, num_speculative_tokens + 1")


_COMPLETE: dict[str, Callable[[dict[str, Any], int | None], None]] = {
    "fly": _complete_fly,
    "synthetic": _complete_synthetic,
}
