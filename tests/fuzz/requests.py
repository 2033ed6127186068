"""Bodies of HTTP requests: whatever they are, they are served or refused, never a surprise."""

from __future__ import annotations

import json
from typing import Any

import trio
from hypothesis import strategies as st

from tests.fuzz.target import Target
from tests.fuzz.values import JSON, NUMBERS
from tests.support.http_stub import StubEngine, StubTokenizer, client_of
from tests.support.tiny_models import CHAT_TEMPLATE
from trioserve.http.api.routes import ROUTES
from trioserve.requests.prompts import TextPrompt

__all__ = ["TARGETS"]

_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SEEDS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        _CHAT,
        {**_CHAT, "tools": [_TOOL], "tool_choice": "auto", "logprobs": True, "top_logprobs": 2},
        {**_CHAT, "stop": ["a"], "stop_regex": "b+", "logit_bias": {"5": 1}, "n": 2, "seed": 7},
        {**_CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "user": "y"},
    ],
    "/v1/completions": [
        {"prompt": "hi", "max_tokens": 2, "echo": True, "logprobs": 1, "temperature": 0.5},
        {"prompt": [1, 2], "min_p": 0.1, "stream_options": None, "bad_words": ["x"]},
        {"prompt": [[1], [2]], "best_of": 2, "n": 2, "truncate_prompt_tokens": 1},
    ],
    "/generate": [
        {"text": "hi", "sampling_params": {"max_new_tokens": 2, "temperature": 0}},
        {"input_ids": [[1], [2]], "sampling_params": [{}, {}], "return_logprob": [True, False]},
    ],
    "/v1/messages": [
        {**_CHAT, "system": "x", "stop_sequences": ["a"], "thinking": {"type": "adaptive"}},
        {**_CHAT, "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}},
        {
            "max_tokens": 2,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]},
            ],
        },
    ],
    "/v1/responses": [
        {"input": "hi", "max_output_tokens": 2, "instructions": "x", "temperature": 0},
        {"input": [{"role": "user", "content": "x"}], "store": False, "previous_response_id": "y"},
        {
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": ""}],
                },
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        },
    ],
    "/v1/messages/count_tokens": [{"messages": _CHAT["messages"], "system": [], "tools": []}],
    "/api/chat": [
        {
            "messages": _CHAT["messages"],
            "tools": [_TOOL],
            "format": "json",
            "options": {"num_predict": 2, "seed": -1, "stop": ["a"], "num_ctx": 4096},
        },
        {
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
                {"role": "tool", "tool_name": "f", "content": "y"},
            ],
            "stream": False,
            "think": False,
            "options": {"num_predict": 2},
        },
    ],
    "/api/generate": [
        {"prompt": "hi", "system": "x", "options": {"num_predict": 2}, "logprobs": True},
        {"prompt": "hi", "raw": True, "format": {}, "keep_alive": 0},
        {},
    ],
    "/tokenize": [{"prompt": "hi"}, {"messages": _CHAT["messages"], "add_generation_prompt": True}],
    "/detokenize": [{"tokens": [1, 2]}],
}
"""For every path with a body, some that are served."""

_PATHS = list(SEEDS)
_FIELDS = {
    path: sorted({*next(r.request for r in ROUTES if r.rule == path).__struct_fields__})  # type: ignore[union-attr]
    for path in _PATHS
}
_ALLOWED = {200, 400, 404, 413}


class _Tokenizer(StubTokenizer):
    """One that can encode, for the routes that do without the engine's task."""

    max_characters = 1 << 19

    def prompt_ids(self, prompt: Any, **options: Any) -> list[int]:
        if isinstance(prompt, TextPrompt):
            return self.encode(prompt.text)
        assert self.chat_template is not None
        return self.encode(self.chat_template.render(prompt))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]


def _send(path: str, body: bytes) -> None:
    async def send() -> None:
        stub = StubEngine(tokenizer=_Tokenizer(CHAT_TEMPLATE))
        headers = {"Content-Type": "application/json"}
        with trio.fail_after(20):
            response = await client_of(stub).post(path, data=body, headers=headers)
            text = await response.get_data(True)
        assert response.status_code in _ALLOWED, (response.status_code, text)
        assert "Traceback" not in text

    trio.run(send)


def _check_bytes(data: bytes) -> None:
    _send(_PATHS[data[0] % len(_PATHS)] if data else _PATHS[0], data[1:])


def _byte_seeds() -> list[bytes]:
    return [
        bytes([number]) + json.dumps(body).encode()
        for number, path in enumerate(_PATHS)
        for body in SEEDS[path]
    ]


_HUGE = st.sampled_from(
    (
        *(b"[" * 100_000, b'{"a":' * 100_000, b"9" * 100_000, b"-" + b"9" * 400, b"1e999999"),
        *(b'"\\ud800"', b'"\\u0000"', b'"' + b"a" * 100_000 + b'"', b"NaN", b"Infinity", b"0" * 9),
        *(b'{"' + b"k" * 50_000 + b'": 1}', b'"\xff"', b'"\xed\xa0\x80"', b"\xef\xbb\xbf1", b""),
    )
)


@st.composite
def _bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    path = draw(st.sampled_from(_PATHS))
    body = dict(draw(st.sampled_from(SEEDS[path])))
    changes = draw(
        st.dictionaries(st.sampled_from(_FIELDS[path]), NUMBERS | JSON | _HUGE, max_size=3)
    )
    parts = {name: value for name, value in body.items() if name not in changes}
    texts = [
        json.dumps(name).encode()
        + b":"
        + (value if isinstance(value, bytes) else json.dumps(value).encode())
        for name, value in {**parts, **changes}.items()
    ]
    return path, b"{" + b",".join(texts) + b"}"


def _check_body(drawn: tuple[str, bytes]) -> None:
    _send(*drawn)


TARGETS = (
    Target("request_bytes", _check_bytes, seeds=_byte_seeds),
    Target("request_fields", _check_body, _bodies()),
)
