"""The runner on hand-made plans, and the slot table's rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from gpu.models.decoder import Decoder
from gpu.runner import Runner
from gpu.slots import PlanError, SlotTable
from tests.support.plans import GREEDY, PlanMaker, load_tiny, make_runner
from tests.support.tiny_models import make_tiny
from trioserve.protocol.embeddings import ImageGrid
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import OpenSlot, Plan, floats, from_ints, ints

PROMPT = [5, 17, 200, 31, 8, 90, 44, 123, 9, 250]
OTHER = [61, 7, 7, 180]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_tiny(make_tiny("smollm2", tmp_path_factory.mktemp("model")))


@pytest.fixture
def maker(model: Decoder) -> PlanMaker:
    runner, _ = make_runner(model)
    return PlanMaker(runner.step)


def generate(
    model: Decoder, prompt: list[int], count: int, params: SamplerParams = GREEDY
) -> list[int]:
    """``count`` tokens after ``prompt``, alone and prefilled at once."""
    runner, _ = make_runner(model)
    maker = PlanMaker(runner.step)
    maker.open(0, prompt, params)
    tokens = maker.step({0: len(prompt)})[0]
    while len(tokens) < count:
        tokens += maker.step({0: 1})[0]
    return tokens


class TestSteps:
    def test_chunks_give_no_token_until_the_last(self, model: Decoder, maker: PlanMaker) -> None:
        maker.open(0, PROMPT)
        assert maker.step({0: 4})[0] == []
        assert maker.step({0: 1})[0] == []
        assert maker.step({0: 5})[0] == generate(model, PROMPT, 1)

    def test_two_sequences_do_not_disturb_each_other(
        self, model: Decoder, maker: PlanMaker
    ) -> None:
        maker.open(3, PROMPT)
        tokens = maker.step({3: 10})
        maker.open(1, OTHER)
        others = []
        for row in ({1: 3}, {1: 1}, {1: 1}, {1: 1}):
            given = maker.step({**row, 3: 1})
            tokens[3] += given[3]
            others += given[1]
        assert tokens[3] == generate(model, PROMPT, 5)
        assert others == generate(model, OTHER, 3)

    def test_result_rows_stand_in_the_order_of_the_plan(self, model: Decoder) -> None:
        runner, _ = make_runner(model)
        maker = PlanMaker(runner.step)
        for slot, prompt in enumerate((PROMPT, OTHER, PROMPT[:6])):
            maker.open(slot, prompt)
        result = runner.step(maker.plan({2: 6, 0: 3, 1: 4}))
        assert ints(result.slots).tolist() == [2, 0, 1]
        assert ints(result.generations).tolist() == [1, 1, 1]
        assert ints(result.offsets).tolist() == [0, 1, 1, 2]
        assert ints(result.tokens).tolist() == [
            *generate(model, PROMPT[:6], 1),
            *generate(model, OTHER, 1),
        ]
        assert result.step_us > 0

    def test_prefix_pages_are_not_computed_again(self, model: Decoder, maker: PlanMaker) -> None:
        maker.open(0, PROMPT)
        maker.step({0: 10})
        maker.open(1, PROMPT[:8] + OTHER, shared_pages=maker.slots[0].pages[:2])
        assert maker.step({1: 4})[1] == generate(model, PROMPT[:8] + OTHER, 1)

    def test_slot_is_used_again_in_the_plan_that_closes_it(
        self, model: Decoder, maker: PlanMaker
    ) -> None:
        maker.open(0, PROMPT)
        maker.step({0: 10})
        maker.close(0)
        maker.open(0, OTHER)
        assert maker.step({0: 4})[0] == generate(model, OTHER, 1)
        assert maker.generations[0] == 2

    def test_resumed_sequence_goes_on_alike(self, model: Decoder, maker: PlanMaker) -> None:
        """Check that draws depend on a slot's tokens and parameters: penalties, seed, length."""
        params = SamplerParams(
            temperature=0.9,
            seed=7,
            frequency_penalty=0.5,
            repetition_penalty=1.2,
            min_tokens=9,
            stop_ids=[2],
        )
        whole = generate(model, PROMPT, 8, params)
        maker.open(0, PROMPT + whole[:5], params, prompt_length=len(PROMPT))
        resumed = maker.step({0: 15})[0]
        resumed += maker.step({0: 1})[0] + maker.step({0: 1})[0]
        assert whole[:5] + resumed == whole

    def test_a_plan_without_rows(self, maker: PlanMaker) -> None:
        assert maker.step({}) == {}
        maker.open(0, PROMPT)
        assert maker.step({}) == {}
        assert maker.step({0: 2}) == {0: []}

    def test_long_outputs_outgrow_their_buffer(self, model: Decoder) -> None:
        assert len(generate(model, PROMPT, 200)) == 200


