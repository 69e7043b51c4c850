"""EAGLE heads through the whole engine against a loop of the published definition without any cache: what is drafted at
every step, and how much of it stands, however the text came to be known."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.engine.engine import Engine
from forerun.errors import CheckpointError
from forerun.request import SamplingParams
from forerun.spec.proposer import RequestDraft
from tests.engine.test_methods import assert_idle, long_work, with_room_beside
from tests.methods import METHODS, DraftModels, K
from tests.models.heads import tiny_heads
from tests.models.heads.fit import LAYERS, MASK_TOKEN, load_head, load_target, read
from tests.models.heads.tiny_heads import Tensors, save
from tests.models.heads.torch_head import TorchHead
from tests.spec.test_draft_model import recorded
from tests.spec.test_tree import assert_same as assert_same_tree
from tests.spec.test_tree import published
from tests.tiny_engine import Result, Work, make_engine, prompts, run
from tests.tiny_tokenizer import VOCAB_SIZE

DEEP_TREE = {"depth": 3, "top_k": 3, "num_draft_tokens": 12}


class Reference:
    """What a head drafts after known tokens: all rows from the target's states of the whole text, each time anew."""

    def __init__(self, target: Path, head: Path, layers: Sequence[int] = LAYERS) -> None:
        self._model = load_target(target).double()
        self._head = load_head(head, self._model)
        self._layers = layers
        self._drafts: dict[tuple[int, ...], list[int]] = {}
        self._confidences: dict[tuple[int, ...], list[float]] = {}
        self._trees: dict[tuple[int, ...], dict[tuple[int, ...], Rows]] = {}

    def chain(self, known: Sequence[int]) -> list[int]:
        """K tokens, each fed back with what the row gave that drafted it."""
        key = tuple(known)
        if key not in self._drafts:
            rows = Rows(self._head, known, self._states(known))
            drafts, confidences = list[int](), list[float]()
            for _ in range(K):
                drafts.append(int(self._head.target_ids(rows.logits().argmax())))
                confidences.append(float(rows.logits().softmax(0).max()))
                rows = rows.then(drafts[-1], rows.fed_back())
            self._drafts[key], self._confidences[key] = drafts, confidences
        return self._drafts[key]

    def confidences(self, known: Sequence[int]) -> list[float]:
        """What the head gives each token of the chain."""
        self.chain(known)
        return self._confidences[tuple(known)]

    def at_once(self, known: Sequence[int]) -> list[int]:
        """K tokens of one pass: K - 1 rows of masks after the last."""
        if tuple(known) not in self._drafts:
            rows = Rows(self._head, known, self._states(known))
            mask_state = self._head.combine(self._head.tensors["mask_hidden"].view(3, -1))
            for _ in range(K - 1):
                rows = rows.then(MASK_TOKEN, mask_state)
            self._drafts[tuple(known)] = rows.run()[1][0, -K:].argmax(-1).tolist()
        return self._drafts[tuple(known)]

    def check_tree(self, draft: RequestDraft, known: Sequence[int], shape: dict[str, int]) -> None:
        """The draft is the tree of the published procedure, cut to so many nodes."""
        if tuple(known) not in self._trees:
            self._trees[tuple(known)] = {(): Rows(self._head, known, self._states(known))}
        after = self._trees[tuple(known)]

        def logits_of(path: tuple[int, ...]) -> Any:
            if path not in after:  # draft ids
                parent = after[path[:-1]]
                after[path] = parent.then(int(self._head.target_ids(torch.tensor(path[-1]))), parent.fed_back())
            return after[path].logits().numpy()

        expected = published(logits_of, known[-1], shape["top_k"], shape["depth"], len(draft))
        tokens = self._head.target_ids(torch.tensor(expected.tokens[1:])).tolist()
        assert_same_tree(draft, dataclasses.replace(expected, tokens=[known[-1], *tokens]))

    def _states(self, known: Sequence[int]) -> Tensor:
        texts = read(self._model, torch.tensor([known[:-1]]))
        return self._head.combine(texts.states[:, :, list(self._layers)] if self._head.is_eagle3 else texts.last)


