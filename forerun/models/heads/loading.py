"""Checkpoints to draft heads.

What a checkpoint is, its config's keys and its tensors' names say, never its path. It must fit the target that it is
loaded for: a head of another target would run, and draft nonsense.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from forerun.errors import CheckpointError
from forerun.kernels.fused import Embedding, Linear, PlainLinear, embed
from forerun.kernels.packed import PackedLinear, PackedWeight
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.families.base import ROPE_FACTORS, GgufHeader, Slot
from forerun.models.families.values import Values
from forerun.models.gguf_file import row_chunks
from forerun.models.heads import eagle, eagle3
from forerun.models.heads.blocks import GGUF, HF
from forerun.models.heads.config import nested
from forerun.models.heads.eagle import EagleConfig, EagleHead
from forerun.models.heads.eagle3 import Eagle3Config, Eagle3Head
from forerun.models.heads.files import HeadFile, open_head
from forerun.models.heads.head import Head
from forerun.models.heads.vocabulary import from_ids, from_offsets
from forerun.models.layers import Weight, linear_of
from forerun.models.loading import (
    fill_weights,
    kind_for,
    naming,
    one_line_errors,
    rope_factors,
)

AnyConfig = EagleConfig | Eagle3Config
EXTRA = re.compile(
    rf"^(d2t|t2d|{'|'.join(map(re.escape, ROPE_FACTORS))})$|rotary_emb\.inv_freq$"
)  # read apart, or not needed
CHUNK_ELEMENTS = 1 << 20  # compared at once


def read_head(path: str | Path, target: DecoderConfig, *, aux_layer_ids: Sequence[int] | None = None) -> AnyConfig:
    """What `load_head` would load for a target of this config, without weights.

    Raises:
        CheckpointError: as `load_head`, for all that the header tells.
    """
    path = Path(path)
    with one_line_errors(path):
        file = open_head(path)
        with naming(file.where):
            return check_head(file, target, aux_layer_ids)[0]


def load_head(
    path: str | Path,
    target: Decoder,
    *,
    packed: bool = False,
    quantization: str | None = None,
    aux_layer_ids: Sequence[int] | None = None,
) -> Head:
    """Load a draft head for a target.

    Embedding and output head are the target's if the checkpoint has none, or the same to the last value; see `notes`.

    Args:
        path: a directory with config.json and *.safetensors or pytorch_model.bin, or a .gguf file.
        target: the model that it will draft for. The head computes in its dtype, on its device.
        packed, quantization: as in `load_model`.
        aux_layer_ids: states of the target to take, as layers that they enter, whatever the checkpoint says.
    Raises:
        CheckpointError: missing, broken, unsupported, or made for another target; one line that names the file and the
            tensor or key.
        ConfigError: as `load_model`.
    """
    choose = kind_for(packed, quantization)
    path = Path(path)
    with one_line_errors(path):
        file = open_head(path)
        with naming(file.where):
            config, slots = check_head(file, target.config, aux_layer_ids)
            vocabulary = _vocabulary(file, config)
        weights = fill_weights(file.sources, slots, config.weight_shapes(), target.dtype, choose, device=target.device)
    return _assemble(config, weights, target, None if vocabulary is None else vocabulary.to(target.device))


def check_head(
    file: HeadFile, target: DecoderConfig, aux_layer_ids: Sequence[int] | None = None, *, known: bool = True
) -> tuple[AnyConfig, dict[str, Slot]]:
    """The config, and where the tensors go; they are what it says, and the target has what is left out.

    Args:
        known: the tensors of the file are known; else they are some of those that its config asks for, by name.
    """
    config = _config(file, target, aux_layer_ids)
    _check_ends(config, target)
    slots = (GGUF if file.gguf else HF).slots(config.weight_shapes(), config.layers)
    if known:
        _check_names(file, config, slots)
    return config, slots


def declared_names(values: Values) -> set[str]:
    """The tensors by which networks and their parts are told apart, as a config without its weights speaks of them.
    Tables that a head may have or share with the target are taken to be its own."""
    kind = values.text("speculators_model_type", "")
    layers = nested(values, "transformer_layer_config") if kind else values
    names = {"embed_tokens.weight"}
    architectures = " ".join(map(str, values.get("architectures", [])))
    if kind or "eagle3" in architectures.lower() or values.get("draft_vocab_size") is not None:
        names |= {"layers.0.hidden_norm.weight", "lm_head.weight"}
    else:
        names |= {"fc.weight", "fc.bias"} if values.flag("bias", True) else {"fc.weight"}
    if layers.flag("attention_bias", False) or layers.flag("qkv_bias", False):
        names.add("layers.0.self_attn.q_proj.bias")
    if layers.flag("attention_bias", False):
        names.add("layers.0.self_attn.o_proj.bias")
    if layers.flag("mlp_bias", False):
        names.add("layers.0.mlp.down_proj.bias")
    if layers.text("model_type", "llama") == "qwen3":
        names.add("layers.0.self_attn.q_norm.weight")
    return names


def _config(file: HeadFile, target: DecoderConfig, aux_layer_ids: Sequence[int] | None) -> AnyConfig:
    shapes = {name: source.shape for name, source in file.sources.items()}
    if file.gguf:
        values = Values(file.values.values, f"{eagle3.METHOD}.")
        return eagle3.from_gguf(GgufHeader(file.values, values, shapes, rope_factors(file.gguf)), target, aux_layer_ids)
    kind = file.values.text("speculators_model_type", "")
    if kind and kind not in eagle3.SPECULATORS:
        raise CheckpointError(
            f"speculators_model_type={kind!r} is not supported; supported: {', '.join(eagle3.SPECULATORS)}"
        )
    if kind or "draft_vocab_size" in file.values.values or {"d2t", "layers.0.hidden_norm.weight"} & shapes.keys():
        return eagle3.from_hf(file.values, shapes, target, aux_layer_ids)
    if "fc.weight" not in shapes:
        raise CheckpointError("neither an EAGLE head (tensor 'fc.weight') nor one of EAGLE-3 ('hidden_norm.weight')")
    if aux_layer_ids is not None:
        raise CheckpointError("aux_layer_ids is for EAGLE-3 heads: an EAGLE head takes the target's last state")
    return eagle.from_hf(file.values, shapes, target)


def _check_ends(config: AnyConfig, target: DecoderConfig) -> None:
    """What is not in the checkpoint must be something that the target has."""
    width = config.layers.hidden_size
    if not config.own_embedding and width != target.hidden_size:
        raise CheckpointError(
            f"tensor 'embed_tokens.weight' is missing, and the target's is {target.hidden_size} wide, the head {width}"
        )
    ours = (config.draft_vocab_size, width)
    theirs = (target.vocab_size, width if config.tied else target.hidden_size)
    if not config.own_head and ours != theirs:
        source = "the embedding" if config.tied else "the target's"
        raise CheckpointError(f"tensor 'lm_head.weight' {list(ours)} is missing, and {source} is {list(theirs)}")


def _check_names(file: HeadFile, config: AnyConfig, needed: Mapping[str, object]) -> None:
    """All that we need is there, and nothing that would change the result is left over."""
    missing = [name for name in needed if name not in file.sources]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(f"tensor {missing[0]!r} is missing{more}, which {config} has")
    for name in file.sources:
        if name not in needed and not EXTRA.search(name):
            raise CheckpointError(f"tensor {name!r} is no part of {config}")


def _vocabulary(file: HeadFile, config: AnyConfig) -> Tensor | None:
    num_draft, num_target = config.draft_vocab_size, config.layers.vocab_size
    if "d2t" not in file.sources:
        if num_draft != num_target:
            raise CheckpointError(f"tensor 'd2t' is missing: without it, {num_draft} of {num_target} ids mean nothing")
        return None
    d2t = file.read("d2t")
    if file.gguf:
        return from_ids(d2t, num_draft, num_target)
    return from_offsets(d2t, num_draft, num_target, file.read("t2d") if "t2d" in file.sources else None)


def _assemble(config: AnyConfig, weights: dict[str, Weight], target: Decoder, vocabulary: Tensor | None) -> Head:
    theirs = {"embedding": target.embedding, "head": _table(target.head)}
    kept: dict[str, Weight] = {}
    notes = []
    for name in theirs:
        own = _table(weights.pop(name)) if name in weights else None
        if own is not None and not _same(own, theirs[name]):
            kept[name] = own
        notes.append(_note(name, own, theirs[name], name in kept))
    embedding = kept.get("embedding", target.embedding)
    assert isinstance(embedding, Tensor | PackedWeight)
    head = linear_of(kept, "head") if "head" in kept else target.head
    if config.tied:
        head = linear_of({"head": embedding}, "head")
    positions = target.max_positions
    result: EagleHead | Eagle3Head
    if isinstance(config, Eagle3Config):
        result = Eagle3Head(config, weights, embedding, head, positions, vocabulary)
    else:
        result = EagleHead(config, weights, embedding, head, positions)
    result.weight_bytes = sum(_num_bytes(weight) for weight in (*weights.values(), *kept.values()))
    result.notes = tuple(notes)
    return result


def _table(weight: Weight | Linear) -> Embedding:
    """A matrix by its rows."""
    if isinstance(weight, PlainLinear):
        return weight.weight
    if isinstance(weight, PackedLinear):
        (weight,) = weight.weights  # embeddings and output heads come in one piece
    return weight


def _same(own: Embedding, theirs: Embedding) -> bool:
    """Whether both have the same values, whatever they are stored as."""
    if tuple(own.shape) != tuple(theirs.shape):
        return False
    num_rows, width = own.shape
    for first, count in row_chunks(num_rows, max(1, CHUNK_ELEMENTS // width)):
        ids = torch.arange(first, first + count)
        if not torch.equal(embed(ids, own).float(), embed(ids, theirs).float()):
            return False
    return True


def _note(name: str, own: Embedding | None, theirs: Embedding, kept: bool) -> str:
    if own is None:
        return f"the draft head has no {name} of its own"
    size = f"{_num_bytes(own) / 1e6:.1f} MB"
    if not kept:
        return f"the draft head's {name} is the target's, shared: saves {size}"
    reason = ""
    if isinstance(theirs, PackedWeight) and theirs.kind != "bf16" and tuple(own.shape) == theirs.shape:
        reason = f"; the target's is quantised ({theirs.kind})"
    return f"the draft head keeps its own {name}: {size}{reason}"


def _num_bytes(weight: Weight) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes
