"""What a family is: how its metadata is read, and where each of a checkpoint's tensors goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.models.config import DecoderConfig
from forerun.models.families.values import Values

# Keys of config.json by which some family changes the maths, and values that change nothing. A family that does not
# read one of them would compute something else than its author meant.
SWITCHES: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "logits_scaling": (1.0,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "partial_rotary_factor": (1.0,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1.0,),
    "use_bidirectional_attention": (False,),
    "use_qk_norm": (False,),
}
GGUF_SWITCHES: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
}


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a checkpoint's tensor goes.

    Attributes:
        tensor: our name, a key of `DecoderConfig.weight_shapes`.
        start: the first of our tensor's rows that it fills.
        shape: the shape it must have.
        interleaved_heads: rows come in this many heads, in each of which the two halves that rope rotates are
            interleaved (llama.cpp's order for Llama); 0 for halves that stand one after the other.
        added: to the checkpoint's values, which lack it.
    """

    tensor: str
    start: int
    shape: tuple[int, ...]
    interleaved_heads: int = 0
    added: float = 0.0


# Names of the tensors; `{expert}` is the number of an expert, `name[i]` matrix i of a tensor of three axes.
HF_NAMES = {"embedding": "embed_tokens.weight", "norm": "norm.weight", "head": "lm_head.weight"}
HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "output": "self_attn.o_proj.weight",
    "output_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down": "mlp.down_proj.weight",
    "down_bias": "mlp.down_proj.bias",
    "router": "mlp.gate.weight",
    "expert.gate": "mlp.experts.{expert}.gate_proj.weight",
    "expert.up": "mlp.experts.{expert}.up_proj.weight",
    "expert.down": "mlp.experts.{expert}.down_proj.weight",
}
# Where what comes out of attention and MLP is normed too, post_attention_layernorm is what its name says.
HF_POST_NORM_NAMES = {
    "post_attn_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}

GGUF_NAMES = {"embedding": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
GGUF_LAYER_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "output": "attn_output.weight",
    "output_bias": "attn_output.bias",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down": "ffn_down.weight",
    "down_bias": "ffn_down.bias",
    "post_attn_norm": "post_attention_norm.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
    "router": "ffn_gate_inp.weight",
    "expert.gate": "ffn_gate_exps.weight[{expert}]",
    "expert.up": "ffn_up_exps.weight[{expert}]",
    "expert.down": "ffn_down_exps.weight[{expert}]",
}

FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS = ROPE_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)

