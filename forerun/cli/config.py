"""`forerun config`: the methods and keys of `--speculative-config`, and an offline check of one. Loads no weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forerun.cli.llama_cpp import flag_rows
from forerun.errors import ConfigError
from forerun.spec.config import MAX_METHODS, SpeculativeConfig
from forerun.spec.control import STEPS_TO_RISE
from forerun.spec.keys import KEYS, METHOD_ALIASES, METHODS, NOT_METHODS, Key, Method, Status
from forerun.spec.method_rules import HEADS, NGRAM_MOD_TOKENS
from forerun.spec.roles import Roles, assign_roles
from forerun.spec.schema import json_schema
from forerun.spec.source import EXAMPLE, FLAG

if TYPE_CHECKING:
    from forerun.models.config import DecoderConfig

_STYLES = {Status.SERVED: "green", Status.NOT_YET: "yellow", Status.NEVER: "red"}
_SHORT_TYPES = {"integer": "int", "number": "float", "boolean": "bool", "string": "str", "array": "list"}


def config(
    check: Annotated[
        str | None,
        typer.Option("--check", metavar="JSON", help="Check a configuration and print what it resolves to."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="M", help="With --check: the target; its config is checked too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON schema of what is served.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/speculative-config.md.")] = False,
) -> None:
    """List the methods and keys of --speculative-config, or check one offline."""
    if (check is not None) + as_json + markdown > 1:
        raise ConfigError("give one of --check, --json and --markdown")
    if model is not None and check is None:
        raise ConfigError("--model goes with --check")
    if check is not None:
        _check(check, model)
    elif as_json:
        typer.echo(json.dumps(json_schema(), indent=2))
    elif markdown:
        typer.echo(render_markdown(), nl=False)
    elif sys.stdout.isatty():
        _print_tables(Console())
    else:
        for line in render_plain():
            typer.echo(line)


def _check(text: str, model: str | None) -> None:
    roles = Roles("", text) if model is None else assign_roles(model, text)
    resolved = SpeculativeConfig.parse(roles.source)
    notes = [*([roles.note] if roles.note else []), *(f"warning: {warning}" for warning in resolved.warnings)]
    if model is not None and (target := check_model(roles.target)) is not None:
        resolved, more = _complete(resolved, target)
        notes += more
    for note in notes:
        typer.echo(note.replace("WARNING: ", "warning: "), err=True)
    typer.echo(json.dumps(resolved.resolved(), indent=2))


def _complete(config: SpeculativeConfig, target: DecoderConfig) -> tuple[SpeculativeConfig, Sequence[str]]:
    """With what the headers of draft heads say, where all of them lie here: nothing is fetched."""
    heads = [method.model for method in config.methods if method.method in HEADS]
    if not all(head is not None and Path(head).exists() for head in heads):
        return config, ()
    from forerun.spec.heads import complete

    return complete(config, target)


def check_model(model: str) -> DecoderConfig | None:
    """Read the target's configuration, not its weights. None for a built-in model, which is known to be good and is not
    fetched.

    Raises:
        ConfigError: no such model, or one that is not served.
    """
    from forerun.models.builtin import BUILTIN_MODELS, resolve_model

    if model in BUILTIN_MODELS and not Path(model).exists():
        return None
    path = resolve_model(model, weights=False)
    from forerun.models.loading import read_config  # brings torch, which nothing else here needs

    return read_config(path)


def _type(key: Key) -> str:
    return " or ".join(_SHORT_TYPES.get(word, word) for word in key.type.split(" or "))


def _default(key: Key) -> str:
    return key.default_text or ("" if key.default is None else json.dumps(key.default).strip('"'))


def _methods(key: Key) -> str:
    return ", ".join(key.methods) if key.methods else "all"


def _remark(part: Key | Method) -> str:
    """What is not served of it, or why it is not."""
    return part.remark if isinstance(part, Key) else part.why


def _by_status() -> Iterator[tuple[Status, list[Method], list[Key]]]:
    for status in Status:
        methods = [method for method in METHODS.values() if method.status is status]
        yield status, methods, [key for key in KEYS.values() if key.status is status]


def render_plain() -> Iterator[str]:
    """One line a method and a key, fields divided by tabs: for grep, cut and awk."""
    yield "\t".join(("what", "name", "status", "type", "default", "bounds", "methods", "meaning", "remark"))
    for status, methods, keys in _by_status():
        for method in methods:
            yield "\t".join(("method", method.name, status, "", "", "", "", method.meaning, _remark(method)))
        for key in keys:
            fields = (_type(key), _default(key), key.bounds, _methods(key), key.meaning, _remark(key))
            yield "\t".join(("key", key.name, status, *fields))


def _print_tables(console: Console) -> None:
    """A table a status: names on the left, unbroken; what there is to know on the right."""
    longest = max(map(len, KEYS))
    for status, methods, keys in _by_status():
        table = Table(box=SIMPLE, expand=True, pad_edge=False)
        table.add_column(f"[bold {_STYLES[status]}]{status}[/]", width=longest, no_wrap=True)
        table.add_column(overflow="fold")
        for method in methods:
            table.add_row(f"[bold]{method.name}[/] [dim](method)[/]", _about(method, ""))
        table.add_section()
        for key in keys:
            bounds = "" if key.name == "method" else key.bounds  # its words are the rows above
            default = _default(key) and f"default {_default(key)}"
            methods_ = key.methods and f"for {_methods(key)}"
            facts = [_type(key), bounds, default, methods_] if status is not Status.NEVER else []
            table.add_row(f"[bold]{key.name}[/]", _about(key, "; ".join(str(fact) for fact in facts if fact)))
        console.print(table)
    console.print(f"Check one: forerun config --check '{EXAMPLE}'", markup=False, highlight=False, soft_wrap=True)


def _about(part: Key | Method, facts: str) -> str:
    lines = [escape(part.meaning)]
    if facts:
        lines.append(f"[dim]{escape(facts)}[/]")
    if remark := _remark(part):
        lines.append(f"[{_STYLES[Status.NOT_YET]}]{escape(remark)}[/]")
    return "\n".join(lines)


_INTRO = f"""\
# Speculative configuration

