"""The tables and the picture of `network.py`, from the rows of its file."""

import statistics
from typing import NamedTuple

import network_rows


class Spread(NamedTuple):
    """Of the parts in which a way was measured."""

    median: float
    least: float
    most: float

    def __str__(self):
        return " ".join(
            [f"{self.median:.3g}", f"({self.least:.3g}..{self.most:.3g})"]
        )


def speed(row):
    """Returns the `Spread` of a row's steps per second."""
    parts = row["steps_per_second"]
    return Spread(statistics.median(parts), min(parts), max(parts))


def shares(rows):
    """Returns the share of the limit, a dict from place and name to `Spread`.

    The limit is the median of the way "alone" of the same framework.

    Args:
        rows: List of dicts, as `network.py` writes them.
    """

    def framework(row):
        return network_rows.place_of(row), row["library"] == "torch"

    measured = list(filter(network_rows.is_measured, rows))
    limits = {
        framework(row): speed(row).median
        for row in measured
        if row["way"] == "alone"
    }
    return {
        network_rows.key_of(row): Spread(
            *(part / limits[framework(row)] for part in speed(row))
        )
        for row in measured
        if framework(row) in limits
    }


def text(rows):
    """Returns all tables in Markdown, a string."""
    rows = sorted(
        rows,
        key=lambda row: network_rows.LIBRARIES.index(row["library"]),
    )
    measured = list(filter(network_rows.is_measured, rows))
    speeds = {network_rows.key_of(row): speed(row) for row in measured}
    megabytes = {
        network_rows.key_of(row): f"{row['bytes_per_step'] / 1e6:.3g}"
        for row in measured
    }
    return "\n".join(
        [
            "Share of the limit's steps per second. Bold: the best of its "
            "kind, which is gradients at every step, or one period.",
            *_tables(rows, shares(rows), has_best=True),
            "\nSteps per second. Bold: the same.",
            *_tables(rows, speeds, has_best=True),
            "\nMegabytes that the busiest host sends for each step.",
            *_tables(rows, megabytes, has_best=False),
            *_reasons(rows),
        ]
    )


def _tables(rows, values, *, has_best):
    """Yields the lines of a table for each number of hosts.

    Args:
        rows: List of dicts.
        values: Dict from place and name to what a cell shows.
        has_best: Bool, whether values are `Spread` of which more is better.
    """
    best = bests(rows, values) if has_best else {}
    marked = set(map(network_rows.key_of, best.values()))
    not_run = {
        network_rows.key_of(row)
        for row in rows
        if not network_rows.is_measured(row)
    }
    every = sorted(set(map(network_rows.place_of, rows)), key=_order(rows))
    names = list(dict.fromkeys(map(network_rows.name_of, rows)))
    for hosts in dict.fromkeys(place.hosts for place in every):
        places = [place for place in every if place.hosts == hosts]
        yield f"\n| way | {' | '.join(map(str, places))} |"
        yield f"|---|{'---|' * len(places)}"
        for name in names:
            cells = []
            for place in places:
                nothing = "not run" if (place, name) in not_run else ""
                cell = str(values.get((place, name), nothing))
                is_best = (place, name) in marked
                cells.append(f"**{cell}**" if is_best else cell)
            yield f"| {name} | {' | '.join(cells)} |"
    yield from _better_than_ours(best)


def _better_than_ours(best):
    others = [
        f"- {place}, {kind}: {network_rows.name_of(row)}"
        for (place, kind), row in best.items()
        if not network_rows.is_ours(row)
    ]
    return ["\nWhere ours is not the best:\n", *others] if others else []


def bests(rows, values):
    """Returns the best row of each place and kind, where several compete.

    Args:
        rows: List of dicts.
        values: Dict from place and name to `Spread`, of which more is better.
    """
    competing = {}
    for row in filter(network_rows.is_measured, rows):
        kind = network_rows.kind_of(row)
        if kind and network_rows.key_of(row) in values:
            place = network_rows.place_of(row)
            competing.setdefault((place, kind), []).append(row)
    return {
        where: max(own, key=lambda row: values[network_rows.key_of(row)].median)
        for where, own in competing.items()
        if len(own) > 1
    }


def _order(rows):
    """Hosts and sizes by their numbers, rates as they were measured."""
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    return lambda place: (
        place.hosts,
        rates.index(place.rate),
        place.megabytes,
    )


def _reasons(rows):
    """Lines that say why rows were not run, each reason once."""
    found = dict.fromkeys(
        (row["library"], row["not_run"])
        for row in rows
        if not network_rows.is_measured(row)
    )
    return [f"\nNot run, {library}: {reason}" for library, reason in found]


def draw(rows, path):
    """Draws the share of the limit against the period.

    Args:
        rows: List of dicts, as `network.py` writes them.
        path: String, the picture's file.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    by_place = shares(rows)
    places = sorted({place for place, _ in by_place}, key=_order(rows))
    if not places:
        return
    rates = list(dict.fromkeys(place.rate for place in places))
    groups = sorted({(place.hosts, place.megabytes) for place in places})
    figure, axes = plt.subplots(
        len(groups),
        len(rates),
        # With room for the names below, however few panels there are.
        figsize=(max(10, 4 * len(rates)), 2.6 * len(groups) + 1.4),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    periods = sorted(
        {int(r["way"].split()[1]) for r in rows if "period" in r["way"]}
    )
    for row, (hosts, megabytes) in zip(axes, groups):
        for axis, rate in zip(row, rates):
            place = network_rows.Place(hosts, rate, megabytes)
            _draw_one(axis, by_place, place, periods)
            axis.set_title(str(place), fontsize="medium")
    for axis in axes[-1]:
        axis.set_xlabel("period, steps")
    for axis in axes[:, 0]:
        axis.set_ylabel("share of the limit")
    handles, labels = _labels(axes.flat)
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.suptitle("Speed by that of as many hosts that exchange nothing")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _labels(axes):
    """Of all panels, as one may lack what another has."""
    found = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            found.setdefault(label, handle)
    return found.values(), found.keys()


def _draw_one(axis, by_place, place, periods):
    for color, name in enumerate(network_rows.LIBRARY_NAMES.values()):
        points = [
            (period, by_place[place, f"{name}, period {period}"])
            for period in periods
            if (place, f"{name}, period {period}") in by_place
        ]
        if points:
            x, y = zip(*points)
            median, least, most = zip(*y)
            axis.plot(x, median, marker="o", color=f"C{color}", label=name)
            axis.fill_between(x, least, most, color=f"C{color}", alpha=0.2)
    synchronous = [
        n for (_, way), n in network_rows.NAMES.items() if way != "alone"
    ]
    styles = ["-", "--", "-.", ":", (0, (1, 3)), (0, (5, 5))]
    for name, style in zip(synchronous, styles):
        if (place, name) in by_place:
            axis.axhline(
                by_place[place, name].median,
                color="0.4",
                linestyle=style,
                linewidth=1,
                label=name,
            )
    axis.set_xscale("log", base=4)
    axis.set_xticks(periods, list(map(str, periods)))
    axis.set_ylim(0, 1.1)
    axis.grid(alpha=0.3)
