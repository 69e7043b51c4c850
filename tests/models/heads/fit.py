"""Tiny heads fitted to a tiny target, so that it accepts what they draft: random ones are never right.

A head starts as a copy of the target's own layers, wired as its network allows, and is then fitted to texts of the
target as the published trainers do it: EAGLE-3 and EAGLE-1 by the training-time test (each row's own output is fed back
for a few steps), P-EAGLE by rows of masks after every row. A few seconds on one thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tiny_engine import prompts
from tests.tiny_tokenizer import ENDOFTEXT, VOCAB_SIZE

from .tiny_heads import Tensors, as_midlayer, random, save
from .torch_head import TorchHead

DRAFT_VOCAB = 200
NUM_TEXTS, PROMPT, TEXT = 512, 16, 64  # texts; tokens of a prompt and of all
ROWS, BATCH, DECAY = 40, 16, 0.8
MASK_TOKEN = ENDOFTEXT
LAYERS = (0, 1, 2)  # whose incoming states the heads are given, of a target of 2: the last is what its final norm gets


@dataclass(frozen=True)
class FittedHeads:
    """Checkpoints for the tiny target.

    Attributes:
        eagle3: SafeAILab's form, two layers, 200 of 320 ids, embedding left out.
        eagle: EAGLE-1, one layer.
        peagle: speculators' form, two layers, all ids.
    """

    eagle3: Path
    eagle: Path
    peagle: Path


@dataclass(frozen=True)
class Texts:
    """What the target said, and what it thought: token_ids [N, T], states [N, T, 3, H], of the layers in `LAYERS`,
    last [N, T, 1, H], after the final norm, and logits [N, T, V]."""

    token_ids: Tensor
    states: Tensor
    last: Tensor
    logits: Tensor

    def some(self, places: Tensor) -> Texts:
        return Texts(self.token_ids[places], self.states[places], self.last[places], self.logits[places])


def load_target(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def read(model: Any, token_ids: Tensor) -> Texts:
    """token_ids: [N, T]."""
    unnormed: list[Tensor] = []  # transformers calls the state after the final norm the last
    hook = model.model.norm.register_forward_hook(lambda module, inputs, output: unnormed.append(inputs[0]))
    output = model(token_ids, output_hidden_states=True)
    hook.remove()
    states = torch.stack([*output.hidden_states[:-1], *unnormed], dim=2)
    return Texts(token_ids, states, output.hidden_states[-1].unsqueeze(2), output.logits)


def load_head(path: Path, model: PreTrainedModel) -> TorchHead:
    """A saved head, in float64."""
    config = json.loads((path / "config.json").read_text())
    config |= config.get("transformer_layer_config", {})
    tensors = load_file(path / "model.safetensors")
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return _head(model, config, tensors).double()


def fit_heads(target: Path, folder: Path) -> FittedHeads:
    """Fit all heads and save them."""
    model = load_target(target)
    texts = read(model, _own_texts(model))
    kept = torch.bincount(texts.logits.argmax(-1).flatten(), minlength=VOCAB_SIZE).topk(DRAFT_VOCAB).indices.sort()[0]
    return FittedHeads(
        _fit_eagle3(model, texts, kept, folder / "eagle3"),
        _fit_eagle(model, texts, folder / "eagle"),
        _fit_peagle(model, texts, folder / "peagle"),
    )


def _own_texts(model: Any) -> Tensor:
    """Continuations of random prompts, [N, T]."""
    starts = prompts(NUM_TEXTS, seed=100, shortest=PROMPT, longest=PROMPT)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn: Tensor = model.generate(
            torch.tensor(starts),
            max_new_tokens=TEXT - PROMPT,
            do_sample=True,
            temperature=0.5,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
        )
    return drawn


# -- what the heads start from


def _config(num_layers: int, middle: int, **keys: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": middle,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,  # the length of the training texts, as published heads have it
        **keys,
    }


EAGLE3_KEYS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "attention_bias": True,
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": list(LAYERS),
}


def _copied_eagle3(model: Any) -> Tensors:
    """The target's two layers. Four more heads of the first bring each row its own token, which no residual does."""
    generator = torch.Generator().manual_seed(1)
    embedding, (first, second) = (
        model.model.embed_tokens.weight.detach(),
        [layer.state_dict() for layer in model.model.layers],
    )
    near_zero = lambda *shape: 0.02 * random(generator, *shape)  # noqa: E731
    scale = embedding.square().mean().sqrt() / first["input_layernorm.weight"]
    own = torch.zeros(128)
    own[64:].view(4, 16)[:, :3] = 8.0  # a query and key whose product falls off with the distance, by the rotation
    tensors: Tensors = {"fc.weight": random(generator, 64, 192), "layers.0.hidden_norm.weight": near_zero(64) * 5}
    for layer, weights in enumerate((first, second)):
        name = f"layers.{layer}."
        for kind in "qkv":
            copied = weights[f"self_attn.{kind}_proj.weight"]
            if kind != "q":
                copied = copied.view(2, 16, 64).repeat_interleave(2, dim=0).flatten(0, 1)
            more = torch.diag(scale) if kind == "v" and layer == 0 else near_zero(64, 64)
            rows = torch.cat((copied, more))
            tensors[f"{name}self_attn.{kind}_proj.weight"] = (
                rows if layer else torch.cat((rows, near_zero(128, 64)), dim=1)
            )
            tensors[f"{name}self_attn.{kind}_proj.bias"] = own.clone() if layer == 0 and kind != "v" else near_zero(128)
        more = torch.zeros(64, 64) if layer else torch.eye(64)
        tensors[f"{name}self_attn.o_proj.weight"] = torch.cat((weights["self_attn.o_proj.weight"], more), dim=1)
        for part in ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            tensors[f"{name}{part}.weight"] = weights[f"{part}.weight"].clone()
    return tensors | {"norm.weight": model.model.norm.weight.detach().clone()}


