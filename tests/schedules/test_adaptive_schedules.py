import json
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import tf_avgstrategy as avg
from tf_avgstrategy.schedules import schedules
from tf_avgstrategy.schedules import timetables


def run(schedule, last, **facts_at):
    """The steps of rounds. `facts_at`: functions of the step."""

    def facts(step):
        return schedules.Facts(
            step, **{k: f(step) for k, f in facts_at.items()}
        )

    timetable = timetables.Timetable(schedule)
    timetable.begin(facts(0))
    rounds = []
    for step in range(1, last + 1):
        if timetable.has_look(step - 1, step):
            is_due = timetable.is_due(facts(step))
            timetable.advance(facts(step), is_due, is_due)
            rounds += [step] * is_due
    return rounds


def constant(value):
    return lambda step: value


class TestQuadraticSynchronizationRule:
    @pytest.mark.parametrize(
        ("rate", "period"),
        [
            (0.5, 4),  # 0.25
            (0.125, 4),  # 4
            (0.1, 6),  # 6.25
            (0.0625, 16),
            (0.0, 4),
            (math.nan, 4),
            (math.inf, 4),
            (1e-320, 2**53),
        ],
    )
    def test_is_the_formula_of_the_paper(self, rate, period):
        assert avg.QuadraticSynchronizationRule(4, 0.25).period(rate) == period

    def test_the_rate_of_the_last_round_counts(self):
        # 0.125 up to step 3, then 0.0625. The period is 4 at steps 0 and 16
        # at step 4.
        rule = avg.QuadraticSynchronizationRule(1, 0.25)
        rounds = run(rule, 40, learning_rate=lambda s: 0.125 / (1 + (s > 3)))
        assert rounds == [4, 20, 36]

    def test_a_round_that_others_ask_for_begins_a_period(self):
        timetable = timetables.Timetable(
            avg.QuadraticSynchronizationRule(4, 1.0)
        )
        timetable.begin(schedules.Facts(0, 1.0))
        timetable.advance(schedules.Facts(3, 0.25), True, False)
        assert [timetable.has_look(s - 1, s) for s in (4, 18, 19)] == [
            False,
            False,
            True,
        ]

    def test_a_warm_up_from_zero(self):
        rule = avg.QuadraticSynchronizationRule(2, 0.25, warmup_steps=5)
        rounds = run(rule, 12, learning_rate=lambda s: min(s, 8) / 64)
        # Up to step 5 every 2 steps. At step 6 the rate is 6 / 64, and
        # (0.25 * 64 / 6) ** 2 = 7.1.
        assert rounds == [2, 4, 6]

    def test_parts_of_a_period(self):
        rule = avg.QuadraticSynchronizationRule(4, 0.25).split(4)
        assert run(rule, 9, learning_rate=constant(0.1)) == list(range(1, 10))
        assert run(rule, 9, learning_rate=constant(0.0625)) == [4, 8]

    @pytest.mark.parametrize("growth", [0, -1.0, math.nan])
    def test_rejects_a_growth_that_is_not_positive(self, growth):
        with pytest.raises(ValueError, match=f"`growth` must be .*{growth}"):
            avg.QuadraticSynchronizationRule(4, growth)

    def test_rejects_a_growth_that_is_no_number(self):
        with pytest.raises(TypeError, match="`growth` must be a number.*'a'"):
            avg.QuadraticSynchronizationRule(4, "a")


class TestAdaComm:
    def test_follows_the_loss(self):
        # Losses 1 up to step 8, then 0.25, then 0.01. Periods: 8; at step 8
        # no shorter one, so half of it, 4; at 16, 8 * sqrt(0.25) = 4 is not
        # shorter than 4, so 2; at 24, ceil(8 * 0.1) = 1.
        losses = {8: 1.0, 12: 1.0, 16: 0.25, 18: 0.25, 20: 0.25, 22: 0.25}
        rounds = run(
            avg.AdaComm(8, 8),
            26,
            loss=lambda s: losses.get(s, 0.01),
            learning_rate=constant(0.1),
        )
        assert rounds == [8, 12, 16, 18, 20, 22, 24, 25, 26]

    def test_a_shorter_period_is_taken_as_it_is(self):
        losses = {8: 1.0, 12: 1.0, 16: 1 / 9}
        # ceil(8 / 3) = 3 is shorter than 4.
        rounds = run(
            avg.AdaComm(8, 8),
            22,
            loss=lambda s: losses.get(s, 1.0),
            learning_rate=constant(0.1),
        )
        assert rounds == [8, 12, 16, 19, 22]

    def test_a_lower_rate_lengthens_the_period(self):
        # At step 8 half of the period. At 16 the rate is a quarter:
        # sqrt(4 * 1) * 8 = 16.
        rounds = run(
            avg.AdaComm(8, 8),
            32,
            loss=constant(1.0),
            learning_rate=lambda s: 0.1 if s < 16 else 0.025,
        )
        assert rounds == [8, 12, 16, 32]

    @pytest.mark.parametrize("first", [0.0, -1.0, math.nan, math.inf])
    def test_keeps_its_period_without_a_positive_first_loss(self, first):
        rounds = run(
            avg.AdaComm(4, 4),
            12,
            loss=lambda s: first if s == 4 else math.nan,
            learning_rate=constant(0.1),
        )
        assert rounds == [4, 8, 12]

    @pytest.mark.parametrize("loss", [0.0, -5.0])
    def test_a_loss_that_is_not_positive_ends_at_period_1(self, loss):
        rounds = run(
            avg.AdaComm(4, 8),
            11,
            loss=lambda s: 1.0 if s == 4 else loss,
            learning_rate=constant(0.1),
        )
        assert rounds == [4, 8, 9, 10, 11]

    def test_rate_zero(self):
        rounds = run(
            avg.AdaComm(4, 4),
            8,
            loss=constant(1.0),
            learning_rate=lambda s: 0.1 if s < 8 else 0.0,
        )
        assert rounds == [4, 6, 8]

    @pytest.mark.parametrize("decay", [0, 1.0, 2])
    def test_rejects_a_decay_out_of_range(self, decay):
        with pytest.raises(
            ValueError, match=f"`decay` must be .* > 0 and < 1.*decay={decay}"
        ):
            avg.AdaComm(4, 4, decay=decay)


