"""From the configuration to a draft model that fits its target, or one line that says why it does not."""

from __future__ import annotations

import time
from pathlib import Path

from forerun.errors import ConfigError
from forerun.memory.groups import GroupSpec
from forerun.models.builtin import resolve_model
from forerun.models.config import DecoderConfig
from forerun.models.decoder import attention_spec
from forerun.models.loading import load_model, read_config, read_metadata
from forerun.models.paged import KV_DTYPES
from forerun.models.tokenizer import load_tokenizer
from forerun.spec.config import MethodConfig
from forerun.spec.proposer import TargetInfo
from forerun.spec.proposers.draft_model import DraftModelProposer
from forerun.spec.proposers.drafting import Chooser
from forerun.spec.vocabulary import SameVocabulary, SharedTokens, Vocabulary, check_same_tokenizer

GIB = 2**30
KIB = 2**10
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def load_draft_model(config: MethodConfig, target: TargetInfo, name: str) -> DraftModelProposer:
    """Load the model that `config` names, for this target; its drafts are counted under `name`.

    Raises:
        ConfigError: no such model, or one that does not fit: another tokenizer, too long a context asked for.
    """
    assert config.model is not None
    path = resolve_model(config.model, revision=config.revision)
    draft = read_config(path)
    notes: list[str] = []
    max_len = draft_context(config, draft, target.max_model_len, notes)
    mask = draft_mask(config, path, draft)
    vocabulary = _vocabulary(config, path, draft, target, mask, notes)
    kv_dtype = KV_DTYPES.get(config.kv_cache_dtype or "auto", target.kv_dtype)
    shape = attention_spec(draft, target.block_size).shape
    group = GroupSpec(name, shape.block_bytes(kv_dtype.itemsize), max_len, config.method)
    started = time.perf_counter()
    model = load_model(
        path,
        target.model.dtype,
        max_len,
        packed=target.packed,
        quantization=config.quantization,
        device=target.model.device,
    )
    notes.insert(
        0,
        f"{name}: {config.model}: {model.weight_bytes / GIB:.2f} GiB of weights loaded in "
        f"{time.perf_counter() - started:.2f} seconds, KV cache {group.block_bytes / target.block_size / KIB:.1f} KiB "
        "per token of a request that drafts",
    )
    return DraftModelProposer(
        model,
        group,
        Chooser(vocabulary, target.config.vocab_size, config.draft_sample_method, config.draft_min_prob),
        block_size=target.block_size,
        kv_dtype=kv_dtype,
        max_rows=target.max_num_batched_tokens,
        mask_token_id=mask,
        name=name,
        notes=notes,
    )


def draft_context(config: MethodConfig, draft: DecoderConfig, target_len: int, notes: list[str]) -> int:
    """How many tokens of a request the draft model can follow; a note where those are not all.

    Raises:
        ConfigError: more is asked for than the draft or the target has.
    """
    own = draft.max_position_embeddings
    if config.max_model_len is not None:
        for what, limit in (("the draft model", own), ("the target", target_len)):
            if config.max_model_len > limit:
                raise ConfigError(
                    f"speculative_config: max_model_len={config.max_model_len} is more than the {limit} tokens that "
                    f"{what} has: lower it"
                )
    length = min(own, config.max_model_len or own, target_len)
    if length < target_len:
        notes.append(
            f"WARNING: the draft model's context is {length} tokens and the target's {target_len}: longer "
            "requests go on without its drafts"
        )
    return length


def draft_mask(config: MethodConfig, path: Path, draft: DecoderConfig) -> int | None:
    """The token of rows of which nothing is known; None: the model drafts token by token.

    Raises:
        ConfigError: it is asked to draft at once, and is not made for it.
    """
    if not config.parallel_drafting:
        return None
    metadata = read_metadata(path)
    if metadata.get("spd_type") == "pard2":
        raise ConfigError(f"speculative_config: model={config.model!r} is a PARD-2 checkpoint, which is not supported")
    token = next((metadata[key] for key in MASK_KEYS if metadata.get(key) is not None), None)
    if token is None:
        raise ConfigError(
            f"speculative_config: parallel_drafting needs a model trained for it: the config of {config.model!r} has "
            f"no mask token ({', '.join(MASK_KEYS)})"
        )
    if type(token) is not int or not 0 <= token < draft.vocab_size:
        raise ConfigError(
            f"speculative_config: the mask token {token!r} of {config.model!r} is not one of its {draft.vocab_size} ids"
        )
    return token


def _vocabulary(
    config: MethodConfig, path: Path, draft: DecoderConfig, target: TargetInfo, mask: int | None, notes: list[str]
) -> Vocabulary:
    tokenizer = load_tokenizer(str(path))
    if config.use_heterogeneous_vocab:
        shared = SharedTokens(target.tokenizer, tokenizer, target.config.vocab_size, draft.vocab_size)
        notes += [f"WARNING: {warning}" for warning in shared.warnings]
        notes.append(
            f"target and draft share {shared.num_shared} tokens, {shared.shares[0]:.1%} of the target's vocabulary of "
            f"{target.tokenizer.vocab_size} and {shared.shares[1]:.1%} of the draft's of {tokenizer.vocab_size}; "
            "drafts are greedy"
        )
        return shared
    warnings = check_same_tokenizer(target.tokenizer, tokenizer, str(config.model))
    notes += [f"WARNING: {warning}" for warning in warnings]
    sizes = (draft.vocab_size, target.config.vocab_size, target.tokenizer.vocab_size)
    return SameVocabulary(min(sizes), draft.vocab_size, () if mask is None else (mask,))
