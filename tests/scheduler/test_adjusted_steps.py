"""The runner on the CPU with adjusted logits, rows without a token, and reports besides draws."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from gpu.models.decoder import Decoder
from gpu.runner import Runner
from gpu.slots import PlanError
from tests.support.adjusters import ToyAdjuster, chained, follows
from tests.support.plans import GREEDY, PlanMaker, RecordingSampler, load_tiny, make_runner
from tests.support.rounding import apart, terms_of
from tests.support.tiny_models import make_tiny
from trioserve.protocol.sampling import NAN_LOGITS, SamplerParams
from trioserve.protocol.wire import StepResult, floats, ints

PROMPT = [5, 17, 200, 31, 8, 90, 44, 123, 9, 250]
OTHER = [61, 7, 7, 180]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_tiny(make_tiny("smollm2", tmp_path_factory.mktemp("model")))


@pytest.fixture
def adjuster(model: Decoder) -> ToyAdjuster:
    return ToyAdjuster(model.config.vocab_size)


@pytest.fixture
def runner_and_sampler(model: Decoder, adjuster: ToyAdjuster) -> tuple[Runner, RecordingSampler]:
    return make_runner(model, adjuster=adjuster)


@pytest.fixture
def runner(runner_and_sampler: tuple[Runner, RecordingSampler]) -> Runner:
    return runner_and_sampler[0]


@pytest.fixture
def maker(runner: Runner) -> PlanMaker:
    return PlanMaker(runner.step)


class TestAdjustments:
    def test_each_row_has_its_own(
        self,
        maker: PlanMaker,
        runner_and_sampler: tuple[Runner, RecordingSampler],
    ) -> None:
        maker.open(0, PROMPT, chained(GREEDY))
        maker.open(1, OTHER)
        maker.open(2, OTHER, attrs.evolve(GREEDY, extra_args={"bias": 100.0}))
        maker.step({0: 10, 1: 4, 2: 4})
        for _ in range(5):
            maker.step({2: 1, 0: 1, 1: 1})
        seen = runner_and_sampler[1].seen
        tokens = maker.slots[0].tokens
        assert all(follows(token, last) for last, token in itertools.pairwise(tokens[9:]))
        assert all(token % 2 == 0 for token in maker.slots[2].tokens[4:])
        for slot, length in ((0, 10), (1, 4), (2, 4)):
            tokens = maker.slots[slot].tokens
            for position in range(length, len(tokens)):
                logits = seen[tuple(tokens[:position])].clone()
                ids = torch.arange(len(logits))
                if slot == 0:
                    logits[ids % 7 != (3 * tokens[position - 1] + 1) % 7] = -torch.inf
                elif slot == 2:
                    logits[ids % 2 == 1] = -torch.inf
                assert tokens[position] == int(logits.argmax())

    def test_slots_are_opened_and_closed_in_the_order_of_the_plans(
        self, maker: PlanMaker, runner: Runner, adjuster: ToyAdjuster
    ) -> None:
        maker.open(0, PROMPT, chained(GREEDY))
        maker.open(3, OTHER)
        maker.step({0: 10})
        maker.close(0)
        maker.open(0, OTHER, chained(GREEDY))
        maker.step({0: 4})
        runner.reset(9)
        assert adjuster.log == ["open 0", "open 3", "close 0", "open 0", "close 3", "close 0"]

    def test_a_slot_that_is_used_again_has_nothing_of_the_last(
        self, maker: PlanMaker, model: Decoder
    ) -> None:
        maker.open(0, PROMPT, chained(GREEDY, length=0))
        assert maker.step({0: 10})[0] == [-1]
        maker.close(0)
        maker.open(0, PROMPT)
        plain = PlanMaker(make_runner(model)[0].step)
        plain.open(0, PROMPT)
        assert maker.step({0: 10}) == plain.step({0: 10})


class TestRowsWithoutAToken:
    def test_the_sequence_has_stopped_and_nobody_else_has(
        self, maker: PlanMaker, model: Decoder
    ) -> None:
        params = attrs.evolve(GREEDY, logprobs=2)
        maker.open(0, PROMPT, chained(params, length=1))
        maker.open(1, OTHER, params)
        plain = PlanMaker(make_runner(model)[0].step)
        plain.open(1, OTHER, params)
        rows = [{0: 10, 1: 4}, {0: 1, 1: 1}, {0: 1, 1: 1}, {1: 1}]
        given = [maker.step(each) for each in rows]
        assert [len(step.get(0, [])) for step in given] == [1, 1, 0, 0]
        assert given[1][0] == [-1]
        wanted = [plain.step({1: each[1]}) for each in rows]
        assert [step[1] for step in given] == [step[1] for step in wanted]

    def test_logits_that_hold_nan(self, model: Decoder) -> None:
        class Spoiling(RecordingSampler):
            def sample(self, logits: torch.Tensor, *others: object) -> object:  # type: ignore[override]
                logits[0] = torch.nan
                return super().sample(logits, *others)  # type: ignore[arg-type]

        runner, _ = make_runner(model, sampler_class=Spoiling)
        maker = PlanMaker(runner.step)
        maker.open(0, PROMPT)
        maker.open(6, OTHER)
        given = maker.step({0: 10, 6: 4})
        assert given[0] == [NAN_LOGITS]
        assert given[6][0] >= 0
        assert maker.step({0: 1, 6: 1})[0] == []


class TestNamedIds:
    def test_raw_log_probabilities_of_the_ids_that_a_request_names(
        self, maker: PlanMaker, runner_and_sampler: tuple[Runner, RecordingSampler]
    ) -> None:
        runner, sampler = runner_and_sampler
        ids = [7, 299, 10**6, 0]
        params = attrs.evolve(GREEDY, logprobs=0, logit_bias={7: 50.0})
        maker.open(0, PROMPT, attrs.evolve(params, logprob_token_ids=ids))
        maker.open(1, OTHER, attrs.evolve(params, logprob_token_ids=[3]))
        maker.open(2, OTHER, params)
        maker.open(4, PROMPT[:3], attrs.evolve(GREEDY, logprob_token_ids=[3]))  # asks for none
        result = runner.step(maker.plan({2: 4, 1: 4, 4: 3, 0: 10}))
        assert ints(result.ids_offsets).tolist() == [0, 0, 1, 1, 5]
        values = floats(result.ids_logprobs).tolist()
        one, zero = (sampler.seen[tuple(key)].double().log_softmax(-1) for key in (OTHER, PROMPT))
        assert values[0] == pytest.approx(float(one[3]), abs=1e-5)
        assert values[1:3] == pytest.approx(zero[[7, 299]].tolist(), abs=1e-5)
        assert values[3] == -np.inf
        assert values[4] == pytest.approx(float(zero[0]), abs=1e-5)

    def test_nobody_asked(self, maker: PlanMaker, runner: Runner) -> None:
        maker.open(0, OTHER)
        result = runner.step(maker.plan({0: 4}))
        assert result.ids_offsets == result.ids_logprobs == b""
        assert result.prompts == []


class TestPromptLogprobs:
    PARAMS = SamplerParams(temperature=0.0, prompt_logprobs=2, logprob_token_ids=[9, 4])

    def bound(self, model: Decoder, logprobs: Any) -> float:
        """Bound the distance between log-probabilities that two batches computed."""
        config = model.config
        terms = terms_of(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            layers=config.num_layers,
            tokens=len(PROMPT),
        )
        return apart(terms, logprobs)

    def pieces(self, result: StepResult) -> list[tuple[int, int, int]]:
        return [(each.slot, each.start, len(each.logprobs) // 4) for each in result.prompts]

    def test_chunks_cover_the_prompt_once(
        self, maker: PlanMaker, runner: Runner, model: Decoder
    ) -> None:
        maker.open(0, PROMPT, self.PARAMS, prompt_logprobs_from=1)
        maker.open(1, OTHER, self.PARAMS, prompt_logprobs_from=3)
        maker.open(2, OTHER)
        results = [
            runner.step(maker.plan(rows))
            for rows in ({0: 4, 2: 3, 1: 4}, {1: 1, 0: 1}, {0: 5, 2: 1}, {0: 1, 1: 1})
        ]
        # The last state of a chunk gives the first token of the next.
        assert [sorted(self.pieces(result)) for result in results] == [
            [(0, 1, 4), (1, 3, 1)],
            [(0, 5, 1)],
            [(0, 6, 4)],
            [],
        ]
        another, _ = make_runner(model)
        other = PlanMaker(another.step)
        other.open(0, PROMPT, self.PARAMS, prompt_logprobs_from=1)
        whole = another.step(other.plan({0: 10})).prompts[0]
        parts = [each for result in results for each in result.prompts if each.slot == 0]
        for name in ("logprobs", "top_logprobs", "ids_logprobs"):
            joined = np.concatenate([floats(getattr(each, name)) for each in parts])
            values = floats(getattr(whole, name))
            assert joined == pytest.approx(values, abs=self.bound(model, values))
        assert len(floats(whole.top_logprobs)) == len(floats(whole.ids_logprobs)) == 2 * 9

    def test_numbers_are_those_of_the_logits_that_draw(
        self,
        maker: PlanMaker,
        runner_and_sampler: tuple[Runner, RecordingSampler],
        model: Decoder,
    ) -> None:
        """Compute logits behind every prefix of the prompt once, in a slot of its own."""
        runner, sampler = runner_and_sampler
        maker.open(0, PROMPT, self.PARAMS, prompt_logprobs_from=1)
        piece = runner.step(maker.plan({0: 10})).prompts[0]
        top = ints(piece.top_ids).reshape(9, 2)
        for index, position in enumerate(range(1, 10)):
            maker.open(position, PROMPT[:position])
            maker.step({position: position})
            raw = sampler.seen[tuple(PROMPT[:position])].double().log_softmax(-1)
            logprob = raw[PROMPT[position]]
            bound = self.bound(model, raw)
            assert floats(piece.logprobs)[index] == pytest.approx(float(logprob), abs=bound)
            assert ints(piece.ranks)[index] == 1 + int((raw > logprob).sum())
            assert top[index].tolist() == raw.topk(2).indices.tolist()

    def test_a_slot_that_is_opened_again_starts_where_it_is_told_to(
        self, maker: PlanMaker, runner: Runner
    ) -> None:
        maker.open(0, PROMPT, self.PARAMS, prompt_logprobs_from=1)
        runner.step(maker.plan({0: 10}))
        pages = maker.slots[0].pages[:1]
        maker.open(1, [*PROMPT, 3], self.PARAMS, prompt_length=10, prompt_logprobs_from=7)
        maker.open(2, PROMPT, self.PARAMS, shared_pages=pages, prompt_logprobs_from=5)
        result = runner.step(maker.plan({1: 11, 2: 6}))
        assert sorted(self.pieces(result)) == [(1, 7, 3), (2, 5, 5)]

    def test_what_is_computed_already_gives_nothing(self, maker: PlanMaker, runner: Runner) -> None:
        maker.open(0, PROMPT)
        maker.step({0: 10})
        pages = maker.slots[0].pages[:1]
        maker.open(1, PROMPT, self.PARAMS, shared_pages=pages, prompt_logprobs_from=4)
        with pytest.raises(PlanError, match="slot 1 wants log-probabilities of what is computed"):
            runner.step(maker.plan({1: 6}))
