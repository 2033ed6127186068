"""What a chat template may take is bounded, and what usual ones do still works."""

from __future__ import annotations

import tracemalloc

import pytest

from fuzz.templates import HOSTILE
from trioserve.errors import InvalidRequest, ModelLoadError
from trioserve.request import ChatPrompt
from trioserve.text import template_sandbox
from trioserve.text.chat_template import ChatTemplate

PROMPT = ChatPrompt(messages=({"role": "user", "content": "x"},))


def rendered(source: str, **arguments: object) -> str:
    return ChatTemplate(source).render(
        ChatPrompt(messages=PROMPT.messages, template_arguments=arguments)
    )


@pytest.fixture
def short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.1)


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_template_is_an_error_of_the_request_or_prints_little(
    source: str, short_time: None
) -> None:
    tracemalloc.start()
    try:
        assert len(rendered(source)) < 1 << 20
    except (InvalidRequest, ModelLoadError):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 256 << 20


@pytest.mark.parametrize(
    "source",
    [
        "{% set x %}{% for a in range(9999) %}{{ 'a' * 99999 }}{% endfor %}{% endset %}",
        f"{{% set x %}}{{% for a in range(9999) %}}{'a' * 9999}{{% endfor %}}{{% endset %}}",
        f"{{% macro f() %}}{{% for a in range(9999) %}}{'a' * 9999}{{% endfor %}}{{% endmacro %}}"
        "{{ f() | length }}",
        "{% filter upper %}{% for a in range(9999) %}{{ a }}{{ 'a' * 9999 }}{% endfor %}"
        "{% endfilter %}",
    ],
)
def test_what_is_printed_into_a_block_is_bounded_however_fast_the_machine(source: str) -> None:
    """Time alone would let a fast machine fill gigabytes."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="builds a text of over"):
            rendered(source)
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{% for a in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
    ],
)
def test_time_is_bounded(source: str, short_time: None) -> None:
    with pytest.raises(InvalidRequest, match=r"takes more than 0\.1 s"):
        rendered(source)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'ab' * 3 ~ 1 ~ none }}", "ababab1None"),
        ("{{ [1] * 2 + [3] }}", "[1, 1, 3]"),
        ("{{ 3 * 'ab' }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ 2.5 * 2 }}", "ababab102435.0"),
        ("{{ '%s-%5d' % ('a', 7) }}{{ '{:>4}'.format(1) }}", "a-    7   1"),
        ("{{ 'a,b'.split(',') | join(' ') }}{{ '-'.join(['c', 'd']) }}", "a bc-d"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ 'aba'.replace('a', 'cc') | replace('b', '') | upper }}", "CCCC"),
        ("{{ [3, 1] | sort | map('string') | list | tojson }}", '["1", "3"]'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ 'x'.center(5) }}{{ 'x' | center(3) }}|", "  x   x |"),
        ("{{ [1, 2, 3] | batch(2, 0) | list }}", "[[1, 2], [3, 0]]"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') }}", "<a>"),
        ("{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}b{% endcall %}", "<b>"),
        (
            "{% for a in [[1], [2]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}",
            "12",
        ),
        ("{% for a in 'abc' if a != 'b' %}{{ loop.index }}{{ a }}{% else %}-{% endfor %}", "1a2c"),
        ("{% for a in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% filter upper %}a{% endfilter %}{{ 'b' | default('c') }}{{ u | default('c') }}", "Abc"),
    ],
)
def test_what_templates_do_still_works(source: str, text: str) -> None:
    assert rendered(source) == text


def test_nothing_is_computed_before_a_request_comes() -> None:
    ChatTemplate("{{ 'a' | center(10**9) }}{{ 'a' * 10**10 }}{{ ('a' ~ 'b') * 10**10 }}")


def test_what_cant_be_compiled_is_the_models_error() -> None:
    with pytest.raises(ModelLoadError, match="chat template"):
        ChatTemplate("{{ " + "(" * 5000 + ")" * 5000 + " }}")
    with pytest.raises(ModelLoadError, match="chat template"):
        ChatTemplate("{% if a %}" * 200 + "{% endif %}" * 200)


def test_a_long_conversation_is_no_hostile_template() -> None:
    messages = tuple({"role": "user", "content": "x" * 1000} for _ in range(5000))
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role + ': ' + m.content ~ '\n' }}{% endfor %}"
    )
    assert len(template.render(ChatPrompt(messages=messages))) == 5000 * 1007
