"""`forerun bench` as it is typed, against a server with a fake engine behind it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun.bench.extras import extra
from forerun.cli.bench_arguments import NOT_SERVED
from forerun.errors import ConfigError
from forerun.server.settings import ServerSettings
from tests.cli.test_flags import run
from tests.server.live import LiveServer
from tests.tiny_engine import save_tiny_target

ROOT = Path(__file__).parents[2]
VERBATIM = "bench serve --backend openai-chat --endpoint /v1/chat/completions --model fake --dataset-name spec_bench"
NGRAM = '{"method":"ngram","num_speculative_tokens":3}'
LINES = [{"category": c, "turns": [f"{c} {n}", "more"]} for c in ("qa", "rag", "writing") for n in range(2)]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    settings = ServerSettings(model="fake", per_request_spec_decode_metrics="summary", enable_per_request_metrics=True)
    with LiveServer(settings) as live:
        yield live


@pytest.fixture(scope="module")
def bare_server() -> Iterator[LiveServer]:
    """Says nothing of single requests, and wants a key."""
    with LiveServer(ServerSettings(model="fake", api_keys=("secret",))) as live:
        yield live


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    return path


def saved(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_vllms_command_runs_as_it_is(
    server: LiveServer, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"{VERBATIM} --dataset-path {questions} --num-prompts -1 --max-concurrency 1".split()
    more = f"--base-url {server.url} --spec-bench-output-len 13 --save-result --save-detailed --result-dir {tmp_path}/r"
    out, err, code = run(*command, *more.split(), capsys=capsys)
    assert code == 0, err
    result = saved(tmp_path / "r")
    assert (result["completed"], result["failed"], result["num_prompts"]) == (6, 0, 6)
    assert result["total_output_tokens"] == 6 * 13 == sum(result["output_lens"])
    # 13 letters, three a step: one step for the prompt, then four of which each drafts 4 and keeps 2, the last none
    assert result["spec_decode_num_drafts"] == 6 * 4
    assert result["spec_decode_draft_tokens"] == 6 * 16
    assert result["spec_decode_accepted_tokens"] == 6 * 6
    assert result["spec_decode_acceptance_length"] == pytest.approx(1 + 36 / 24)
    assert [len(gaps) for gaps in result["itls"]] == [4] * 6
    assert result["server_ttfts"] == [0.002] * 6
    assert set(result["forerun"]["by_category"]) == {"qa", "rag", "mt_bench"}
    assert result["forerun"]["by_category"]["qa"]["spec_decode_num_drafts"] == 8
    assert result["forerun"]["by_category_acceptance_from"] == "the server's metrics of each request"
    assert "Speculative Decoding" in out
    assert "Acceptance length" in out
    assert "no --temperature is given: the server's own default applies" in err


def test_a_server_that_says_nothing_of_requests_is_read_between_them(
    bare_server: LiveServer, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    command = f"{VERBATIM} --dataset-path {questions} --num-prompts -1 --base-url {bare_server.url} --output-len 13"
    assert "OPENAI_API_KEY" in run(*command.split(), capsys=capsys)[1]
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    one = f"{command} --max-concurrency 1 --save-result --result-dir {tmp_path}/r"
    _, err, code = run(*one.split(), capsys=capsys)
    assert code == 0, err
    result = saved(tmp_path / "r")
    assert {c: row["spec_decode_num_drafts"] for c, row in result["forerun"]["by_category"].items()} == {
        "qa": 8, "rag": 8, "mt_bench": 8
    }  # fmt: skip
    assert result["forerun"]["by_category_acceptance_from"].startswith("/metrics")
    out, _, code = run(*f"{command} --max-concurrency 2".split(), capsys=capsys)
    assert code == 0
    assert "acceptance by category needs --max-concurrency 1" in out


def test_completions_of_random_tokens_and_the_page(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.bench.test_datasets import Tokenizer

    monkeypatch.setattr("forerun.bench.serve.load_tokenizer", lambda name: Tokenizer())
    page = tmp_path / "page.html"
    flags = "--num-prompts 5 --input-len 9 --output-len 4 --temperature 0 --goodput ttft:9000 e2el:9000"
    metadata = f"--metadata tier=<b> run=2 --append-result --result-filename r --result-dir {tmp_path} --html {page}"
    for number in (1, 2):
        out, err, code = run("bench", "serve", "--base-url", server.url, *f"{flags} {metadata}".split(), capsys=capsys)
        assert code == 0, err
        results = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
        assert len(results) == number
    assert (results[0]["total_input_tokens"], results[0]["tier"], results[0]["run"]) == (45, "<b>", "2")
    assert results[0]["request_goodput"] == pytest.approx(results[0]["request_throughput"])
    assert "random tokens cannot be guessed" in err
    assert "Good requests/s" in out
    text = page.read_text()
    assert "plotly.js" in text.lower()
    assert 'src="http' not in text


def test_failed_requests_are_counted_shown_and_end_in_1_when_all_failed(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.jsonl"
    path.write_text('{"prompt": "!reject a"}\n{"prompt": "!reject b"}\n{"prompt": "fine"}\n')
    flags = f"bench serve --base-url {server.url} --dataset-name custom --dataset-path {path} --custom-output-len 3"
    more = ["--skip-chat-template", "--disable-shuffle", "--num-prompts"]
    out, _, code = run(*flags.split(), *more, "3", capsys=capsys)
    assert code == 0
    assert "2 requests failed:" in out
    assert "2 x HTTP 400: the engine does not like this prompt" in out
    out, _, code = run(*flags.split(), *more, "2", capsys=capsys)
    assert code == 1
    assert "2 requests failed:" in out


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_server_that_is_not_there_is_one_line(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    out, err, code = run(*f"{VERBATIM} --dataset-path {questions} --port {port}".split(), capsys=capsys)
    assert (out, code) == ("", 1)
    assert err.splitlines()[-1].startswith(f"forerun: error: no server at http://127.0.0.1:{port}")


@pytest.mark.parametrize("flag", [name if not name.endswith("-") else f"{name}x" for name in NOT_SERVED])
@pytest.mark.parametrize("form", ["word", "equals"])
def test_a_flag_of_vllms_that_is_not_served_says_what_to_do(
    flag: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [flag, "x"] if form == "word" else [f"{flag}=x"]
    out, err, code = run("bench", "serve", *words, capsys=capsys)
    assert (out, code) == ("", 1)
    assert err.startswith(f"forerun: error: {flag} is not served: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve --num-promts 3", "unknown flag --num-promts: did you mean --num-prompts?"),
        ("serve --metadata ab", "--metadata takes NAME=VALUE, got 'ab'"),
        ("serve --header =x", "--header takes NAME=VALUE, got '=x'"),
        ("serve --goodput ttft:soon", "--goodput ttft must be milliseconds, got 'soon'"),
        ("serve --metric-percentiles 50;99", "--metric-percentiles takes numbers with commas"),
        ("serve --extra-body [1]", "--extra-body must be a JSON object, got [1]"),
        ("serve --extra-body {", "--extra-body is no JSON"),
        ("serve --save-detailed", "--save-detailed has no effect without --save-result"),
        ("serve --result-dir x", "--result-dir has no effect without --save-result"),
        ("serve --backend openai-chat", "ends in /chat/completions, got '/v1/completions'"),
        ("compare m", "bench compare needs --speculative-config"),
        ("compare m -sc {}", "method"),
        (f"compare m -sc {NGRAM} --max-concurrency 1,x", "--max-concurrency takes whole numbers"),
        ("offline m --num-warmups -1", "--num-warmups must be at least 0"),
        ("offline m --dataset-name nope", "--dataset-name 'nope' is not served"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = [] if words.startswith("serve") else ["--dataset-path", "/nowhere"]
    _, err, code = run("bench", *words.split(), *path, capsys=capsys)
    assert code == 1
    assert message in err.splitlines()[-1]


def test_an_extra_that_is_absent_is_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"a page needs surely_absent: install it with pip install 'forerun\[bench\]'"
    ):
        extra("surely_absent.part", "a page")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


def test_offline_measures_and_shows_the_parts_of_a_step(
    tiny: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = f"--dataset-path {questions} --output-json {tmp_path}/r.json --html {tmp_path}/r.html"
    flags = "--num-prompts -1 --output-len 8 --device cpu --kv-cache-memory 8MiB --ignore-eos --spec-method suffix"
    out, err, code = run("bench", "offline", str(tiny), *f"{files} {flags}".split(), capsys=capsys)
    assert code == 0, err
    result = saved(tmp_path)
    assert (result["backend"], result["completed"], result["total_output_tokens"]) == ("offline", 6, 48)
    parts = result["forerun"]["step_profile_ms"]["decode"]
    assert parts["draft"] + parts["target"] + parts["verify"] + parts["host"] == pytest.approx(parts["step"])
    assert "steps that only decode" in out
    assert "Where the time of a step goes" in (tmp_path / "r.html").read_text()


@pytest.mark.slow
def test_compare_starts_its_servers_and_ends_with_a_verdict(
    tiny: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--dataset-path {questions} --num-prompts 6 --windows 3 --output-len 8 --output-json {tmp_path}/r.json"
    words = [*flags.split(), "--ignore-eos", "--", "--device", "cpu", "--kv-cache-memory", "8MiB"]
    out, err, code = run("bench", "compare", str(tiny), "-sc", NGRAM, *words, capsys=capsys)
    assert code == 0, err
    assert "A ngram K=3, one request at a time: " in out
    assert "A ngram K=3: 6 of 6 answers are plain's, letter by letter." in out
    assert saved(tmp_path)["levels"][0]["error_counts"] == {"plain": {}, "A ngram K=3": {}}


def test_a_server_of_a_comparison_that_does_not_start_is_one_line(
    questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--dataset-path {questions} --num-prompts 6 --windows 3 -- --device cpu --no-such-flag"
    _, err, code = run("bench", "compare", "nowhere", "-sc", NGRAM, *flags.split(), capsys=capsys)
    assert code == 1
    assert "ended at once: forerun: error: unknown flag --no-such-flag" in err.splitlines()[-1]


def test_ctrl_c_ends_with_what_has_been_measured(server: LiveServer, questions: Path) -> None:
    flags = f"--dataset-path {questions} --base-url {server.url} --num-prompts 4000 --max-concurrency 1 --output-len 40"
    process = subprocess.Popen(
        [sys.executable, "-m", "forerun", *VERBATIM.split(), *flags.split(), "--temperature", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    before = server.client.stats().generation_tokens
    deadline = time.monotonic() + 60
    while server.client.stats().generation_tokens < before + 200 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "note: interrupted: " in out
    assert " of 4000 requests were measured" in out
    assert "Traceback" not in err
