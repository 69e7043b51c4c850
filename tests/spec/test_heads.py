"""What a head's header adds to a configuration, and which heads are refused before weights load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.engine import build
from forerun.engine.config import EngineConfig
from forerun.errors import ConfigError
from forerun.models.config import DecoderConfig
from forerun.models.loading import read_config
from forerun.spec.config import SpeculativeConfig
from forerun.spec.detect import suggested_method
from forerun.spec.heads import complete
from forerun.spec.proposer import TargetInfo
from forerun.spec.proposers.first import FirstOf
from tests.models.heads.tiny_heads import (
    CONFIG,
    DRAFT_VOCAB,
    HIDDEN,
    TARGET_LAYERS,
    VOCAB,
    as_midlayer,
    eagle,
    eagle3,
    save,
    save_gguf,
)
from tests.models.tiny import hf_model, save_hf
from tests.tiny_engine import save_tiny_target
from tests.tiny_tokenizer import VOCAB_SIZE

TREE = {"depth": 2, "top_k": 2, "num_draft_tokens": 4}
TABLE = "num_speculative_tokens_per_batch_size"
MASK_TOKEN = 7


def save_speculators(folder: Path, kind: str = "eagle3", k: int | None = 3, vocab: int = VOCAB, **config: Any) -> Path:
    """A head in speculators' form."""
    flat, tensors = eagle3(1, vocab_size=vocab)
    if kind == "peagle":
        tensors["mask_hidden"] = torch.ones(1, 1, 3 * HIDDEN)
        config = {"mask_token_id": MASK_TOKEN} | config
    methods = [] if k is None else [{"proposal_type": "greedy", "speculative_tokens": k}]
    whole = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": kind,
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": flat,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": methods,
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
    }
    return save(folder, whole | config, tensors)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> DecoderConfig:
    folder = tmp_path_factory.mktemp("target")
    return read_config(save_hf(hf_model("llama", seed=1, num_hidden_layers=TARGET_LAYERS), folder))


def given(method: str, head: Path, **keys: Any) -> SpeculativeConfig:
    return SpeculativeConfig.parse({"method": method, "model": str(head)} | keys)


