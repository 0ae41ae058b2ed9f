"""What `benchmarks/network.py` makes of its rows."""

import importlib
import pathlib
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("network_rows", "network_tables")
    yield [importlib.import_module(name) for name in names]
    for name in names:
        del sys.modules[name]


def row(library, way, *speeds, megabytes=10.0, rate="1gbit", **changes):
    return {
        "hosts": 2,
        "rate": rate,
        "library": library,
        "megabytes": megabytes,
        "way": way,
        "steps_per_second": list(speeds),
        "bytes_per_step": 2.5e6,
        **changes,
    }


ALONE = [row("collective", "alone", 30, 40, 50), row("torch", "alone", 80)]


class TestRows:
    def test_only_what_is_not_known_is_missing(self, modules):
        rows = [
            ALONE[0],
            row("collective", "period 4", not_run="failed", megabytes=1.0),
        ]
        found = modules[0].missing(
            rows,
            hosts=2,
            rate="1gbit",
            library="collective",
            sizes=[1.0, 10.0],
            periods=["4"],
        )
        assert found == [
            (1.0, "alone"),
            (1.0, "gradients"),
            (1.0, "period 4"),
            (10.0, "gradients"),
            (10.0, "period 4"),
        ]

    def test_other_rates_and_libraries_are_not_known(self, modules):
        found = modules[0].missing(
            ALONE,
            hosts=2,
            rate="none",
            library="tape",
            sizes=[10.0],
            periods=[],
        )
        assert found == [(10.0, "horovod")]

    def test_a_new_row_takes_the_place_of_the_same(self, modules):
        new = row("collective", "alone", 7)
        assert modules[0].replaced(ALONE, new) == [ALONE[1], new]


class TestTables:
    def test_shares_are_of_the_own_framework(self, modules):
        rows = [
            *ALONE,
            row("collective", "period 4", 10, 20, 30),
            row("torch", "period 4", 20),
        ]
        place = modules[0].Place(2, "1gbit", 10.0)
        found = modules[1].shares(rows)
        assert found[place, "ours, collectives, period 4"] == (0.5, 0.25, 0.75)
        name = "PyTorch, PostLocalSGDOptimizer, period 4"
        assert found[place, name] == (0.25, 0.25, 0.25)

    def test_says_what_is_best_and_where_it_is_not_ours(self, modules):
        rows = [
            *ALONE,
            row("collective", "gradients", 8),
            row("tape", "horovod", 12),
            row("collective", "period 4", 36),
            row("torch", "period 4", 32),
        ]
        tables = modules[1].text(rows).split("| way |")[1:]
        shares, speeds, megabytes = tables
        assert "| Horovod, DistributedGradientTape | **0.3 (0.3..0.3)** |" in (
            shares
        )
        assert "| ours, collectives, gradient_sync | 0.2 (0.2..0.2) |" in shares
        assert "| ours, collectives, period 4 | **0.9 (0.9..0.9)** |" in shares
        worse = "- 2 hosts, 10 MB, 1gbit/s, gradients: Horovod, Distributed"
        assert worse in shares and worse in speeds
        assert "period 4: " not in shares
        assert "| ours, collectives, period 4 | **36 (36..36)** |" in speeds
        assert "| ours, collectives, period 4 | 2.5 |" in megabytes

    def test_what_was_not_run_says_so(self, modules):
        rows = [
            ALONE[0],
            row("torch", "alone", not_run="there is no .venv-torch"),
        ]
        text = modules[1].text(rows)
        assert "| PyTorch, no exchange at all: its limit | not run |" in text
        assert text.endswith("\nNot run, torch: there is no .venv-torch")

    def test_draws(self, modules, tmp_path):
        rows = [
            *ALONE,
            row("collective", "period 4", 10),
            row("horovod", "period 16", 20, rate="none"),
            row("tape", "horovod", 20),
        ]
        modules[1].draw(rows, tmp_path / "network.png")
        assert (tmp_path / "network.png").stat().st_size > 1000
