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
least and the most. Horovod's tape runs in processes of its own, since this
library changes settings of Horovod in its processes.

Each result is added to a JSON file at once: what a run that was cut has
measured is not measured again. Prints tables in Markdown and draws a picture.
With the default settings it takes well over an hour on 2 cores. Needs root and
iproute2. PyTorch is measured if `.venv-torch` has it, which
`make .venv-torch/.installed` makes. What cannot be run has rows that say so.
"""

import importlib.util
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile

import network_rows
import network_tables
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
    list(network_rows.LIBRARIES),
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
_LIMIT_SECONDS = 1800
_SKIPPED = 77  # What tests/hosts.sh says where it cannot make hosts.
# Where workers meet, a folder in it for each run.
_FOLDER = tempfile.TemporaryDirectory()


def main(_):
    path = pathlib.Path(_OUTPUT.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(path.read_text()) if path.exists() else []
    has_failed = False
    if not _TABLES.value:
        check_settings(rows, path)
        for row in measure_all(rows):
            rows = network_rows.replaced(rows, row)
            write(path, rows)
            has_failed |= row.get("not_run", "").startswith("failed")
    print_circumstances(rows)
    print(network_tables.text(rows))
    network_tables.draw(rows, _PICTURE.value)
    if has_failed:
        raise SystemExit("What failed is in the tables as not run.")


def settings():
    """Returns what the rows of a file have in common, a dict."""
    return {
        "rows": _ROWS.value,
        "seconds": _SECONDS.value,
        "machine": machine(),
    }


def machine():
    cpus = pathlib.Path("/proc/cpuinfo").read_text()
    found = re.search(r"^model name\s*: (.*)$", cpus, re.MULTILINE)
    name = found[1] if found else platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores, {name}"


def check_settings(rows, path):
    """Raises SystemExit if a file's rows cannot stand beside new ones."""
    own = settings()
    for row in rows:
        if row.get("settings", own) != own:
            raise SystemExit(
                f"The rows of {path} must be measured alike. Received: "
                f"{row['settings']} there and {own} now. Pass another "
                "--output, or remove the file."
            )


def write(path, rows):
    """Writes a file that is never half there."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(rows, indent=1) + "\n")
    unfinished.rename(path)


def measure_all(rows):
    """Measures what is not known yet, and yields a dict for each result."""
    for hosts in map(int, _HOSTS.value):
        for rate in _RATES.value:
            for library in _LIBRARIES.value:
                place = {"hosts": hosts, "rate": rate, "library": library}
                wanted = network_rows.missing(
                    rows,
                    **place,
                    sizes=list(map(float, _MEGABYTES.value)),
                    periods=_PERIODS.value,
                )
                if wanted:
                    yield from measure(place, wanted)


def measure(place, wanted):
    """Runs one library, and yields its results, or why there are none.

    Args:
        place: Dict with the number of hosts, the rate and the library.
        wanted: List of pairs of megabytes and way.
    """
    print("{hosts} hosts, {rate}, {library}".format(**place), flush=True)
    reason = reason_against(place["library"])
    output = []
    left = list(wanted)
    if reason is None:
        process = start(place, wanted)
        for line in process.stdout:
            output.append(line)
            _, is_result, text = line.partition("RESULT ")
            if is_result:
                row = json.loads(text)
                left.remove((row["megabytes"], row["way"]))
                print(f"  {text.strip()}", flush=True)
                yield {**place, **row, "settings": settings()}
        code = process.wait()
        reason = f"failed with exit code {code}"
        if code == _SKIPPED:
            reason = output[-1].strip()
        elif code:
            print("".join(output[-40:]), file=sys.stderr, flush=True)
    for megabytes, way in left:
        row = {"megabytes": megabytes, "way": way, "not_run": reason}
        print(f"  {way}, {megabytes:g} MB: not run, {reason}", flush=True)
        yield {**place, **row, "settings": settings()}


def reason_against(library):
    """Returns why a library cannot be run here, or None."""
    if library == "torch" and not _TORCH.exists():
        return "PyTorch is not installed, there is no .venv-torch"
    needs_horovod = library in ("horovod", "tape")
    if needs_horovod and importlib.util.find_spec("horovod") is None:
        return "Horovod is not installed"
    return None


def start(place, wanted):
    """Starts a worker on each host. Returns the process of all."""
    library = place["library"]
    is_torch = library == "torch"
    task = {
        "library": library,
        "wanted": wanted,
        "periods": {f"period {p}": int(p) for p in _PERIODS.value},
        "rows": _ROWS.value,
        "seconds": _SECONDS.value,
    }
    needs_horovod = library in ("horovod", "tape")
    return subprocess.Popen(
        [
            _ROOT / "tests" / "hosts.sh",
            "run",
            f"--hosts={place['hosts']}",
            f"--rate={place['rate']}",
            f"--communicator={'horovod' if needs_horovod else 'collective'}",
            f"--limit={_LIMIT_SECONDS}",
            "--",
            _ROOT
            / "benchmarks"
            / ("network_torch.py" if is_torch else "network_keras.py"),
            tempfile.mkdtemp(dir=_FOLDER.name),
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


def print_circumstances(rows):
    """Prints machine and command of the rows, as they were measured."""
    for text in dict.fromkeys(
        json.dumps(row["settings"]) for row in rows if "settings" in row
    ):
        own = json.loads(text)
        print(
            f"\n{own['machine']}. `python benchmarks/network.py "
            f"--rows={own['rows']} --seconds={own['seconds']}`\n"
        )


if __name__ == "__main__":
    app.run(main)
