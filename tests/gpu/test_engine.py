"""The same engine on a GPU: in float32 the CPU's tokens, for every family and every proposer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.engine.build import build_engine
from forerun.engine.config import EngineConfig
from forerun.engine.device import find_device
from forerun.errors import ConfigError
from forerun.kernels import cuda
from forerun.models import paged
from forerun.request import SamplingParams
from tests.engine.test_ahead import launched_ahead, recorded
from tests.engine.test_lossless import mixed_work
from tests.gpu.flips import assert_near_ties_only, with_logprobs
from tests.methods import METHODS, DraftModels
from tests.models.heads.tiny_heads import eagle, eagle3, save
from tests.models.tiny import FAMILIES
from tests.tiny_engine import NGRAM, Result, make_engine, prompts, run, save_tiny_target
from tests.tiny_tokenizer import VOCAB_SIZE

pytest.importorskip("triton")
from forerun.models.graphs import GraphedModel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no usable GPU")

FLOAT32: dict[str, Any] = {"device": "cuda", "dtype": "float32"}
NEAR_TIE = 1e-3  # of logits around 10 in float32, summed in another order
WORK = with_logprobs(mixed_work())  # of which the host has to see each step
QUIET = [(prompt, dataclasses.replace(params, logprobs=None)) for prompt, params in WORK]  # it need not
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"method": "eagle", "num_speculative_tokens": 4},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 4},
    "eagle3_tree": {"method": "eagle3", "spec_tree": {"depth": 3, "top_k": 3, "num_draft_tokens": 8}},
}


@pytest.fixture(scope="module", autouse=True)
def _full_precision() -> Iterator[None]:
    assert not torch.backends.cuda.matmul.allow_tf32
    yield
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> list[Result]:
    """Each request alone on the CPU, without speculation."""
    return run(make_engine(tiny_model, dtype="float32"), WORK, together=False)


def check(engine: Any, expected: list[Result], name: str) -> None:
    """Thrice: from the second time on from the prefix cache, and step ahead of step where it can."""
    for work in (WORK, QUIET, QUIET):
        assert_near_ties_only(run(engine, work), expected, WORK, NEAR_TIE, name)


@pytest.mark.parametrize("method", [None, *METHODS])
def test_every_method_says_what_the_cpu_says(
    tiny_model: Path, draft_models: DraftModels, reference: list[Result], method: str | None
) -> None:
    engine = make_engine(tiny_model, METHODS[method](draft_models) if method else None, **FLOAT32)
    assert isinstance(engine.runner.target, GraphedModel)
    check(engine, reference, method or "plain")
    assert method is None or engine.stats().spec.num_draft_tokens > 0


@pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 12, "max_num_seqs": 3}, {"block_size": 4}], ids=str)
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_in_chunks_and_other_blocks(
    tiny_model: Path, draft_models: DraftModels, reference: list[Result], method: str, settings: dict[str, Any]
) -> None:
    check(make_engine(tiny_model, METHODS[method](draft_models), **FLOAT32, **settings), reference, method)


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_guess_wrong_change_nothing(
    tiny_model: Path, reference: list[Result], name: str, tmp_path: Path
) -> None:
    """Random heads, chains and trees."""
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 256}
    states = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    made = eagle(**sizes) if name == "eagle" else eagle3(**sizes, **states)
    spec = HEADS[name] | {"model": str(save(tmp_path, *made))}
    engine = make_engine(tiny_model, spec, **FLOAT32)
    assert (engine.device_step is None) == name.endswith("tree")
    check(engine, reference, name)
    assert engine.stats().spec.num_draft_tokens > 0


@pytest.mark.parametrize("name", ["eagle3", "eagle"])
def test_heads_draft_ahead_what_they_draft_step_by_step(tiny_model: Path, draft_models: DraftModels, name: str) -> None:
    """From graphs, and as much of it stands. Near ties, and the last tokens before a text's end, may differ."""
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    work = [(prompt, params) for prompt in prompts(5, seed=3)]
    ahead, step_by_step = (
        make_engine(tiny_model, METHODS[name](draft_models), async_scheduling=wanted, **FLOAT32)
        for wanted in (None, False)
    )
    assert ahead.device_step is not None
    (member,) = ahead.proposer.members  # type: ignore[attr-defined]
    graphs = member.proposer._on_slots._recorded
    assert graphs._fitting(len(work), 4) is not None
    seen, found, expected = launched_ahead(ahead), recorded(ahead), recorded(step_by_step)
    run(ahead, work)
    run(step_by_step, work)
    assert sum(seen) > 0.9 * len(seen)
    common = found.keys() & expected.keys()
    assert len(common) > 0.9 * len(expected)
    assert sum(found[key] == expected[key] for key in common) > 0.9 * len(common)
    accepted, wanted = ahead.stats().spec.num_accepted_tokens, step_by_step.stats().spec.num_accepted_tokens
    assert wanted > 0
    assert abs(accepted - wanted) <= 0.1 * wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_what_the_cpu_says(family: str, tmp_path: Path) -> None:
    model = save_tiny_target(tmp_path, family=family, num_hidden_layers=3)
    expected = run(make_engine(model, dtype="float32"), WORK, together=False)
    for spec in (None, NGRAM):
        check(make_engine(model, spec, **FLOAT32), expected, family)


