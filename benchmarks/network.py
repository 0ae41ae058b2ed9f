"""How fast does each way of training run, on each network?

python benchmarks/network.py

Hosts are network namespaces of this machine (`tests/hosts.sh`), with a limit on
what each may send. Every way trains the same multilayer perceptron on the same
rows, each in the way that its users would: synchronously by Horovod's tape, by
a MultiWorkerMirroredStrategy that was repaired for Keras 3, by PyTorch's
DistributedDataParallel and by this library's `gradient_sync="global"`; with
local steps by PyTorch's PostLocalSGDOptimizer and by this library. The limit is
as many hosts that train at the same time and exchange nothing; PyTorch, whose
steps take another time, has its own.

Each way is measured in three parts of whole periods: their median, and the
least and the most. Prints tables in Markdown, adds all numbers to a JSON file
after each step, so that what is there already is not measured again, and draws
a picture. With the default settings it takes about three quarters of an hour on
2 cores. Needs root and iproute2. PyTorch is measured if `.venv-torch` has it,
which `make .venv-torch/.installed` makes.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from absl import app
from absl import flags

_OUTPUT = flags.DEFINE_string(
    "output", "build/network.json", "JSON file for the numbers."
)
_PICTURE = flags.DEFINE_string("picture", "build/network.png", "The picture.")
_HOSTS = flags.DEFINE_list("hosts", ["2", "4"], "How many hosts.")
_RATES = flags.DEFINE_list(
    "rates", ["100mbit", "1gbit", "none"], "What a host may send, for tc."
)
_MEGABYTES = flags.DEFINE_list(
    "megabytes", ["1", "10", "50"], "Sizes of the model, in 1e6 bytes."
)
_PERIODS = flags.DEFINE_list(
    "periods", ["1", "4", "16", "64"], "Steps between two averagings."
)
_LIBRARIES = flags.DEFINE_list(
    "libraries",
    ["collective", "horovod", "mirrored", "torch"],
    "Which to run: this one's two communicators, and others.",
)
_SECONDS = flags.DEFINE_float(
    "seconds", 2.0, "For each way, at least three periods."
)
_ROWS = flags.DEFINE_integer("rows", 8, "Rows of a worker's batch.")
_TABLES = flags.DEFINE_bool(
    "tables", False, "Measure nothing, print and draw what the file holds."
)

_ROOT = pathlib.Path(__file__).parents[1]
_TORCH = _ROOT / ".venv-torch" / "bin" / "python"
_NAMES = {
    ("collective", "alone"): "Keras, no exchange at all: the limit",
    ("collective", "gradients"): "ours, collectives, gradient_sync",
    ("horovod", "gradients"): "ours, Horovod, gradient_sync",
    ("horovod", "horovod"): "Horovod, DistributedGradientTape",
    ("mirrored", "mirrored"): "MultiWorkerMirroredStrategy, repaired",
    ("torch", "alone"): "PyTorch, no exchange at all: its limit",
    ("torch", "gradients"): "PyTorch, DistributedDataParallel",
}
_LIBRARY_NAMES = {
    "collective": "ours, collectives",
    "horovod": "ours, Horovod",
    "torch": "PyTorch, PostLocalSGDOptimizer",
}
_LIMIT_SECONDS = 1800


def ways(library, periods):
    """Returns the names of what a library runs, in order."""
    local = [f"period {period}" for period in periods]
    return {
        "collective": ["alone", "gradients", *local],
        "horovod": ["horovod", "gradients", *local],
        "mirrored": ["mirrored"],
        "torch": ["alone", "gradients", *local],
    }[library]


def main(_):
    path = pathlib.Path(_OUTPUT.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(path.read_text()) if path.exists() else []
    for hosts in [] if _TABLES.value else map(int, _HOSTS.value):
        for rate in _RATES.value:
            for library in _LIBRARIES.value:
                rows += measure(hosts, rate, library, rows)
                path.write_text(json.dumps(rows, indent=1) + "\n")
    print_tables(rows)
    draw(rows, _PICTURE.value)


def measure(hosts, rate, library, known):
    """Measures what is not known yet, and returns it as a list of dicts."""
    if library == "torch" and not _TORCH.exists():
        print("PyTorch is not measured: there is no .venv-torch", flush=True)
        return []
    place = {"hosts": hosts, "rate": rate, "library": library}
    done = {
        (row["way"], row["megabytes"])
        for row in known
        if place.items() <= row.items()
    }
    wanted = ways(library, _PERIODS.value)
    sizes = [
        size
        for size in map(float, _MEGABYTES.value)
        if any((way, size) not in done for way in wanted)
    ]
    if not sizes:
        return []
    task = {
        "megabytes": sizes,
        "ways": wanted,
        "periods": {f"period {p}": int(p) for p in _PERIODS.value},
        "rows": _ROWS.value,
        "seconds": _SECONDS.value,
    }
    print(f"{hosts} hosts, {rate}, {library}", flush=True)
    found = []
    for line in run(hosts, rate, library, task):
        _, is_result, text = line.partition("RESULT ")
        if is_result:
            found.append({**place, **json.loads(text)})
            print(f"  {text.strip()}", flush=True)
    return found


def run(hosts, rate, library, task):
    """Runs a worker on each host and yields the lines that they print."""
    is_torch = library == "torch"
    script = "network_torch.py" if is_torch else "network_keras.py"
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [
                _ROOT / "tests" / "hosts.sh",
                "run",
                f"--hosts={hosts}",
                f"--rate={rate}",
                "--communicator="
                + ("horovod" if library == "horovod" else "collective"),
                f"--limit={_LIMIT_SECONDS}",
                "--",
                _ROOT / "benchmarks" / script,
                folder,
                json.dumps(task),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                "TF_CPP_MIN_LOG_LEVEL": "3",
                **os.environ,
                "PYTHON": str(_TORCH if is_torch else sys.executable),
            },
        )
        lines = []
        for line in process.stdout:
            lines.append(line)
            yield line
        if process.wait() != 0:
            raise SystemExit(
                f"{''.join(lines[-40:])}\nexit code {process.returncode}"
            )


def name_of(row):
    """Returns what a row is called in tables."""
    key = row["library"], row["way"]
    if key in _NAMES:
        return _NAMES[key]
    return f"{_LIBRARY_NAMES[row['library']]}, {row['way']}"


def shares(rows):
    """Returns the share of the limit of each row, a dict from its place.

    Args:
        rows: List of dicts, of which those of the way "alone" are the limits
            of the others of their framework.

    Returns:
        Dict from `(hosts, rate, megabytes, name)` to three floats: median,
        least and most over the parts, by the limit's median.
    """

    def place(row):
        return row["hosts"], row["rate"], row["megabytes"]

    def limit_of(row):
        return (*place(row), row["library"] == "torch")

    limits = {
        limit_of(row): statistics.median(row["steps_per_second"])
        for row in rows
        if row["way"] == "alone"
    }
    return {
        (*place(row), name_of(row)): tuple(
            speed / limits[limit_of(row)]
            for speed in (
                statistics.median(row["steps_per_second"]),
                min(row["steps_per_second"]),
                max(row["steps_per_second"]),
            )
        )
        for row in rows
        if limit_of(row) in limits
    }


def print_tables(rows):
    by_place = shares(rows)
    names = list(dict.fromkeys(map(name_of, rows)))
    sizes = sorted({row["megabytes"] for row in rows})
    for hosts in sorted({row["hosts"] for row in rows}):
        rates = list(
            dict.fromkeys(r["rate"] for r in rows if r["hosts"] == hosts)
        )
        print(f"\n{hosts} hosts: share of the limit's steps per second.\n")
        columns = [(rate, size) for rate in rates for size in sizes]
        heads = [f"{rate}, {size:g} MB" for rate, size in columns]
        print(f"| way | {' | '.join(heads)} |")
        print(f"|---|{'---|' * len(heads)}")
        for name in names:
            cells = [
                _share(by_place.get((hosts, rate, size, name)))
                for rate, size in columns
            ]
            print(f"| {name} | {' | '.join(cells)} |")
        for library in ("collective", "torch"):
            limits = [_limit(rows, hosts, *c, library) for c in columns]
            name = _NAMES[library, "alone"]
            print(f"| {name}, steps per second | {' | '.join(limits)} |")
    print("\nMegabytes that the busiest host sends for each step.\n")
    places = [
        (hosts, size)
        for hosts in sorted({row["hosts"] for row in rows})
        for size in sizes
    ]
    heads = [f"{hosts} hosts, {size:g} MB" for hosts, size in places]
    print(f"| way | {' | '.join(heads)} |")
    print(f"|---|{'---|' * len(heads)}")
    for name in names:
        cells = [_megabytes(rows, name, *place) for place in places]
        print(f"| {name} | {' | '.join(cells)} |")


def _share(three):
    if three is None:
        return ""
    median, least, most = three
    return f"{median:.2f} ({least:.2f}..{most:.2f})"


def _limit(rows, hosts, rate, size, library):
    place = {"hosts": hosts, "rate": rate, "megabytes": size}
    place |= {"library": library, "way": "alone"}
    own = [row for row in rows if place.items() <= row.items()]
    if not own:
        return ""
    return f"{statistics.median(own[0]['steps_per_second']):.1f}"


def _megabytes(rows, name, hosts, size):
    place = {"hosts": hosts, "megabytes": size}
    own = [
        row["bytes_per_step"] / 1e6
        for row in rows
        if name_of(row) == name and place.items() <= row.items()
    ]
    # The same for every rate, but for what the protocol adds.
    return f"{statistics.median(own):.3g}" if own else ""


def draw(rows, path):
    """Draws the share of the limit against the period."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    by_place = shares(rows)
    hosts = min(row["hosts"] for row in rows)
    places = list(
        dict.fromkeys(
            (row["rate"], row["megabytes"])
            for row in rows
            if row["hosts"] == hosts
        )
    )
    rates = list(dict.fromkeys(rate for rate, _ in places))
    sizes = sorted({size for _, size in places})
    figure, axes = plt.subplots(
        len(sizes),
        len(rates),
        figsize=(4 * len(rates), 2.6 * len(sizes)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    periods = sorted(
        {int(r["way"].split()[1]) for r in rows if "period" in r["way"]}
    )
    for row, size in zip(axes, sizes):
        for axis, rate in zip(row, rates):
            place = hosts, rate, size
            _draw_one(axis, by_place, place, periods)
            limit = "no limit" if rate == "none" else f"{rate}/s"
            axis.set_title(f"{size:g} MB, {limit}", fontsize="medium")
    for axis in axes[-1]:
        axis.set_xlabel("period, steps")
    for axis in axes[:, 0]:
        axis.set_ylabel("share of the limit")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.suptitle(
        f"{hosts} hosts: speed by that of hosts that exchange nothing"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_one(axis, by_place, place, periods):
    for name in _LIBRARY_NAMES.values():
        points = [
            (period, by_place[(*place, f"{name}, period {period}")])
            for period in periods
            if (*place, f"{name}, period {period}") in by_place
        ]
        if points:
            x, y = zip(*points)
            median, least, most = zip(*y)
            (line,) = axis.plot(x, median, marker="o", label=name)
            axis.fill_between(x, least, most, color=line.get_color(), alpha=0.2)
    synchronous = [n for (_, way), n in _NAMES.items() if way != "alone"]
    styles = ["-", "--", "-.", ":", (0, (1, 3))]
    for name, style in zip(synchronous, styles):
        if (*place, name) in by_place:
            axis.axhline(
                by_place[(*place, name)][0],
                color="0.4",
                linestyle=style,
                linewidth=1,
                label=name,
            )
    axis.set_xscale("log", base=4)
    axis.set_xticks(periods, list(map(str, periods)))
    axis.set_ylim(0, 1.1)
    axis.grid(alpha=0.3)


if __name__ == "__main__":
    app.run(main)