class Rows:
    """All rows of a head after some tokens; row i sees those up to its own."""

    def __init__(self, head: TorchHead, known: Sequence[int], states: Tensor) -> None:
        self._head, self._token_ids, self._states = head, list(known[1:]), states
        self._output: tuple[Tensor, Tensor] | None = None

    def run(self) -> tuple[Tensor, Tensor]:
        if self._output is None:
            count = len(self._token_ids)
            sees = torch.ones(count, count, dtype=torch.bool).tril()
            token_ids, positions = torch.tensor([self._token_ids]), torch.arange(count)
            self._output = self._head.run(token_ids, self._states, positions, sees)
        return self._output

    def logits(self) -> Tensor:
        """[Vd], of the last row."""
        return self.run()[1][0, -1]

    def fed_back(self) -> Tensor:
        return self.run()[0][0, -1]

    def then(self, token_id: int, state: Tensor) -> Rows:
        """And one row more."""
        return Rows(self._head, [-1, *self._token_ids, token_id], torch.cat((self._states, state.expand(1, 1, -1)), 1))


@dataclasses.dataclass(frozen=True)
class Case:
    """spec: of an engine. check: (draft, known tokens) -> raises where the draft is not the reference's.
    draft: known tokens -> the reference's; None for trees."""

    spec: dict[str, Any]
    check: Callable[[RequestDraft, Sequence[int]], None]
    draft: Callable[[Sequence[int]], list[int]] | None = None


def chain_case(spec: dict[str, Any], draft: Callable[[Sequence[int]], list[int]]) -> Case:
    def check(found: RequestDraft, known: Sequence[int]) -> None:
        assert found.tokens == draft(known)[: len(found)]

    return Case(spec, check, draft)


CASES = ["eagle3", "eagle", "peagle", "eagle3_tree", "eagle_tree"]


@pytest.fixture(scope="module")
def cases(tiny_model: Path, draft_models: DraftModels) -> dict[str, Case]:
    heads = draft_models.heads
    references = {name: Reference(tiny_model, getattr(heads, name)) for name in ("eagle3", "eagle", "peagle")}
    found = {
        name: chain_case(
            METHODS[name](draft_models), references[name].at_once if name == "peagle" else references[name].chain
        )
        for name in references
    }
    for name in ("eagle3", "eagle"):
        spec = METHODS[f"{name}_tree"](draft_models) | {"spec_tree": DEEP_TREE}
        check = references[name].check_tree
        found[f"{name}_tree"] = Case(spec, lambda draft, known, check=check: check(draft, known, DEEP_TREE))
    return found


def run_checked(case: Case, engine: Engine, work: Work, **fields: Any) -> list[Result]:
    """Every draft is the reference's, and as long as was granted."""
    seen = recorded(engine)
    results = run(engine, work, **fields)
    for known, draft, granted in seen:
        assert len(draft) == granted
        case.check(draft, known)
    seen.clear()
    return results


