"""The security page tells the numbers that the code has."""

from __future__ import annotations

import re

import pytest

from gpu.constraints.grammar_trial import MAX_MEMORY
from gpu.constraints.grammar_trial import MAX_SECONDS as TRIAL_SECONDS
from tests.support.source_files import ROOT
from trioserve.cli.worker_options import WorkerOptions
from trioserve.config import EngineConfig, ServerConfig
from trioserve.config.media import MediaOptions
from trioserve.config.options import options_of
from trioserve.http.api.auth import OPEN_PATHS
from trioserve.http.api.bounds import MAX_FIELDS, MAX_VALUES
from trioserve.http.api.openai.chat.messages import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from trioserve.http.api.openai.responses.items import MAX_ITEMS
from trioserve.http.api.openai.responses.store import (
    MAX_BYTES,
    MAX_CONVERSATION_BYTES,
    MAX_RESPONSES,
)
from trioserve.http.api.openai.structured import MAX_SCHEMA_DEPTH
from trioserve.http.api.routes import ROUTES
from trioserve.http.api.schema.field_bounds import (
    MAX_JSON_CHARACTERS,
    MAX_JSON_DEPTH,
    MAX_JSON_VALUES,
    MAX_SHORT_CHARACTERS,
    MAX_TEXT_CHARACTERS,
)
from trioserve.http.server.connections import MAX_CONNECTIONS
from trioserve.http.server.http1 import MAX_HEADERS
from trioserve.http.server.settings import MAX_HEAD_SIZE, MAX_STREAMS, server_settings
from trioserve.observability.live import MAX_WATCHERS
from trioserve.protocol.grammar import MAX_GRAMMAR_CHARACTERS
from trioserve.protocol.sampling import MAX_SEQUENCES, MAX_STOP_STRINGS, MAX_STRING_CHARACTERS
from trioserve.protocol.wire import MAX_MESSAGE_BYTES
from trioserve.requests.media.child import MAX_SECONDS, memory_of
from trioserve.requests.media.fetching import FETCH_SECONDS
from trioserve.requests.media.reader import MAX_ARRAY_BYTES, setup_of
from trioserve.requests.media_arguments import (
    MAX_ARGUMENT_BYTES,
    MAX_ARGUMENT_DEPTH,
    MAX_ARGUMENTS,
)
from trioserve.text import template_child
from trioserve.text.guarded import CHARACTERS_PER_TOKEN, FEWEST_MAX_CHARACTERS
from trioserve.text.stop_regex import MAX_EXPANDED_CHARACTERS, MAX_PATTERN_CHARACTERS

PAGE = (ROOT / "docs" / "security.md").read_text()
SERVER = ServerConfig(engine=EngineConfig("m"))
MEDIA = MediaOptions()


def bound_of(what: str) -> str:
    """Return the second column of a row of the table of bounds."""
    match = re.search(rf"^\| {re.escape(what)} \| (.*?) \|", PAGE, re.MULTILINE)
    assert match is not None, what
    return match[1]


