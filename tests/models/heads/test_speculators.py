"""EAGLE-3 and P-EAGLE heads against `speculators`, which trains such heads: its checkpoints, its networks' values.

speculators asks for an older transformers and for torchvision, so it is no dependency of ours. scripts/oracles puts it,
without those, into the folder .oracles; without that folder these tests are skipped.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.kernels import native
from forerun.models.decoder import Decoder, attention_spec
from forerun.models.heads import Head, load_head
from forerun.models.loading import load_model

from ..tiny import CausalCache
from .speculators_oracle import MASK_TOKEN, STARTS, STEPS, VARIANTS
from .tiny_heads import SlotCache

ROOT = Path(__file__).parents[3]
TOLERANCE = 1e-5  # float32 sums in another order, relative to the largest logit; measured 2e-6
SEQUENTIAL = [name for name, variant in VARIANTS.items() if variant[0] == "eagle3"]
PARALLEL = [name for name in VARIANTS if name not in SEQUENTIAL]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `speculators_oracle.py` fills."""
    packages = Path(os.environ.get("FORERUN_ORACLES", ROOT / ".oracles"))
    if importlib.util.find_spec("speculators") is None and not (packages / "speculators").is_dir():
        pytest.skip("speculators is not there: run scripts/oracles")
    folder = tmp_path_factory.mktemp("speculators")
    program = Path(__file__).with_name("speculators_oracle.py")
    environment = os.environ | {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, program, folder], env=environment, capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


class Case:
    """A checkpoint loaded by us, and what speculators computed with it."""

    def __init__(self, folder: Path, end: str = "", **kwargs: Any) -> None:
        self.target: Decoder = load_model(folder / "target")
        self.head: Head = load_head(folder / f"head{end}", self.target, **kwargs)
        self.reference = load_file(folder / f"reference{end}.safetensors")

    def states(self, tokens: Tensor) -> Tensor:
        positions = list(range(len(tokens)))
        taps = self.head.config.taps
        output = self.target.forward(
            tokens, torch.tensor(positions), CausalCache(attention_spec(self.target.config)).at(positions), taps
        )
        return self.head.combine([output.taps[tap] for tap in taps])

    def drafted(self, tokens: Tensor, given: list[int] | None = None) -> tuple[list[int], Tensor]:
        """K drafts after tokens and their logits [K, Vd]; fed `given` instead of the drafts, if given."""
        head, last = self.head, len(tokens) - 2
        cache = SlotCache(head.config.layers)
        states = self.states(tokens[:-1])
        if head.mask_state is not None:
            assert head.config.mask_token_id is not None
            masks = torch.full((STEPS - 1,), head.config.mask_token_id)
            hidden = torch.cat((states, head.mask_state.expand(STEPS - 1, -1)))
            positions = torch.arange(len(hidden))
            output = head.forward(torch.cat((tokens[1:], masks)), hidden, positions, cache.at(positions))
            logits = head.logits(output.normed[last:])
            return head.target_ids(logits.argmax(-1)).tolist(), logits
        positions = torch.arange(last + 1)
        output = head.forward(tokens[1:], states, positions, cache.at(positions))
        rows = [head.logits(output.normed[-1:])]
        drafts = head.target_ids(rows[0].argmax(-1)).tolist()
        for step in range(1, STEPS):
            fed = drafts[-1] if given is None else given[step - 1]
            position = torch.tensor([last + step])
            output = head.forward(torch.tensor([fed]), output.hidden[-1:], position, cache.at(position))
            rows.append(head.logits(output.normed))
            drafts += head.target_ids(rows[-1].argmax(-1)).tolist()
        return drafts, torch.cat(rows)


def difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def slides(case: Case) -> bool:
    """The training mask does not slide a window with the depth of a draft: step 0 only can be compared."""
    return any(case.head.config.layers.sliding_windows)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_every_step_are_theirs_when_fed_the_same_tokens(name: str, made: Path) -> None:
    case = Case(made / name)
    tokens = case.reference["tokens"]
    num_steps = 1 if slides(case) else STEPS
    for row in range(len(tokens) - 1 - STEPS):
        given = tokens[row + 2 : row + 1 + STEPS].tolist()
        _, logits = case.drafted(tokens[: row + 2], given)
        for step in range(num_steps):
            assert difference(logits[step], case.reference[f"step{step}"][row]) < TOLERANCE, (row, step)


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_drafts_are_theirs(name: str, made: Path) -> None:
    case = Case(made / name)
    num_steps = 1 if slides(case) else STEPS
    for place, start in enumerate(STARTS):
        drafts, logits = case.drafted(case.reference["tokens"][: start + 1])
        assert drafts[:num_steps] == case.reference["chain"][place].tolist()[:num_steps]
        assert difference(logits[:num_steps], case.reference["chain_logits"][place, :num_steps]) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "qwen3-all-norms", "peagle-qwen3"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_bfloat16_checkpoint_keeps_its_values(name: str, packed: bool, made: Path) -> None:
    if packed and not native.available():
        pytest.skip("needs the CPU extension")
    case = Case(made / name, "_bf16", packed=packed)
    for place, start in enumerate(STARTS):
        drafts, logits = case.drafted(case.reference["tokens"][: start + 1])
        assert drafts == case.reference["chain"][place].tolist()
        assert difference(logits, case.reference["chain_logits"][place]) < TOLERANCE


@pytest.mark.parametrize("name", VARIANTS)
def test_the_config_is_what_they_wrote(name: str, made: Path) -> None:
    case = Case(made / name)
    config = case.head.config
    kind, _, layers, options = VARIANTS[name]
    assert config.method == "eagle3"
    assert config.num_speculative_tokens == STEPS
    assert config.verifier == str(made / name / "target")
    assert config.mask_token_id == (MASK_TOKEN if kind == "peagle" else None)
    assert [layer for layer, _ in config.taps] == options.get("target_layer_ids", [2, 4, 5])
    window = layers.get("sliding_window")
    assert config.layers.sliding_windows == ((window, None) if window else ())
    assert any("embedding is the target's" in note for note in case.head.notes)  # a copy of it is in the file
