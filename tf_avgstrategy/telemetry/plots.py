"""Plots of runs: what a file of `PeriodicAveraging(log_file=...)` shows."""

import json
import pathlib
from typing import NamedTuple

import numpy as np

__all__ = ["Run", "draw", "read"]

_PARTS = ("waiting", "exchanging", "computing")
_PART_COLORS = ("tab:red", "tab:blue", "tab:gray")
_AXES = {
    "steps": "training step",
    "megabytes": "MB sent per replica, in a ring of all",
    "minutes": "minutes",
}


class Run(NamedTuple):
    """One training.

    Attributes:
        name: String.
        replicas: Int.
        rounds: List of dicts, the lines of rounds, by step.
        epochs: List of dicts, the lines of epochs, by step.
    """

    name: str
    replicas: int
    rounds: list
    epochs: list

    def positions(self, lines):
        """Returns where lines are on each axis, a dict of arrays."""
        # A replica sends its part of the sum, and receives the others'.
        share = 2 - 2 / self.replicas
        sent = np.cumsum([r["payload_bytes"] * share for r in self.rounds])
        steps = np.array([line["step"] for line in lines])
        before = np.searchsorted(
            [r["step"] for r in self.rounds], steps, side="right"
        )
        return {
            "steps": steps,
            "megabytes": np.append(0, sent)[before] / 1e6,
            "minutes": np.array([line["time"] for line in lines]) / 60,
        }

    def values(self, name):
        """Returns a number of each epoch's logs, NaN where there is none."""
        found = [epoch["logs"].get(name) for epoch in self.epochs]
        return np.array([np.nan if f is None else f for f in found])

    def median_parts(self):
        """Returns the median seconds of a round's parts, as in `_PARTS`."""
        return [
            np.median([r[f"{part}_seconds"] for r in self.rounds] or [0.0])
            for part in _PARTS
        ]


