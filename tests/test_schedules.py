import pytest

from tf_avgstrategy import schedules


def due_steps(schedule, last):
    return [step for step in range(1, last + 1) if schedule.is_due(step)]


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
