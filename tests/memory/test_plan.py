"""`forerun plan` against arithmetic by hand, and against the engine that really loads."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.cli import main
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.footprint import footprint
from forerun.errors import CheckpointError, ConfigError
from forerun.memory.budget import GIB, MIB
from forerun.memory.cards import CARDS, find_card
from forerun.memory.plan import Machine, Plan
from forerun.models.builtin import resolve_model
from forerun.models.loading import read_config
from forerun.models.sizes import Form, size_decoder, size_head
from forerun.spec.config import SpeculativeConfig
from forerun.spec.heads import complete
from tests.methods import DraftModels
from tests.models.heads import tiny_heads
from tests.models.tiny import hf_model, save_hf
from tests.spec.test_heads import save_speculators
from tests.tiny_engine import make_engine, save_tiny_target

CONFIGS = Path(__file__).parent / "configs"
TARGET, DRAFT, HEAD = (str(CONFIGS / name) for name in ("qwen3-8b", "qwen3-0.6b", "qwen3-8b-eagle3"))
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 8}
EAGLE3 = {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 5}
DRAFT_MODEL = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 5}
CARD = ("--gpu-memory", "46068MiB", "--gpu-memory-utilization", "0.92")
KIB = 2**10


def report(capsys: pytest.CaptureFixture[str], model: str, *flags: str, drafts: tuple[Any, ...] = ()) -> dict[str, Any]:
    """What `forerun plan --json` says, by column."""
    for draft in drafts:
        flags += ("--speculative-config", json.dumps(draft))
    with pytest.raises(SystemExit) as ended:
        main(["plan", model, *flags, "--json"])
    read = json.loads(capsys.readouterr().out)
    plans: dict[str, Any] = read["plans"] | {"code": ended.value.code or 0, "notes": read["notes"]}
    return plans


# -- the published configurations, on a card of 46,068 MiB


@pytest.fixture(scope="module")
def pair() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("typer.echo", said.append)
        flags = [word for draft in (NGRAM, SUFFIX, EAGLE3, DRAFT_MODEL) for word in ("-sc", json.dumps(draft))]
        with pytest.raises(SystemExit):
            main(["plan", TARGET, *CARD, "--max-model-len", "32768", *flags, "--json"])
    plans: dict[str, Any] = json.loads(said[0])["plans"]
    return plans


@pytest.mark.parametrize(
    ("proposer", "weights", "otherwise", "kib", "tokens"),
    [
        ("none", None, None, 144, 190_000),
        ("ngram", None, None, 144, 190_000),
        ("suffix", None, None, 144, 190_000),
        ("eagle3", 2.04e9, 0.80e9, 148, 172_000),
        ("draft_model", 1.19e9, 1.50e9, 256, 102_500),
    ],
)
def test_the_published_configs_take_what_was_worked_out_by_hand(
    pair: dict[str, Any], proposer: str, weights: float | None, otherwise: float | None, kib: int, tokens: int
) -> None:
    plan = pair[proposer]
    assert plan["weights"]["target"]["num_bytes"] == pytest.approx(16.38e9, rel=0.001)
    if weights is None:
        assert plan["weights"].keys() == {"target"}
    else:
        draft = plan["weights"][proposer]
        assert (draft["num_bytes"], draft["otherwise"]) == (
            pytest.approx(weights, rel=0.005),
            pytest.approx(otherwise, rel=0.005),
        )
    assert sum(plan["kv_bytes_per_token"].values()) == kib * KIB
    assert plan["tokens_before_activations"] == pytest.approx(tokens, rel=0.005)
    assert plan["tokens"] < plan["tokens_before_activations"]


def test_both_figures_of_a_draft_have_their_tokens(pair: dict[str, Any]) -> None:
    assert pair["draft_model"]["tokens_before_activations_otherwise"] == pytest.approx(101_000, rel=0.005)
    assert pair["eagle3"]["tokens_before_activations_otherwise"] == pytest.approx(180_000, rel=0.005)


def test_a_request_of_full_length_takes_the_targets_and_the_drafts_part(pair: dict[str, Any]) -> None:
    assert pair["draft_model"]["request_bytes"]["32768"] == {"target": 4.5 * GIB, "draft": 3.5 * GIB}
    tokens = pair["draft_model"]["tokens"]
    assert pair["draft_model"]["batch"]["32768"] == tokens // 32_768
    assert pair["none"]["batch"]["8192"] == pair["none"]["tokens"] // 8192


def test_a_draft_that_nearly_doubles_what_a_token_takes_is_warned_of(pair: dict[str, Any]) -> None:
    [warning] = pair["draft_model"]["warnings"]
    assert "(112 KiB a token) nearly double the target's (144 KiB)" in warning
    assert pair["eagle3"]["warnings"] == []


# -- what is counted and not served


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with one layer for multi-token prediction, and Qwen3.5's vocabulary."""
    folder = tmp_path_factory.mktemp("mtp")
    config = json.loads((CONFIGS / "qwen3-8b" / "config.json").read_text())
    config |= {"vocab_size": 248_000, "hidden_size": 2560, "num_hidden_layers": 32, "mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_layers_for_multi_token_prediction_are_counted(with_mtp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mtp = {"method": "mtp", "num_speculative_tokens": 3, "draft_lm_head_quantization": "fp8"}
    plan = report(capsys, str(with_mtp), *CARD, drafts=(mtp,))["mtp"]
    config = read_config(with_mtp)
    layer = sum(torch.Size(shape).numel() for shape in config.layer_shapes(0).values())
    assert plan["weights"]["mtp"]["num_bytes"] == 2 * (layer + 2 * 2560**2 + 3 * 2560)
    assert plan["kv_bytes_per_token"]["mtp"] * 32 == plan["kv_bytes_per_token"]["target"]
    assert plan["kept_bytes"]["output head of the drafter (fp8)"] / GIB == pytest.approx(0.6, abs=0.01)
    unserved, beyond = plan["warnings"]
    assert 'method="mtp" is not served yet' in unserved
    assert "num_speculative_tokens=3 is more than the 1 that the checkpoint is made for" in beyond


def test_block_drafters_are_counted_from_their_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DFlash and DSpark share embedding and head with the target, and keep keys and values of the context."""
    config = json.loads((CONFIGS / "qwen3-8b" / "config.json").read_text())
    config |= {"num_hidden_layers": 5, "block_size": 16, "markov_rank": 256, "architectures": ["DFlashDraftModel"]}
    config |= {"dflash_config": {"mask_token_id": 151_669, "target_layer_ids": [1, 9, 17, 25, 33]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafts = [{"method": name, "model": str(tmp_path), "num_speculative_tokens": 16} for name in ("dflash", "dspark")]
    plans = report(capsys, TARGET, *CARD, drafts=tuple(drafts))
    layer = sum(torch.Size(shape).numel() for shape in read_config(TARGET).layer_shapes(0).values())
    elements = 5 * layer + 4096 * 5 * 4096 + 2 * 4096
    assert plans["dflash"]["weights"]["dflash"]["num_bytes"] == 2 * elements
    assert plans["dspark"]["weights"]["dspark"]["num_bytes"] == 2 * (elements + 2 * 151_936 * 256)
    assert plans["dflash"]["kv_bytes_per_token"]["dflash"] == 5 * 4 * KIB
    assert any("more than the 15 that the checkpoint is made for" in line for line in plans["dflash"]["warnings"])
    assert not any("made for" in line for line in plans["dspark"]["warnings"])


def test_more_tokens_than_a_head_was_trained_for_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = save_hf(hf_model("llama", num_hidden_layers=tiny_heads.TARGET_LAYERS), tmp_path / "target")
    head = save_speculators(tmp_path / "head", k=3)
    (head / "model.safetensors").unlink()
    for k in (3, 5):
        spec = {"method": "eagle3", "model": str(head), "num_speculative_tokens": k}
        warnings = report(capsys, str(target), "--gpu", "L4", drafts=(spec,))["eagle3"]["warnings"]
        beyond = [line for line in warnings if "made for" in line]
        assert len(beyond) == (k > 3)
    assert "num_speculative_tokens=5 is more than the 3 that the checkpoint is made for" in beyond[0]


def test_an_index_tells_whether_the_file_stores_a_tied_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((CONFIGS / "qwen3-0.6b" / "config.json").read_text())
    form = Form(torch.bfloat16)
    for names, stored in ((["model.norm.weight"], False), (["model.norm.weight", "lm_head.weight"], True)):
        index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        weights = size_decoder(tmp_path, form).weights
        assert (weights.otherwise is not None) == stored
        assert weights.num_bytes == pytest.approx(1.19e9, rel=0.005)


def test_settings_that_a_device_does_not_serve_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    plans = report(capsys, TARGET, "--gpu", "L40S", "--quantization", "int8")
    assert plans["none"]["refused"] == "quantization='int8' is served on a CPU only: leave it out on a GPU"
    assert plans["code"] == 1


def test_more_cache_than_there_is_memory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    refused = report(capsys, TARGET, *CARD, "--kv-cache-memory", "40GiB")["none"]["refused"]
    assert "kv_cache_memory=42949672960 (40.00 GiB) is more than the " in refused
    assert report(capsys, TARGET, *CARD, "--kv-cache-memory", "9GiB")["none"]["tokens"] == 65_536


def test_a_method_that_the_checkpoint_does_not_have_is_refused_in_its_column(
    capsys: pytest.CaptureFixture[str],
) -> None:
    eagle = {"method": "eagle", "model": HEAD, "num_speculative_tokens": 3}
    plans = report(capsys, TARGET, *CARD, drafts=({"method": "mtp", "num_speculative_tokens": 1}, eagle))
    assert "the target has no layers for multi-token prediction" in plans["mtp"]["refused"]
    assert "does not fit model=" in plans["eagle"]["refused"]
    assert plans["none"]["tokens"] > 0
    assert plans["code"] == 0


def test_eight_bits_in_the_cache_hold_twice_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    plain = report(capsys, TARGET, *CARD)["none"]
    plans = report(capsys, TARGET, *CARD, "--kv-cache-dtype", "fp8")
    assert plans["none"]["kv_bytes_per_token"] == {"target": 72 * KIB}
    assert plans["none"]["tokens"] == pytest.approx(2 * plain["tokens"], rel=0.001)
    assert "kv_cache_dtype='fp8' is not served" in plans["notes"][0]


def test_quantised_weights_are_counted_by_flag_and_by_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((CONFIGS / "qwen3-8b" / "config.json").read_text())
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    plan = report(capsys, str(tmp_path), *CARD)["none"]
    ends = 2 * 151_936 * 4096 * 2  # embedding and output head stay in 16 bits
    linear = 16.38e9 - ends
    assert plan["weights"]["target"]["num_bytes"] == pytest.approx(ends + linear * (4 + 16 / 128) / 16, rel=0.002)
    assert "quantization_config 'awq' is not supported" in plan["warnings"][0]
    plans = report(capsys, TARGET, *CARD, "--quantization", "fp8")
    assert plans["none"]["weights"]["target"]["num_bytes"] == pytest.approx(ends + linear / 2, rel=0.002)
    assert "quantization='fp8' is not served" in plans["notes"][0]


# -- plan and engine


def planned(config: EngineConfig) -> Plan:
    """For a CPU with memory enough. The heads' headers are read first, as at start."""
    if config.speculative_config is not None:
        completed, _ = complete(config.speculative_config, read_config(resolve_model(config.model)))
        config = dataclasses.replace(config, speculative_config=completed)
    return footprint(config, Machine("CPU", 64 * GIB, 64 * GIB))


def agree(model: Path | str, spec: Mapping[str, Any] | None, *, shared: bool = False, **settings: Any) -> None:
    """A plan and the engine of the same settings: weights, bytes of a token, tokens that fit. Within 2 %."""
    defaults: dict[str, Any] = {"kv_cache_memory_bytes": 8 * MIB, "max_num_seqs": 16, "max_num_batched_tokens": 96}
    settings = defaults | settings
    parsed = None if spec is None else SpeculativeConfig.parse(spec)
    plan = planned(EngineConfig(model=str(model), device="cpu", speculative_config=parsed, **settings))
    engine = make_engine(Path(model), spec, **settings)
    info = engine.info()
    weights = plan.target.num_bytes + sum(
        weights.otherwise if shared and weights.otherwise else weights.num_bytes for weights in plan.drafts.values()
    )
    assert weights == pytest.approx(resident(engine), rel=0.02)
    assert plan.caches.num_tokens(settings["kv_cache_memory_bytes"]) == info.kv_cache_tokens
    groups = [engine.scheduler.target.spec.block_bytes]
    groups += [m.proposer.group.block_bytes for m in engine.proposer.members if m.proposer.group is not None]
    assert [group.block_bytes for group in plan.caches.groups] == groups
    assert plan.served_len == info.max_model_len


def resident(engine: Engine) -> int:
    """Bytes of the weights that the engine holds."""
    total = engine.runner.target.model.weight_bytes
    for member in engine.proposer.members:
        for name in ("_model", "_head"):
            if (network := getattr(member.proposer, name, None)) is not None:
                total += network.weight_bytes
    return int(total)


def test_the_tiny_target_takes_what_was_planned(tiny_model: Path) -> None:
    for spec in (None, NGRAM, SUFFIX):
        agree(tiny_model, spec)
    agree(tiny_model, None, kv_cache_dtype="bfloat16")
    agree(tiny_model, None, quantization="int8")
    agree(tiny_model, None, max_model_len=100)


def test_drafts_take_what_was_planned(tiny_model: Path, draft_models: DraftModels) -> None:
    agree(tiny_model, {"method": "draft_model", "model": str(draft_models.noisy), "num_speculative_tokens": 3})
    members = [{"method": "draft_model", "model": str(draft_models.noisy)}, {"method": "suffix"}]
    agree(tiny_model, {"method": members, "num_speculative_tokens": 3})


@pytest.mark.parametrize("own", [False, True])
def test_heads_take_what_was_planned(own: bool, tmp_path: Path) -> None:
    """Whether a table of the head's own equals the target's, only its values tell: both figures are planned."""
    target = save_tiny_target(tmp_path / "target", num_hidden_layers=tiny_heads.TARGET_LAYERS)
    vocab = read_config(target).vocab_size
    config, tensors = tiny_heads.eagle3(1, vocab_size=vocab)
    if not own:
        from forerun.models.loading import load_model

        embedding = load_model(target).embedding
        assert isinstance(embedding, torch.Tensor)
        tensors["embed_tokens.weight"] = embedding.clone()
    head = tiny_heads.save(tmp_path / "head", config, tensors)
    spec = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    agree(target, spec, shared=not own)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(config))
    decoder = read_config(target)
    assert size_head(tmp_path / "bare", decoder, Form(torch.float32)) == size_head(head, decoder, Form(torch.float32))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma2"])
