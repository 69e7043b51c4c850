"""The command line's own answers: lists, flags that are not served or not known, exit codes, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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


@pytest.mark.parametrize(
    "flag",
    ["--max-logprobs", "--chat-template", "--config", "--tensor-parallel-size", "--reasoning-parser-plugin", "-tp"],
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
    if "Application startup complete" in err or popen.returncode == 0:
        return  # it had started
    assert err.splitlines()[-1] == "forerun: interrupted", err
    # Python ends by the signal itself where that came inside of exec(), as when a dataclass is made; a shell sees 130.
    assert popen.returncode in (130, -signal.SIGINT)
