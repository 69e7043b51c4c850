"""C17: vocabularies that are padded differently run; those that differ are refused by the first id and both texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from forerun.errors import ConfigError
from forerun.request import SamplingParams
from tests.cases.conftest import MakeEngine, Reference
from tests.cases.material import DISTINCT
from tests.methods import DraftModels
from tests.tiny_engine import make_engine, run, save_tiny_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer, tiny_backend

WORK = [(prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)) for prompt in DISTINCT]


def draft_model(path: Path, **keys: object) -> dict[str, object]:
    return {"method": "draft_model", "model": str(path), "num_speculative_tokens": 4} | keys


def test_a_padded_draft_never_proposes_its_padding(
    engines: MakeEngine, ref: Reference, draft_models: DraftModels
) -> None:
    engine = engines(None, spec=draft_model(draft_models.padded))
    propose = engine.proposer.propose
    proposed: set[int] = set()

    def recording(inputs, grant):  # type: ignore[no-untyped-def]
        draft = propose(inputs, grant)
        proposed.update(token for guess in draft.by_request.values() for token in guess.tokens)
        return draft

    engine.proposer.propose = recording  # type: ignore[method-assign]
    for result, (prompt, params) in zip(run(engine, WORK), WORK, strict=True):
        assert result.key == ref(prompt, params).key
    assert proposed
    assert max(proposed) < VOCAB_SIZE
    spec = engine.stats().spec
    assert spec.num_accepted_tokens == spec.num_draft_tokens > 0


def test_a_padded_target_is_drafted_for(draft_models: DraftModels, tmp_path: Path) -> None:
    """The target has rows that no tokenizer knows; its text stays within the tokenizer's ids as far as it says so."""
    target = save_tiny_target(tmp_path / "target", vocab_size=VOCAB_SIZE + 8)
    expected = run(make_engine(target), WORK, together=False)
    engine = make_engine(target, draft_model(draft_models.target))
    assert [r.key for r in run(engine, WORK)] == [r.key for r in expected]
    assert engine.stats().spec.num_draft_tokens > 0


def with_tokenizer(draft_models: DraftModels, folder: Path, backend: Tokenizer, **config: str) -> Path:
    """The target's weights with another tokenizer."""
    folder.mkdir()
    for file in draft_models.target.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save_tiny_tokenizer(folder, backend=backend)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def swapped(first: int, second: int) -> Tokenizer:
    content = json.loads(tiny_backend().to_str())
    names = {i: text for text, i in content["model"]["vocab"].items()}
    content["model"]["vocab"] |= {names[first]: second, names[second]: first}
    return Tokenizer.from_str(json.dumps(content))


def test_another_tokenizer_is_refused_by_the_first_id_that_differs(
    tiny_model: Path, draft_models: DraftModels, tmp_path: Path
) -> None:
    draft = with_tokenizer(draft_models, tmp_path / "swapped", swapped(40, 41))
    texts = {i: text for text, i in tiny_backend().get_vocab().items()}
    with pytest.raises(ConfigError) as error:
        make_engine(tiny_model, draft_model(draft))
    message = str(error.value)
    assert "id 40" in message
    assert repr(texts[40]) in message
    assert repr(texts[41]) in message
    assert "use_heterogeneous_vocab" in message
    assert "\n" not in message


def test_another_end_token_is_warned_of(tiny_model: Path, draft_models: DraftModels, tmp_path: Path) -> None:
    draft = with_tokenizer(draft_models, tmp_path / "end", tiny_backend(), eos_token="<|endoftext|>")
    engine = make_engine(tiny_model, draft_model(draft))
    (warning,) = [line for line in engine.info().log_lines if "end their texts" in line]
    assert warning.startswith("WARNING")
    assert "2" in warning
    assert "0" in warning


def test_too_little_in_common_is_refused(tiny_model: Path, draft_models: DraftModels, tmp_path: Path) -> None:
    content = json.loads(tiny_backend().to_str())
    content["model"]["vocab"] = {
        text if i < 90 else f"\u4e00{text}": i for text, i in content["model"]["vocab"].items()
    }
    content["model"]["merges"] = []
    draft = with_tokenizer(draft_models, tmp_path / "other", Tokenizer.from_str(json.dumps(content)))
    with pytest.raises(ConfigError, match=r"share \d+ tokens of 320 and 320, and at least 100 are needed"):
        make_engine(tiny_model, draft_model(draft, use_heterogeneous_vocab=True))
