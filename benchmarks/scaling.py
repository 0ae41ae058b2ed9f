"""What would many workers cost? A model of rounds, fitted to measured ones.

python benchmarks/scaling.py

Measures rounds on two, three and four hosts with `benchmarks/round.py`, at two
rates, unless their files are beside that for the numbers. A round of B bytes
over N workers that may send R bytes a second takes

    ring: t = a + 2 (N - 1) l + c B + h * 2 (N - 1) / N * B / R
    tree: t = a + 2 log2(N) l + c B + h * 2 log2(N) * B / R

with what starts it (a), a message's latency (l), the processor's work for each
byte (c) and what the network's protocols add (h). The four are fitted to the
rounds of two and three hosts, and checked against those of four, which were
left out. The one that errs less where it was fitted is drawn for 8 to 4,096
workers.

What is drawn is computed and not measured: it knows nothing of switches that
many hosts share, of slow hosts, or of other traffic. Prints tables in Markdown
and draws a picture.
"""

import json
import pathlib
import subprocess
import sys

import cost_model
from absl import app
from absl import flags

from tf_avgstrategy.tools import network_probe

_OUTPUT = flags.DEFINE_string(
    "output", "build/scaling.json", "JSON file for the numbers."
)
_PICTURE = flags.DEFINE_string("picture", "build/scaling.png", "The picture.")
_RATES = flags.DEFINE_list(
    "rates", ["100mbit", "500mbit"], "What hosts may send, for tc."
)
_MEGABYTES = flags.DEFINE_list(
    "megabytes", ["1", "10", "50"], "Sizes of rounds that are measured."
)
_COMMUNICATOR = flags.DEFINE_string(
    "communicator", "horovod", "Whose rounds are measured."
)
_SECONDS = flags.DEFINE_float("seconds", 3.0, "For the turns of one size.")
_DRAWN_RATE = flags.DEFINE_float(
    "drawn_gbit", 1.0, "What a worker of the picture may send, in Gbit/s."
)
_DRAWN_MEGABYTES = flags.DEFINE_float(
    "drawn_megabytes", 100.0, "The weights of the picture's model."
)
_DRAWN_STEP = flags.DEFINE_float(
    "drawn_step_ms", 100.0, "The picture's training step without exchange."
)

_ROOT = pathlib.Path(__file__).parents[1]
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_LEFT_OUT = 4
_WORKERS = (8, 64, 512, 4096)
_PERIODS = tuple(2**power for power in range(11))


def main(_):
    points = [point for rate in _RATES.value for point in measured(rate)]
    fitted = [point for point in points if point.workers != _LEFT_OUT]
    left_out = [point for point in points if point.workers == _LEFT_OUT]
    models = [cost_model.fit(shape, fitted) for shape in ("ring", "tree")]
    print_models(models, fitted, left_out)
    best = min(models, key=lambda model: _largest(model, fitted))
    print_points(best, fitted + left_out)
    print_crossings(best)
    draw(best, _PICTURE.value)
    path = pathlib.Path(_OUTPUT.value)
    path.write_text(
        json.dumps(
            {
                "models": [model._asdict() for model in models],
                "points": [point._asdict() for point in points],
            },
            indent=1,
        )
        + "\n"
    )


def measured(rate):
    """Returns the rounds at a rate as a list of `Point`."""
    path = pathlib.Path(_OUTPUT.value)
    path = path.with_name(f"rounds-{_COMMUNICATOR.value}-{rate}.json")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [
                sys.executable,
                _ROOT / "benchmarks" / "round.py",
                "--places=hosts",
                f"--communicators={_COMMUNICATOR.value}",
                f"--workers=2,3,{_LEFT_OUT}",
                f"--megabytes={','.join(_MEGABYTES.value)}",
                f"--seconds={_SECONDS.value}",
                "--pause=0.5",
                f"--rate={rate}",
                f"--output={path}",
            ],
            check=True,
        )
    rows = json.loads(path.read_text())
    if not rows:
        raise SystemExit(f"There are no rounds in {path}. Remove it.")
    return [
        cost_model.Point(
            row["workers"],
            row["megabytes"] * 1e6,
            bytes_per_second(row["rate"]),
            row["round_ms"]["median"] / 1e3,
        )
        for row in rows
    ]


