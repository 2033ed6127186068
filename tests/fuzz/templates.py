"""Chat templates, which come with models, over conversations, which come with clients."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.limits import address_space_bounded
from tests.fuzz.target import Target
from tests.fuzz.values import JSON, TEXTS
from tests.support.tiny_models import CHAT_TEMPLATE
from trioserve.protocol.errors import InvalidRequest, ModelLoadError
from trioserve.requests.prompts import ChatPrompt
from trioserve.text.chat_template import ChatTemplate
from trioserve.text.template_bounds import BeyondBounds

__all__ = ["HOSTILE", "TARGETS"]

MEMORY = 256 << 20
MAX_SECONDS = 1.0
"""Processor time for rendering one template, in seconds."""

_TOKENS = st.sampled_from(
    (
        *(
            "{{",
            "}}",
            "{%",
            "%}",
            "{#",
            "#}",
            " ",
            "\n",
            "'",
            "a",
            "x",
            "'abc'",
            "10**9",
            "9**9**9",
        ),
        *("messages", "message", "content", "['content']", ".role", "tools", "bos_token", "|"),
        *("for ", "in ", "endfor", "if ", "else", "endif", "set ", "=", "macro f(x)", "endmacro"),
        *("f(x)", "range(", "100000", ")", "(", "[", "]", "*", "+", "~", "%", "**", "-1", ","),
        *("tojson", "join", "replace", "center(", "indent", "format", "map(", "'upper'", "sort"),
        *("namespace(x=", "loop", "loop.index", "recursive", "include ", "import ", "extends "),
        *("__class__", "__init__", "__globals__", "__subclasses__()", "cycler", "lipsum", "dict("),
        *("raise_exception('x')", "strftime_now('%Y')", "generation", "endgeneration", "break"),
        *("{% for m in messages %}", "{{ m.content }}", "{% endfor %}", "self", "caller()", "call"),
    )
)
HOSTILE = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 10**10**10 }}",
    "{{ [0] * 10**10 }}",
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a' | center(10**9) }}",
    "{{ 'a' | indent(10**9, true) }}",
    "{{ lipsum(10**6) }}",
    "{{ ('a' * 60000).replace('a', 'b' * 60000) }}",
    "{{ [1] | batch(10**9, 0) | list }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ ('a' * 50000) | map('center', 50000) | join }}",
    "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% for a in [[[]]] recursive %}{{ loop([a, a]) }}{{ loop([a]) }}{% endfor %}",
    "{{ 'a'.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''.join(['a' * 60000] * 60000) }}",
    "{{ (['a' * 60000] * 60000) | join }}",
    "{{ 'a'.ljust(9**9) }}{{ 'a'.zfill(9**9) }}{{ '\t'.expandtabs(9**9) }}",
    "{{ 1.0 | round(10**9) }}{{ (1 | float) ** 10**9 }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ '%s' | format('a' * 10**9) }}",
    "{% set x %}{% for a in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endset %}",
    "{{ range(10**9) | list }}",
    "{{ dict(a=1).update(b=2) }}{{ messages.append(1) }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
    "{% extends '/etc/passwd' %}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{% set n = (messages | string * 99).replace(' ', '1') | int(0, 32) %}{{ '%d' % n }}",
    "{{ ('9' * 10**7) | int(0, 32) }}",
    "{{ '{0:{1}}'.format(1, 10**9) }}",
    "{{ [['a'] * 60000] * 60000 | sum(start=[]) }}",
    "{{ ('a' * 60000).translate({97: 'b' * 60000}) }}",
    "{{ ('a b ' * 10**7) | wordwrap(1, true, 'x' * 60000) }}",
    "{{ ('a.b ' * 10**6) | urlize | length }}",
    "{{ range(99999) | map('string') | sort | join }}",
    "{% for i in range(999) %}{{ ('ab' * 10**6) | unique | list | sort }}{% endfor %}",
    "{% set n = namespace(a=1) %}{% for i in range(60) %}{% set n = namespace(a=n, b=n) %}"
    "{% endfor %}{{ n }}",
    "{% set n0 = namespace() %}"
    + "".join(f"{{% set n{i + 1} = namespace(a=n{i}, b=n{i}) %}}" for i in range(60))
    + "{{ n60 }}",
    "{% set l0 = [1] %}"
    + "".join(f"{{% set l{i + 1} = [l{i}, l{i}] %}}" for i in range(60))
    + "{{ l60 }}{{ l60 == l60 }}",
    "{% for a in range(99999) if false %}{% endfor %}" * 60,
    "{% for a in messages | string * 60000 if a == 'b' %}{% endfor %}",
    "{% set x %}x{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60 + "{{ x }}",
    "{{ messages[0].content.split('') }}{{ ('x' * 99999).strip('y' * 99999) }}",
)
"""Templates that want to run, read, or take all there is."""
_HOSTILE = st.sampled_from(HOSTILE)
_SOURCES = st.one_of(
    _HOSTILE,
    st.lists(_TOKENS, max_size=20).map("".join),
    st.tuples(_HOSTILE, _HOSTILE).map("".join),
    st.just(CHAT_TEMPLATE),
)
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": TEXTS},
        optional={
            "content": TEXTS | JSON,
            "tool_calls": JSON,
            "reasoning": TEXTS,
            "x": JSON,
        },
    ),
    max_size=3,
)


def _check_template(drawn: tuple[str, list[dict[str, Any]], dict[str, Any]]) -> None:
    source, messages, arguments = drawn
    with address_space_bounded(MEMORY):
        try:
            template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
        except ModelLoadError:
            return
        started = time.process_time()
        try:
            prompt = ChatPrompt(messages=tuple(messages), template_arguments=arguments)
            assert isinstance(template.render_within_bounds(prompt), str)
        except (InvalidRequest, BeyondBounds):
            pass
    assert time.process_time() - started < MAX_SECONDS


TARGETS = (
    Target(
        "chat_template",
        _check_template,
        st.tuples(
            _SOURCES,
            _MESSAGES,
            st.dictionaries(st.sampled_from(("x", "a", "tools", "documents")), JSON, max_size=2),
        ),
    ),
)
