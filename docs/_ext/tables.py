"""Tables of the docs that a program makes: ``python docs/_ext/tables.py`` writes them anew.

They are committed, so that a page reads the same in a repository's web view as on the built site.
A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``, and a file of the repository
between ``<!-- file: PATH -->`` and ``<!-- end -->``. A test holds them to what the program makes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import api_tables
import clients_table
import first_time
import metrics_table
import options_table

__all__ = ["TABLES", "filled", "main", "pages"]

ROOT = Path(__file__).parents[2]
TABLES: dict[str, Callable[[], Iterable[str]]] = {
    "api-endpoints": api_tables.endpoint_lines,
    "api-fields": api_tables.field_lines,
    "api-answers": api_tables.answer_lines,
    "clients": clients_table.table_lines,
    "dashboard": metrics_table.dashboard_lines,
    "first-time": first_time.newest_lines,
    "metrics": metrics_table.metrics_lines,
    "options": options_table.table_lines,
    "router-options": options_table.router_lines,
}
LANGUAGES = {".py": "py", ".yaml": "yaml", ".yml": "yaml", ".conf": "nginx"}
"""The language of a file's block, by its ending; ``text`` for others."""

_BLOCK = re.compile(r"(<!-- (table|file): (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """Return the pages of the docs."""
    return sorted((ROOT / "docs").glob("*.md"))


def filled(page: Path) -> str:
    """Return the text of ``page`` with its tables and files as they are now.

    Raises:
        KeyError: it names a table that no program makes.
        OSError: it names a file that isn't there.
    """

    def replace(match: re.Match[str]) -> str:
        begin, kind, name, end = match.groups()
        made = "\n".join(TABLES[name]()) if kind == "table" else _block(page.parent / name)
        return f"{begin}\n{made.strip()}\n\n{end}"

    return _BLOCK.sub(replace, page.read_text(encoding="utf-8"))


def _block(file: Path) -> str:
    language = LANGUAGES.get(file.suffix, "text")
    return f"```{language}\n{file.read_text(encoding='utf-8').strip()}\n```"


def main() -> int:
    """Write the pages with changed tables, and print their names."""
    for page in pages():
        text = filled(page)
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
