"""Completes a configuration by what the checkpoints of its draft heads say. Headers are read, weights are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from forerun.models.builtin import resolve_model
from forerun.models.config import DecoderConfig
from forerun.models.heads import read_head
from forerun.models.heads.config import HeadConfig
from forerun.spec.config import MethodConfig, SpeculativeConfig
from forerun.spec.method_rules import HEADS
from forerun.spec.refusal import refuse, show, within

ReadHead = Callable[[MethodConfig, DecoderConfig], HeadConfig]


def read_checkpoint(method: MethodConfig, target: DecoderConfig) -> HeadConfig:
    """What the header of a method's head says."""
    assert method.model is not None
    return read_head(resolve_model(method.model, revision=method.revision), target)


def complete(
    config: SpeculativeConfig, target: DecoderConfig, read: ReadHead = read_checkpoint
) -> tuple[SpeculativeConfig, tuple[str, ...]]:
    """The configuration with each head's K known and its kind of drafting, and the lines that the user should read.

    Args:
        target: the model that is served.
        read: how a head is read.
    Raises:
        ConfigError: a checkpoint that is missing, is of another method, or says no K where none is given; keys that
            contradict it.
        CheckpointError: it is no head, or one of another target, as `read_head` says it.
    """
    notes: list[str] = []
    methods = list(config.methods)
    for place, method in enumerate(methods):
        if method.method in HEADS:
            with within(f"method[{place}]" if len(methods) > 1 else ""):
                methods[place] = _with_header(method, read(method, target), target, notes)
    completed = dataclasses.replace(config, methods=tuple(methods))
    notes += [f"WARNING: {warning}" for warning in completed.warnings[len(config.warnings) :]]
    return completed, tuple(notes)


def _with_header(method: MethodConfig, head: HeadConfig, target: DecoderConfig, notes: list[str]) -> MethodConfig:
    if head.method != method.method:
        refuse(
            f'method="{method.method}" does not fit model={method.model!r}, whose checkpoint is a head of method '
            f'"{head.method}": give that'
        )
    _check_output_head(method, head, target)
    if method.parallel_drafting and head.mask_token_id is None:
        refuse(
            f"parallel_drafting=true does not fit model={method.model!r}: its checkpoint has no mask state, so it is "
            "no P-EAGLE head: leave parallel_drafting out"
        )
    parallel = head.mask_token_id is not None
    if parallel and not method.parallel_drafting:
        notes.append(f"WARNING: model {method.model!r} is a P-EAGLE head: parallel_drafting is turned on")
    k = method.num_speculative_tokens
    if k is None:
        k = head.num_speculative_tokens
        if k is None:
            refuse(
                f"num_speculative_tokens is missing, and the checkpoint of model={method.model!r} has no number of its "
                "own"
            )
        notes.append(f"num_speculative_tokens={k}, as the checkpoint of {method.model!r} says")
    return dataclasses.replace(method, num_speculative_tokens=k, parallel_drafting=parallel)


def _check_output_head(method: MethodConfig, head: HeadConfig, target: DecoderConfig) -> None:
    """As far as shapes tell; whether a matrix of the same shape is the same, the weights will."""
    size = (head.draft_vocab_size, head.layers.hidden_size)
    shared = not head.tied and size == (target.vocab_size, target.hidden_size)
    if method.draft_lm_head_quantization is not None and not shared:
        refuse(
            f"draft_lm_head_quantization={show(method.draft_lm_head_quantization)} does not fit model="
            f"{method.model!r}: it needs a head that shares the target's output head, and this one has its own, "
            f"{list(size)}"
        )
