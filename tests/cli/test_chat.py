"""Chat templates, against transformers' own rendering."""

from __future__ import annotations

import copy
import datetime
import json
from typing import Any

import pytest
import tokenizers
import transformers

from tests.support import text_tokenizers
from trioserve.model_files import locate, open_model
from trioserve.protocol.errors import InvalidRequest, ModelLoadError
from trioserve.requests.prompts import ChatPrompt
from trioserve.text.chat_template import ChatTemplate

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" %}
        {%- set ns.last_query_index = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- continue %}{%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- message.content.split('</think>')[-1].lstrip('\\n') }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {{- '<tool_call>' ~ (tool_call.function | tojson) ~ '</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {{ message['content'] + eos_token }}
    {% endif %}
{% endfor %}
"""

HERMES_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- "\\n" + (tool | tojson) }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA3_TOOLS = """\
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}
    {{- "<|start_header_id|>user<|end_header_id|>\\n\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}
    {{- "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL_TOOLS = """\
{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.index0 == 0 %}
            {{- "[AVAILABLE_TOOLS] " + (tools | map(attribute="function") | list | tojson) }}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should have a length of 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string }}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

TEXT_TOOLS = """\
{%- for message in messages %}
    {%- if message['tool_calls'] %}
        {%- for tool in message['tool_calls'] %}
            {{- '<call>' + tool['function']['name'] + '\\n' }}
            {{- tool['function']['arguments'] + '</call>' }}
        {%- endfor %}
    {%- else %}{{- '<' + message.role + '>' + message['content'] }}{%- endif %}
{%- endfor %}
"""

PARTS = """\
{% for message in messages %}
{{ '<' + message['role'] + '>' }}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}
{%- for part in message['content'] %}[{{ part['text'] }}]{% endfor %}
{%- endif %}
{% endfor %}
"""

SYSTEM = {"role": "system", "content": " You are brief. "}
USER = {"role": "user", "content": "Say <hi> to “Zoë” & 你好\n"}
ASSISTANT = {"role": "assistant", "content": "hi "}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"city": "Köln"}}}],
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "ä <b>", "parameters": {}}}]


@pytest.fixture(scope="session")
def smollm2_template() -> str:
    template = open_model(locate("smollm2-135m")).chat_template
    assert template is not None
    return template


def rendered_by_transformers(source: str, prompt: ChatPrompt) -> str:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(text_tokenizers.byte_level().to_str()),
        bos_token="<s>",
        eos_token="</s>",
    )
    return str(
        tokenizer.apply_chat_template(
            list(prompt.messages),
            chat_template=source,
            tokenize=False,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            **prompt.template_arguments,
        )
    )


def ours(source: str, prompt: ChatPrompt) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", unk_token=None).render(prompt)


def chat_of(*messages: dict[str, Any], **fields: Any) -> ChatPrompt:
    return ChatPrompt(messages=messages, **fields)


@pytest.mark.parametrize(
    "source",
    ["smollm2", LLAMA3, QWEN, MISTRAL, PARTS],
    ids=["smollm2", "llama3", "qwen", "mistral", "parts"],
)
@pytest.mark.parametrize(
    "prompt",
    [
        chat_of(USER),
        chat_of(USER, add_generation_prompt=False),
        chat_of(USER, ASSISTANT, USER),
        chat_of(SYSTEM, USER, ASSISTANT, USER),
        chat_of(USER, CALL, template_arguments={"tools": TOOLS, "enable_thinking": False}),
        chat_of(USER, ASSISTANT, add_generation_prompt=False, continue_final_message=True),
        chat_of(SYSTEM, USER, template_arguments={"date_string": "1 Jan 2030"}),
    ],
    ids=["user", "no-prompt", "turns", "system", "tools", "continue", "arguments"],
)
def test_renders_as_transformers_does(
    source: str, prompt: ChatPrompt, smollm2_template: str
) -> None:
    if source == "smollm2":
        source = smollm2_template
    if source is MISTRAL and prompt.messages[0] is SYSTEM:
        with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
            ours(source, prompt)
        assert caught.value.param == "messages"
        return
    assert ours(source, prompt) == rendered_by_transformers(source, prompt)