@pytest.mark.parametrize(
    ("what", "bound"),
    [
        ("A request's head", f"{MAX_HEAD_SIZE >> 10} KiB, {MAX_HEADERS} headers"),
        ("Its body", f"{SERVER.max_body_size >> 20} MiB; 413 past it"),
        ("Time to send either", f"{SERVER.request_timeout:g} s each"),
        ("Time that a client may leave an answer unread", f"{SERVER.send_timeout:g} s"),
        ("Open requests on one HTTP/2 connection", f"{MAX_STREAMS}"),
        ("Connections", f"{MAX_CONNECTIONS}, or what the system's limit of files leaves"),
        (
            "Values in a body; objects, lists and fields in it",
            f"{MAX_VALUES:,}; {MAX_FIELDS:,}",
        ),
        (
            "A string of a request: a name, an id, a role, a salt and their like; a text",
            f"{MAX_SHORT_CHARACTERS} characters; {MAX_TEXT_CHARACTERS:,}",
        ),
        (
            "JSON of any form in a field: characters, values, levels",
            f"{MAX_JSON_CHARACTERS:,}; {MAX_JSON_VALUES:,}; {MAX_JSON_DEPTH}",
        ),
        (
            "Messages, items of a response's input, parts of one, tools",
            f"{MAX_MESSAGES}, {MAX_ITEMS}, {MAX_PARTS}, {MAX_TOOLS}",
        ),
        (
            "[Responses that are kept](responses.md#what-is-kept), and a conversation of them",
            f"{MAX_RESPONSES:,} and {MAX_BYTES >> 20} MiB; {MAX_CONVERSATION_BYTES >> 20} MiB",
        ),
        ("Watchers of the [live feed](live.md)", f"{MAX_WATCHERS}; 429 past it"),
        ("Prompts in a request", f"{SERVER.max_prompts_per_request}"),
        ("Outputs of a prompt (`n`)", f"{MAX_SEQUENCES}"),
        ("Stop strings", f"{MAX_STOP_STRINGS} of {MAX_STRING_CHARACTERS} characters"),
        (
            "[Stop regexes](api.md#stop-regexes)",
            f"{MAX_PATTERN_CHARACTERS} characters together, {MAX_EXPANDED_CHARACTERS} with "
            "repetitions written out",
        ),
        (
            "A grammar or schema",
            f"{MAX_GRAMMAR_CHARACTERS >> 10} KiB, nested {MAX_SCHEMA_DEPTH} deep; "
            f"{TRIAL_SECONDS} s and {MAX_MEMORY >> 30} GiB to compile, in a process of its own",
        ),
        (
            "A text to tokenize",
            f"{FEWEST_MAX_CHARACTERS:,} characters, or {CHARACTERS_PER_TOKEN} for each token",
        ),
        (
            "A text by a chat template",
            f"{template_child.MAX_SECONDS} s of processor time, "
            f"{template_child.MAX_MEMORY >> 20} MiB, in a process of its own",
        ),
        (
            "Bytes of an [image, audio clip or video](media.md#limits), pixels, seconds",
            f"{MEDIA.limit_mm_bytes >> 20} MiB; {MEDIA.limit_mm_pixels:,}; "
            f"{MEDIA.limit_mm_seconds:g}",
        ),
        (
            "Reading one",
            f"{MAX_SECONDS} s of processor time, {memory_of(setup_of(MEDIA)) >> 20} MiB",
        ),
        (
            "[Arguments of a request](media.md#arguments-of-one-request) for its media, as JSON; "
            "arrays made with them",
            f"{MAX_ARGUMENTS}, {MAX_ARGUMENT_BYTES >> 10} KiB, {MAX_ARGUMENT_DEPTH} levels; "
            f"{MAX_ARRAY_BYTES >> 20} MiB for a prompt",
        ),
        ("[Fetching one](media.md#urls)", f"{FETCH_SECONDS:g} s, public addresses"),
        ("A message between the processes", f"{MAX_MESSAGE_BYTES >> 20} MiB"),
    ],
)
def test_the_bounds_are_those_of_the_code(what: str, bound: str) -> None:
    assert re.match(rf"{re.escape(bound)}(?!\w)", bound_of(what))


def test_the_queues_bounds_are_those_of_the_options() -> None:
    (tokens,) = (o.unset for o in options_of(EngineConfig) if o.name == "max_num_queued_tokens")
    number = re.search(r"([\d,]+),", str(tokens))
    assert number is not None
    row = bound_of("Waiting requests, and tokens in their prompts")
    assert row.startswith(f"{EngineConfig('m').max_num_queued_reqs}, and {number[1]};")


def test_the_options_that_it_names_exist() -> None:
    known = {o.flag for cls in (EngineConfig, ServerConfig, WorkerOptions) for o in options_of(cls)}
    known |= {f"--no-{flag.removeprefix('--')}" for flag in known}
    named = set(re.findall(r"`(--[a-z-]+)", PAGE))
    assert len(named) > 15
    assert named <= known


def test_the_routes_that_it_names_are_as_it_says() -> None:
    control = {route.rule for route in ROUTES if route.control}
    assert all(f"`{rule}`" in PAGE for rule in (*control, *OPEN_PATHS))
    open_line = re.search(r"every route but (.*?) wants one", PAGE)
    assert open_line is not None
    assert set(re.findall(r"`(.*?)`", open_line[1])) == set(OPEN_PATHS)
    assert (SERVER.host, SERVER.allowed_origins, SERVER.api_key) == ("127.0.0.1", (), ())
    assert f"more than {server_settings(SERVER).keep_alive_timeout} s" in PAGE


def test_the_table_of_attacks_names_the_tests_that_make_them() -> None:
    section = PAGE.partition("\n## Attacks\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    named = [re.findall(r"`(test_\w+\.py)`", row.split(" | ")[-1]) for row in rows]
    assert all(named), rows
    files = {path.name for path in (ROOT / "tests" / "attacks").glob("test_*.py")}
    assert {name for names in named for name in names} == files - {"test_siege.py"}
