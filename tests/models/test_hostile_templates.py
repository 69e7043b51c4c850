"""Chat templates are programs that come with a model: they are kept in a sandbox, and in time."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import RequestError
from forerun.models import tokenizer as module
from forerun.models.confine import DeadlineError, deadline, memory_limit
from forerun.models.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).parents[2]

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(str(tiny_model))


def render(tokenizer: Tokenizer, template: str) -> str:
    tokenizer.hf.chat_template = template
    return tokenizer.decode(tokenizer.apply_chat_template(MESSAGES), skip_special_tokens=False)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ 1 / 0 }}",
        "{{ messages[0]['content' }}",
        "{{ raise_exception('no\nroles') }}",
        "{{ none.missing.more }}",
    ],
)
def test_what_a_template_must_not_do_is_a_refusal_in_one_line(tokenizer: Tokenizer, template: str) -> None:
    with pytest.raises(RequestError) as refused:
        render(tokenizer, template)
    assert refused.value.param == "messages"
    assert "\n" not in str(refused.value)
    assert MESSAGES == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


def test_a_template_that_does_not_end_is_ended(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TEMPLATE_S", 0.2)
    loops = "".join("{% for " + name + " in range(99999) %}" for name in "abc") + "{% endfor %}" * 3
    tree = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    for template in (loops, tree):
        began = time.monotonic()
        with pytest.raises(RequestError, match=r"took longer than 0\.2 s"):
            render(tokenizer, template)
        assert time.monotonic() - began < 10
    assert "hello" in render(tokenizer, "{{ messages[0].content }}")


BOMBS = [
    "{{ 'a' * 10 ** 10 }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ 'a'.rjust(10 ** 10) }}",
    "{{ [0] * 10 ** 9 }}",
    "{{ range(99999) | join('a' * 10 ** 6) }}",
    "{% set ns = namespace(x='a' * 1000) %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='aa') %}{% for i in range(9) %}{% set ns.x = ns.x | replace('a', 'a' * 99) %}{% endfor %}",
]


@pytest.mark.parametrize("template", BOMBS)
def test_a_template_may_take_so_much_memory(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(tokenizer, "max_template_bytes", 2**28)
    limit, peak = resource.getrlimit(resource.RLIMIT_AS), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError, match=r"took more memory than it may|10 characters|refused"):
        render(tokenizer, template)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 400_000  # kB
    assert resource.getrlimit(resource.RLIMIT_AS) == limit
    assert "hello" in render(tokenizer, "{{ messages[0].content }}")


def test_a_process_that_is_started_meanwhile_has_no_such_limit() -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)
    with memory_limit.at(2**30), memory_limit.at(2**20):
        inside = resource.getrlimit(resource.RLIMIT_AS)
        assert inside != limit
        with memory_limit.lifted():
            assert resource.getrlimit(resource.RLIMIT_AS) == limit
        assert resource.getrlimit(resource.RLIMIT_AS) == inside
    assert resource.getrlimit(resource.RLIMIT_AS) == limit


def test_a_text_that_is_too_long_is_not_tokenised(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TEMPLATE_TEXT", 1000)
    with pytest.raises(RequestError, match="made 5000 characters, at most 1000"):
        render(tokenizer, "{{ 'hello' * 1000 }}")


def test_the_deadline_leaves_nothing_behind() -> None:
    for _ in range(200):  # it falls due while the block is being left
        with suppress(DeadlineError), deadline(0.0005):
            time.sleep(0.0004)
        sum(range(1000))


WORDS = """
{{ }} {% %} {%- -%} {# #} for in if else endif endfor set macro endmacro messages message role content range(3)
loop.index0 | + ~ * ( ) [ ] { } . , : 'a' "b" 0 1 -1 true none upper trim tojson join namespace() ns.x = == is not
defined and or add_generation_prompt raise_exception('x') strftime_now('%Y')
"""
PIECES = st.sampled_from(WORDS.split())


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, max_size=25).map(" ".join))
def test_any_template_is_rendered_or_refused(tokenizer: Tokenizer, template: str) -> None:
    with suppress(RequestError):
        render(tokenizer, template)


TRACED_AFTER = """
import sys
from contextlib import suppress
from forerun.models.confine import DeadlineError, deadline

for seconds in (5.0, 0.0005):
    with suppress(DeadlineError), deadline(seconds):
        for _ in range(2000):
            pass

def trace(frame, event, arg):
    return trace

sys.settrace(trace)
(lambda: [i for i in range(10)])()
"""


def test_a_deadline_leaves_nothing_behind_in_the_interpreter() -> None:
    """An asynchronous exception that is taken back keeps CPython 3.11 busy for good, and hangs what is traced."""
    subprocess.run([sys.executable, "-c", TRACED_AFTER], cwd=ROOT, timeout=60, check=True)