<!-- Made by `forerun config --markdown > docs/speculative-config.md` from forerun/spec/keys.py; a test compares. -->

`{FLAG} JSON` (short `-sc`) says how to draft. In Python it is `LLM(model, speculative_config={{...}})`.

```
forerun serve MODEL {FLAG} '{EXAMPLE}'
forerun serve MODEL {FLAG} @draft.json
forerun serve MODEL {FLAG}.method suffix {FLAG}.num_speculative_tokens 16
forerun serve MODEL --spec-method suffix --spec-tokens 16
forerun config --check '{EXAMPLE}'
```

- The JSON may stand in a file: `@FILE`, or a name that ends in `.json` (UTF-8, at most 1 MiB).
- `--spec-method`, `--spec-model` and `--spec-tokens` are short for `method`, `model` and `num_speculative_tokens`; one
  of them is enough to draft. They join the JSON; the same key in both is refused.
- `--speculative-config.KEY VALUE` and `-sc.KEY=VALUE` set one key. They join the JSON too.
- `--speculative-model` and `--num-speculative-tokens`, vLLM's flags of old, work with a warning that shows the JSON.
- llama.cpp's flags (`--spec-type`, `-md`, ...) are read on `serve` and `generate`, see the end of this page.
- `-` in the name of a key reads as `_`. `null` reads as not given.
- Unknown keys, keys given twice, keys of another method, wrong types (`true` or `5.0` for an int, `"5"` for a number)
  and values out of range stop the start, before weights are loaded, with one line that names key, value and range.
- What it resolves to is logged at start, and `{FLAG}` takes it back unchanged.

**served**: works. **not yet**: known, refused by name. **never**: refused by name, for the reason given.
"""

_RULES = f"""\
## How a configuration is resolved

1. `method` is missing: `model` decides. `ngram` and `[ngram]` mean that method, a dotted path means `custom_class`.
   Else files that lie here count: keys of config.json, the names of the tensors, the header of a GGUF file. Where they
   say nothing, `eagle-`, `eagle3`, `dflash` or `dspark` in the last component of the path mean that method; else it is
   a draft model. Nothing overrides a `method` that is given: a warning says where files or name suggest another one.
2. An alias becomes the method that it names, with a warning.
3. `ngram`: `num_speculative_tokens` must be given. Of `prompt_lookup_min` and `prompt_lookup_max` one that is missing
   takes the value of the other; both are 5 where both are missing. min above max is refused.