def calling(arguments: Any, **fields: Any) -> dict[str, Any]:
    call = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "call00001", "type": "function", "function": call}],
        **fields,
    }


RESULT = {"role": "tool", "tool_call_id": "call00001", "content": '{"celsius": 5}'}
CITY = {"city": "Köln", "days": [1, 2], "exact": True}


@pytest.mark.parametrize(
    "source",
    [HERMES_TOOLS, LLAMA3_TOOLS, MISTRAL_TOOLS, QWEN],
    ids=["hermes", "llama3", "mistral", "qwen"],
)
@pytest.mark.parametrize(
    ("sent", "arguments"),
    [
        (json.dumps(CITY), CITY),
        (json.dumps(CITY, ensure_ascii=False, indent=1), CITY),
        ("{}", {}),
        ("", {}),
        (None, {}),
        (CITY, CITY),
        ("no JSON: {", "no JSON: {"),
        ("[1, 2]", "[1, 2]"),
        ("[" * 100_000, "[" * 100_000),
    ],
    ids=["json", "indented", "none", "empty", "null", "object", "text", "list", "deep"],
)
def test_tool_calls_come_as_text_and_are_printed_as_transformers_prints_objects(
    source: str, sent: Any, arguments: Any
) -> None:
    call = calling(sent, content=None)
    before = copy.deepcopy(call)
    rendered = ours(source, chat_of(USER, call, RESULT, template_arguments={"tools": TOOLS}))
    told = chat_of(
        USER, calling(arguments, content=""), RESULT, template_arguments={"tools": TOOLS}
    )
    assert rendered == rendered_by_transformers(source, told)
    assert "weather" in rendered
    assert call == before


def test_a_template_that_wants_arguments_as_text_gets_text() -> None:
    for arguments in (json.dumps(CITY, ensure_ascii=False), CITY):
        assert ours(TEXT_TOOLS, chat_of(USER, calling(arguments))) == (
            f"<user>{USER['content']}<call>weather\n{json.dumps(CITY, ensure_ascii=False)}</call>"
        )
    loops = "{% for m in messages %}{% for c in m.tool_calls %}"
    printing = loops + "{{ c.function.arguments }}{% endfor %}{% endfor %}"
    assert ours(printing, chat_of(calling('{"a": 1}'))) == '{"a": 1}'
    one_by_one = loops + (
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    assert ours(one_by_one, chat_of(calling('{"a": 1, "b": "x"}'))) == "a=1;b=x;"


@pytest.mark.parametrize("empty", [None, []])
def test_tool_calls_that_are_empty_are_none(empty: Any) -> None:
    message = {**ASSISTANT, "tool_calls": empty}
    assert ours(LLAMA3_TOOLS, chat_of(USER, message)) == ours(
        LLAMA3_TOOLS, chat_of(USER, ASSISTANT)
    )


@pytest.mark.parametrize("calls", ["x", {"a": 1}, ["x"], [{"function": "x"}]])
def test_malformed_tool_calls_are_the_request_s_error(calls: Any) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    with pytest.raises(InvalidRequest) as caught:
        ours(LLAMA3_TOOLS, chat_of(USER, message))
    assert caught.value.param == "messages"


def test_which_variables_a_template_looks_at() -> None:
    names = {"bos_token", "custom_tools", "tools", "messages", "add_generation_prompt"}
    # A name that is set in one branch only counts as well.
    assert ChatTemplate(LLAMA3_TOOLS).variables == names | {"tool_call"}
    assert ChatTemplate(QWEN).variables == {"messages", "add_generation_prompt", "enable_thinking"}
    source = (
        "{% set x = 1 %}{% for m in messages %}{{ x }}{{ m.tools }}{{ 'documents' }}{% endfor %}"
    )
    assert ChatTemplate(source).variables == {"messages"}
    assert ChatTemplate(source).source == source


def test_the_default_system_prompt_of_smollm2(smollm2_template: str) -> None:
    assert ours(smollm2_template, chat_of({"role": "user", "content": "Hi"})) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_parts_of_a_content_are_joined_unless_the_template_looks_at_them() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message = {"role": "user", "content": parts}
    assert ours("{{ messages[0].content }}", chat_of(message)) == "one\ntwo"
    assert ours(PARTS, chat_of(message)) == rendered_by_transformers(PARTS, chat_of(message))
    assert "[one][two]" in ours(PARTS, chat_of(message))
    continued = chat_of(message, add_generation_prompt=False, continue_final_message=True)
    assert ours(PARTS, continued) == rendered_by_transformers(PARTS, continued)
    assert ours(PARTS, continued).endswith("[one][two")


@pytest.mark.parametrize(
    ("source", "takes_parts"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for part in messages[0]['content'] %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}", True),
        ("{% set c = messages[0].content %}{% for p in c | list %}{% endfor %}", True),
        ("{% set c = messages[0].role %}{% for p in c %}{% endfor %}", False),
        ("{% for t in tools %}{{ t.content }}{% endfor %}", False),
    ],
)
def test_whether_a_template_looks_at_parts(source: str, takes_parts: bool) -> None:
    assert ChatTemplate(source).takes_parts is takes_parts


