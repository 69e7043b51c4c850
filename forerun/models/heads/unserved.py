"""Draft networks that are known and cannot be run yet, as the tensors that they will hold. Only `forerun plan` asks.

What they share with the target is not among them. Names are ours; what matters are shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forerun.errors import CheckpointError
from forerun.models.config import DecoderConfig
from forerun.models.families.values import Values
from forerun.models.heads.config import Shapes, check_vocabulary, hf_layers, nested

MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")
DEFAULT_MARKOV_RANK = 256


@dataclass(frozen=True, slots=True)
class Network:
    """A draft network in numbers.

    Attributes:
        layers: of its keys and values, which lie beside the target's.
        num_tokens: most tokens that it drafts as it was trained; None: the config does not say.
        beyond: what happens to more than those, in words.
    """

    shapes: Shapes
    layers: DecoderConfig
    num_tokens: int | None
    beyond: str


def mtp(target: DecoderConfig, metadata: Mapping[str, Any]) -> Network:
    """The multi-token-prediction layers of the target's own checkpoint.

    Args:
        metadata: of the target, its config.json.
    Raises:
        CheckpointError: it has none.
    """
    values = Values(metadata)
    count = next((count for key in MTP_COUNTS if (count := values.integer(key, 0))), 0)
    if count < 1:
        raise CheckpointError(f"the target has no layers for multi-token prediction ({', '.join(MTP_COUNTS)})")
    width = target.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(count):
        own = target.layer_shapes(target.num_layers - 1)
        own |= {"proj": (width, 2 * width), "embedding_norm": (width,), "hidden_norm": (width,), "norm": (width,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    return Network(shapes, _of_layers(target, count), count, "its layers are run again, which costs acceptance")


def dflash(target: DecoderConfig, metadata: Mapping[str, Any]) -> Network:
    """A block-diffusion drafter.

    Args:
        metadata: of the drafter, its config.json, flat or in speculators' form.
    Raises:
        CheckpointError: it is not one of this target.
    """
    values, options, layers = _backbone(target, metadata)
    width = layers.hidden_size
    places = ((values, "aux_hidden_state_layer_ids"), (options, "target_layer_ids"), (values, "target_layer_ids"))
    states = next((ids for where, key in places if isinstance(ids := where.get(key), list) and ids), None)
    num_states = layers.num_layers if states is None else len(states)
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (width, num_states * target.hidden_size),
        "hidden_norm": (width,),
        "norm": (width,),
    }
    for layer in range(layers.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in layers.layer_shapes(layer).items()}
    if (num_draft := values.optional_integer("draft_vocab_size")) not in (None, layers.vocab_size):
        assert num_draft is not None
        shapes["head"] = (num_draft, width)
    block = values.optional_integer("block_size") or options.optional_integer("block_size")
    return Network(shapes, layers, None if block is None else block - 1, "a block has no room for them")


def dspark(target: DecoderConfig, metadata: Mapping[str, Any]) -> Network:
    """The same with a Markov head.

    Args, Raises: as `dflash`.
    """
    values, options, layers = _backbone(target, metadata)
    network = dflash(target, metadata)
    rank = values.optional_integer("markov_rank") or options.optional_integer("markov_rank") or DEFAULT_MARKOV_RANK
    num_draft = network.shapes.get("head", (layers.vocab_size,))[0]
    shapes = {**network.shapes, "markov_w1": (layers.vocab_size, rank), "markov_w2": (num_draft, rank)}
    block = values.optional_integer("dspark_block_size")
    block = block or (None if network.num_tokens is None else network.num_tokens + 1)
    return Network(shapes, layers, block, network.beyond)


NETWORKS: dict[str, Callable[[DecoderConfig, Mapping[str, Any]], Network]] = {
    "mtp": mtp,
    "dflash": dflash,
    "dspark": dspark,
}


def _backbone(target: DecoderConfig, metadata: Mapping[str, Any]) -> tuple[Values, Values, DecoderConfig]:
    """All values, those of the object that the network's own may stand in, and its layers."""
    values = Values(metadata)
    flat = values if values.get("transformer_layer_config") is None else nested(values, "transformer_layer_config")
    normed = {"layers.0.self_attn.q_norm.weight"} if flat.text("model_type", "qwen3") == "qwen3" else set()
    layers = hf_layers(flat, normed, "dflash")
    check_vocabulary(layers, target)
    options = next((key for key in ("dspark_config", "dflash_config") if values.get(key)), "dflash_config")
    return values, nested(values, options), layers


def _of_layers(target: DecoderConfig, count: int) -> DecoderConfig:
    """The target's sizes with so many layers."""
    return dataclasses.replace(target, num_layers=count, sliding_windows=(), sliding_rope=None, moe=None)
