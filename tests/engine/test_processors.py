"""Loading logits processors: what a class has to be, and what is said where it isn't."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.constraints.processors import load_processors
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.logits_processors import ProcessorContext

CONTEXT = ProcessorContext(vocab_size=7, max_num_seqs=3, device="cpu", model="m")
MODULE = """
class Good:
    parameters = ("word",)
    def __init__(self, context):
        self.context = context
    def check(self, args): return False
    def open(self, slot, args): pass
    def close(self, slot): pass
    def apply(self, logits, bias, rows): pass

class Better(Good):
    pass

class Bare:
    def check(self, args): return False
    def close(self, slot): pass

class Nameless(Good):
    parameters = None

class OneName(Good):
    parameters = "word"

class Broken(Good):
    def __init__(self, context):
        raise KeyError("no\\nway")

instance = Good(None)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours_to_load.py").write_text(MODULE)
    (tmp_path / "does_not_load.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("modules")
def test_processors_are_made_in_order() -> None:
    names = ["ours_to_load:Better", "ours_to_load:Good"]
    loaded = load_processors(names, CONTEXT)
    assert [each.name for each in loaded] == names
    assert [type(each.processor).__name__ for each in loaded] == ["Better", "Good"]
    assert vars(loaded[0].processor) == {"context": CONTEXT}


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ours_to_load", "write it as module:Class"),
        (":Good", "write it as module:Class"),
        ("no_such_module:Good", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("does_not_load:Good", "can't be imported: ZeroDivisionError: division by zero"),
        ("ours_to_load:Missing", "ours_to_load has no class Missing"),
        ("ours_to_load:instance", "ours_to_load has no class instance"),
        ("ours_to_load:Bare", "the class has no method open and no apply"),
        ("ours_to_load:Nameless", "its parameters must be the names of those it takes"),
        ("ours_to_load:OneName", "its parameters must be the names of those it takes"),
        ("ours_to_load:Broken", "it can't be made: KeyError: "),
    ],
)
def test_why_a_processor_cannot_be_loaded(name: str, reason: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_processors([name], CONTEXT)
    message = str(caught.value)
    assert message.startswith(f"--logits-processors {name}: ")
    assert reason in message
    assert "\n" not in message
