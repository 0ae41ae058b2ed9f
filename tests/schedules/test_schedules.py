import copy
import json
import pickle

import pytest

import tf_avgstrategy as avg
from tf_avgstrategy.schedules import schedules


def due_steps(schedule, last):
    steps, step = [], 0
    while (step := schedule.next_look(step, {})) <= last:
        steps.append(step)
    return steps


class TestPeriodic:
    @pytest.mark.parametrize(
        ("period", "expected"),
        [(1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3]), (4, [4]), (5, [])],
    )
    def test_rounds_follow_multiples_of_the_period(self, period, expected):
        assert due_steps(schedules.Periodic(period), 4) == expected

    def test_warm_up_averages_every_step_then_waits_a_whole_period(self):
        schedule = schedules.Periodic(period=4, warmup_steps=3)
        assert due_steps(schedule, 15) == [1, 2, 3, 7, 11, 15]
        warm = [schedule.is_warming_up(step) for step in (1, 3, 4)]
        assert warm == [True, True, False]

    def test_parts_come_more_often(self):
        assert due_steps(schedules.Periodic(8, 1).split(4), 6) == [1, 3, 5]

    @pytest.mark.parametrize("period", [0, -1])
    def test_rejects_a_period_below_one(self, period):
        with pytest.raises(
            ValueError,
            match=rf"`period` must be .* >= 1.*period={period}\..*=1",
        ):
            schedules.Periodic(period)

    @pytest.mark.parametrize("period", [2.5, "16", True, None])
    def test_rejects_a_period_that_is_no_integer(self, period):
        with pytest.raises(
            TypeError, match=rf"`period` must be an integer.*{period!r}.*=16"
        ):
            schedules.Periodic(period)

    def test_rejects_a_negative_warm_up(self):
        with pytest.raises(
            ValueError, match="`warmup_steps` must be .* >= 0.*warmup_steps=-1"
        ):
            schedules.Periodic(4, warmup_steps=-1)


class TestStagewise:
    def test_a_stage_counts_from_its_start(self):
        schedule = schedules.Stagewise({0: 2, 4: 3})
        assert due_steps(schedule, 13) == [2, 4, 7, 10, 13]

    def test_a_stage_ends_with_a_round(self):
        schedule = schedules.Stagewise({5: 1, 0: 3})
        assert due_steps(schedule, 8) == [3, 5, 6, 7, 8]

    def test_parts_come_more_often(self):
        schedule = schedules.Stagewise({0: 2, 4: 4}).split(2)
        assert due_steps(schedule, 8) == [1, 2, 3, 4, 6, 8]

    @pytest.mark.parametrize(
        ("stages", "error", "message"),
        [
            ({4: 2}, ValueError, "must begin at step 0.*{4: 2}"),
            ({0: 0}, ValueError, "`period of a stage` must be .* >= 1"),
            ({0: 2, -1: 2}, ValueError, "`step of a stage` must be .* >= 0"),
            ({0: 2.5}, TypeError, "`period of a stage` must be an integer"),
            (
                [4, 16],
                TypeError,
                r"must be a dict.*\[4, 16\].*{0: 4, 1000: 16}",
            ),
        ],
    )
    def test_rejects(self, stages, error, message):
        with pytest.raises(error, match=message):
            schedules.Stagewise(stages)


@pytest.mark.parametrize(
    "schedule",
    [
        avg.Periodic(4, 2),
        avg.Stagewise({0: 4, 100: 16}),
        avg.QuadraticSynchronizationRule(4, 0.25, warmup_steps=3),
        avg.AdaComm(16, 100, decay=0.25),
        avg.DivergenceTriggered(0.1, 4),
        avg.TimeBased(2.5),
    ],
)
class TestEverySchedule:
    def test_is_made_of_its_config(self, schedule):
        config = json.loads(json.dumps(schedule.get_config()))
        again = schedules.from_config(type(schedule).__name__, config)
        assert again == schedule
        assert str(again) == str(schedule)

    def test_can_be_copied_and_compared(self, schedule):
        again = pickle.loads(pickle.dumps(copy.deepcopy(schedule)))
        assert again == schedule
        assert len({again, schedule}) == 1

    def test_keeps_its_class_when_copied(self, schedule):
        original = _subclass_of(type(schedule))(**schedule.get_config())
        for again in (copy.copy(original), copy.deepcopy(original)):
            assert type(again) is type(original)
            assert again == original
            assert hash(again) == hash(original)

    def test_cannot_be_changed(self, schedule):
        for name in schedule.get_config():
            with pytest.raises(AttributeError):
                setattr(schedule, name, 1)

    def test_looks_are_later_than_the_step(self, schedule):
        memory = schedule.begin(schedules.Facts(7, learning_rate=0.1))
        assert schedule.next_look(7, memory) > 7


def test_an_unknown_schedule_is_named():
    with pytest.raises(ValueError, match="'Often', not one of.*'AdaComm'"):
        schedules.from_config("Often", {})


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (avg.Periodic(6), "`period` .*=6 with fragments=4.*=8"),
        (avg.Stagewise({0: 6}), "`period of a stage` .*=6 .*=8"),
        (avg.QuadraticSynchronizationRule(2, 0.1), "`base_period` .*=2 .*=4"),
        (avg.AdaComm(9, 5), "`initial_period` .*=9 .*=12"),
        (avg.TimeBased(2.0), "`fragments` need a .* period.*TimeBased"),
        (avg.DivergenceTriggered(2.0), "`fragments` need a .* period"),
    ],
)
def test_fragments_need_parts_of_a_period(schedule, message):
    with pytest.raises(ValueError, match=message):
        schedule.split(4)


def _subclass_of(cls):
    return type(f"Own{cls.__name__}", (cls,), {})
