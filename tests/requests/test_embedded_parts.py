"""The ids of a text with media: each kind in its order, and texts of media within the text."""

from __future__ import annotations

import re

import pytest

from trioserve.protocol.embeddings import EmbeddingRows
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.embedded import EmbeddedMedia, take_marks
from trioserve.requests.embedded_parts import ids_with_marks

PLACEHOLDER = 7
TOKENS = {"image": "<image>", "video": "<video>"}


def encode(text: str) -> list[int]:
    """Return a token for each frame, and one with its length for each text between frames."""
    pieces = re.split("(<frame>)", text)
    return [PLACEHOLDER if each == "<frame>" else 100 + len(each) for each in pieces if each]


def medium(kind: str, *token_ids: int, text: str = "") -> EmbeddedMedia:
    rows = bytes(4 * token_ids.count(PLACEHOLDER))
    return EmbeddedMedia(
        kind=kind,
        token_ids=list(token_ids),
        placeholder=PLACEHOLDER,
        digest=bytes(16),
        rows=EmbeddingRows(start=0, rows=rows, number_format="float32"),
        text=text,
    )


IMAGE = medium("image", 1, PLACEHOLDER, 2)
VIDEO = medium("video", 102, PLACEHOLDER, 103, PLACEHOLDER, text="in<frame>and<frame>")


def marked(text: str, *media: EmbeddedMedia) -> list[int]:
    tokens = {each.kind: TOKENS[each.kind] for each in media}
    return ids_with_marks(text, (), media, tokens, encode, "prompt")


def test_the_text_of_a_video_is_encoded_with_what_stands_beside_it() -> None:
    # The text before it has one token with the beginning of its own.
    assert marked("before<video>after", VIDEO) == [108, -1, 103, -1, 105]
    assert marked("<video><video>", VIDEO, VIDEO) == [102, -1, 103, -1, 102, -2, 103, -2]


def test_media_of_each_kind_keep_their_order() -> None:
    ids = marked("<image>a<video>b<image>", IMAGE, IMAGE, VIDEO)
    assert ids == [1, -1, 2, 103, -3, 103, -3, 101, 1, -2, 2]
    spans = take_marks(ids, [IMAGE, IMAGE, VIDEO])
    assert [(span.start, span.stop, span.kind) for span in spans] == [
        (1, 2, "image"),
        (4, 5, "video"),
        (6, 7, "video"),
        (9, 10, "image"),
    ]
    assert ids.count(PLACEHOLDER) == 4


@pytest.mark.parametrize(
    ("text", "media", "told"),
    [
        ("<video>", [IMAGE, VIDEO], "must have the text '<image>' once for each of its 1 images"),
        ("<image>", [IMAGE, VIDEO], "must have the text '<video>' once for each of its 1 videos"),
        ("<video><video>", [VIDEO], "'<video>', which stands for videos, 2 times"),
        ("<frame> <video>", [VIDEO], "has a text that stands for embeddings of a medium"),
    ],
)
def test_a_text_has_the_place_of_each_medium_once(
    text: str, media: list[EmbeddedMedia], told: str
) -> None:
    with pytest.raises(InvalidRequest, match=told) as refused:
        marked(text, *media)
    assert refused.value.param == "prompt"