def test_a_config_alone_says_what_its_headers_say(kind: str, tmp_path: Path) -> None:
    folder = save_hf(hf_model(kind), tmp_path / "model")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((folder / "config.json").read_text())
    for form in (Form(torch.float32), Form(torch.float32, packed=True), Form(torch.bfloat16)):
        known, bare = size_decoder(folder, form), size_decoder(tmp_path / "bare", form)
        assert (known.weights.num_bytes, known.is_packed) == (bare.weights.num_bytes, bare.is_packed)


def test_the_built_in_model_takes_what_was_planned() -> None:
    path = resolve_model("smollm2-135m")
    agree(path, NGRAM, kv_cache_memory_bytes=64 * MIB)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_real_models_take_what_was_planned(name: str) -> None:
    agree(resolve_model(name), SUFFIX, kv_cache_memory_bytes=256 * MIB)


@pytest.mark.slow
def test_a_real_pair_takes_what_was_planned() -> None:
    draft = str(resolve_model("qwen2.5-coder-0.5b"))
    spec = {"method": "draft_model", "model": draft, "num_speculative_tokens": 4}
    agree(resolve_model("qwen2.5-coder-1.5b"), spec, kv_cache_memory_bytes=512 * MIB)


# -- a server that does not fit


def test_a_server_that_does_not_fit_says_what_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_target(tmp_path / "model", max_position_embeddings=100_000)
    with pytest.raises(ConfigError) as caught:
        make_engine(model, NGRAM, kv_cache_memory_bytes=MIB, max_model_len=50_000, dtype="float32")
    message = str(caught.value)
    assert message.isprintable()
    token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, values of a head, bytes
    fits = MIB // token
    needed = 50_000 * token / MIB
    assert f"max_model_len=50000 needs {needed:.1f} MiB" in message
    assert "kv_cache_memory holds 1.0 MiB" in message
    assert (
        f"the largest length that fits is {fits:,} tokens, the largest batch 16 requests of {fits // 16:,}" in message
    )
    assert f"--max-model-len {fits} ({needed - 1:.1f} MiB)" in message
    assert f"--kv-cache-dtype bfloat16 ({needed / 2:.1f} MiB)" in message
    assert "--kv-cache-memory 25MiB (24.0 MiB)" in message
    assert "no draft" not in message, "leaving out n-grams frees nothing"
    flags = ("--kv-cache-memory", "1MiB", "--max-model-len", "50000", "--dtype", "float32")
    plans = report(capsys, str(model), *flags, drafts=(NGRAM,))
    assert plans["code"] == 1
    [warning] = [line for line in plans["ngram"]["warnings"] if line.startswith("does not fit: ")]
    without_numbers_of_requests = re.sub(r", the largest batch [^;]*", "", warning.removeprefix("does not fit: "))
    assert without_numbers_of_requests == re.sub(r", the largest batch [^;]*", "", message)


