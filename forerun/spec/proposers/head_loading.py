"""From the configuration to an EAGLE head that fits its target, or one line that says why it does not."""

from __future__ import annotations

import time

from forerun.memory.groups import GroupSpec
from forerun.models.builtin import resolve_model
from forerun.models.decoder import attention_spec
from forerun.models.heads.loading import load_head
from forerun.spec.config import MethodConfig
from forerun.spec.proposer import TargetInfo
from forerun.spec.proposers.drafting import Chooser
from forerun.spec.proposers.eagle import EagleProposer
from forerun.spec.vocabulary import ReducedVocabulary

GIB = 2**30
KIB = 2**10


def load_eagle(config: MethodConfig, target: TargetInfo, name: str) -> EagleProposer:
    """Load the head that `config` names, for this target; its drafts are counted under `name`.

    Raises:
        ConfigError: no such head, or one that is made for another target.
    """
    assert config.model is not None
    started = time.perf_counter()
    path = resolve_model(config.model, revision=config.revision)
    head = load_head(path, target.model, packed=target.packed, quantization=config.quantization)
    shape = attention_spec(head.config.layers, target.block_size).shape
    tree = config.spec_tree
    group = GroupSpec(
        name,
        shape.block_bytes(target.kv_dtype.itemsize),
        method=config.method,
        beside_target=True,
        scratch_tokens=config.max_draft_tokens if tree is None else tree.depth * tree.top_k,
    )
    vocabulary = ReducedVocabulary(head.draft_to_target, target.config.vocab_size)
    loaded = (
        f"{name}: {config.model}: {head.weight_bytes / GIB:.2f} GiB of weights loaded in "
        f"{time.perf_counter() - started:.2f} seconds, KV cache {group.block_bytes / target.block_size / KIB:.1f} KiB "
        "per token beside the target's"
    )
    notes = [loaded, *(f"{name}: {note}" for note in head.notes)]
    notes += head_context_notes(head.max_positions, target.max_model_len)
    return EagleProposer(
        head,
        group,
        Chooser(vocabulary, target.config.vocab_size, config.draft_sample_method, config.draft_min_prob),
        block_size=target.block_size,
        kv_dtype=target.kv_dtype,
        num_slots=target.max_num_seqs,
        dtype=target.model.dtype,
        spec_tree=tree,
        name=name,
        notes=notes,
    )


def head_context_notes(own: int, target: int) -> list[str]:
    """A note where the head follows fewer tokens than the target."""
    if own >= target:
        return []
    return [
        f"WARNING: the draft head's context is {own} tokens and the target's {target}: longer requests go on without "
        "its drafts"
    ]