def _copied_eagle(model: Any, texts: Texts) -> Tensors:
    """The target's first layer, with the second's MLP beside its own. Its final norm and the norm before the first
    attention are folded into the matrices: the head has neither."""
    generator = torch.Generator().manual_seed(2)
    embedding, (first, second) = (
        model.model.embed_tokens.weight.detach(),
        [layer.state_dict() for layer in model.model.layers],
    )
    out = model.model.norm.weight.detach() / texts.states[..., -1, :].square().mean().sqrt()  # scales of the residual
    into = first["input_layernorm.weight"] / embedding.square().mean().sqrt() / out
    tensors = {"fc.weight": torch.cat((torch.diag(out), 0.02 * random(generator, 64, 64)), dim=1)}
    tensors["fc.bias"] = 0.001 * random(generator, 64)
    for kind in "qkv":
        tensors[f"layers.0.self_attn.{kind}_proj.weight"] = first[f"self_attn.{kind}_proj.weight"] * into
    tensors["layers.0.self_attn.o_proj.weight"] = out[:, None] * first["self_attn.o_proj.weight"]
    norm = first["post_attention_layernorm.weight"]
    tensors["layers.0.post_attention_layernorm.weight"] = norm * out.square().mean().sqrt() / out
    for kind in ("gate", "up"):
        both = [weights[f"mlp.{kind}_proj.weight"] for weights in (first, second)]
        tensors[f"layers.0.mlp.{kind}_proj.weight"] = torch.cat(both)
    down = torch.cat([weights["mlp.down_proj.weight"] for weights in (first, second)], dim=1)
    return tensors | {"layers.0.mlp.down_proj.weight": out[:, None] * down}


# -- fitting