class TestDivergenceTriggered:
    def test_waits_for_the_threshold(self):
        drift = {2: 0.1, 4: 0.5, 6: 0.51, 8: math.nan, 10: math.inf}
        rounds = run(
            avg.DivergenceTriggered(0.5, check_every=2), 10, drift=drift.get
        )
        assert rounds == [6, 8, 10]

    @pytest.mark.parametrize("threshold", [0.0, -1, math.nan])
    def test_rejects_a_threshold_that_is_not_positive(self, threshold):
        with pytest.raises(ValueError, match="`threshold` must be .* > 0"):
            avg.DivergenceTriggered(threshold)


class TestTimeBased:
    @pytest.mark.parametrize("seconds_per_step", [0.01, 0.3, 1.0, 7.0])
    def test_rounds_come_when_it_is_time(self, seconds_per_step):
        schedule = avg.TimeBased(3.0)
        timetable = timetables.Timetable(schedule)
        timetable.begin(schedules.Facts(0))
        since, looks, rounds = 0, 0, []
        for step in range(1, 2000):
            since += 1
            if timetable.has_look(step - 1, step):
                looks += 1
                facts = schedules.Facts(step, seconds=since * seconds_per_step)
                is_due = timetable.is_due(facts)
                timetable.advance(facts, is_due, is_due)
                if is_due:
                    rounds.append(since)
                    since = 0
        # Rounds at the first step at which 3 s have passed, with few looks.
        wanted = math.ceil(3.0 / seconds_per_step)
        assert set(rounds) == {wanted}
        assert looks <= (len(rounds) + 1) * (2 * math.log2(wanted) + 3)

    def test_a_look_is_never_after_more_than_twice_the_steps(self):
        schedule = avg.TimeBased(1e9)
        memory = schedule.begin(schedules.Facts(0))
        step = 0
        for expected in (1, 2, 4, 8, 16):
            step = schedule.next_look(step, memory)
            assert step == expected
            facts = schedules.Facts(step, seconds=1e-3)
            memory = schedule.advance(facts, memory, False)

    @pytest.mark.parametrize("seconds", [0, -2.0])
    def test_rejects(self, seconds):
        with pytest.raises(ValueError, match=f"`seconds` must.*{seconds}"):
            avg.TimeBased(seconds)


ADAPTIVE = st.sampled_from(
    [
        avg.Periodic(3, 2),
        avg.Stagewise({0: 2, 5: 3}),
        avg.QuadraticSynchronizationRule(2, 0.1),
        avg.QuadraticSynchronizationRule(4, 0.1, parts=2),
        avg.AdaComm(6, 4),
        avg.DivergenceTriggered(0.5, 2),
        avg.TimeBased(1.0),
    ]
)
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@hypothesis.given(ADAPTIVE, st.data(), st.integers(1, 4))
@hypothesis.settings(max_examples=300, deadline=None)
def test_every_worker_counts_the_same_rounds(schedule, data, num_workers):
    """Whatever losses, rates and clocks each of them has."""
    tables = [timetables.Timetable(schedule) for _ in range(num_workers)]
    first = schedules.Facts(0, learning_rate=data.draw(NUMBERS))
    for table in tables:
        table.begin(first)
    rounds = [[] for _ in tables]
    for step in range(1, 25):
        looks = {table.has_look(step - 1, step) for table in tables}
        assert len(looks) == 1
        if not looks.pop():
            continue
        facts = timetables.facts(
            [_Status(step, data) for _ in range(num_workers)], 1
        )
        for table, own in zip(tables, rounds):
            is_due = table.is_due(facts)
            table.advance(facts, is_due, is_due)
            own += [step] * is_due
            # As a checkpoint has it.
            state = json.loads(json.dumps(table.state()))
            table.restore(state)
    assert all(own == rounds[0] for own in rounds)


class _Status:
    def __init__(self, step, data):
        self.steps = step
        self.num_replicas = data.draw(st.integers(0, 3))
        self.learning_rate = data.draw(NUMBERS)
        self.loss = data.draw(NUMBERS)
        self.loss_weight = data.draw(st.integers(0, 5))
        self.drift = abs(data.draw(NUMBERS))
        self.seconds = data.draw(st.floats(0, 100))


def test_facts_are_means_over_workers():
    class Status:
        def __init__(self, *values):
            (
                self.steps,
                self.num_replicas,
                self.learning_rate,
                self.loss,
                self.loss_weight,
                self.drift,
                self.seconds,
            ) = values

    facts = timetables.facts(
        [
            Status(6, 2, 0.5, 1.0, 6, 0.25, 9.0),
            Status(4, 1, 0.1, 5.0, 2, 1.0, 1),
        ],
        2,
    )
    assert facts == (3, 0.5, 2.0, 0.5, 9.0)
    unknown = timetables.facts([Status(6, 0, 0.5, 1.0, 0, 0.25, 9.0)], 1)
    assert np.isnan([unknown.loss, unknown.drift]).all()
