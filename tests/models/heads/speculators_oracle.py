"""Makes tiny checkpoints with the `speculators` package and writes down what its own networks compute.

Run as a program, in a process of its own: `python speculators_oracle.py DIR`. speculators wants other packages and
warns of things that our tests take for errors. Every folder DIR/<variant> then holds

    target/             a Hugging Face model
    head/, head_bf16/   the checkpoint as speculators saves it; the same rounded to bfloat16
    reference.safetensors, reference_bf16.safetensors
        tokens [T]               x
        step<s> [T - 1, Vd]      logits of draft step s; row p: prefix x_0..x_{p+1}, fed x_{p+2}..x_{p+1+s}
        chain [R, K]             greedy drafts, target ids, each fed to the next step; row r: after x_0..x_{starts[r]}
        chain_logits [R, K, Vd]
        starts [R]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB, DRAFT_VOCAB, HIDDEN, TARGET_LAYERS = 160, 64, 64, 8
NUM_TOKENS, STEPS = 21, 4
STARTS = (1, 5, 16)
MASK_TOKEN = 150

LAYERS: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 20000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SLIDING = {"num_hidden_layers": 2, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

# name: (speculators_model_type, model_type of the layers, their config, options of the head)
VARIANTS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("eagle3", "llama", {}, {}),
    "llama-residual": ("eagle3", "llama", {}, {"norm_before_residual": True}),
    "llama-2-layers": ("eagle3", "llama", {"num_hidden_layers": 2}, {"draft_vocab_size": VOCAB}),
    "llama-biases-llama3": ("eagle3", "llama", {"attention_bias": True, "rope_parameters": LLAMA3}, {}),
    "llama-layers-given": ("eagle3", "llama", {}, {"target_layer_ids": [1, 3, 6, 8]}),
    "qwen3-all-norms": (
        "eagle3",
        "qwen3",
        {"num_hidden_layers": 2},
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    ),
    "qwen3-fc-norm": ("eagle3", "qwen3", {}, {"fc_norm": True, "norm_output": True}),
    "qwen3-sliding": ("eagle3", "qwen3", SLIDING | {"use_sliding_window": True}, {}),
    "peagle-llama": ("peagle", "llama", {}, {"norm_before_fc": True}),
    "peagle-qwen3": (
        "peagle",
        "qwen3",
        {"num_hidden_layers": 3},
        {"draft_vocab_size": VOCAB, "norm_before_residual": True, "fc_norm": True},
    ),
}


def main(root: Path) -> None:
    for place, (name, (kind, family, layers, options)) in enumerate(VARIANTS.items()):
        torch.manual_seed(place)
        folder = root / name
        target = _target(folder / "target")
        head = _head(kind, family, layers, options, folder / "target")
        head.save_pretrained(folder / "head")
        _rounded(folder / "head", folder / "head_bf16")
        for end in ("", "_bf16"):
            save_file(_reference(kind, folder / f"head{end}", target), folder / f"reference{end}.safetensors")


def _perturbed(model: torch.nn.Module) -> None:
    """No norm all ones, no bias all zeros: those hide errors."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)


def _target(path: Path) -> PreTrainedModel:
    config = AutoConfig.for_model("qwen3", **LAYERS, num_hidden_layers=TARGET_LAYERS, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    _perturbed(model)
    model.save_pretrained(path)
    return model


def _head(kind: str, family: str, layers: dict[str, Any], options: dict[str, Any], target: Path) -> Any:
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.models.peagle import PEagleDraftModel

    config = AutoConfig.for_model(family, **LAYERS | {"num_hidden_layers": 1} | layers, tie_word_embeddings=False)
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    arguments = {
        "t2d": t2d,
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "verifier_name_or_path": str(target),
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": False,
        "ttt_steps": STEPS,
        "num_depths": STEPS,
        "mask_token_id": MASK_TOKEN,
        "draft_attn_impl": "eager",
    }
    cls = {"eagle3": Eagle3DraftModel, "peagle": PEagleDraftModel}[kind]
    head = cls.from_training_args(config, **arguments | options)
    _perturbed(head)
    with torch.no_grad():  # weights large enough that a mistake is
        for name, parameter in head.named_parameters():
            if name.startswith(("fc.", "layers.")) and parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[1] ** -0.5)
    return head.eval()