4. `suffix`: `num_speculative_tokens` is `suffix_decoding_max_tree_depth` where it is missing, with a warning. Values
   that leave no room for a draft, or make K unreachable, are taken with a warning.
5. `ngram_mod`: `num_speculative_tokens` is {NGRAM_MOD_TOKENS} where it is missing, as in llama.cpp. `ngram_mod_n_min`
   above it is refused.
6. `draft_model`: `model` and `num_speculative_tokens` must be given. `parallel_drafting` and `use_heterogeneous_vocab`
   exclude each other, and go with `draft_sample_method` `greedy` only.
7. `eagle`, `eagle3`: `model` must be given. `num_speculative_tokens` is the checkpoint's own where it is missing;
   where that has none either, the start is refused. It is read from the header, before weights are loaded, and logged.
   A checkpoint that is a head of the other method is refused. A P-EAGLE head turns `parallel_drafting` on, with a
   warning; on any other head `true` is refused. The cache of a head has the target's type.
8. `spec_tree`: K is its `num_draft_tokens`; another `num_speculative_tokens` is refused, and so are
   `parallel_drafting`, `draft_min_prob` and any `draft_sample_method` but `greedy` beside it. `num_draft_tokens` is at
   most what a tree of that depth and top_k has: top_k + depth * top_k^2.
9. `rejection_sample_method` `standard` and `block` become `match` unless a draft is probabilistic: with one-hot and
   coupled drafts `match` keeps the text, and with one-hot ones all three accept the same. With `draft_sample_method`
   `probabilistic` `standard` is taken where no rule is given, with a warning: it keeps the distribution, not the text
   of a seed. `match` is refused with it.

`suffix_decoding_max_cached_requests` is 0 where it is missing, and not 10000 as in vLLM 0.33.0: drafts copy from the
request's own tokens unless more is asked for, so that no answer's speed depends on what others wrote. With a cache, an
answer enters when it has ended by itself; between half of that many answers and all of them are remembered, within
`suffix_decoding_max_cached_bytes`. `ngram_mod` always shares, prompts too. What is shared is apart by `cache_salt`, as
prefixes are: requests of one salt (or of none) draft from each other, those of different salts never. All pools of
`ngram_mod` together take at most 8 times `ngram_mod_pool_bytes`; that of the salt that was not used for longest is
given up.

Bounds above (1024 tokens, 128 for the depth of the suffix tree, {MAX_METHODS} methods) are ours; vLLM has none.

## Speculators checkpoints

A checkpoint with `speculators_config` in its config.json names its target. As `model` of the configuration it is a
draft like any other. As the model to serve (`forerun serve CHECKPOINT`, `generate`, `LLM(CHECKPOINT)`) it changes its
role: model and tokenizer are its `verifier.name_or_path` (a path from the checkpoint's folder if one is there; else a
path, a built-in name or a hub id), and the checkpoint drafts by the method that its `speculators_model_type` means
(`eagle3`; `peagle`: `eagle3` with `parallel_drafting`; others are refused by name) with its own K. Keys of
`{FLAG}` win, but `method` and `model` must not contradict it. A line of the log says who serves and who
drafts.

## Several methods

`"method"` may be a list. In each step a request asks its members in order and takes the first draft that is not empty.

```json
{{"method": ["suffix", "draft_model"], "model": "DRAFT", "num_speculative_tokens": 4}}
{{"method": [{{"method": "suffix", "num_speculative_tokens": 16}}, {{"method": "draft_model", "model": "DRAFT"}}],
 "num_speculative_tokens": 4}}
```

- A key beside `method` goes to every member that it belongs to, and must belong to one. A member's own key wins.
- `rejection_sample_method` and `num_speculative_tokens_per_batch_size` hold for all and stand beside `method`.
- K of the whole is the largest of the members'. Two members of one method must differ.
- A message about a member begins with its place: `method[1]: ...`.

## Draft lengths by batch size

`"num_speculative_tokens_per_batch_size": [[1, 4, 5], [8, 16, 2], [32, 64, 0]]` drafts 5 tokens where 1 to 4 requests
decode, 2 where 8 to 16 do, none from 32 on.

