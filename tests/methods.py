"""Every method that drafts, each with a configuration for the tiny target: what the tests of promises run over.

A method joins by a line in METHODS; a draft model that it needs, by a line in `save_draft_models`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.models.heads.fit import FittedHeads, fit_heads
from tests.tiny_engine import NGRAM, SUFFIX, save_tiny_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer, tiny_backend

MASK_TOKEN = VOCAB_SIZE  # one id past the tokenizer's, in the padding
K = 4
TREE = {"depth": 3, "top_k": 3, "num_draft_tokens": K}
NGRAM_MOD = {"method": "ngram_mod", "num_speculative_tokens": 8, "ngram_mod_n_match": 2, "ngram_mod_n_min": 1}


@dataclass(frozen=True)
class DraftModels:
    """Draft models for the tiny target T.

    Attributes:
        target: T itself.
        noisy: T with noise on its weights: right now and then.
        padded: T with more rows in embedding and head, whose logits are high.
        renamed: T with its ids shuffled, and a tokenizer shuffled alike: right, in other ids.
        parallel: random, with a mask token (PARD).
        folder: for what is made later.
    """

    target: Path
    noisy: Path
    padded: Path
    renamed: Path
    parallel: Path
    folder: Path

    @cached_property
    def heads(self) -> FittedHeads:
        """EAGLE heads, fitted when first asked for: it takes seconds."""
        return fit_heads(self.target, self.folder / "heads")


def save_draft_models(target: Path, folder: Path) -> DraftModels:
    return DraftModels(
        target,
        save_noisy(target, folder / "noisy"),
        _padded(target, folder / "padded"),
        _renamed(target, folder / "renamed"),
        save_tiny_target(
            folder / "parallel", seed=3, vocab_size=VOCAB_SIZE + 8, pard_token=MASK_TOKEN, spd_type="pard"
        ),
        folder,
    )


def _load(target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


def save_noisy(target: Path, folder: Path, noise: float = 0.15) -> Path:
    """T with noise on its weights, in shares of their own spread."""
    model = _load(target)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std() * noise)
    model.save_pretrained(folder)
    return save_tiny_tokenizer(folder)


def _padded(target: Path, folder: Path) -> Path:
    model = _load(target)
    model.resize_token_embeddings(VOCAB_SIZE + 8, mean_resizing=False)
    with torch.no_grad():
        mean = model.lm_head.weight[:VOCAB_SIZE].abs().max(0).values
        model.lm_head.weight[VOCAB_SIZE:] = mean * 100  # half of all rows would choose one of these
    model.save_pretrained(folder)
    return save_tiny_tokenizer(folder)


def _renamed(target: Path, folder: Path) -> Path:
    """Id i of the target is id PERMUTATION[i] here."""
    permutation = shuffled_ids()
    model = _load(target)
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(VOCAB_SIZE)
    with torch.no_grad():
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight.copy_(weight[inverse].clone())
    model.save_pretrained(folder)
    return save_tiny_tokenizer(folder, backend=renamed_backend())


def shuffled_ids() -> torch.Tensor:
    return torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))


def renamed_backend() -> Tokenizer:
    backend = json.loads(tiny_backend().to_str())
    permutation = shuffled_ids().tolist()
    backend["model"]["vocab"] = {text: permutation[i] for text, i in backend["model"]["vocab"].items()}
    for token in backend["added_tokens"]:
        token["id"] = permutation[token["id"]]
    return Tokenizer.from_str(json.dumps(backend))


def _draft_model(name: str, **keys: Any) -> Callable[[DraftModels], dict[str, Any]]:
    return lambda drafts: (
        {
            "method": "draft_model",
            "model": str(getattr(drafts, name)),
            "num_speculative_tokens": K,
        }
        | keys
    )


def _head(name: str, method: str = "eagle3", **keys: Any) -> Callable[[DraftModels], dict[str, Any]]:
    length = {} if "spec_tree" in keys else {"num_speculative_tokens": K}
    return lambda drafts: {"method": method, "model": str(getattr(drafts.heads, name))} | length | keys


def _combined(drafts: DraftModels) -> dict[str, Any]:
    return {"method": [SUFFIX, _draft_model("noisy")(drafts)]}


def remembers(spec: dict[str, Any] | None) -> bool:
    """Whether something is kept when no request is there: what others may draft from."""
    listed = spec["method"] if spec and isinstance(spec["method"], list) else [spec or {}]
    members = [{"method": member} if isinstance(member, str) else member for member in listed]
    return any(
        member.get("method") == "ngram_mod" or member.get("suffix_decoding_max_cached_requests") for member in members
    )


METHODS: dict[str, Callable[[DraftModels], dict[str, Any]]] = {
    "ngram": lambda drafts: NGRAM,
    "suffix": lambda drafts: SUFFIX,
    "draft_model": _draft_model("noisy"),
    "draft_model_coupled": _draft_model("noisy", draft_sample_method="coupled"),
    "draft_model_min_prob": _draft_model("noisy", draft_min_prob=0.5),
    "draft_model_renamed": _draft_model("renamed", use_heterogeneous_vocab=True),
    "pard": _draft_model("parallel", parallel_drafting=True),
    "suffix_then_draft_model": _combined,
    "suffix_cached": lambda drafts: SUFFIX | {"suffix_decoding_max_cached_requests": 100},
    "ngram_mod": lambda drafts: NGRAM_MOD,
    "eagle3": _head("eagle3"),
    "eagle3_coupled": _head("eagle3", draft_sample_method="coupled"),
    "eagle3_min_prob": _head("eagle3", draft_min_prob=0.3),
    "eagle3_tree": _head("eagle3", spec_tree=TREE),
    "eagle": _head("eagle", method="eagle"),
    "eagle_tree": _head("eagle", method="eagle", spec_tree=TREE),
    "peagle": _head("peagle", parallel_drafting=True),
    "grammar_then_ngram": lambda drafts: {"method": ["grammar", NGRAM]},
    "suffix_then_eagle3": lambda drafts: {"method": [SUFFIX, METHODS["eagle3"](drafts)]},
}

# Those that draft for requests with a form of their text alone come on top.
WITH_FORMS = METHODS | {"grammar": lambda drafts: {"method": "grammar"}}

# Methods whose draft is the target itself, and knows its noise: every drafted token is right.
PERFECT: dict[str, Callable[[DraftModels], dict[str, Any]]] = {
    "draft_model": _draft_model("target", draft_sample_method="coupled"),
    "padded": _draft_model("padded", draft_sample_method="coupled"),
    "probabilistic": _draft_model("target", draft_sample_method="probabilistic"),
    "ngram_then_draft_model": lambda drafts: {
        "method": [
            NGRAM | {"prompt_lookup_min": 200, "prompt_lookup_max": 200, "num_speculative_tokens": K},
            PERFECT["draft_model"](drafts),
        ]
    },
}