def bytes_per_second(rate):
    digits = rate.rstrip("abcdefghijklmnopqrstuvwxyz")
    return float(digits) * _UNITS[rate[len(digits) :]] / 8


def _largest(model, points):
    """The largest error of a model, by the share of the time."""
    return max(map(abs, cost_model.errors(model, points)))


def print_models(models, fitted, left_out):
    print(
        "\n| model | start, ms | latency, ms | work, ns per byte | wire bytes "
        f"per byte | largest error, 2 and 3 hosts | {_LEFT_OUT} hosts, left "
        "out |"
    )
    print("|---|---|---|---|---|---|---|")
    for model in models:
        print(
            f"| {model.shape} | {1e3 * model.start:.2f} | "
            f"{1e3 * model.latency:.2f} | {1e9 * model.work:.2f} | "
            f"{model.overhead:.3f} | {_largest(model, fitted):.1%} | "
            f"{_largest(model, left_out):.1%} |"
        )


def print_points(model, points):
    print(f"\n| hosts | MB | Mbit/s | measured, ms | {model.shape}, ms | off |")
    print("|---|---|---|---|---|---|")
    for point, error in zip(points, cost_model.errors(model, points)):
        print(
            f"| {point.workers} | {point.num_bytes / 1e6:g} | "
            f"{point.rate * 8e-6:g} | {1e3 * point.seconds:.1f} | "
            f"{1e3 * model.seconds(*point[:3]):.1f} | {error:+.1%} |"
        )


def _training(model, workers):
    return cost_model.Training(
        model,
        workers,
        _DRAWN_MEGABYTES.value * 1e6,
        _DRAWN_RATE.value * 1e9 / 8,
        _DRAWN_STEP.value / 1e3,
    )


def print_crossings(model):
    print(
        f"\nComputed for {_DRAWN_MEGABYTES.value:g} MB of weights, steps of "
        f"{_DRAWN_STEP.value:g} ms and {_DRAWN_RATE.value:g} Gbit/s.\n"
    )
    print(
        "| workers | synchronous, share of the speed alone | period from which "
        "averaging with Adam's slots is faster | period at which rounds add 5 "
        "% |"
    )
    print("|---|---|---|---|")
    for workers in _WORKERS:
        job = _training(model, workers)
        faster = next(
            period
            for period in range(1, 100)
            if job.local(period, 3) < job.synchronous()
        )
        print(
            f"| {workers} | {job.step / job.synchronous():.3f} | {faster} | "
            f"{network_probe.period_for_share(job.round(3), job.step)} |"
        )


def draw(model, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (speed, volume) = plt.subplots(
        1, 2, figsize=(11, 4.5), layout="constrained"
    )
    for place, workers in enumerate(_WORKERS):
        job = _training(model, workers)
        color = f"C{place}"
        speed.plot(
            _PERIODS,
            [job.step / job.local(period, 3) for period in _PERIODS],
            marker="o",
            color=color,
            label=f"{workers:,} workers",
        )
        speed.axhline(job.step / job.synchronous(), color=color, linestyle="--")
    share = 2 * (_WORKERS[-1] - 1) / _WORKERS[-1] * _DRAWN_MEGABYTES.value
    volume.plot(
        _PERIODS,
        [3 * share / period for period in _PERIODS],
        marker="o",
        label="weights and Adam's slots",
    )
    volume.plot(
        _PERIODS,
        [share / period for period in _PERIODS],
        marker="o",
        label="weights alone",
    )
    volume.axhline(share, color="0.4", linestyle="--", label="synchronous")
    speed.set_ylabel("speed, by that of a worker alone")
    speed.set_ylim(0, 1.05)
    speed.set_title("with Adam's slots; dashed: synchronous training")
    volume.set_ylabel("MB that each worker sends for a step")
    volume.set_yscale("log")
    volume.set_title(f"{_WORKERS[-1]:,} workers in a ring")
    for axis in (speed, volume):
        axis.set_xscale("log", base=2)
        axis.set_xticks(_PERIODS[::2], [str(p) for p in _PERIODS[::2]])
        axis.set_xlabel("period, steps")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(
        f"Computed, not measured: {_DRAWN_MEGABYTES.value:g} MB of weights, "
        f"steps of {_DRAWN_STEP.value:g} ms, {_DRAWN_RATE.value:g} Gbit/s, by "
        f"a {model.shape} fitted to 2 and 3 hosts"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    app.run(main)
