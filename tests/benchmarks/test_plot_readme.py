"""What `benchmarks/plot_readme.py` reads, and what the README says of it."""

import importlib
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TABLE = """
| way | 2 hosts, 1 MB, 100mbit/s | 2 hosts, 10 MB, no limit |
|---|---|---|
| PyTorch, DistributedDataParallel | 0.5 (0.25..0.75) | **3 (2.5..4)** |
"""


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = ("network_rows", "plot_readme", "network_tables")
    yield [importlib.import_module(name) for name in names[:2]]
    for name in names:
        del sys.modules[name]


@pytest.fixture
def measured(modules):
    """What the page holds, a dict from place and name to `Spread`."""
    return modules[1].parse(modules[1].PAGE.read_text())


def test_reads_tables(modules):
    network_rows, plot_readme = modules
    name = network_rows.NAMES["torch", "gradients"]
    assert plot_readme.parse(TABLE) == {
        (network_rows.Place(2, "100mbit", 1.0), name): (0.5, 0.25, 0.75),
        (network_rows.Place(2, "none", 10.0), name): (3.0, 2.5, 4.0),
    }


def test_reads_all_of_the_page(modules, measured):
    network_rows, plot_readme = modules
    names = {name for _, name in measured}
    places = {place for place, _ in measured}
    assert set(network_rows.NAMES.values()) <= names
    # 2 and 4 hosts, 3 sizes, 3 networks.
    assert len(places) == 18
    assert len(measured) == len(places) * len(names)
    place = network_rows.Place(4, "1gbit", 50.0)
    assert measured[place, "ours, collectives, period 64"] == (16, 14.3, 16.9)
    fastest = plot_readme.fastest(measured, place, plot_readme.SYNCHRONOUS)
    assert fastest.median == 0.762


def test_speed_in_the_readme_is_that_of_the_page(modules, measured):
    network_rows, plot_readme = modules
    ours = [
        f"{network_rows.LIBRARY_NAMES[library]}, period 16"
        for library in ("collective", "horovod")
    ]
    synchronous = [
        name
        for (library, _), name in network_rows.NAMES.items()
        if name in plot_readme.SYNCHRONOUS and library != "torch"
    ]
    times = [
        plot_readme.fastest(measured, place, ours).median
        / plot_readme.fastest(measured, place, synchronous).median
        for place in {place for place, _ in measured}
        if place.rate != "none"
    ]
    text = f"{min(times):.2g} to {max(times):.2g} times as many steps"
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    assert text in readme


def test_draws(modules, measured, tmp_path):
    modules[1].draw(measured, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000