def test_what_is_named_then_fits(tmp_path: Path) -> None:
    model = save_tiny_target(tmp_path / "model", max_position_embeddings=100_000)
    settings: dict[str, Any] = {"kv_cache_memory_bytes": MIB, "max_model_len": 3000, "dtype": "float32"}
    with pytest.raises(ConfigError, match="max_model_len=3000") as caught:
        make_engine(model, **settings)
    length = int(re.search(r"--max-model-len (\d+)", str(caught.value))[1])  # type: ignore[index]
    assert make_engine(model, **settings | {"max_model_len": length}).info().max_model_len == length
    with pytest.raises(ConfigError, match=f"max_model_len={length + 1}"):
        make_engine(model, **settings | {"max_model_len": length + 1})
    memory = int(re.search(r"--kv-cache-memory (\d+)MiB", str(caught.value))[1])  # type: ignore[index]
    assert make_engine(model, **settings | {"kv_cache_memory_bytes": memory * MIB}).info().max_model_len == 3000


def test_weights_are_not_read_where_the_config_says_that_they_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_target(tmp_path / "model")

    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("forerun.engine.build.load_model", load)
    with pytest.raises(ConfigError, match="max_model_len=256 needs"):
        make_engine(model, kv_cache_memory_bytes=16 * KIB, max_model_len=256)