SETTINGS: dict[str, dict[str, Any]] = {
    "one_chunk": {"max_num_batched_tokens": 512},
    "many_chunks": {"max_num_batched_tokens": 24},
    "small_blocks": {"block_size": 4},
    "no_prefix_cache": {"enable_prefix_caching": False},
    "two_at_a_time": {"max_num_seqs": 2},
    "few_blocks": {"kv_cache_memory_bytes": 96 << 10, "max_model_len": 128},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_the_reference(
    tiny_model: Path, cases: dict[str, Case], name: str, settings: dict[str, Any]
) -> None:
    """In any batch, chunks and blocks, after preemption, and again from the prefix cache."""
    spec = cases[name].spec
    engine = make_engine(tiny_model, spec, **with_room_beside(tiny_model, spec, settings))
    work = long_work(3 if name.endswith("tree") else 6)
    run_checked(cases[name], engine, work)
    run_checked(cases[name], engine, work)
    if "kv_cache_memory_bytes" in settings:
        assert engine.stats().num_preemptions > 0
    elif settings.get("enable_prefix_caching", True):
        assert engine.scheduler.prefix_cache_hits > 0
    assert engine.stats().spec.num_accepted_tokens > 0
    assert_idle(engine)


@pytest.mark.parametrize("name", CASES)
def test_drafts_after_pauses_are_those_of_the_reference(tiny_model: Path, cases: dict[str, Case], name: str) -> None:
    """Steps in which nobody may draft leave no gap."""
    engine = make_engine(tiny_model, cases[name].spec)
    lengths, calls = engine.control.lengths, 0

    def with_pauses(requests: Any) -> dict[str, int]:
        nonlocal calls
        calls += 1
        return lengths(requests) if calls % 7 in (1, 2) else {}

    engine.control.lengths = with_pauses  # type: ignore[method-assign]
    run_checked(cases[name], engine, long_work(3))
    assert engine.stats().spec.num_accepted_tokens > 0
    assert_idle(engine)


@pytest.mark.parametrize("name", CASES)
def test_prefixes_of_requests_that_do_not_draft_are_worth_as_much(
    tiny_model: Path, cases: dict[str, Case], name: str
) -> None:
    """Their rows are filled as well: whoever takes their blocks over, prompt and answer, drafts from them."""
    engine = make_engine(tiny_model, cases[name].spec, block_size=4)
    work = long_work(3)
    first = run(engine, work, max_draft_tokens=0)
    assert engine.stats().spec.num_draft_tokens == 0
    hits = engine.scheduler.prefix_cache_hits
    longer = [([*prompt, *result.token_ids], params) for (prompt, params), result in zip(work, first, strict=True)]
    run_checked(cases[name], engine, longer)
    assert engine.scheduler.prefix_cache_hits - hits > sum(len(prompt) - 8 for prompt, _ in longer)
    assert engine.stats().spec.num_accepted_tokens > 0


def loop(case: Case, prompt: Sequence[int], text: Sequence[int]) -> list[tuple[int, int]]:
    """(drafted, accepted) of each step of the published loop over a known text, whose first token needs no draft."""
    assert case.draft is not None
    steps, done = [], 1
    while (length := min(K, len(text) - done - 1)) > 0:
        draft = case.draft([*prompt, *text[:done]])[:length]
        right = [drafted == said for drafted, said in zip(draft, text[done:], strict=False)]
        accepted = (*right, False).index(False)
        steps.append((length, accepted))
        done += accepted + 1
    return steps


@pytest.mark.parametrize("name", ["eagle3", "eagle", "peagle"])
def test_acceptance_by_position_is_the_references(tiny_model: Path, cases: dict[str, Case], name: str) -> None:
    """Per step and request. How much of it the texts accept is shown to be worth counting."""
    case, work = cases[name], long_work()
    for settings in ({}, {"max_num_batched_tokens": 64, "block_size": 4}):
        engine = make_engine(tiny_model, case.spec, **settings)
        for together in (True, False):
            expected = []
            for (prompt, _), result in zip(work, run(engine, work, together=together), strict=True):
                found = result.last.metrics.speculative_decoding
                expected += loop(case, prompt, result.token_ids)
                steps = list(zip(found["per_step_drafted"], found["per_step_accepted"], strict=True))
                assert steps == loop(case, prompt, result.token_ids)
    share = [sum(accepted > place for _, accepted in expected) / len(expected) for place in range(2)]
    least = {"eagle3": (0.3, 0.1), "eagle": (0.05, 0.0), "peagle": (0.2, 0.0)}[name]
    assert share[0] > least[0]
    assert share[1] > least[1]


# -- prefixes: the last row of a block knows the token after it


def confidences(engine: Engine, prompt: Sequence[int]) -> list[tuple[list[int], list[float] | None]]:
    """Of all drafts for a prompt: they show any other bit in the head's cache."""
    seen = recorded(engine)
    run(engine, [(prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))])
    found = [(draft.tokens, draft.confidence) for _, draft, _ in seen]
    seen.clear()
    return found


@pytest.mark.parametrize("name", ["eagle3", "eagle"])
@pytest.mark.parametrize("look_ahead", [1, 0])
def test_a_shared_prefix_that_goes_on_otherwise_drafts_as_if_alone(
    tiny_model: Path, cases: dict[str, Case], name: str, look_ahead: int
) -> None:
    """Two prompts part right behind a block. Without looking ahead the second is given the first's row."""
    start = prompts(1, seed=21, shortest=32, longest=32)[0]
    first, second = [*start, 40, 41, 42], [*start, 50, 51, 52]
    alone = confidences(make_engine(tiny_model, cases[name].spec), second)
    engine = make_engine(tiny_model, cases[name].spec)
    assert engine.scheduler.hash_look_ahead == 1
    engine.scheduler.hash_look_ahead = look_ahead
    confidences(engine, first)
    assert (confidences(engine, second) == alone) == bool(look_ahead)
    assert engine.scheduler.prefix_cache_hits == (16 if look_ahead else 32)