def read(path):
    """Reads a file of round records.

    Where a run was resumed and steps were made again, the later ones count.

    Args:
        path: String.

    Returns:
        `Run`.

    Raises:
        ValueError: If there is no such file, or it holds no training.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(
            "There must be a file that `PeriodicAveraging(log_file=...)` has "
            f"written. Received: {str(path)!r}, which is none. Correct it."
        )
    lines = [_parsed(path, line) for line in path.read_text().splitlines()]
    starts = [line for line in lines if line.get("kind") == "start"]
    if not starts:
        raise ValueError(
            "The file must hold the start of a training. Received: "
            f"{str(path)!r} with {len(lines)} lines without. Pass "
            "`log_file` to `PeriodicAveraging` and train."
        )
    kept = _without_repeated_steps(lines)
    return Run(
        name=path.stem,
        replicas=starts[-1]["replicas"],
        rounds=[line for line in kept if line["kind"] == "round"],
        epochs=[line for line in kept if line["kind"] == "epoch"],
    )


def _parsed(path, line):
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(
            "Each line must be JSON, as `PeriodicAveraging` writes it. "
            f"Received: {line[:60]!r} in {str(path)!r}. Remove the line."
        ) from error


def _without_repeated_steps(lines):
    """Also makes time go on where a resumed run has begun anew."""
    kept, offset, latest = [], 0.0, 0.0
    for line in lines:
        if line["kind"] == "start":
            kept = [k for k in kept if k["step"] <= line["step"]]
            latest = max((k["time"] for k in kept), default=0.0)
            offset = latest
            continue
        kept.append({**line, "time": line["time"] + offset})
    return sorted(kept, key=lambda line: line["step"])


def draw(runs, output, *, is_comparison=False):
    """Draws runs into a picture.

    Args:
        runs: List of `Run`.
        output: String, the picture's file, such as "run.png".
        is_comparison: Bool, whether the last row compares totals of the runs
            in place of parts of rounds and stragglers.
    """
    # Not at the top: nothing else needs it.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measures = [("loss", "loss")]
    for name in ("accuracy", "sparse_categorical_accuracy", "acc"):
        if any(np.isfinite(run.values(name)).any() for run in runs):
            measures.append((name, "accuracy"))
            break
    num_rows = len(measures) + 1
    figure, grid = pyplot.subplots(
        num_rows, 3, figsize=(13, 3.6 * num_rows), layout="constrained"
    )
    for row, (name, label) in zip(grid, measures):
        _draw_measure(row, runs, name, label)
    _draw_divergence(grid[-1][0], runs)
    if is_comparison:
        _draw_totals(grid[-1][1], grid[-1][2], runs)
    else:
        _draw_parts(grid[-1][1], runs)
        _draw_stragglers(grid[-1][2], runs)
    figure.savefig(output, dpi=110)
    pyplot.close(figure)


def _draw_measure(row, runs, name, label):
    """A row: the measure against steps, bytes and time."""
    for axes, (axis, title) in zip(row, _AXES.items()):
        for place, run in enumerate(runs):
            where = run.positions(run.epochs)[axis]
            color = f"C{place}"
            axes.plot(
                where, run.values(name), "o-", ms=3, color=color, label=run.name
            )
            validation = run.values(f"val_{name}")
            if np.isfinite(validation).any():
                axes.plot(
                    where,
                    validation,
                    "s--",
                    ms=3,
                    color=color,
                    label=f"{run.name}, validation",
                )
        axes.set_xlabel(title)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    row[0].legend(fontsize=8)


def _draw_divergence(axes, runs):
    for place, run in enumerate(runs):
        steps = [r["step"] for r in run.rounds]
        apart = [
            np.nan if r["divergence"] is None else r["divergence"]
            for r in run.rounds
        ]
        axes.plot(steps, apart, ".-", lw=0.8, color=f"C{place}", label=run.name)
    axes.set_title("How far replicas were apart before each round", fontsize=10)
    axes.set_xlabel("training step")
    axes.set_ylabel("distance from the mean / its norm")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if len(runs) > 1:
        axes.legend(fontsize=8)


def _draw_parts(axes, runs):
    """Of one run over its rounds, of several the medians."""
    if len(runs) == 1:
        (run,) = runs
        parts = [[1e3 * r[f"{p}_seconds"] for r in run.rounds] for p in _PARTS]
        steps = [r["step"] for r in run.rounds]
        axes.stackplot(steps, parts, labels=_PARTS, colors=_PART_COLORS)
        axes.set_xlabel("training step")
        if parts[0]:
            # The first one includes tracing.
            highest = np.percentile(np.sum(parts, axis=0), 95)
            axes.set_ylim(0, max(1.3 * highest, 1e-3))
    else:
        bottom = np.zeros(len(runs))
        medians = 1e3 * np.array([run.median_parts() for run in runs])
        names = [run.name for run in runs]
        for part, color, own in zip(_PARTS, _PART_COLORS, medians.T):
            axes.bar(names, own, bottom=bottom, label=part, color=color)
            bottom += own
        axes.tick_params(axis="x", labelrotation=20)
    axes.set_title("Where a round's time goes (chief)", fontsize=10)
    axes.set_ylabel("ms per round")
    axes.legend(fontsize=8)


def _draw_stragglers(axes, runs):
    """How often each worker came last, and by how much."""
    workers = max(
        (len(r["weights"]) for run in runs for r in run.rounds), default=1
    )
    width = 0.8 / len(runs)
    for place, run in enumerate(runs):
        counts = [
            sum(r["late"] == rank for r in run.rounds)
            for rank in range(workers)
        ]
        axes.bar(
            np.arange(workers) + place * width,
            counts,
            width,
            color=f"C{place}",
            label=run.name,
        )
    late = [1e3 * r["late_seconds"] for run in runs for r in run.rounds]
    middle = np.median(late) if late else 0.0
    axes.set_title(
        f"Who came last to rounds (median {middle:.1f} ms late)", fontsize=10
    )
    axes.set_xticks(np.arange(workers) + 0.4 - width / 2)
    axes.set_xticklabels([f"worker {rank}" for rank in range(workers)])
    axes.set_ylabel("rounds")
    if len(runs) > 1:
        axes.legend(fontsize=8)


def _draw_totals(left, right, runs):
    names = [run.name for run in runs]
    colors = [f"C{place}" for place in range(len(runs))]
    for axes, axis, title in (
        (left, "megabytes", "MB sent per replica, in a ring of all"),
        (right, "minutes", "minutes"),
    ):
        totals = []
        for run in runs:
            where = run.positions(run.rounds + run.epochs)[axis]
            totals.append(max(where, default=0.0))
        bars = axes.barh(names, totals, color=colors)
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=10)
