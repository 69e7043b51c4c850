"""The command line's own answers: lists, flags that are not served or not known, exit codes, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forerun.cli import main
from forerun.cli.flags import NOT_SERVED, repeat_lists

ROOT = Path(__file__).parents[2]


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, str, int]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    return out, err, int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("serve m --api-key a b --port 1", "serve m --api-key a --api-key b --port 1"),
        (
            "serve m --served-model-name A B C",
            "serve m --served-model-name A --served-model-name B --served-model-name C",
        ),
        ("serve m --api-key=a b", "serve m --api-key=a --api-key b"),
        ("serve m --api-key a --api-key b", "serve m --api-key a --api-key b"),
        ("serve --api-key a m", "serve --api-key a m"),
        ("serve m --host a b", "serve m --host a b"),
        ("serve m --api-key a -- b", "serve m --api-key a -- b"),
        ("generate m --api-key a b", "generate m --api-key a b"),
    ],
)
def test_lists_have_their_flag_before_each_value(given: str, taken: str) -> None:
    assert repeat_lists(given.split()) == taken.split()


def test_lists_reach_the_settings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    monkeypatch.setattr("forerun.server.run.serve", lambda config, settings, web: seen.append(settings) or 0)
    monkeypatch.setattr("forerun.cli.serve.log_to_stderr", lambda process: None)
    assert run("serve", "m", "--api-key", "a", "b", "--served-model-name", "A", "B", capsys=capsys)[2] == 0
    assert seen[0].api_keys == ("a", "b")
    assert seen[0].served_model_names == ("A", "B")


def serve_settings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """What `serve` would start: the engine's configuration and the server's settings."""
    seen: list[Any] = []
    monkeypatch.setattr("forerun.server.run.serve", lambda config, settings, web: seen.append((config, settings)) or 0)
    monkeypatch.setattr("forerun.cli.serve.log_to_stderr", lambda process: None)
    assert run("serve", *words, capsys=capsys)[1:] == ("", 0)
    return seen[0]


def test_a_file_gives_flags_and_the_command_line_wins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: mine\nmax-model-len: 4k\nmax_num_seqs: 3\nserved-model-name: [A, B]\nenable-prefix-caching: false\n"
        "disable-log-stats: true\nenable-per-request-metrics: false\napi-key: secret\n"
        "speculative-config: {method: ngram, num_speculative_tokens: 3}\n"
    )
    config, settings = serve_settings(monkeypatch, capsys, "--config", str(file), "--max-num-seqs", "5", "--api-key=a")
    assert (config.model, config.max_model_len, config.max_num_seqs) == ("mine", 4000, 5)
    assert not config.enable_prefix_caching
    assert not config.batch_invariant
    assert config.speculative_config.num_speculative_tokens == 3
    assert settings.served_model_names == ("A", "B")
    assert settings.api_keys == ("a",)
    assert not settings.log_stats
    config, _ = serve_settings(monkeypatch, capsys, "other", f"--config={file}", "--max-model-len", "auto")
    assert (config.model, config.max_model_len) == ("other", None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("- a", "names of flags"),
        ("a: [", "no YAML"),
        ("max-model-len:", "max-model-len has no value"),
        ("max-modl-len: 3", "unknown flag --max-modl-len: did you mean --max-model-len?"),
        ("tensor-parallel-size: 2", "--tensor-parallel-size is not served yet"),
    ],
)
def test_a_file_that_gives_none_is_one_line(
    content: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    if content is not None:
        file.write_text(content)
    out, err, code = run("serve", "m", "--config", str(file), capsys=capsys)
    assert (out, code, len(err.splitlines())) == ("", 1, 1)
    assert words in err


def test_parsers_and_templates_reach_the_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    words = ["m", "--reasoning-parser", "qwen3", "--tool-call-parser", "hermes", "--enable-auto-tool-choice"]
    _, settings = serve_settings(
        monkeypatch, capsys, *words, "--chat-template", str(file), "--max-stored-responses", "0"
    )
    assert settings.reasoning is not None
    assert settings.tools is not None
    assert settings.chat_template == "{{ messages }}"
    assert settings.max_stored_response_bytes == 0
    _, settings = serve_settings(monkeypatch, capsys, "m", "--chat-template", "{{ x }}")
    assert settings.chat_template == "{{ x }}"
    for wrong, word in (
        (["--reasoning-parser", "none"], "qwen3"),
        (["--tool-call-parser", "none"], "hermes"),
        (["--enable-auto-tool-choice"], "tool_call_parser"),
        (["--chat-template", "nowhere.jinja"], "No such file"),
    ):
        _, err, code = run("serve", "m", *wrong, capsys=capsys)
        assert code == 1
        assert word in err


@pytest.mark.parametrize(
    "flag",
    [
        "--max-logprobs",
        "--load-format",
        "--lora-modules",
        "--tensor-parallel-size",
        "--model-impl",
        "--reasoning-parser-plugin",
        "-tp",
    ],
)
@pytest.mark.parametrize("form", ["word", "equals"])
def test_a_flag_of_vllms_that_is_not_served_is_one_line(
    flag: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"{flag}=1"] if form == "equals" else [flag, "1"]
    assert run("serve", "m", *words, capsys=capsys) == ("", f"forerun: error: {flag} is not served yet\n", 1)


def test_no_flag_is_called_not_served_that_is(capsys: pytest.CaptureFixture[str]) -> None:
    shown = "".join(run(command, "--help", capsys=capsys)[0] for command in ("serve", "generate", "demo"))
    assert "--api-key" in shown
    assert not NOT_SERVED & set(shown.replace(",", " ").split())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "m", "--max-model-le", "5"], "unknown flag --max-model-le: did you mean --max-model-len?"),
        (["generate", "m", "--promt", "x"], "unknown flag --promt: did you mean --prompt?"),
        (["serve", "m", "--zzzzzz"], "unknown flag --zzzzzz"),
        (["serve"], "missing argument 'MODEL'"),
        (["generate", "m"], "missing option '--prompt' / '-p'"),
        (["serve", "m", "--max-num-seqs", "many"], "invalid value for '--max-num-seqs'"),
        (["serve", "m", "--port"], "option '--port' requires an argument"),
        (["sevre", "m"], "no such command 'sevre'"),
        (["config", "--check", "{"], "speculative_config: "),
        (["config", "--model", "x"], "--model goes with --check"),
        (["config", "--chek", "{}"], "unknown flag --chek: did you mean --check?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_1_for_every_command(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err, code = run(*arguments, capsys=capsys)
    assert (out, code) == ("", 1)
    assert err.lower().startswith(f"forerun: error: {line.lower()}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["--help"], ["serve", "--help"], ["--version"]], ids=" ".join)
def test_help_is_no_mistake(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out, err, code = run(*arguments, capsys=capsys)
    assert out
    assert (err, code) == ("", 0)


@pytest.mark.parametrize("after_s", [1.5, 4.0])
@pytest.mark.parametrize(
    "command", [["generate", "-p", "x", "--ignore-eos", "--max-tokens", "9999"], ["serve", "--port", "0"]]
)
def test_ctrl_c_while_it_starts_is_one_line(command: list[str], after_s: float, tiny_model: Path) -> None:
    """Wherever it is by then: in the imports, in the tokenizer, in the start of the core."""
    words = [sys.executable, "-m", "forerun", command[0], str(tiny_model), *command[1:], "--kv-cache-memory", "8MiB"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    ) as popen:
        time.sleep(after_s)
        os.killpg(popen.pid, signal.SIGINT)  # as a terminal does: the core gets it as well
        _, err = popen.communicate(timeout=60)
    assert "Traceback" not in err, err
    if "Application startup complete" in err or "; seed " in err or popen.returncode == 0:
        return  # it had started, or was done
    assert err.splitlines()[-1] == "forerun: interrupted", err
    # Python ends by the signal itself where that came inside of exec(), as when a dataclass is made; a shell sees 130.
    assert popen.returncode in (130, -signal.SIGINT)


def test_batch_invariant_reaches_the_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve_settings(monkeypatch, capsys, "m", "--batch-invariant")[0].batch_invariant
