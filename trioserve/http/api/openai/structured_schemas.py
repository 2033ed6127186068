"""Classes of the fields that give the form of an output, as OpenAI and vLLM have them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from trioserve.http.api.schema.field_bounds import Text
from trioserve.http.api.schema.reading import Exclusive, about
from trioserve.protocol.grammar import MAX_GRAMMAR_CHARACTERS

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]

JsonText = _Text | dict[str, Any]
"""A JSON object, or the text of one."""


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(
    msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"
):
    """Any JSON object."""


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON schema with its name."""

    name: Annotated[str | None, about("A name for the schema; it isn't shown to the model.")] = None
    description: Annotated[
        Text | None, about("A description of the schema; it isn't shown to the model.")
    ] = None
    schema: Annotated[dict[str, Any] | None, about("The JSON schema.")] = None
    json_schema: Annotated[dict[str, Any] | None, about("vLLM's other name of `schema`.")] = None
    strict: Annotated[bool | None, about("The schema is always followed strictly.")] = None


class JsonSchemaFormat(
    msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """JSON that follows a schema."""

    json_schema: Annotated[JsonSchema, about("The schema, with its name.")]


class StructuralTag(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A stretch of output between two texts, which is JSON."""

    begin: Annotated[str, about("The beginning of the stretch; it begins with a trigger.")]
    schema: Annotated[dict[str, Any] | None, about("The JSON schema of the content between.")] = (
        None
    )
    end: Annotated[str, about("The end of the stretch.")]


class StructuralTagFormat(
    msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="structural_tag", kw_only=True
):
    """Free text in which tags are followed by JSON."""

    structures: Annotated[
        Annotated[list[StructuralTag], msgspec.Meta(min_length=1)] | None,
        about("The tags that may occur."),
    ] = None
    triggers: Annotated[
        Annotated[list[str], msgspec.Meta(min_length=1)] | None,
        about("A text that begins with one of these has to be one of the tags."),
    ] = None
    format: Annotated[
        dict[str, Any] | None,
        about(
            "The whole output, piece by piece, in place of these: xgrammar's format, which "
            "has a `type`."
        ),
    ] = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's form of an output: one of six rules, and options of JSON."""

    EXCLUSIVE: ClassVar = (
        Exclusive(
            ("json", "json_object", "regex", "choice", "grammar", "structural_tag"), required=True
        ),
    )

    json: Annotated[JsonText | None, about("A JSON schema, or its text.")] = None
    json_object: Annotated[bool | None, about("Whether to produce a JSON object.")] = None
    regex: Annotated[
        _Text | None, about("A regular expression that the whole output matches (Rust's syntax).")
    ] = None
    choice: Annotated[
        Annotated[list[Text], msgspec.Meta(min_length=1)] | None,
        about("Texts of which the output is one."),
    ] = None
    grammar: Annotated[_Text | None, about("A grammar: Lark (llguidance's dialect) or GBNF.")] = (
        None
    )
    structural_tag: Annotated[
        JsonText | None,
        about("The structural tags of `response_format`, as an object or as text."),
    ] = None
    disable_any_whitespace: Annotated[
        bool | None, about("JSON without white space between its parts.")
    ] = None
    disable_additional_properties: Annotated[
        bool | None,
        about("Objects of the schema with properties allow no others, unless it says so."),
    ] = None
    whitespace_pattern: Annotated[
        _Text | None, about("A regular expression for the white space between the parts of JSON.")
    ] = None