def test_a_prefix_hit_loses_one_block_at_most(tiny_model: Path, cases: dict[str, Case]) -> None:
    """None where the prompt goes on with the same token."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    stem = prompts(1, seed=22, shortest=70, longest=70)[0]
    for same, total in [(32, 40), (33, 40), (47, 60), (48, 60), (64, 64), (64, 65), (65, 65), (16, 17), (15, 40)]:
        hits = []
        for spec in (None, cases["eagle3"].spec):
            engine = make_engine(tiny_model, spec)
            run(engine, [(stem, params)])
            run(engine, [(stem[:same] + [7] * (total - same), params)])
            hits.append(engine.scheduler.prefix_cache_hits)
        without, with_head = hits
        parts_at_a_block = same % 16 == 0 and same < total
        assert without - with_head == (16 if parts_at_a_block else 0), (same, total)


# -- heads of every kind, through the engine: random ones, as nothing needs to stand for drafts to be compared

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_fc": {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
    "fc_norm": {"fc_norm": True},
    "two_layers": {"num_hidden_layers": 2, "rope_theta": 500.0},
    "all_ids": {"draft_vocab_size": None},
    "two_states": {"num_states": 2, "eagle_aux_hidden_state_layer_ids": [0, 2]},
    "one_output": {"num_states": 1, "eagle_aux_hidden_state_layer_ids": [1]},  # what leaves layer 1: flat form's rule
}


def random_head(folder: Path, **keys: Any) -> Path:
    keys = {"vocab_size": VOCAB_SIZE, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]} | keys
    return save(folder, *tiny_heads.eagle3(3, **keys))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 24, "block_size": 4}], ids=["wide", "chunks"])
def test_every_kind_of_head_drafts_what_the_reference_does(
    tiny_model: Path, tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    head = random_head(tmp_path / "head", **KINDS[name])
    entered = {"two_states": [0, 2], "one_output": [2]}.get(name, LAYERS)
    reference = Reference(tiny_model, head, entered)
    spec = {"method": "eagle3", "model": str(head), "num_speculative_tokens": K}
    case = chain_case(spec, reference.chain)
    run_checked(case, make_engine(tiny_model, spec, **settings), long_work(3))
    tree = {"method": "eagle3", "model": str(head), "spec_tree": DEEP_TREE}
    case = Case(tree, lambda draft, known: reference.check_tree(draft, known, DEEP_TREE))
    run_checked(case, make_engine(tiny_model, tree, **settings), long_work(1))


# -- together with others


def test_a_combination_works_per_request(tiny_model: Path, draft_models: DraftModels) -> None:
    """Each request gets the first draft that there is, or that of the method it names."""
    engine = make_engine(tiny_model, METHODS["suffix_then_eagle3"](draft_models))
    run(engine, long_work())
    assert all(spec.num_accepted_tokens > 0 for spec in engine.stats().spec_by_proposer.values())
    assert set(engine.stats().spec_by_proposer) == {"suffix", "eagle3"}
    for method in ("suffix", "eagle3"):
        before = {name: spec.num_draft_tokens for name, spec in engine.stats().spec_by_proposer.items()}
        run(engine, long_work(), draft_methods=(method,))
        after = {name: spec.num_draft_tokens for name, spec in engine.stats().spec_by_proposer.items()}
        assert {name for name in after if after[name] > before[name]} == {method}
    assert_idle(engine)


def test_a_head_behind_another_method_drafts_as_it_does_alone(tiny_model: Path, draft_models: DraftModels) -> None:
    """Its rows are filled in the steps whose drafts are another's."""
    reference = Reference(tiny_model, draft_models.heads.eagle3)
    engine = make_engine(tiny_model, METHODS["suffix_then_eagle3"](draft_models))
    seen = recorded(engine)
    run(engine, long_work())
    own = [(known, draft) for known, draft, _ in seen if draft.source == "eagle3"]
    assert len(own) > 20
    for known, draft in own:
        assert draft.tokens == reference.chain(known)[: len(draft)]


def test_coupled_drafts_stand_more_often_than_greedy_ones(tiny_model: Path, draft_models: DraftModels) -> None:
    """At temperature 1, with the target's noise; the draft's vocabulary is a part of the target's."""
    work = [(p, SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)) for p in prompts(12, seed=8)]
    rate: dict[str, float] = {}
    for method in ("eagle3", "eagle3_coupled"):
        engine = make_engine(tiny_model, METHODS[method](draft_models))
        run(engine, work)
        spec = engine.stats().spec
        rate[method] = spec.num_accepted_tokens / spec.num_draft_tokens
    assert rate["eagle3_coupled"] > rate["eagle3"] + 0.02


