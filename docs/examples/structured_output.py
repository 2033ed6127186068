"""An answer as an object of a class of yours: ``python docs/examples/structured_output.py``."""

import json
from typing import Annotated, Literal

import msgspec
import trio

import trioserve

Name = Annotated[str, msgspec.Meta(max_length=20)]


class Person(msgspec.Struct, forbid_unknown_fields=True):
    """A person, as the answer describes them."""

    name: Name
    age: Annotated[int, msgspec.Meta(ge=0, le=120)]
    mood: Literal["happy", "sad", "angry"]
    friends: Annotated[list[Name], msgspec.Meta(max_length=3)]


async def extract(engine: trioserve.Engine, text: str) -> Person:
    """Read a person out of a text. Tokens that don't fit the class are masked."""
    question = f"Tell me of the person in this text as JSON.\n\n{text}"
    completion = await engine.complete(
        [{"role": "user", "content": question}],
        grammar=trioserve.Grammar("json_schema", json.dumps(msgspec.json.schema(Person))),
        temperature=0,
        max_tokens=200,
    )
    # An answer cut off by its length would be incomplete JSON, and an error here.
    return msgspec.json.decode(completion.text, type=Person)


async def main() -> None:
    async with trioserve.open_engine("smollm2-135m") as engine:
        text = "Ada is 36. She laughs all day with her friends Charles and Mary."
        person = await extract(engine, text)
        print(person)
        assert person.mood in ("happy", "sad", "angry")


if __name__ == "__main__":
    trio.run(main)