- Ranges include both ends. The lowest begins at 1; two that overlap are refused, in whatever order they stand.
- A gap keeps the K of the range before it, and beyond the last range its K holds: the table resolves to
  `[[1, 7, 5], [8, 31, 2], [32, 64, 0]]`, which the log shows at start and `/v1/speculation` at any time.
- K above `num_speculative_tokens` is cut to it, with a warning.
- Counted are requests that decode: not those whose prompt is still being computed (vLLM counts these too).
- K falls in the step in which more requests decode. It rises once the table has allowed more in {STEPS_TO_RISE} steps
  in a row, to the least that it allowed in them: requests that come and go around an edge do not have K flap.
- K = 0: no draft is made, and no memory is taken for one.

## Per request

A body of `/v1/completions` or `/v1/chat/completions`, and `SamplingParams` in Python, may hold `speculative_config`:

```json
{{"speculative_config": {{"num_speculative_tokens": 2}}}}
{{"speculative_config": {{"method": "suffix"}}}}
{{"speculative_config": {{"method": ["suffix", "ngram"], "num_speculative_tokens": 4}}}}
{{"speculative_config": {{"method": "none"}}}}
```

- `num_speculative_tokens`: 0 to K of the server; 0 switches drafting off for this request.
- `method`: one of the methods that the server has loaded, or a list of them, which may draft for this request (in the
  server's order); `none` switches drafting off.
- Anything else is refused with HTTP 400. A server without speculation takes only what switches it off. The text never
  depends on it where the rule is `match`.
"""

_LLAMA_CPP = """\
## llama.cpp's flags

On `forerun serve` and `forerun generate` they are read as JSON that says the same, and one line of the log shows it.
Types are asked in llama.cpp's order, whatever their order in `--spec-type`. Defaults are llama.cpp's too: 3 tokens for
draft models and heads, n-grams of 12 tokens and drafts of 48 for `ngram-simple`, 24, 48 and 64 for `ngram-mod`. A flag
of a type that does not draft has no effect, which is said; what is not served is refused by name. They do not go
together with `--speculative-config` and its shorthands.
"""


def render_markdown() -> str:
    """The text of docs/speculative-config.md."""
    parts = [_INTRO, "## Methods\n", _method_table(), "## Keys\n", _key_table()]
    parts += ["## Words that keys take\n", _choice_table(), _RULES, "## Names of methods that are taken or explained\n"]
    parts += [_alias_table(), _LLAMA_CPP, _markdown_table(("Flag", "Here"), flag_rows())]
    return "\n".join(parts)


def _markdown_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _method_table() -> str:
    return _markdown_table(
        ("Method", "Status", "Weights", "Meaning", "Why not"),
        (
            (f"`{m.name}`", f"**{m.status}**", m.weights, m.meaning, _remark(m))
            for _, methods, _ in _by_status()
            for m in methods
        ),
    )


def _key_table() -> str:
    return _markdown_table(
        ("Key", "Status", "Type", "Default", "Bounds", "Methods", "Meaning", "What is not served, or why"),
        (
            (
                f"`{key.name}`",
                f"**{key.status}**" + (", in part" if key.remark and key.status is Status.SERVED else ""),
                _type(key),
                _default(key),
                "a method" if key.name == "method" else key.bounds,
                _methods(key) if key.status is not Status.NEVER else "",
                key.meaning,
                _remark(key),
            )
            for _, _, keys in _by_status()
            for key in keys
        ),
    )


def _choice_table() -> str:
    return _markdown_table(
        ("Key", "Word", "Status", "Meaning"),
        (
            (f"`{key.name}`", f"`{choice.value}`", f"**{choice.status}**", choice.meaning)
            for key in KEYS.values()
            for choice in key.choices
            if key.name != "method"
        ),
    )


def _alias_table() -> str:
    taken = {Status.SERVED: "with a warning", Status.NOT_YET: "not served yet", Status.NEVER: "not served"}
    aliases = ((f"`{alias}`", f"`{name}`, {taken[METHODS[name].status]}") for alias, name in METHOD_ALIASES.items())
    refused = ((f"`{word}`", f"refused: {instead}") for word, instead in NOT_METHODS.items())
    return _markdown_table(("Name", "Here"), (*aliases, *refused))
