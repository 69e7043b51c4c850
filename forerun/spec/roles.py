"""Speculators checkpoints given as the model that is served: such a head names its target, so the roles are flipped.

No torch here. Of a hub model the configuration is fetched, not the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.models.builtin import BUILTIN_MODELS, resolve_model
from forerun.models.hub import HubModel
from forerun.spec.config import SpeculativeConfig, known_keys, unserved
from forerun.spec.detect import SPECULATORS, read_config_json
from forerun.spec.keys import METHODS, Status
from forerun.spec.refusal import quoted, refuse, show, within
from forerun.spec.source import read_object

Source = str | Mapping[str, Any] | SpeculativeConfig | None


@dataclass(frozen=True)
class Roles:
    """Who is served and who drafts.

    Attributes:
        target: the model that is served, and its tokenizer.
        source: what `SpeculativeConfig.parse` is to read; None: plain decoding.
        note: a line for the log where the roles were flipped; "" where they were not.
    """

    target: str
    source: Source
    note: str = ""


def assign_roles(model: str, source: Source) -> Roles:
    """What to serve, and how to draft for it, where `model` may be a speculators checkpoint.

    Then its verifier is served, and the checkpoint drafts as it says, unless keys of `source` say otherwise. Any other
    model comes back with `source` as it was given.

    Raises:
        ConfigError: the checkpoint names no verifier that there is, is of a kind that is not served, or `source` names
            another method or draft.
        CheckpointError: a model of the hub that cannot be fetched.
    """
    folder = _folder(model)
    config = read_config_json(folder) if folder is not None else {}
    if folder is None or config.get("speculators_config") is None:
        return Roles(model, source)
    with within(f"the speculators checkpoint {model!r}"):
        draft = _draft(model, config)
        target = _verifier(config, folder)
        given = _given(source)
        for key in ("method", "model"):
            if given.get(key, draft[key]) != draft[key]:
                refuse(
                    f"{key}={show(given[key])} contradicts its own, {show(draft[key])}: leave it out, or serve "
                    f"{show(target)} and draft as you like"
                )
    note = f"{model} is a speculators checkpoint: its verifier {target} is served, and it drafts ({draft['method']})"
    return Roles(target, draft | given, note)


def _folder(model: str) -> Path | None:
    """Where the model's config.json may lie; None where it has none, or there is no such model: loading it will say."""
    if model and _is_there(model):
        return Path(model).expanduser()
    on_hub = None if model in BUILTIN_MODELS else HubModel.parse(model)
    # A file of a repository is a GGUF file, which has no config.json.
    return resolve_model(model, weights=False) if on_hub is not None and on_hub.file is None else None


def _is_there(path: str | Path) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # no name that a file could have, or a home that nobody has
        return False


def _given(source: Source) -> dict[str, Any]:
    if isinstance(source, SpeculativeConfig):
        return source.resolved()
    return {} if source is None else known_keys(read_object(source))


def _draft(model: str, config: Mapping[str, Any]) -> dict[str, Any]:
    kind = config.get("speculators_model_type")
    if not isinstance(kind, str) or kind not in SPECULATORS:
        refuse(f"speculators_model_type={show(kind)} is unknown; known: {quoted(SPECULATORS)}")
    method = SPECULATORS[kind]
    if METHODS[method].status is not Status.SERVED:
        refuse(f'speculators_model_type="{kind}" means method "{method}", which {unserved(method)}')
    return {"method": method, "model": model} | ({"parallel_drafting": True} if kind == "peagle" else {})


def _verifier(config: Mapping[str, Any], folder: Path) -> str:
    """The target that the checkpoint names: a path relative to it, any other path, a built-in name or a hub id."""
    name: Any = config
    for key in ("speculators_config", "verifier", "name_or_path"):
        name = name.get(key) if isinstance(name, Mapping) else None
    entry = f"speculators_config.verifier.name_or_path={show(name)}"
    instead = 'give the target as the model to serve, and the checkpoint as "model" of the speculative configuration'
    if not isinstance(name, str) or not name.strip():
        refuse(f"{entry} names no target: {instead}")
    target = str(folder / name) if _is_there(folder / name) else name
    if not (_is_there(target) or target in BUILTIN_MODELS or HubModel.parse(target)):
        refuse(f"{entry} is no path, built-in name or hub id: {instead}")
    if _is_there(target) and read_config_json(Path(target).expanduser()).get("speculators_config") is not None:
        refuse(f"{entry} is a speculators checkpoint itself, and no target: {instead}")
    return target
