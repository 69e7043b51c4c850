"""What the README says works: its commands and its Python are run, on the tiny model in place of the built-in one."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from forerun.cli import main
from forerun.cli.demo_prompts import DEMO_PROMPTS
from tests.server.test_concurrent import served

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def _commands() -> Iterator[list[str]]:
    for block in _blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] == ".venv/bin/forerun":
                yield words[1:]


COMMANDS = list(_commands())


def test_the_first_screen_holds_the_two_commands_and_the_output() -> None:
    first_screen = "\n".join(README.splitlines()[:40])
    assert "scripts/demo" in first_screen
    assert "scripts/test" in first_screen
    assert "demo output: end" in first_screen


def test_the_demos_output_has_a_row_for_each_kind_of_prompt() -> None:
    """Failing? Paste what `scripts/demo` prints, from a machine that does nothing else."""
    (block,) = re.findall(r"<!-- demo output: begin -->(.*?)<!-- demo output: end -->", README, re.DOTALL)
    rows = [line.split() for line in block.splitlines()]
    assert len(DEMO_PROMPTS) == 4
    for prompt in DEMO_PROMPTS:
        kind = prompt.kind.split()
        found = [row for row in rows if row[: len(kind)] == kind and row[-1] in ("yes", "NO")]
        assert len(found) == 1, f"no row for {prompt.kind!r}"
        assert found[0][-1] == "yes", "the demo is not lossless"


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] != "serve"], ids=lambda words: words[0])
def test_commands_run(words: list[str], tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tiny_model) if word == "smollm2-135m" else word for word in words]
    if words[0] == "generate":
        arguments += ["--kv-cache-memory", "8MiB"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code
    assert capsys.readouterr().out


def _curl_bodies() -> list[tuple[str, str]]:
    """(path, body) of each request that the README sends with curl."""
    requests = []
    for block in _blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] == "curl":
                (url,) = [word for word in words if word.startswith("localhost:8000/")]
                requests.append((url.removeprefix("localhost:8000"), words[words.index("-d") + 1]))
    return requests


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] == "serve"], ids=lambda words: words[0])
def test_serve_commands_serve(words: list[str], tiny_model: Path) -> None:
    model, *flags = words[1:]
    assert model == "smollm2-135m"
    requests = _curl_bodies()
    assert requests
    with served(str(tiny_model), *flags, "--kv-cache-memory", "8MiB") as url:
        for path, body in requests:
            response = httpx.post(url + path, content=body, timeout=60)
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["completion_tokens"] > 0


def test_python_runs(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in _blocks("python") if "import" in block]
    block = block.replace('LLM("smollm2-135m", ', f"LLM({str(tiny_model)!r}, kv_cache_memory_bytes=8 << 20, ")
    exec(compile(block, "README.md", "exec"), {})
    assert "mean_acceptance_length" in capsys.readouterr().out


@pytest.mark.parametrize("script", ["scripts/demo", "scripts/test", "scripts/check", ".ci/run"])
def test_scripts_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_every_file_that_is_named_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^):]+)\)", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link
    for row in re.findall(r"^\| (.*?) \|", text, re.MULTILINE):
        for name in re.findall(r"`([\w/.]+)`", row):
            if name.endswith("/"):
                assert any(base.joinpath(name).is_dir() for base in (ROOT, ROOT / "forerun", *_parts())), name
            elif name.endswith(".py"):
                assert any(base.joinpath(name).is_file() for base in (ROOT / "forerun", *_parts())), name


def _parts() -> list[Path]:
    return [path for path in (ROOT / "forerun").iterdir() if path.is_dir()]