def test_a_content_that_is_null_or_missing_is_empty() -> None:
    source = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    prompt = chat_of({"role": "assistant", "content": None}, {"role": "user"})
    assert ours(source, prompt) == "<><>"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("hello", "an object with a role"),
        ({"content": "no role"}, "an object with a role"),
        ({"role": 5, "content": "x"}, "an object with a role"),
        ({"role": "user", "content": 5}, "a string or a list of text parts"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "text only"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "a text that is a string"),
        ({"role": "user", "content": [None]}, "text only"),
    ],
)
def test_malformed_messages_are_refused(message: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        ours("{{ messages }}", chat_of(message))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('no tools here') }}", "print the messages: no tools here"),
        ("{{ messages[0].content.missing.attribute }}", "no attribute 'missing'"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "not safely callable|unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
    ],
)
def test_a_failing_template_is_the_request_s_error(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        ours(source, chat_of(USER))
    assert caught.value.param == "messages"


def test_messages_are_required_and_arguments_can_not_replace_them() -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        ours("x", chat_of())
    prompt = chat_of(USER, template_arguments={"messages": [], "add_generation_prompt": 5})
    source = "{{ messages | length }}{{ add_generation_prompt }}"
    assert ours(source, prompt) == "1True"


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (chat_of(ASSISTANT, continue_final_message=True), "add_generation_prompt"),
        (
            chat_of(
                {"role": "user", "content": []},
                add_generation_prompt=False,
                continue_final_message=True,
            ),
            "no text",
        ),
    ],
)
def test_a_final_message_that_can_not_be_continued(prompt: ChatPrompt, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        ours(PARTS, prompt)


def test_a_template_that_drops_the_final_message_can_not_continue_it() -> None:
    prompt = chat_of(ASSISTANT, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="doesn't print the final message"):
        ours("{{ messages[0].role }}", prompt)


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(ModelLoadError, match="line 2"):
        ChatTemplate("{% for m in messages %}\n{% endif %}")


def test_functions_that_templates_may_call() -> None:
    today = datetime.datetime.now().strftime("%Y")
    assert ours("{{ strftime_now('%Y') }}", chat_of(USER)) == today
    source = "{{ {'b': 'ü<', 'a': 1} | tojson(sort_keys=true) }}"
    assert ours(source, chat_of(USER)) == '{"a": 1, "b": "ü<"}'