def _rounded(source: Path, path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    halves = {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()}
    save_file(halves, path / "model.safetensors")


def _reference(kind: str, path: Path, target: PreTrainedModel) -> dict[str, Tensor]:
    head = _loaded(path)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=generator)
    steps = _steps(kind, head, target, tokens)
    reference = {"tokens": tokens, "starts": torch.tensor(STARTS)}
    reference |= {f"step{s}": logits for s, logits in enumerate(steps)}
    chains = [_chain(kind, head, target, tokens[: start + 1]) for start in STARTS]
    reference["chain"] = torch.stack([chain for chain, _ in chains])
    reference["chain_logits"] = torch.stack([logits for _, logits in chains])
    return {name: tensor.contiguous() for name, tensor in reference.items()}


def _loaded(path: Path) -> Any:
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(path, config=config, dtype=torch.float32).float().eval()


def _chain(kind: str, head: Any, target: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy drafts after the last token, each fed to the next step."""
    drafts: list[int] = []
    rows: list[Tensor] = []
    for step in range(STEPS):
        padded = torch.cat((tokens, torch.tensor(drafts + [0] * (STEPS - len(drafts)), dtype=torch.int64)))
        rows.append(_steps(kind, head, target, padded)[step][len(tokens) - 2])
        draft = int(rows[-1].argmax())
        drafts.append(draft if head.d2t is None else draft + int(head.d2t[draft]))
    return torch.tensor(drafts), torch.stack(rows)


@torch.no_grad()
def _steps(kind: str, head: Any, target: PreTrainedModel, tokens: Tensor) -> list[Tensor]:
    states = target(tokens[None], output_hidden_states=True).hidden_states
    last = target.model.layers[-1]
    captured: list[Tensor] = []
    if TARGET_LAYERS in head.target_layer_ids:  # what transformers returns there is normed
        hook = last.register_forward_hook(lambda _, __, output: captured.append(output))
        target(tokens[None])
        hook.remove()
        states = (*states[:-1], captured[0] if isinstance(captured[0], Tensor) else captured[0][0])
    hidden = torch.cat([states[layer] for layer in head.target_layer_ids], dim=-1)[:, :-1]
    logits: list[Tensor] = []
    hook = head.lm_head.register_forward_hook(lambda _, __, output: logits.append(output[0].float().clone()))
    try:
        run = _run_parallel if kind == "peagle" else _run_chain
        run(head, hidden, tokens[None, 1:], states[-1][:, :-1])
    finally:
        hook.remove()
    return logits if kind == "eagle3" else _by_depth(logits[0], tokens.shape[0] - 1)


def _run_chain(head: Any, hidden: Tensor, token_ids: Tensor, _: Tensor) -> None:
    head(hidden_states=hidden, input_ids=token_ids, document_ids=torch.zeros_like(token_ids), ttt_steps=STEPS)


def _run_parallel(head: Any, hidden: Tensor, token_ids: Tensor, last: Tensor) -> None:
    """Every rollout to its end in place of the training's random choice of them: depths 0..STEPS - 1 of all rows."""
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import core

    num_rows = token_ids.shape[1]
    anchors = torch.arange(num_rows).repeat(STEPS)
    depths = torch.arange(STEPS).repeat_interleave(num_rows)
    inside = anchors + depths < num_rows
    core.generate_cod_sample_indices = lambda **_: (anchors[inside], depths[inside])
    head(
        hidden_states=hidden,
        input_ids=token_ids,
        document_ids=torch.zeros_like(token_ids),
        verifier_last_hidden_states=last,
        loss_config=resolve_loss_config("kl_div", "eager"),
        num_depths=STEPS,
    )


def _by_depth(logits: Tensor, num_rows: int) -> list[Tensor]:
    """[sum of rows, Vd] -> one a depth, rows past the end zero."""
    steps = []
    for depth, part in enumerate(logits.split([num_rows - depth for depth in range(STEPS)])):
        steps.append(torch.cat((part, torch.zeros(depth, part.shape[1]))))
    return steps


if __name__ == "__main__":
    main(Path(sys.argv[1]))
