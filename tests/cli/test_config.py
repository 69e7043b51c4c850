"""`forerun config`, and the speculation options that other commands share."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from forerun.cli.config import config, render_markdown
from forerun.cli.speculation import (
    LegacyModelOption,
    LegacyTokensOption,
    SpecMethodOption,
    SpecModelOption,
    SpecNotesOption,
    SpecTokensOption,
    SpeculativeConfigOption,
    join_dotted,
    roles_from_options,
)
from forerun.errors import ConfigError
from forerun.spec.config import SpeculativeConfig
from forerun.spec.keys import KEYS, METHODS, Status
from forerun.spec.schema import json_schema

DOCS = Path(__file__).parents[2] / "docs" / "speculative-config.md"
NGRAM = '{"method": "ngram", "num_speculative_tokens": 5}'
RESOLVED = SpeculativeConfig.parse(NGRAM).resolved()

app = typer.Typer()
app.command()(config)


@app.command()
def draft(
    speculative_config: SpeculativeConfigOption = None,
    spec_method: SpecMethodOption = None,
    spec_model: SpecModelOption = None,
    spec_tokens: SpecTokensOption = None,
    speculative_model: LegacyModelOption = None,
    num_speculative_tokens: LegacyTokensOption = None,
    spec_note: SpecNotesOption = None,
) -> None:
    """A command with the speculation options, as `serve` and `generate` have them."""
    _, resolved, notes = roles_from_options(
        "m",
        speculative_config=speculative_config,
        spec_method=spec_method,
        spec_model=spec_model,
        spec_tokens=spec_tokens,
        speculative_model=speculative_model,
        num_speculative_tokens=num_speculative_tokens,
        notes=spec_note,
    )
    typer.echo(json.dumps([None if resolved is None else resolved.resolved(), notes]))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def drafts(*arguments: str) -> tuple[dict[str, Any], list[str]]:
    """What `draft` resolves its arguments to, and its warnings."""
    result = run("draft", *join_dotted(arguments))
    assert result.exit_code == 0, result.output
    resolved, warnings = json.loads(result.stdout)
    return resolved, warnings


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, ["draft", *join_dotted(arguments)], catch_exceptions=False, standalone_mode=False)
    message = str(caught.value)
    assert message.isprintable()
    return message


# The options


def test_without_an_option_there_is_no_speculation() -> None:
    assert run("draft").stdout == "[null, []]\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--speculative-config", NGRAM],
        [f"--speculative-config={NGRAM}"],
        ["-sc", NGRAM],
        ["--spec-method", "ngram", "--spec-tokens", "5"],
        ["--spec-model", "[ngram]", "--spec-tokens", "5"],
        ["--speculative-config", '{"method": "ngram"}', "--spec-tokens", "5"],
        ["--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens", "5"],
        ["-sc.method", "ngram", "-sc.num_speculative_tokens", "5"],
        ["-sc.method=ngram", "--speculative-config.num-speculative-tokens=5"],
        ["-sc.method", '"ngram"', "-sc.num_speculative_tokens", "5"],
        ["-sc.model", "[ngram]", "-sc.num_speculative_tokens", "5"],
        ["-sc", '{"method": "ngram"}', "-sc.num_speculative_tokens", "5"],
        ["-sc.num_speculative_tokens", "5", '--speculative-config={"method": "ngram"}'],
        ["-sc.method", "ngram", "--spec-tokens", "5"],
    ],
)
def test_every_spelling_of_one_configuration(arguments: list[str]) -> None:
    assert drafts(*arguments) == (RESOLVED, [])


def test_a_key_that_takes_a_string_takes_the_text_as_it_is() -> None:
    assert 'model="5"' in refusal("-sc.method", "ngram", "-sc.model", "5")


def test_a_tree_may_be_spelt_key_by_key() -> None:
    tree = {"depth": 2, "top_k": 4, "num_draft_tokens": 8}
    options = [f"-sc.spec-tree.{name.replace('_', '-')}={value}" for name, value in tree.items()]
    resolved, notes = drafts("-sc.method", "eagle3", "-sc.model", "h", *options)
    assert (resolved["spec_tree"], resolved["num_speculative_tokens"], notes) == (tree, 8, [])


def test_legacy_flags_are_taken_with_a_warning_that_shows_the_json() -> None:
    resolved, [warning] = drafts("--speculative-model", "[ngram]", "--num-speculative-tokens", "5")
    assert resolved == RESOLVED
    assert "--speculative-model and --num-speculative-tokens" in warning
    shown = warning.partition("'")[2].rstrip("'")
    assert json.loads(shown) == {"model": "[ngram]", "num_speculative_tokens": 5}
    assert drafts("-sc", shown) == (RESOLVED, [])


def test_the_warning_shows_all_that_was_given() -> None:
    _, [warning] = drafts("--spec-method", "ngram", "--num-speculative-tokens", "5")
    assert warning.startswith("--num-speculative-tokens: ")
    assert NGRAM in warning


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["-sc", NGRAM, "--spec-tokens", "5"], ["mutually exclusive", "--spec-tokens", "num_speculative_tokens=5"]),
        (["-sc", NGRAM, "--spec-method", "ngram"], ["mutually exclusive", "--spec-method", 'method="ngram"']),
        (["--spec-tokens", "4", "--num-speculative-tokens", "5"], ["mutually exclusive", "--num-speculative-tokens"]),
        (["-sc", NGRAM, "-sc.num_speculative_tokens", "4"], ["num_speculative_tokens", "twice", "5", "4"]),
        (["-sc", '{"prompt-lookup-max": 3}', "-sc.prompt_lookup-max", "4"], ["prompt_lookup_max", "twice"]),
        (["-sc.method", "ngram", "-sc.method", "suffix"], ["method", "twice", "ngram", "suffix"]),
        (["-sc.method"], ["-sc.method needs a value"]),
        (["-sc.method", "--spec-tokens", "5"], ["-sc.method needs a value"]),
        (["-sc.method", "ngram", "-sc"], ["-sc needs a value"]),
        (["-sc", "{", "-sc.method", "ngram"], ["not JSON"]),
        (["-sc", NGRAM, "-sc", NGRAM, "-sc.prompt_lookup_max", "3"], ["2 times"]),
        (["-sc.method", "ngram", "-sc.num_speculative_tokens", "-1"], ["num_speculative_tokens", "got -1"]),
        (["-sc.method", "ngram", "-sc.num_speculative_tokens", "five"], ["num_speculative_tokens", 'got "five"']),
        (["-sc.method", "suffix", "-sc.suffix_decoding_min_token_prob=NaN"], ["min_token_prob", "got NaN"]),
        (["-sc.", "5"], ['unknown key ""']),
        (["-sc.metod", "ngram"], ['"metod"', '"method"']),
        (["-sc.draft_load_config.a.b", "1", "-sc.method", "ngram"], ['draft_load_config={"a": {"b": 1}}']),
        (["-sc.method", "ngram", "-sc.method.a", "1"], ["method", "already"]),
        (["-sc.spec_tree.a", "1", "-sc.spec_tree.a", "2"], ["spec_tree.a", "twice"]),
        (["--speculative-model", "org/model", "--num-speculative-tokens", "-5"], ["num_speculative_tokens", "got -5"]),
        (
            ["-sc.method=eagle3", "-sc.model=h", "-sc.spec_tree.depth=2", "-sc.spec_tree.top_k", "4"],
            ["num_draft_tokens is missing"],
        ),
        (["-sc.method=eagle3", "-sc.model=h", "-sc.spec_tree", "5"], ["spec_tree must be an object", "got 5"]),
        (["-sc", ""], ["empty"]),
        (["--spec-method", ""], ['method=""']),
    ],
)
def test_options_that_clash_or_make_no_sense_are_refused(arguments: list[str], parts: list[str]) -> None:
    message = refusal(*arguments)
    for part in parts:
        assert part in message


def test_a_number_that_is_none_is_refused_by_the_parser() -> None:
    result = run("draft", "--spec-tokens", "five")
    assert result.exit_code == 2
    assert "--spec-tokens" in result.output


def test_arguments_without_a_dotted_form_stay_as_they_are() -> None:
    arguments = ["serve", "model", "-sc", NGRAM, "-sc", "{", "--port", "1", "--", "-sc.method", "x"]
    assert join_dotted(arguments) == arguments


def test_dotted_forms_leave_their_neighbours_in_place() -> None:
    joined = join_dotted(["serve", "-sc.method", "ngram", "model", "--port", "1", "-sc.a=b=c", "--", "-sc.x"])
    assert joined == [
        *("serve", "model", "--port", "1"),
        *("--speculative-config", '{"method": "ngram", "a": "b=c"}'),
        *("--", "-sc.x"),
    ]


WORDS = st.sampled_from(["-sc", "-sc.method", "-sc.a.b=1", "-sc.a=2", "--speculative-config.", "--", "-1", "{}", "-x"])


@settings(max_examples=300, deadline=None)
@given(arguments=st.lists(WORDS | st.text(max_size=6), max_size=6))
def test_any_arguments_are_joined_or_refused_in_one_line(arguments: list[str]) -> None:
    try:
        joined = join_dotted(arguments)
    except ConfigError as error:
        message = str(error)
    else:
        assert join_dotted(joined) == joined
        return
    assert message.isprintable()


# forerun config


def config_refusal(*arguments: str) -> str:
    """What the command ends with; the main program makes one line and exit code 1 of it (see test_flags)."""
    result = run("config", *arguments)
    assert isinstance(result.exception, ConfigError)
    assert result.output == ""
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_check_prints_what_a_configuration_resolves_to() -> None:
    result = run("config", "--check", '{"method": "suffix"}')
    assert result.exit_code == 0
    assert json.loads(result.stdout) == SpeculativeConfig.parse({"method": "suffix"}).resolved()
    assert result.stderr.startswith("warning: num_speculative_tokens is not given")


@pytest.mark.parametrize(
    "text",
    [
        "{method: ngram}",
        '{"method":"ngram",}',
        "[]",
        '"ngram"',
        "",
        "no/such.json",
        '{"method": "eagel3"}',
        '{"method": "ngram", "num_speculative_token": 5}',
        '{"method": "ngram", "num_speculative_tokens": 0}',
    ],
)
def test_check_refuses_in_one_line_without_a_traceback(text: str) -> None:
    assert config_refusal("--check", text).startswith("speculative_config: ")


def test_check_reads_the_config_of_a_model(tmp_path: Path) -> None:
    assert run("config", "--check", NGRAM, "--model", "smollm2-135m").exit_code == 0
    assert "no such file" in config_refusal("--check", NGRAM, "--model", str(tmp_path / "none"))
    (tmp_path / "config.json").write_text('{"model_type": "llamo"}')
    assert "llamo" in config_refusal("--check", NGRAM, "--model", str(tmp_path))


@pytest.mark.parametrize(
    "arguments", [["--model", "x"], ["--json", "--markdown"], ["--check", NGRAM, "--json"]], ids=" ".join
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str]) -> None:
    assert config_refusal(*arguments)


def test_json_prints_the_schema() -> None:
    assert json.loads(run("config", "--json").stdout) == json_schema()


def test_the_docs_are_what_the_table_says() -> None:
    """Failing? `forerun config --markdown > docs/speculative-config.md`."""
    assert run("config", "--markdown").stdout == render_markdown()
    assert DOCS.read_text(encoding="utf-8") == render_markdown()


def test_the_docs_name_every_key_and_method_with_its_status() -> None:
    lines = render_markdown().splitlines()
    statuses = {name: part.status for table in (KEYS, METHODS) for name, part in table.items()}  # no name is in both
    assert len(statuses) == len(KEYS) + len(METHODS)
    for name, status in statuses.items():
        assert any(line.startswith(f"| `{name}` | **{status}**") for line in lines), name


def test_piped_it_is_plain_lines_of_tabs() -> None:
    result = run("config")
    assert result.exit_code == 0
    head, *rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert {len(row) for row in rows} == {len(head)}
    assert {(row[0], row[1]) for row in rows} == {("method", m) for m in METHODS} | {("key", k) for k in KEYS}
    assert all(row[2] in list(Status) for row in rows)
    assert "\x1b" not in result.stdout


def test_in_a_terminal_of_80_columns_no_name_is_broken() -> None:
    code = "import typer; from forerun.cli.config import config; typer.run(config)"
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": "80", "TERM": "xterm"}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = bytearray()
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert child.wait() == 0
    text = shown.decode()
    assert "\x1b" in text
    for name in (*METHODS, *KEYS):
        assert name in text
