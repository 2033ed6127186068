"""Let a model call functions until it has an answer: ``python docs/examples/tool_loop.py``.

The server is at http://127.0.0.1:8000 (``trioserve serve``), or at the URL in the first argument.
"""

import json
import sys
from typing import Any

import openai

WEATHER = {"Paris": "It rains, 12 degrees.", "Rome": "Sunny, 25 degrees."}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": list(WEATHER)}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def answer(client: openai.OpenAI, question: str, most_rounds: int = 3) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    for round in range(most_rounds):
        # A large model chooses by itself ("auto"); a small one is told when to call.
        message = (
            client.chat.completions.create(
                model="smollm2-135m",
                messages=messages,
                tools=TOOLS,
                tool_choice="required" if round == 0 else "none",
                parallel_tool_calls=False,
                max_tokens=80,
                temperature=0,
            )
            .choices[0]
            .message
        )
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            assert call.type == "function"  # for type checkers
            result = WEATHER[json.loads(call.function.arguments)["city"]]
            print(call.function.name, call.function.arguments, "->", result)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "no answer"


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    print(answer(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), "What to wear in Paris?"))