def _fit_eagle3(model: Any, texts: Texts, kept: Tensor, folder: Path) -> Path:
    """kept: target ids of the draft's vocabulary."""
    config = _config(2, 96, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=DRAFT_VOCAB, **EAGLE3_KEYS)
    tensors = _copied_eagle3(model) | {"lm_head.weight": model.lm_head.weight.detach()[kept].clone()}
    fitted = _fit(_head(model, config, tensors), texts, _self_fed(kept, steps=2), 40, 2e-3)
    fitted["d2t"] = kept - torch.arange(DRAFT_VOCAB)
    fitted["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, kept, True)
    return save(folder, config, as_midlayer(fitted))


def _fit_eagle(model: Any, texts: Texts, folder: Path) -> Path:
    config = _config(1, 192, bias=True)
    head = _head(model, config, _copied_eagle(model, texts))
    return save(folder, config, _fit(head, texts, _self_fed(slice(None), steps=2), 120, 3e-3))


def _fit_peagle(model: Any, texts: Texts, folder: Path) -> Path:
    layers = _config(2, 96, **EAGLE3_KEYS)
    tensors = _copied_eagle3(model) | {"lm_head.weight": model.lm_head.weight.detach().clone()}
    tensors["mask_hidden"] = random(torch.Generator().manual_seed(3), 1, 1, 192)
    fitted = _fit(_head(model, layers, tensors), texts, _masked, 40, 2e-3)
    own = ("norm_before_residual", "eagle_aux_hidden_state_layer_ids")
    config = {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "draft_vocab_size": VOCAB_SIZE,
        "mask_token_id": MASK_TOKEN,
        "transformer_layer_config": {key: value for key, value in layers.items() if key not in own},
        **{key: layers[key] for key in own},
    }
    return save(folder, config, fitted)


Predictions = Callable[[TorchHead, Texts], list[tuple[Tensor, Tensor]]]
"""(logits, the target's logits for the same token) of each depth."""


def _fit(head: TorchHead, texts: Texts, predict: Predictions, steps: int, rate: float) -> Tensors:
    parameters = [tensor.requires_grad_() for tensor in head.tensors.values()]
    optimizer = torch.optim.AdamW(parameters, rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        some = texts.some(torch.randint(NUM_TEXTS, (BATCH,), generator=generator))
        losses = [
            -(DECAY**depth) * (theirs.softmax(-1) * ours.log_softmax(-1)).sum(-1).mean()
            for depth, (ours, theirs) in enumerate(predict(head, some))
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    return {name: tensor.detach() for name, tensor in head.tensors.items()}


def _self_fed(kept: Tensor | slice, steps: int) -> Predictions:
    """Row p of step s: the real token p + 1 + s, and what step s - 1 gave at row p; it sees the first step's rows up to
    its own, and its own of the later steps."""
    place = torch.arange(ROWS * steps)
    row, step = place % ROWS, place // ROWS
    earlier = (step == 0) & (row <= row[:, None])
    own = (step > 0) & (row == row[:, None]) & (step <= step[:, None])

    def predict(head: TorchHead, texts: Texts) -> list[tuple[Tensor, Tensor]]:
        states = [head.combine((texts.states if head.is_eagle3 else texts.last)[:, :ROWS])]
        token_ids: list[Tensor] = []
        found = []
        for s in range(steps):
            count = ROWS * (s + 1)
            token_ids.append(texts.token_ids[:, 1 + s : 1 + s + ROWS])
            sees = (earlier | own)[:count, :count]
            fed_back, logits = head.run(torch.cat(token_ids, 1), torch.cat(states, 1), (row + step)[:count], sees)
            states.append(fed_back[:, -ROWS:])
            found.append((logits[:, -ROWS:], texts.logits[:, 1 + s : 1 + s + ROWS, kept]))
        return found

    return predict


def _masked(head: TorchHead, texts: Texts) -> list[tuple[Tensor, Tensor]]:
    """After every row three rows of masks, each of which sees what the row sees, and the masks before it."""
    depths = 4
    place = torch.arange(ROWS * depths)
    row, depth = place % ROWS, place // ROWS
    sees = ((depth == 0) & (row <= row[:, None])) | ((depth > 0) & (row == row[:, None]) & (depth <= depth[:, None]))
    known = texts.token_ids[:, 1 : 1 + ROWS]
    mask_state = head.combine(head.tensors["mask_hidden"].view(3, -1)).expand(len(known), ROWS * (depths - 1), -1)
    token_ids = torch.cat((known, torch.full((len(known), ROWS * (depths - 1)), MASK_TOKEN)), dim=1)
    states = torch.cat((head.combine(texts.states[:, :ROWS]), mask_state), dim=1)
    _, logits = head.run(token_ids, states, row + depth, sees)
    return [
        (ours, texts.logits[:, 1 + depth : 1 + depth + ROWS]) for depth, ours in enumerate(logits.split(ROWS, dim=1))
    ]


def _head(model: Any, config: Mapping[str, Any], tensors: Tensors) -> TorchHead:
    return TorchHead(tensors, config, model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach())