def test_without_triton_plain_torch_says_the_same(
    tiny_model: Path, reference: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_ops", None)
    engine = make_engine(tiny_model, NGRAM, **FLOAT32)
    assert type(engine.runner.target) is paged.PagedModel
    check(engine, reference, "plain torch")
    assert any("Triton is not installed" in line for line in engine.info().log_lines)


def test_a_replayed_pass_has_the_bits_of_a_launched_one(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding and recorded inputs change nothing."""
    greedy = [(prompt, params) for prompt, params in WORK if params.greedy][:4]
    replayed = run(make_engine(tiny_model, NGRAM, **FLOAT32), greedy)
    engine = make_engine(tiny_model, NGRAM, **FLOAT32)
    engine.runner.target._graphs.clear()  # type: ignore[attr-defined]
    launched = run(engine, greedy)
    assert [result.token_ids for result in replayed] == [result.token_ids for result in launched]


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_half_precision_runs(tiny_model: Path, dtype: str) -> None:
    engine = make_engine(tiny_model, NGRAM, device="cuda", dtype=dtype)
    assert engine.info().dtype == ("bfloat16" if dtype == "auto" else dtype)
    results = run(engine, WORK)
    assert all(result.token_ids for result in results)


def test_start_up_says_what_memory_goes_where(tiny_model: Path) -> None:
    info = make_engine(tiny_model, device="cuda").info()
    lines = "\n".join(info.log_lines)
    assert info.device == "cuda"
    assert "GPU KV cache size: " in lines
    assert "Graph capturing finished in " in lines


def test_the_cache_takes_what_utilization_leaves(tiny_model: Path) -> None:
    free, total = torch.cuda.mem_get_info()
    share = (total - free) / total + 0.02
    engine = build_engine(EngineConfig(model=str(tiny_model), device="cuda", gpu_memory_utilization=share))
    held = engine.info().kv_cache_tokens * 2 * 2 * 2 * 16 * 2  # layers, K and V, heads, head size, bytes
    assert 0.5 * 0.02 * total < held < 0.02 * total


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "int8"}, "quantization='int8' is served on a CPU only"),
        ({"kv_cache_memory_bytes": 1 << 50}, "GiB that are free on the GPU"),
    ],
)
def test_refuses_settings_in_one_line(tiny_model: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_engine(tiny_model, device="cuda", **settings)
    assert "\n" not in str(caught.value)


def test_auto_takes_the_gpu() -> None:
    assert find_device("auto")[0].type == "cuda"


def test_noise_is_the_cpus(tiny_model: Path) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=60, ignore_eos=True, logprobs=20)
    work = [([5, 6, 7], params), ([9, 8], params)]
    expected = run(make_engine(tiny_model, dtype="float32"), work)
    assert_near_ties_only(run(make_engine(tiny_model, **FLOAT32), work), expected, work, NEAR_TIE, "drawn")
