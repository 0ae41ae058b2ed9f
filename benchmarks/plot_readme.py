"""The README's picture, from the tables of `docs/benchmarks.md`.

    python benchmarks/plot_readme.py

draws `docs/speed.png`: steps per second against the period where the network is
the limit, beside the fastest synchronous training and PyTorch's averaging.
"""

import pathlib
import re

import network_rows
import network_tables

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "speed.png"
PERIODS = (1, 4, 16, 64)
# Of the page's tables those of 50 MB are in steps per second.
PLACES = (
    network_rows.Place(4, "100mbit", 50.0),
    network_rows.Place(4, "1gbit", 50.0),
)
_TITLES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}
_OURS = network_rows.LIBRARY_NAMES["collective"]
_TORCH = network_rows.LIBRARY_NAMES["torch"]
_OUR_LIMIT = network_rows.NAMES["collective", "alone"]
_TORCH_LIMIT = network_rows.NAMES["torch", "alone"]
SYNCHRONOUS = [
    name for (_, way), name in network_rows.NAMES.items() if way != "alone"
]


def parse(text):
    """Returns what tables of ways hold, a dict from place and name to `Spread`.

    Args:
        text: String, a page in Markdown with tables as `network_tables.text`
            makes them.
    """
    found = {}
    for table in re.findall(r"^\| way \|.*\n(?:\|.*\n)+", text, re.M):
        header, _, *lines = map(_cells, table.splitlines())
        for name, *cells in lines:
            for place, cell in zip(header[1:], cells):
                found[_place(place), name] = _spread(cell)
    return found


def fastest(found, place, names):
    """Returns the `Spread` with the largest median among ways at a place."""
    return max((found[place, name] for name in names), key=lambda s: s.median)


def draw(found, path):
    """Draws steps per second against the period, a panel for each of `PLACES`.

    Args:
        found: Dict, what `parse` returned.
        path: String or path, the picture's file.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["font.size"] = 12
    figure, axes = plt.subplots(
        1, len(PLACES), figsize=(10, 4.4), sharey=True, layout="constrained"
    )
    for axis, place in zip(axes, PLACES):
        _draw_one(axis, found, place)
    axes[0].set_ylabel("training steps per second")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_one(axis, found, place):
    limits = (
        (_OUR_LIMIT, "C0", "no exchange at all, Keras"),
        (_TORCH_LIMIT, "C1", "no exchange at all, PyTorch"),
    )
    curves = (
        (_OURS, "C0", "tf_avgstrategy, averaging once a period"),
        (_TORCH, "C1", "PyTorch, averaging by PostLocalSGDOptimizer"),
    )
    for name, color, label in curves:
        spreads = [found[place, f"{name}, period {p}"] for p in PERIODS]
        median, least, most = zip(*spreads)
        axis.plot(PERIODS, median, marker="o", color=color, label=label)
        axis.fill_between(PERIODS, least, most, color=color, alpha=0.2)
    synchronous = fastest(found, place, SYNCHRONOUS).median
    axis.axhline(
        synchronous,
        color="C3",
        linewidth=2,
        label=f"synchronous, the fastest of {len(SYNCHRONOUS)} ways",
    )
    for name, color, label in limits:
        axis.axhline(
            found[place, name].median,
            color=color,
            linestyle=":",
            label=label,
        )
    for period in PERIODS[-2:]:
        value = found[place, f"{_OURS}, period {period}"].median
        axis.annotate(
            f"{value / synchronous:.0f} × synchronous",
            (period, value),
            xytext=(-8, 6),
            textcoords="offset points",
            ha="right",
            color="C0",
        )
    axis.annotate(
        f"{synchronous:.2g} per second",
        (PERIODS[-1], synchronous),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right",
        color="C3",
    )
    axis.set_xscale("log", base=4)
    axis.set_xticks(PERIODS, list(map(str, PERIODS)))
    axis.minorticks_off()
    axis.set_xlabel("period: steps between two averagings")
    axis.set_ylim(bottom=0)
    axis.set_title(
        f"{place.hosts} hosts, {_TITLES[place.rate]}, "
        f"{place.megabytes:g} MB of weights"
    )
    axis.grid(alpha=0.3)


def _cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def _place(text):
    hosts, megabytes, limit = text.split(", ")
    rate = "none" if limit == "no limit" else limit.removesuffix("/s")
    return network_rows.Place(
        int(hosts.split()[0]), rate, float(megabytes.split()[0])
    )


def _spread(cell):
    numbers = re.fullmatch(
        r"([\d.]+) \(([\d.]+?)\.\.([\d.]+)\)", cell.strip("*")
    )
    return network_tables.Spread(*map(float, numbers.groups()))


if __name__ == "__main__":
    draw(parse(PAGE.read_text()), PICTURE)
