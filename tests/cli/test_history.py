"""The file of what was written at a prompt before."""

from __future__ import annotations

from pathlib import Path

import pytest

from trioserve.cli.history import MAX_CHARACTERS, MAX_ENTRIES, History, history_path


@pytest.mark.parametrize(
    ("given", "environment", "path"),
    [
        (None, {"XDG_STATE_HOME": "/state"}, "/state/trioserve/chat_history"),
        (None, {"XDG_STATE_HOME": "relative", "HOME": "/me"}, "/me/.local/state/trioserve"),
        (None, {"HOME": "/me"}, "/me/.local/state/trioserve/chat_history"),
        (None, {"TRIOSERVE_HISTORY": "/there", "XDG_STATE_HOME": "/state"}, "/there"),
        ("here", {"TRIOSERVE_HISTORY": "/there"}, "here"),
        ("off", {"TRIOSERVE_HISTORY": "/there"}, None),
        (None, {"TRIOSERVE_HISTORY": "off"}, None),
    ],
)
def test_where_it_is(
    given: str | None,
    environment: dict[str, str],
    path: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", environment.get("HOME", "/nowhere"))
    found = history_path(given, environment)
    assert (found is None) if path is None else str(found).startswith(path)


def test_entries_come_back_in_order_and_the_file_is_the_users_own(tmp_path: Path) -> None:
    history = History(tmp_path / "new" / "folder" / "file")
    assert history.read() == []
    entries = ["one", "two\nlines", 'quotes " and \\', "Äpfel 🍏 \u2028"]
    for entry in entries:
        history.append(entry)
    history.append("x" * (MAX_CHARACTERS + 1))
    assert history.read() == entries
    assert history.path is not None
    assert history.path.stat().st_mode & 0o777 == 0o600
    assert history.path.parent.stat().st_mode & 0o777 == 0o700


def test_it_is_bounded_and_a_damaged_line_is_left_out(tmp_path: Path) -> None:
    history = History(tmp_path / "file")
    for number in range(2 * MAX_ENTRIES):
        history.append(str(number))
    assert history.read() == [str(number) for number in range(MAX_ENTRIES, 2 * MAX_ENTRIES)]
    assert history.path is not None
    with history.path.open("ab") as file:
        file.write(b'\xff{\n3\n"last"\n')
    assert history.read()[-2:] == [str(2 * MAX_ENTRIES - 1), "last"]
    assert len(history.path.read_bytes().splitlines()) == MAX_ENTRIES
    assert history.path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_can_not_be_kept_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for history in (History(tmp_path / "file" / "below"), History(tmp_path), History(None)):
        history.append("one")
        assert history.read() == []