# Parts of our fused tensors, in row order.
FUSED = {
    "qkv": ("q", "k", "v"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "gate_up": ("gate", "up"),
    "gate_up_bias": ("gate_bias", "up_bias"),
}


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says before its weights.

    Attributes:
        general: all metadata. values: the metadata under the architecture's prefix.
        shapes: of all tensors.
        rope_factors: the small tensors that rope is scaled by, those of ROPE_FACTORS that are there.
    """

    general: Values
    values: Values
    shapes: Mapping[str, tuple[int, ...]]
    rope_factors: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family: how to read its config and where to find its tensors, in Hugging Face and in GGUF files.

    Attributes:
        name: `model_type` of config.json.
        gguf_name: `general.architecture` of a GGUF file; None: llama.cpp writes it as another family.
        from_hf: config.json -> config.
        from_gguf: header of a GGUF file -> config.
        hf_prefixes: what the names of a Hugging Face checkpoint may begin with, left out in ours; the first that fits.
        hf_ignored: pattern of further names that may be there and carry nothing of the text model.
        gguf_interleaves_heads: llama.cpp's conversion reorders the rows of q and k.
        fused: parts of our fused tensors that a checkpoint stores apart, in row order.
        hf_added_to_norms: Hugging Face's checkpoints store norm weights less this; GGUF files never do.
    """

    name: str
    gguf_name: str | None
    from_hf: Callable[[Values], DecoderConfig]
    from_gguf: Callable[[GgufHeader], DecoderConfig] | None
    hf_prefixes: tuple[str, ...] = ("model.",)
    hf_ignored: str | None = None
    hf_names: Mapping[str, str] = field(default_factory=HF_NAMES.copy)
    hf_layer_names: Mapping[str, str] = field(default_factory=HF_LAYER_NAMES.copy)
    gguf_names: Mapping[str, str] = field(default_factory=GGUF_NAMES.copy)
    gguf_layer_names: Mapping[str, str] = field(default_factory=GGUF_LAYER_NAMES.copy)
    gguf_interleaves_heads: bool = False
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=FUSED.copy)
    hf_added_to_norms: float = 0.0

    def read_hf(self, values: Values) -> DecoderConfig:
        """config.json -> config.

        Raises:
            CheckpointError: a value that we cannot honour.
        """
        config = self.from_hf(values)
        values.refuse_unread(SWITCHES)
        return config

    def read_gguf(self, header: GgufHeader) -> DecoderConfig:
        """Header of a GGUF file -> config.

        Raises:
            CheckpointError: a value that we cannot honour.
        """
        assert self.from_gguf is not None
        config = self.from_gguf(header)
        header.values.refuse_unread(GGUF_SWITCHES)
        return config

    def hf_slots(self, config: DecoderConfig) -> dict[str, Slot]:
        """Every tensor that a Hugging Face checkpoint must have (without its prefix), and where it goes."""
        slots = self._slots(config, self.hf_names, self.hf_layer_names, "layers")
        if not self.hf_added_to_norms:
            return slots
        return {
            name: replace(slot, added=self.hf_added_to_norms) if slot.tensor.endswith("norm") else slot
            for name, slot in slots.items()
        }

    def gguf_slots(self, config: DecoderConfig) -> dict[str, Slot]:
        """Every tensor that a GGUF file must have, and where it goes."""
        return self._slots(config, self.gguf_names, self.gguf_layer_names, "blk", self.gguf_interleaves_heads)

    def _slots(
        self,
        config: DecoderConfig,
        names: Mapping[str, str],
        layer_names: Mapping[str, str],
        layer_prefix: str,
        interleaved: bool = False,
    ) -> dict[str, Slot]:
        shapes = config.weight_shapes()
        slots = {names[ours]: Slot(ours, 0, shapes[ours]) for ours in names if ours in shapes}
        heads = {"q": config.num_heads, "k": config.num_kv_heads} if interleaved else {}
        for layer in range(config.num_layers):
            for tensor, shape in config.layer_shapes(layer).items():
                for part, start, num_rows in self._parts(config, tensor, shape[0]):
                    name = f"{layer_prefix}.{layer}.{_name_of(part, layer_names)}"
                    num_heads = heads.get(part.removesuffix("_bias"), 0)
                    slots[name] = Slot(f"layers.{layer}.{tensor}", start, (num_rows, *shape[1:]), num_heads)
        return slots

    def _parts(self, config: DecoderConfig, tensor: str, num_rows: int) -> Iterator[tuple[str, int, int]]:
        """What a checkpoint stores of a layer's tensor: (part, its first row in ours, its rows)."""
        prefix, dot, name = tensor.rpartition(".")
        sizes = {"q": config.query_size, "k": config.kv_size, "v": config.kv_size}
        start = 0
        parts = self.fused.get(name, (name,))
        for part in parts:
            size = sizes.get(part.removesuffix("_bias"), num_rows // len(parts))
            yield prefix + dot + part, start, size
            start += size


def _name_of(part: str, names: Mapping[str, str]) -> str:
    """A part's name in a checkpoint; `experts.<i>.<part>` has that of `expert.<part>`."""
    if not part.startswith("experts."):
        return names[part]
    _, expert, inner = part.split(".")
    return names[f"expert.{inner}"].format(expert=expert)
