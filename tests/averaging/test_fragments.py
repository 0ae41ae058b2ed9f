import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from hypothesis import strategies as st

import tf_avgstrategy as avg
from tf_avgstrategy.averaging import fragments
from tf_avgstrategy.averaging import rounds
from tf_avgstrategy.schedules import schedules
from tf_avgstrategy.state import state
from tf_avgstrategy.tensors import buckets


def rules_of(variables, optimizers=(), **options):
    options = {"slots": "mean", "overrides": {}, **options}
    return state.state_rules(variables, optimizers, **options)


def moving(fragment):
    return [r for r in fragment.rules if r.travels or r.rule == "reset"]


def num_bytes(fragment):
    return sum(map(buckets.num_bytes, rounds.specs(moving(fragment))))


def network(sizes, **options):
    with toys.make_strategy(1).scope():
        model = keras.Sequential(
            [keras.layers.Input((sizes[0],))]
            + [
                layer
                for size in sizes[1:]
                for layer in (
                    keras.layers.Dense(size),
                    keras.layers.BatchNormalization(),
                )
            ]
        )
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    return rules_of(model.variables, [optimizer], **options)


class TestCut:
    def test_pieces_are_of_similar_bytes_in_the_order_of_layers(self):
        rules = network([16] * 9)
        pieces = fragments.cut(rules, 4, None, schedules.Periodic(1))
        sizes = [num_bytes(piece) for piece in pieces]
        assert max(sizes) < 1.3 * min(sizes)
        firsts = [moving(piece)[0].path for piece in pieces]
        order = [rule.path for rule in rules]
        places = [order.index(path) for path in firsts]
        assert places == sorted(places)
        assert [(p.every, p.phase) for p in pieces] == [
            (4, 1),
            (4, 2),
            (4, 3),
            (4, 0),
        ]

    def test_slots_and_statistics_travel_with_what_they_belong_to(self):
        rules = network([4] * 5)
        home = {}
        pieces = fragments.cut(rules, 3, None, schedules.Periodic(1))
        for place, piece in enumerate(pieces):
            for rule in moving(piece):
                home[id(rule.copies[0])] = place
        for rule in rules:
            if rule.owner is not None and rule.travels:
                assert home[id(rule.copies[0])] == home[id(rule.owner)]
            if rule.rule == "pooled":
                partner = home[id(rule.partner[0])]
                assert home[id(rule.copies[0])] == partner

    def test_slots_that_are_reset_wait_for_their_weights(self):
        rules = network([4] * 3, slots="reset")
        pieces = fragments.cut(rules, 2, None, schedules.Periodic(1))
        resets = [[r for r in moving(p) if r.rule == "reset"] for p in pieces]
        assert all(resets)
        assert sum(map(len, resets)) == sum(r.rule == "reset" for r in rules)

    def test_what_does_not_travel_is_in_every_round(self):
        rules = network([4] * 3)
        for piece in fragments.cut(rules, 2, None, schedules.Periodic(1)):
            assert [r.path for r in piece.rules if r.kind == "iterations"]

    def test_single_variables_may_have_a_period_of_their_own(self):
        rules = network([4] * 3)
        pieces = fragments.cut(
            rules, 2, {"dense/": 16}, schedules.Periodic(8).split(2)
        )
        own = {r.path for r in moving(pieces[0])}
        assert pieces[0][1:] == (4, 0)
        assert all(
            "dense/" in r or "dense_kernel" in r or "dense_bias" in r
            for r in own
        )
        assert len(own) == 6  # Two weights and two slots of each.
        assert [piece[1:] for piece in pieces[1:]] == [(2, 1), (2, 0)]

    def test_one_fragment_is_all(self):
        rules = network([4] * 3)
        (whole,) = fragments.cut(rules, 1, None, schedules.Periodic(4))
        assert whole.rules == rules
        assert all(whole.travels_in(count) for count in range(1, 9))

    @pytest.mark.parametrize(
        ("periods", "message"),
        [
            ({"nothing": 8}, "must match .*'nothing'.*kernel"),
            ({"kernel": 8, "dense/": 16}, "one period. Received: 8 and 16"),
        ],
    )
    def test_rejects(self, periods, message):
        with pytest.raises(ValueError, match=message):
            fragments.cut(network([4] * 3), 1, periods, schedules.Periodic(8))


@hypothesis.given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.integers(1, 6),
    st.dictionaries(st.integers(0, 11), st.sampled_from([1, 2, 3, 5])),
)
@hypothesis.settings(max_examples=100, deadline=None)
def test_everything_travels_exactly_once_in_a_cycle(sizes, parts, multiples):
    """Or, with a period of its own, in each of these."""
    with STRATEGY.scope():
        variables = [
            tf.Variable(tf.zeros([size]), name=f"v{place}.")
            for place, size in enumerate(sizes)
        ]
    rules = rules_of(variables)
    tick = schedules.Periodic(2)
    periods = {
        rf"^v{place}\.": 2 * parts * multiple
        for place, multiple in multiples.items()
        if place < len(sizes)
    }
    pieces = fragments.cut(rules, parts, periods, tick)
    cycle = parts * int(np.lcm.reduce([1, *multiples.values()]))
    travelled = {rule.path: 0 for rule in rules}
    for count in range(1, cycle + 1):
        for piece in pieces:
            if piece.travels_in(count):
                for rule in piece.rules:
                    travelled[rule.path] += 1
    for place, rule in enumerate(rules):
        own = multiples.get(place, 1)
        assert travelled[rule.path] == cycle / parts / own


STRATEGY = toys.make_strategy(1)


class TestCheck:
    def test_returns_the_schedule_of_parts(self):
        split = fragments.check(4, None, schedules.Periodic(16, 3))
        assert split == schedules.Periodic(4, 3)

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ((0, None), ValueError, "`fragments` must be .* >= 1.*=0"),
            ((2.0, None), TypeError, "`fragments` must be an integer.*2.0"),
            (
                (3, None),
                ValueError,
                "`period` must .*=16 with fragments=3.*=18",
            ),
            (
                (4, {"a": 6}),
                ValueError,
                "multiple .* here 4.*6 for 'a'. Pass 8",
            ),
            ((1, {"a": 0}), ValueError, "`period of 'a'` must be .* >= 1"),
        ],
    )
    def test_rejects(self, arguments, error, message):
        with pytest.raises(error, match=message):
            fragments.check(*arguments, schedules.Periodic(16))

    def test_single_periods_need_a_fixed_one(self):
        with pytest.raises(ValueError, match="fixed period.*TimeBased"):
            fragments.check(1, {"a": 4}, avg.TimeBased(1.0))
