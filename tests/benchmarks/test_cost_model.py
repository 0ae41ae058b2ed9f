"""The cost model of the benchmarks, on rounds that follow it exactly."""

import importlib.util
import pathlib

import pytest

# The benchmarks have packages of their own.
pytest.importorskip("scipy")
PATH = pathlib.Path(__file__).parents[2] / "benchmarks" / "cost_model.py"
SPEC = importlib.util.spec_from_file_location("cost_model", PATH)
cost_model = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(cost_model)


def points(model, workers=(2, 3, 4)):
    return [
        cost_model.Point(
            size, num_bytes, rate, model.seconds(size, num_bytes, rate)
        )
        for size in workers
        for num_bytes in (1e6, 1e7, 5e7)
        for rate in (1.25e7, 1.25e8)
    ]


def test_a_ring_by_hand():
    model = cost_model.Model("ring", 0.001, 0.002, 1e-9, 1.05)
    # 6 messages, and 1.5 of the bytes on the wire.
    by_hand = 0.001 + 6 * 0.002 + 1e-9 * 1e6 + 1.05 * 1.5 * 1e6 / 1e7
    assert model.seconds(4, 1e6, 1e7) == pytest.approx(by_hand, rel=1e-12)


def test_a_tree_by_hand():
    model = cost_model.Model("tree", 0.001, 0.002, 1e-9, 1.05)
    by_hand = 0.001 + 4 * 0.002 + 1e-9 * 1e6 + 1.05 * 4 * 1e6 / 1e7
    assert model.seconds(4, 1e6, 1e7) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("shape", ["ring", "tree"])
def test_finds_the_model_that_made_the_points(shape):
    model = cost_model.Model(shape, 0.003, 0.0005, 2e-9, 1.06)
    fitted = cost_model.fit(shape, points(model, (2, 3)))
    # The least squares of float64 numbers that fit exactly.
    assert fitted[1:] == pytest.approx(model[1:], rel=1e-6)
    assert max(map(abs, cost_model.errors(fitted, points(model)))) < 1e-6


def test_no_parameter_is_negative():
    model = cost_model.Model("ring", 0.003, 0.0005, 2e-9, 1.06)
    noisy = [
        point._replace(seconds=point.seconds * (0.8 if place % 2 else 1.2))
        for place, point in enumerate(points(model))
    ]
    assert min(cost_model.fit("ring", noisy)[1:]) >= 0


class TestTraining:
    # A round of B bytes takes B / 1e8 s, whatever else.
    MODEL = cost_model.Model("ring", 0.0, 0.0, 1e-8, 0.0)
    JOB = cost_model.Training(
        MODEL, workers=8, weights=1e7, rate=1e9, step=0.05
    )

    def test_steps(self):
        assert self.JOB.synchronous() == pytest.approx(0.15)
        assert self.JOB.local(10, copies=3) == pytest.approx(0.08)