class TestStops:
    def test_a_stop_id_ends_the_rows_of_its_slot(self, model: Decoder, maker: PlanMaker) -> None:
        wanted = generate(model, PROMPT, 4)
        assert len(set(wanted)) == 4
        maker.open(0, PROMPT, attrs.evolve(GREEDY, stop_ids=[299, wanted[2]]))
        maker.open(1, OTHER)
        tokens = maker.step({0: 10, 1: 4})[0]
        for _ in range(4):
            given = maker.step({0: 1, 1: 1})
            tokens += given[0]
            assert len(given[1]) == 1
        assert tokens == wanted[:3]

    def test_a_stop_id_before_min_tokens_does_not_end(self, model: Decoder) -> None:
        wanted = generate(model, PROMPT, 4)
        params = attrs.evolve(GREEDY, stop_ids=[wanted[0]], min_tokens=3)
        tokens = generate(model, PROMPT, 3, params)
        assert len(tokens) == 3
        assert wanted[0] not in tokens[:2]


class TestLogprobs:
    def test_columns(self, model: Decoder) -> None:
        runner, sampler = make_runner(model)
        maker = PlanMaker(runner.step)
        maker.open(0, PROMPT, attrs.evolve(GREEDY, logprobs=3))
        maker.open(1, OTHER)
        maker.open(2, PROMPT[:3], attrs.evolve(GREEDY, logprobs=0))
        result = runner.step(maker.plan({1: 4, 0: 10, 2: 3}))
        tokens, logprobs = ints(result.tokens).tolist(), floats(result.logprobs).tolist()
        assert math.isnan(logprobs[0])
        for index, key in ((1, PROMPT), (2, PROMPT[:3])):
            expected = sampler.seen[tuple(key)].log_softmax(-1)
            assert logprobs[index] == pytest.approx(float(expected[tokens[index]]), abs=1e-5)
        assert ints(result.top_offsets).tolist() == [0, 0, 3, 3]
        best = sampler.seen[tuple(PROMPT)].log_softmax(-1).topk(3)
        assert ints(result.top_ids).tolist() == best.indices.tolist()
        assert floats(result.top_logprobs).tolist() == pytest.approx(best.values.tolist(), abs=1e-5)

    def test_nobody_asked(self, model: Decoder) -> None:
        runner, _ = make_runner(model)
        maker = PlanMaker(runner.step)
        maker.open(0, OTHER)
        result = runner.step(maker.plan({0: 4}))
        assert math.isnan(floats(result.logprobs)[0])
        assert result.top_offsets == result.top_ids == result.top_logprobs == b""


class TestFailures:
    def fail(self, runner: Runner, plan: Plan, message: str, slot: int = -1) -> None:
        with pytest.raises(PlanError, match=message) as caught:
            runner.step(plan)
        assert caught.value.slot == slot

    def test_refuses_until_reset(self, model: Decoder) -> None:
        runner, _ = make_runner(model)
        maker = PlanMaker(runner.step)
        maker.open(0, PROMPT)
        maker.step({0: 10})
        self.fail(runner, Plan(number=2, closed=from_ints([5])), "slot 5 .* not open", 5)
        self.fail(runner, Plan(number=3), "no Reset")
        runner.reset(4)
        assert len(runner.slots) == 0
        again = PlanMaker(runner.step)
        again.number = 3
        again.open(0, PROMPT)
        assert again.step({0: 10})[0] == generate(model, PROMPT, 1)

    def test_numbers_must_follow(self, model: Decoder) -> None:
        runner, _ = make_runner(model)
        runner.step(Plan(number=8))
        self.fail(runner, Plan(number=10), "plan 10 came where 9 was due")

    def test_too_many_tokens_in_one_plan(self, model: Decoder) -> None:
        runner, _ = make_runner(model, max_num_batched_tokens=9)
        maker = PlanMaker(runner.step)
        maker.open(0, PROMPT)
        self.fail(runner, maker.plan({0: 10}), "10 tokens in one plan, over 9")


def opened(**changes: Any) -> OpenSlot:
    fields: dict[str, Any] = {
        "slot": 0,
        "generation": 1,
        "tokens": [1, 2, 3, 4, 5],
        "prompt_length": 5,
        "computed": 0,
        "pages": [0, 1],
        **changes,
    }
    columns = {name: from_ints(fields.pop(name)) for name in ("tokens", "pages")}
    return OpenSlot(**fields, **columns, sampler=GREEDY)


def image(start: int, rows: int, columns: int, **more: Any) -> ImageGrid:
    return ImageGrid(start=start, rows=rows, columns=columns, **more)


def rows(**counts: int) -> dict[str, bytes]:
    return {
        "row_slots": from_ints([int(name[1:]) for name in counts]),
        "row_counts": from_ints(list(counts.values())),
    }


