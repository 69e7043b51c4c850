"""A speculators checkpoint as the model that is served: who serves, who drafts, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forerun.cli import main
from forerun.cli.config import config as config_command
from forerun.cli.speculation import roles_from_options
from forerun.engine import build
from forerun.errors import ConfigError
from forerun.llm import LLM
from forerun.request import SamplingParams
from forerun.spec.config import SpeculativeConfig
from forerun.spec.proposer import TargetInfo
from forerun.spec.proposers.first import FirstOf
from forerun.spec.roles import assign_roles
from tests.models.heads.tiny_heads import TARGET_LAYERS, eagle3, save
from tests.spec.test_heads import save_speculators
from tests.tiny_engine import save_tiny_target
from tests.tiny_tokenizer import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TREE = {"depth": 2, "top_k": 2, "num_draft_tokens": 4}


def save_checkpoint(folder: Path, verifier: Any, kind: str = "eagle3") -> Path:
    """A head whose verifier is the given entry."""
    head = save_speculators(folder, kind, vocab=VOCAB_SIZE)
    content = json.loads((head / "config.json").read_text())
    content["speculators_config"]["verifier"] = verifier
    (head / "config.json").write_text(json.dumps(content))
    return head


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a speculators checkpoint for it that names it by a path from its own folder."""
    folder = tmp_path_factory.mktemp("served")
    target = save_tiny_target(folder / "target", num_hidden_layers=TARGET_LAYERS)
    return target, save_checkpoint(folder / "head", {"name_or_path": "../target"})


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> list[SpeculativeConfig]:
    """What engines are built to draft with; they draft nothing."""
    seen: list[SpeculativeConfig] = []

    def proposer(config: SpeculativeConfig, target: TargetInfo) -> FirstOf:
        seen.append(config)
        return FirstOf()

    monkeypatch.setattr(build, "make_proposer", proposer)
    return seen


def refusal(model: Path, source: Any = None) -> str:
    with pytest.raises(ConfigError) as caught:
        assign_roles(str(model), source)
    message = str(caught.value)
    assert message.isprintable()
    assert str(model) in message
    return message


@pytest.mark.parametrize("source", [None, {"method": "suffix"}, '{"method": "suffix"}', "{broken"])
def test_any_other_model_is_served_as_it_is(source: Any, tiny_model: Path, tmp_path: Path) -> None:
    head = save(tmp_path, *eagle3(1))
    for model in (str(tiny_model), str(head), "smollm2-135m", "no-such-model", "", "model.gguf"):
        roles = assign_roles(model, source)
        assert (roles.target, roles.source, roles.note) == (model, source, "")


def test_the_verifier_is_served_and_the_checkpoint_drafts(served: tuple[Path, Path]) -> None:
    target, head = served
    roles = assign_roles(str(head), None)
    assert Path(roles.target).resolve() == target.resolve()
    assert roles.source == {"method": "eagle3", "model": str(head)}
    assert "\n" not in roles.note
    for part in (str(head), roles.target, "eagle3"):
        assert part in roles.note


def test_peagle_means_drafts_of_one_pass(served: tuple[Path, Path], tmp_path: Path) -> None:
    head = save_checkpoint(tmp_path, {"name_or_path": str(served[0])}, "peagle")
    roles = assign_roles(str(head), None)
    assert roles.source == {"method": "eagle3", "model": str(head), "parallel_drafting": True}
    assert roles.target == str(served[0])
    otherwise = assign_roles(str(head), {"parallel_drafting": False}).source
    assert isinstance(otherwise, dict)
    assert otherwise["parallel_drafting"] is False  # the header will have a word in it, see `complete`


def test_a_folder_of_the_checkpoint_comes_before_any_other_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = save_checkpoint(tmp_path / "head", {"name_or_path": "target"})
    (tmp_path / "target").mkdir()
    monkeypatch.chdir(tmp_path)
    assert assign_roles(str(head), None).target == "target"
    (head / "target").mkdir()
    assert assign_roles(str(head), None).target == str(head / "target")


@pytest.mark.parametrize("name", ["org/target", "org/target@main", "smollm2-135m"])
def test_the_verifier_may_be_a_hub_id_or_a_built_in_name(name: str, tmp_path: Path) -> None:
    assert assign_roles(str(save_checkpoint(tmp_path, {"name_or_path": name})), None).target == name


@pytest.mark.parametrize("as_source", [lambda keys: keys, json.dumps])
def test_keys_that_are_given_win(as_source: Any, served: tuple[Path, Path]) -> None:
    _, head = served
    keys = {"num-speculative-tokens": 5, "draft_min_prob": 0.5, "rejection_sample_method": "standard", "revision": None}
    for more in ({}, {"method": "eagle3"}, {"model": str(head), "method": None}):
        config = SpeculativeConfig.parse(assign_roles(str(head), as_source(keys | more)).source)
        [method] = config.methods
        assert (method.method, method.model) == ("eagle3", str(head))
        assert (method.num_speculative_tokens, method.draft_min_prob) == (5, 0.5)
        again = assign_roles(str(head), config)
        assert SpeculativeConfig.parse(again.source) == config


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"method": "suffix"}, 'method="suffix" contradicts its own, "eagle3"'),
        ({"method": ["suffix", "eagle3"]}, 'method=["suffix", "eagle3"] contradicts'),
        ({"method": "peagle"}, 'method="peagle" contradicts'),
        ({"model": "org/other"}, 'model="org/other" contradicts'),
        ({"methd": "eagle3"}, 'unknown key "methd"'),
    ],
)
def test_another_method_or_draft_contradicts_it(keys: dict[str, Any], part: str, served: tuple[Path, Path]) -> None:
    assert part in refusal(served[1], keys)