def test_a_gpu_that_does_not_hold_the_weights_says_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    plans = report(capsys, TARGET, "--gpu", "RTX-4080", drafts=(EAGLE3,))
    assert plans["code"] == 1
    [message] = [line for line in plans["eagle3"]["warnings"] if line.startswith("does not fit")]
    assert re.search(r"nothing is available: gpu_memory_utilization=0.92 of 15.99 GiB is 14.71 GiB, and there", message)
    assert "17.16 GiB of weights" in message
    assert ": no request fits;" in message
    assert "--gpu-memory-utilization 0.96 (" in message
    assert "no draft (" in message


def test_a_draft_is_an_option_to_leave_out(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--gpu-memory", "24GiB", "--max-model-len", "40960", "--gpu-memory-utilization", "0.9")
    steps = ("--max-num-seqs", "64", "--max-num-batched-tokens", "512")
    plans = report(capsys, TARGET, *flags, *steps, drafts=(EAGLE3,))
    [message] = [line for line in plans["eagle3"]["warnings"] if line.startswith("does not fit")]
    plain, drafting = plans["none"], plans["eagle3"]
    kept = sum(drafting["kept_bytes"].values()) - sum(plain["kept_bytes"].values())
    freed = drafting["weights"]["eagle3"]["num_bytes"] + kept + 40_960 * 4 * KIB
    assert f"no draft ({freed / GIB:.2f} GiB)" in message
    assert (plain["max_model_len"], drafting["max_model_len"]) == (40_960, 0)
    assert "--max-model-len " in message


# -- cards and mistakes


def test_cards_are_known_by_name() -> None:
    assert find_card("NVIDIA L40S") == find_card("l40s") == CARDS["L40S"]
    assert CARDS["L40S"].mib == 46_068
    assert find_card("rtx 4090") == CARDS["RTX-4090"]
    with pytest.raises(ConfigError, match=r"'A100' is unknown; did you mean A100-40GB or A100-80GB\?"):
        find_card("A100")
    with pytest.raises(ConfigError, match=r"'Quantum 9' is unknown; known: A10, .*give --gpu-memory, such as 46068MiB"):
        find_card("Quantum 9")


def test_a_card_that_is_not_served_is_counted_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    plans = report(capsys, DRAFT, "--gpu", "T4")
    assert plans["notes"] == ["T4 has compute capability 7.5, and 8.0 or newer is needed: it is counted all the same"]
    assert plans["none"]["tokens"] > 0
    assert report(capsys, DRAFT, "--gpu", "MI300X")["notes"][0].startswith("MI300X is no NVIDIA GPU")


def test_a_draft_model_of_another_tokenizer_is_refused_in_the_engines_words(
    tiny_model: Path, draft_models: DraftModels, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {"method": "draft_model", "model": str(draft_models.renamed), "num_speculative_tokens": 3}
    with pytest.raises(ConfigError) as caught:
        make_engine(tiny_model, spec)
    refused = report(capsys, str(tiny_model), "--gpu", "L40S", drafts=(spec,))["draft_model"]["refused"]
    assert refused == str(caught.value)
    assert "has another tokenizer" in refused


def test_the_table_shows_each_proposer_and_both_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for draft in (NGRAM, EAGLE3) for word in ("-sc", json.dumps(draft))]
    with pytest.raises(SystemExit) as ended:
        main(["plan", TARGET, "--gpu", "L40S", *words])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "2.04 GB (0.80 GB)" in shown
    assert "0.80 GB where its embedding is the target's, and so shared" in shown
    assert re.search(r"KV a token +144 KiB +144 KiB +144 \+ 4 KiB", shown)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--gpu", "L40S", "--gpu-memory", "1GiB"), "exclude each other"),
        (("--gpu-memory", "much"), "--gpu-memory must be bytes"),
        (("--gpu", "L40S", "--max-model-len", "50000"), "max_model_len=50000 is more than the 40960 positions"),
    ],
)
def test_mistakes_are_one_line(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", TARGET, *flags])
    said = capsys.readouterr()
    assert ended.value.code == 1
    assert message in said.err + said.out


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises((ConfigError, CheckpointError)):
        size_decoder(CONFIGS, Form(torch.float32))