def test_a_draft_ends_where_the_head_is_unsure(tiny_model: Path, draft_models: DraftModels) -> None:
    reference = Reference(tiny_model, draft_models.heads.eagle3)
    engine = make_engine(tiny_model, METHODS["eagle3_min_prob"](draft_models))
    seen = recorded(engine)
    run(engine, long_work())
    lengths = {len(draft) for _, draft, _ in seen}
    assert {0, K} < lengths
    for known, draft, granted in seen:
        own = reference.confidences(known)
        assert draft.tokens == reference.chain(known)[: len(draft)]
        assert all(p >= 0.3 for p in own[: len(draft)])
        assert len(draft) == granted or own[len(draft)] < 0.3


# -- heads that do not fit

Built = tuple[dict[str, Any], Tensors]


def _wider_target(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["fc.weight"] = torch.randn(64, 3 * 96)


def _wider_head(config: dict[str, Any], tensors: Tensors) -> None:
    config["target_hidden_size"] = 96


def _missing(config: dict[str, Any], tensors: Tensors) -> None:
    del tensors["d2t"], tensors["t2d"]


def _absolute(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def _absolute_alone(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))
    del tensors["t2d"]


def _too_deep(config: dict[str, Any], tensors: Tensors) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [2, 18, 33]


def _default_layers(config: dict[str, Any], tensors: Tensors) -> None:
    del config["eagle_aux_hidden_state_layer_ids"]


def _other_vocabulary(config: dict[str, Any], tensors: Tensors) -> None:
    config["vocab_size"] = 32000


def _no_head(config: dict[str, Any], tensors: Tensors) -> None:
    del tensors["lm_head.weight"]


UNFIT: dict[str, tuple[Callable[[dict[str, Any], Tensors], None], str]] = {
    "states_of_another_width": (_wider_target, r"tensor 'fc\.weight': expected shape \[64, 192\].*found \[64, 288\]"),
    "another_target_hidden_size": (_wider_head, r"target_hidden_size=96, but the target's width is 64"),
    "missing_d2t": (_missing, r"tensor 'd2t' is missing"),
    "absolute_d2t": (_absolute, r"tensor 'd2t' holds absolute target ids"),
    "absolute_d2t_without_t2d": (_absolute_alone, r"tensor 'd2t' reads as absolute target ids"),
    "aux_layers_out_of_range": (_too_deep, r"eagle_aux_hidden_state_layer_ids .* within 0\.\.2, got \[2, 18, 33\]"),
    "aux_layers_of_a_deep_target": (_default_layers, r"eagle_aux_hidden_state_layer_ids is missing.*2 layers"),
    "another_vocabulary": (_other_vocabulary, r"vocab_size=32000, but the target's is 320"),
    "no_output_head": (_no_head, r"tensor 'lm_head\.weight' .* is missing"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_head_that_does_not_fit_never_starts(
    tiny_model: Path, draft_models: DraftModels, name: str, tmp_path: Path
) -> None:
    """Of a head that fits, with one thing changed: one line that names the tensor or the key."""
    break_it, message = UNFIT[name]
    good = draft_models.heads.eagle3
    config = json.loads((good / "config.json").read_text())
    tensors = load_file(good / "model.safetensors")
    break_it(config, tensors)
    spec = {"method": "eagle3", "model": str(save(tmp_path / "head", config, tensors)), "num_speculative_tokens": K}
    with pytest.raises(CheckpointError, match=message) as caught:
        make_engine(tiny_model, spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["eagle3", "eagle3_tree", "peagle"])
def test_a_request_longer_than_the_heads_context_goes_on_without_it(
    tiny_model: Path, draft_models: DraftModels, method: str
) -> None:
    """As heads with yarn have it: past their context nothing is drafted or filled for that request alone."""
    limit = 40
    work = [
        (prompts(1, seed=3, shortest=50)[0][:length], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        for length in (20, 50)
    ]
    expected = run(make_engine(tiny_model), work, together=False)
    engine = make_engine(tiny_model, METHODS[method](draft_models), max_num_batched_tokens=24)
    (member,) = engine.proposer.members  # type: ignore[attr-defined]
    head = member.proposer._head
    head.max_positions = limit
    head.blocks.cos, head.blocks.sin = head.blocks.cos[:limit], head.blocks.sin[:limit]
    results = run(engine, work)
    assert [result.key for result in results] == [result.key for result in expected]
    short, long = (result.last.metrics.speculative_decoding["num_draft_tokens"] for result in results)
    assert short > 0
    assert long == 0
    assert_idle(engine)