@pytest.mark.parametrize(
    ("verifier", "part"),
    [
        (None, "name_or_path=null"),
        ({}, "name_or_path=null"),
        ("org/target", "name_or_path=null"),
        ({"name_or_path": None}, "name_or_path=null"),
        ({"name_or_path": ""}, 'name_or_path=""'),
        ({"name_or_path": 5}, "name_or_path=5"),
        ({"name_or_path": "x" * 5000}, 'name_or_path="xxx'),
        ({"name_or_path": "a\0b"}, 'name_or_path="a\\u0000b" is no path'),
        ({"name_or_path": "~nobody-of-this-name/x/y"}, "name_or_path="),
        ({"name_or_path": "../gone"}, 'name_or_path="../gone" is no path'),
        ({"name_or_path": "."}, 'name_or_path="." is a speculators checkpoint itself'),
    ],
)
def test_a_verifier_that_is_none_is_refused(verifier: Any, part: str, tmp_path: Path) -> None:
    message = refusal(save_checkpoint(tmp_path, verifier))
    assert f"speculators_config.verifier.{part}" in message
    assert "give the target as the model to serve" in message


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("dflash", '"dflash" means method "dflash", which is not served yet'),
        ("dflash2", '"dflash2" means method "dflash", which is not served yet'),
        ("dspark", '"dspark" means method "dspark", which is not served yet'),
        ("mtp", '"mtp" means method "mtp", which is not served yet'),
        ("medusa", 'speculators_model_type="medusa" is unknown'),
        (None, "speculators_model_type=null is unknown"),
        (["eagle3"], "is unknown"),
    ],
)
def test_a_kind_that_is_not_served_is_refused_by_name(kind: Any, part: str, tmp_path: Path) -> None:
    content = {"speculators_model_type": kind, "speculators_config": {"verifier": {"name_or_path": "org/target"}}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert part in refusal(tmp_path)


def test_a_hub_model_that_cannot_be_fetched_is_said_so() -> None:
    with pytest.raises(ConfigError, match="org/no-such-model"):
        assign_roles("org/no-such-model", None)


# The commands, and LLM


def test_options_are_read_with_the_roles(served: tuple[Path, Path]) -> None:
    target, head = served
    model, config, notes = roles_from_options(str(head))
    assert Path(model).resolve() == target.resolve()
    assert config == SpeculativeConfig.parse({"method": "eagle3", "model": str(head)})
    assert [str(head) in note for note in notes] == [True]
    _, config, _ = roles_from_options(str(head), spec_tokens=7)
    assert config is not None
    assert config.num_speculative_tokens == 7
    model, config, notes = roles_from_options(str(target), spec_model=str(head))
    assert (model, notes) == (str(target), ())
    assert config == SpeculativeConfig.parse({"method": "eagle3", "model": str(head)})


@pytest.mark.parametrize(("keys", "k"), [(None, 3), ({"num_speculative_tokens": 2}, 2), ({"spec_tree": TREE}, 4)])
def test_llm_serves_the_verifier(
    keys: Any,
    k: int,
    served: tuple[Path, Path],
    drafting: list[SpeculativeConfig],
    caplog: pytest.LogCaptureFixture,
) -> None:
    target, head = served
    plain = LLM(str(target), kv_cache_memory_bytes=8 << 20).generate([5, 6, 7], GREEDY)
    with caplog.at_level(logging.INFO, logger="forerun.llm"):
        llm = LLM(str(head), speculative_config=keys, kv_cache_memory_bytes=8 << 20)
    assert [record.message for record in caplog.records] == [assign_roles(str(head), None).note]
    assert llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert llm.info.num_spec_tokens == k
    assert llm.info.spec_methods == ("eagle3",)
    assert drafting[-1].num_speculative_tokens == k


def test_generate_serves_the_verifier(
    served: tuple[Path, Path], drafting: list[SpeculativeConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    outs = []
    for model in served:
        with pytest.raises(SystemExit) as ended:
            main(
                [
                    "generate",
                    str(model),
                    "-p",
                    "the",
                    "--max-tokens",
                    "4",
                    "--temperature",
                    "0",
                    "--kv-cache-memory",
                    "8MiB",
                ]
            )
        assert not ended.value.code
        out, err = capsys.readouterr()
        outs.append(out)
    assert outs[0] == outs[1]
    assert "is a speculators checkpoint: its verifier" in err


def test_serve_serves_the_verifier_under_the_name_that_was_given(
    served: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = served
    seen: list[Any] = []
    monkeypatch.setattr("forerun.server.run.serve", lambda *given: seen.extend(given) or 0)
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(head), "--spec-tokens", "2"])
    assert not ended.value.code
    engine, settings, _ = seen
    assert Path(engine.model).resolve() == target.resolve()
    assert engine.tokenizer is None
    assert engine.speculative_config.resolved()["model"] == str(head)
    assert engine.speculative_config.num_speculative_tokens == 2
    assert settings.names == (str(head),)


def check(*arguments: str) -> tuple[dict[str, Any], str]:
    import typer

    app = typer.Typer()
    app.command()(config_command)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout), result.stderr


def test_config_checks_with_what_the_headers_say(served: tuple[Path, Path]) -> None:
    target, head = served
    source = json.dumps({"method": "eagle3", "model": str(head)})
    resolved, said = check("--check", source, "--model", str(target))
    assert resolved["num_speculative_tokens"] == 3
    assert "as the checkpoint of" in said
    flipped, said = check("--check", "{}", "--model", str(head))
    assert flipped == resolved
    assert "is a speculators checkpoint" in said
    alone, said = check("--check", source)
    assert "num_speculative_tokens" not in alone
    assert said == ""