def refusal(config: SpeculativeConfig, target: DecoderConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        complete(config, target)
    message = str(caught.value)
    assert message.isprintable()
    return message


# K


def test_k_that_is_not_given_is_the_checkpoints(target: DecoderConfig, tmp_path: Path) -> None:
    config, notes = complete(given("eagle3", save_speculators(tmp_path)), target)
    assert config.num_speculative_tokens == 3
    assert config.resolved()["num_speculative_tokens"] == 3
    assert SpeculativeConfig.parse(config.to_json()) == config
    [note] = notes
    assert f"num_speculative_tokens=3, as the checkpoint of {str(tmp_path)!r}" in note


@pytest.mark.parametrize("keys", [{"num_speculative_tokens": 5}, {"spec_tree": TREE}])
def test_what_is_given_wins_over_the_checkpoint(keys: dict[str, Any], target: DecoderConfig, tmp_path: Path) -> None:
    asked = given("eagle3", save_speculators(tmp_path), **keys)
    assert complete(asked, target) == (asked, ())
    assert complete(asked, target)[0].num_speculative_tokens == asked.num_speculative_tokens


@pytest.mark.parametrize("form", ["flat", "eagle", "speculators", "gguf"])
def test_a_checkpoint_without_a_k_needs_one(form: str, target: DecoderConfig, tmp_path: Path) -> None:
    head = {
        "flat": lambda: save(tmp_path, *eagle3(1)),
        "eagle": lambda: save(tmp_path, *eagle(1)),
        "speculators": lambda: save_speculators(tmp_path, k=None),
        "gguf": lambda: save_gguf(tmp_path / "head.gguf", *eagle3(1)),
    }[form]()
    method = "eagle" if form == "eagle" else "eagle3"
    message = refusal(given(method, head), target)
    assert f"num_speculative_tokens is missing, and the checkpoint of model={str(head)!r}" in message
    config, notes = complete(given(method, head, num_speculative_tokens=4), target)
    assert (config.num_speculative_tokens, notes) == (4, ())


def test_what_depends_on_k_is_judged_once_it_is_known(target: DecoderConfig, tmp_path: Path) -> None:
    head = save_speculators(tmp_path)
    message = refusal(given("eagle3", head, draft_min_tokens=4), target)
    assert "draft_min_tokens=4 must not be above num_speculative_tokens=3" in message
    config, notes = complete(given("eagle3", head, **{TABLE: [[1, 2, 900], [3, 4, 1]]}), target)
    assert config.num_speculative_tokens_per_batch_size == ((1, 2, 3), (3, 4, 1))
    assert [note for note in notes if note.startswith("WARNING: ") and "K=900" in note]
    many = save_speculators(tmp_path / "many", k=2000)
    assert "num_speculative_tokens must be an integer (1 to 1024), got 2000" in refusal(given("eagle3", many), target)


def test_members_of_a_list_are_completed_and_named_by_their_place(target: DecoderConfig, tmp_path: Path) -> None:
    members: list[dict[str, Any]] = [
        {"method": "suffix", "num_speculative_tokens": 8},
        {"method": "eagle3", "model": str(save_speculators(tmp_path / "a"))},
    ]
    config, _ = complete(SpeculativeConfig.parse({"method": members}), target)
    assert [method.num_speculative_tokens for method in config.methods] == [8, 3]
    members[1]["model"] = str(save(tmp_path / "b", *eagle3(1)))
    message = refusal(SpeculativeConfig.parse({"method": members}), target)
    assert message.startswith("speculative_config: method[1]: num_speculative_tokens is missing")


def test_a_configuration_without_heads_stays_as_it_is(target: DecoderConfig) -> None:
    config = SpeculativeConfig.parse({"method": ["suffix", "ngram"], "num_speculative_tokens": 4})
    assert complete(config, target) == (config, ())


# The kind of head


@pytest.mark.parametrize(("asked", "there"), [("eagle", "eagle3"), ("eagle3", "eagle")])
def test_a_head_of_the_other_method_is_refused(asked: str, there: str, target: DecoderConfig, tmp_path: Path) -> None:
    head = save(tmp_path, *(eagle(1) if there == "eagle" else eagle3(1)))
    config = given(asked, head, num_speculative_tokens=4)
    [warning] = config.warnings  # the name and the files are looked at, and nothing is overridden
    assert f'method "{asked}" is kept' in warning
    assert f'suggests "{there}"' in warning
    message = refusal(config, target)
    for part in (f'method="{asked}"', f'method "{there}"', str(head)):
        assert part in message


@pytest.mark.parametrize("keys", [{}, {"parallel_drafting": True}])
def test_a_p_eagle_head_drafts_in_one_pass(keys: dict[str, Any], target: DecoderConfig, tmp_path: Path) -> None:
    head = save_speculators(tmp_path, "peagle")
    config, notes = complete(given("eagle3", head, num_speculative_tokens=4, **keys), target)
    assert config.methods[0].parallel_drafting
    assert len(notes) == (not keys)
    assert all(note.startswith("WARNING: ") and "parallel_drafting is turned on" in note for note in notes)


@pytest.mark.parametrize(
    ("keys", "part"),
    [({"draft_sample_method": "coupled"}, 'draft_sample_method="coupled"'), ({"spec_tree": TREE}, "spec_tree")],
)
def test_what_does_not_go_with_one_pass_is_refused(
    keys: dict[str, Any], part: str, target: DecoderConfig, tmp_path: Path
) -> None:
    message = refusal(given("eagle3", save_speculators(tmp_path, "peagle"), **keys), target)
    assert "parallel_drafting=true" in message
    assert part in message


def test_one_pass_needs_a_mask_state(target: DecoderConfig, tmp_path: Path) -> None:
    config = given("eagle3", save_speculators(tmp_path), parallel_drafting=True)
    message = refusal(config, target)
    for part in ("parallel_drafting=true", str(tmp_path), "no mask state", "P-EAGLE"):
        assert part in message


def test_a_quantised_output_head_must_be_the_targets(target: DecoderConfig, tmp_path: Path) -> None:
    keys = {"draft_lm_head_quantization": "fp8", "num_speculative_tokens": 4}
    message = refusal(given("eagle3", save(tmp_path / "own", *eagle3(1)), **keys), target)
    for part in ('draft_lm_head_quantization="fp8"', str(tmp_path), f"[{DRAFT_VOCAB}, {HIDDEN}]"):
        assert part in message
    config, _ = complete(given("eagle", save(tmp_path / "shared", *eagle(1)), **keys), target)
    assert config.methods[0].draft_lm_head_quantization == "fp8"


def test_no_head_and_a_head_of_another_target_are_refused(target: DecoderConfig, tmp_path: Path) -> None:
    keys = {"num_speculative_tokens": 4}
    assert "neither an EAGLE head" in refusal(given("eagle3", save(tmp_path / "none", CONFIG, {}), **keys), target)
    other = save(tmp_path / "other", *eagle(1, vocab_size=VOCAB + 1))
    assert f"vocab_size={VOCAB + 1}" in refusal(given("eagle", other, **keys), target)
    assert "no such file" in refusal(given("eagle", tmp_path / "missing", **keys), target)
    revised = given("eagle", save(tmp_path / "here", *eagle(1)), revision="main", **keys)
    assert "revision='main'" in refusal(revised, target)


# What the files say a model is


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_tensors_say_what_the_config_does_not(pickled: bool, prefix: str, tmp_path: Path) -> None:
    for name, (config, tensors), method in (
        ("one", eagle(1), "eagle"),
        ("three", eagle3(1, architectures=["LlamaForCausalLM"], draft_vocab_size=None), "eagle3"),
    ):
        tensors = {prefix + key: tensor for key, tensor in as_midlayer(tensors).items()}
        folder = save(tmp_path / name, config, tensors, pickled)
        found = suggested_method(str(folder))
        assert found is not None
        assert found[0] == method
        assert "tensor" in found[1]


def test_a_head_is_known_by_its_files_before_its_name(tmp_path: Path) -> None:
    for name, built, method in (("eagle3-like", eagle(1), "eagle"), ("eagle-like", eagle3(1), "eagle3")):
        config = SpeculativeConfig.parse({"model": str(save(tmp_path / name, *built)), "num_speculative_tokens": 4})
        assert config.methods[0].method == method
        assert config.warnings == ()
    gguf = save_gguf(tmp_path / "head.gguf", *eagle3(1))
    assert SpeculativeConfig.parse({"model": str(gguf)}).methods[0].method == "eagle3"


def test_a_language_model_is_no_head(tmp_path: Path) -> None:
    folder = save_hf(hf_model("llama"), tmp_path / "draft")
    assert suggested_method(str(folder)) is None


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x10" + b"\0" * 7 + b"[" * 16, b"PK\x05\x06" + b"\0" * 18])
def test_files_that_cannot_be_read_say_nothing(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(content)
    assert suggested_method(str(tmp_path)) is None
    (tmp_path / "broken.gguf").write_bytes(content)
    assert suggested_method(str(tmp_path / "broken.gguf")) is None


# In the engine


def test_the_engine_is_built_with_the_completed_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def proposer(config: SpeculativeConfig, target: TargetInfo) -> FirstOf:
        seen.append(config)
        return FirstOf()

    monkeypatch.setattr(build, "make_proposer", proposer)
    model = save_tiny_target(tmp_path / "target", num_hidden_layers=TARGET_LAYERS)
    asked = given("eagle3", save_speculators(tmp_path / "head", vocab=VOCAB_SIZE), **{TABLE: [[1, 2, 9]]})
    config = EngineConfig(model=str(model), speculative_config=asked, kv_cache_memory_bytes=8 << 20)
    info = build.build_engine(config).info()
    assert info.num_spec_tokens == 3
    assert info.speculative_config == seen[0].resolved()
    assert info.speculative_config is not None
    assert info.speculative_config[TABLE] == [[1, 2, 3]]
    assert any("num_speculative_tokens=3, as the checkpoint" in line for line in info.log_lines)


def test_a_head_is_judged_before_weights_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    model = save_tiny_target(tmp_path / "target", num_hidden_layers=TARGET_LAYERS)
    asked = given("eagle", save_speculators(tmp_path / "head", vocab=VOCAB_SIZE))
    with pytest.raises(ConfigError, match='method="eagle" does not fit'):
        build.build_engine(EngineConfig(model=str(model), speculative_config=asked))
