"""Usual chat templates work in the sandbox, and ways out of it don't."""

from __future__ import annotations

import pytest

from trioserve.protocol.errors import InvalidRequest, ModelLoadError
from trioserve.requests.prompts import ChatPrompt
from trioserve.text.chat_template import ChatTemplate

PROMPT = ChatPrompt(messages=({"role": "user", "content": "x"},))


def rendered(source: str, **arguments: object) -> str:
    return ChatTemplate(source).render(
        ChatPrompt(messages=PROMPT.messages, template_arguments=arguments)
    )


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


def test_what_cant_be_compiled_is_the_models_error() -> None:
    with pytest.raises(ModelLoadError, match="chat template"):
        ChatTemplate("{{ " + "(" * 5000 + ")" * 5000 + " }}")
    with pytest.raises(ModelLoadError, match="chat template"):
        ChatTemplate("{% if a %}" * 200 + "{% endif %}" * 200)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a'.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ dict(a=1).update(b=2) }}",
        "{% include '/etc/passwd' %}",
        "{{ lipsum(3) }}",
    ],
)
def test_nothing_leads_out_of_the_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest):
        rendered(source)