class TestSlotTable:
    """Eight pages of 4 tokens, sequences of at most 12 tokens, 100 words."""

    @pytest.fixture
    def table(self) -> SlotTable:
        return SlotTable(num_pages=8, page_size=4, max_model_len=12, vocab_size=100)

    BROKEN: tuple[tuple[str, Callable[[], Plan], str], ...] = (
        ("open twice", lambda: Plan(number=1, opened=[opened(), opened()]), "but is open"),
        ("negative", lambda: Plan(number=1, opened=[opened(slot=-1)]), "but is open"),
        ("empty", lambda: Plan(number=1, opened=[opened(tokens=[])]), "lengths that don't fit"),
        ("prompt", lambda: Plan(number=1, opened=[opened(prompt_length=6)]), "don't fit"),
        ("computed", lambda: Plan(number=1, opened=[opened(computed=5)]), "don't fit"),
        ("vocabulary", lambda: Plan(number=1, opened=[opened(tokens=[1, 2, 3, 4, 100])]),
         "outside the vocabulary"),
        ("image", lambda: Plan(number=1, opened=[opened(grids=[image(3, 1, 3)])]), "an image"),
        ("images", lambda: Plan(number=1, opened=[opened(grids=[image(0, 1, 3), image(2, 1, 1)])]),
         "an image where it has no tokens"),
        ("video", lambda: Plan(number=1, opened=[opened(
            grids=[image(0, 1, 2, interval=4, frames=2)])]), "more positions than tokens"),
        ("page", lambda: Plan(number=1, opened=[opened(pages=[8])]), "page 8 of 8"),
        ("pages", lambda: Plan(number=1, opened=[opened(pages=[1, 2, 3, 4])]), "more pages"),
        ("stray page", lambda: Plan(number=1, page_slots=from_ints([0]), page_ids=from_ints([1])),
         "gets a page but is not open"),
        ("ragged pages", lambda: Plan(number=1, page_slots=from_ints([0])), "one slot for each"),
        ("ragged cuts", lambda: Plan(number=1, cuts=from_ints([0])), "not a number of pages for"),
        ("stray cut", lambda: Plan(number=1, cuts=from_ints([0, 1])), "loses pages but is not"),
        ("cut too late", lambda: Plan(number=1, opened=[opened()], cuts=from_ints([0, 2])),
         "keeps 2 of 2"),
        ("stray row", lambda: Plan(number=1, **rows(s2=1)), "slot 2 .* not open"),
        ("ragged rows", lambda: Plan(number=1, row_slots=from_ints([0])), "not one count"),
        ("same slot", lambda: Plan(number=1, opened=[opened()], row_slots=from_ints([0, 0]),
                                   row_counts=from_ints([1, 1])), "different slots"),
        ("no tokens", lambda: Plan(number=1, opened=[opened()], **rows(s0=0)), "compute 0 tokens"),
        ("too far", lambda: Plan(number=1, opened=[opened()], **rows(s0=6)), "tokens but has 5"),
        ("no room", lambda: Plan(number=1, opened=[opened(pages=[0])], **rows(s0=5)),
         "no room for 5"),
        ("too long", lambda: Plan(number=1, opened=[opened(
            tokens=[1] * 13, pages=[0, 1, 2], computed=8)], **rows(s0=5)), "no room for 13"),
    )  # fmt: skip

    @pytest.mark.parametrize(("plan", "message"), [case[1:] for case in BROKEN],
                             ids=[case[0] for case in BROKEN])  # fmt: skip
    def test_refuses(self, table: SlotTable, plan: Callable[[], Plan], message: str) -> None:
        with pytest.raises(PlanError, match=message):
            table.apply(plan())

    def test_rows_and_pages(self, table: SlotTable) -> None:
        first = Plan(
            number=1,
            opened=[opened(), opened(slot=9, pages=[1, 3], computed=4)],
            **rows(s9=1, s0=3),
        )
        nine, zero = table.apply(first)
        assert (nine.start, nine.end, nine.samples) == (4, 5, True)
        assert (zero.start, zero.end, zero.samples) == (0, 3, False)
        assert table.num_pages_used() == 3
        table.apply(Plan(number=2, page_slots=from_ints([9]), page_ids=from_ints([7])))
        assert table.block_tables[9].tolist() == [1, 3, 7]
        cut_and_grown = {"cuts": [9, 1], "page_slots": [9], "page_ids": [6]}
        columns = {name: from_ints(values) for name, values in cut_and_grown.items()}
        table.apply(Plan(number=3, **columns))
        assert table.block_tables[9, :2].tolist() == [1, 6]
        assert table[9].num_pages == 2
        table.apply(Plan(number=4, closed=from_ints([0])))
        assert [slot.number for slot in table] == [9]
        assert table.num_pages_used() == 2
        table.clear()
        assert len(table) == table.num_pages_used() == 0


def test_runners_over_one_model_share_nothing(model: Decoder) -> None:
    first, second = (PlanMaker(make_runner(model)[0].step) for _ in range(2))
    first.open(0, PROMPT)
    second.open(0, OTHER)
    first.step({0: 9})
    second.step({0: 4})
    assert first.step({0: 1})[0] == generate(model, PROMPT, 1)
