"""Subtitles: the segments of a transcript in the formats of video players."""

from __future__ import annotations

from collections.abc import Iterable

from trioserve.requests.speech.transcript import Segment


def srt_of(segments: Iterable[Segment]) -> str:
    """Return the segments as SubRip subtitles."""
    return "".join(
        f"{number}\n{_time(each.start, ',')} --> {_time(each.end, ',')}\n{_shown(each)}\n\n"
        for number, each in enumerate(segments, 1)
    )


def vtt_of(segments: Iterable[Segment]) -> str:
    """Return the segments as WebVTT subtitles."""
    return "WEBVTT\n\n" + "".join(
        f"{_time(each.start, '.')} --> {_time(each.end, '.')}\n{_shown(each)}\n\n"
        for each in segments
    )


def _shown(segment: Segment) -> str:
    """Return the text on one line, without what would be read as times."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
