"""The command `tf-avgstrategy`."""

import importlib
import math
import sys
import textwrap
from typing import NamedTuple

from absl import app
from absl import flags

from tf_avgstrategy.telemetry import plots

# Commands import what needs TensorFlow, which takes seconds, themselves.
from tf_avgstrategy.tools import horovod_build
from tf_avgstrategy.tools import launcher

__all__ = ["main"]

_USAGE = """Usage: tf-avgstrategy COMMAND

Commands:
  doctor         says whether all is ready, and what the network costs
  launch         runs a script on several workers of this machine
  build-horovod  builds Horovod for the installed TensorFlow, and installs it
  average        writes the mean of the files of several trained models
  plot           draws what rounds cost and gave, of files of round records

`tf-avgstrategy COMMAND --help` lists the options of a command.
"""


class _Command(NamedTuple):
    """A command: what follows its name, what it does, and its options.

    `run` gets the values of the options and a list of the other arguments.
    It raises `flags.Error` if it cannot take them.
    """

    run: object
    synopsis: str
    options: flags.FlagValues


def main():
    """Runs the command line and exits with its status."""
    app.run(_run, flags_parser=_leave_to_commands)


def _leave_to_commands(argv):
    flags.FLAGS(argv[:1])
    return argv


def _run(argv):
    commands = {
        "doctor": _Command(_doctor, "[OPTIONS]", _doctor_options()),
        "launch": _Command(
            _launch,
            "[OPTIONS] SCRIPT|-m MODULE [ARGUMENTS OF THE SCRIPT]",
            _launch_options(),
        ),
        "build-horovod": _Command(
            _build_horovod, "[OPTIONS]", _build_horovod_options()
        ),
        "average": _Command(
            _average, "--output=FILE [OPTIONS] FILES", _average_options()
        ),
        "plot": _Command(_plot, "[OPTIONS] FILES", _plot_options()),
    }
    name, arguments = "".join(argv[1:2]), argv[2:]
    if name in ("--help", "-h", "help"):
        print(_USAGE, end="")
        return 0
    if name not in commands:
        print(_USAGE, end="", file=sys.stderr)
        return 2
    return _run_command(name, commands[name], arguments)


def _run_command(name, command, arguments):
    try:
        others = _parse(command.options, arguments)
        if command.options.help:
            print(_usage(name, command))
            return 0
        return command.run(command.options, others)
    except flags.Error as error:
        print(
            f"tf-avgstrategy {name}: {error}\nReceived: {arguments}. See "
            f"`tf-avgstrategy {name} --help`.",
            file=sys.stderr,
        )
        return 2


def _parse(options, arguments):
    """Sets the options. Returns the arguments from the first that is none."""
    # absl would go on behind "-m module", which begins the script's own.
    end = arguments.index("-m") if "-m" in arguments else len(arguments)
    before = options(["tf-avgstrategy", *arguments[:end]])
    return before[1:] + arguments[end:]


def _usage(name, command):
    lines = [f"Usage: tf-avgstrategy {name} {command.synopsis}".rstrip(), ""]
    for option in command.options:
        # Neither the short names nor the spellings with dashes.
        if len(option) > 1 and "-" not in option:
            flag = command.options[option]
            text = f"--{option}: {flag.help} (default: {flag.default})"
            lines.append(
                textwrap.fill(
                    text,
                    initial_indent="  ",
                    subsequent_indent="    ",
                    break_on_hyphens=False,
                )
            )
    return "\n".join(lines)


def _options():
    options = flags.FlagValues()
    # What follows the script is the script's.
    options.set_gnu_getopt(False)
    flags.DEFINE_boolean(
        "help", False, "Show this.", short_name="h", flag_values=options
    )
    return options


def _allow_dashes(options):
    for name in list(options):
        if "_" in name:
            flags.DEFINE_alias(
                name.replace("_", "-"), name, flag_values=options
            )
    return options


def _doctor_options():
    options = _options()
    flags.DEFINE_integer(
        "workers",
        None,
        "Measure between so many workers of this machine. None: between those "
        "of the cluster that this process belongs to, if any.",
        lower_bound=2,
        flag_values=options,
    )
    flags.DEFINE_enum(
        "communicator",
        None,
        launcher.COMMUNICATORS,
        "How workers exchange. None: TensorFlow's collectives with --workers, "
        "what the job was started with in a cluster.",
        flag_values=options,
    )
    flags.DEFINE_float(
        "parameters",
        25e6,
        "Parameters of the model whose rounds are measured.",
        flag_values=options,
    )
    flags.DEFINE_float(
        "step_ms",
        None,
        "Milliseconds that a training step takes: computes the period at which "
        "exchange costs 5 %.",
        flag_values=options,
    )
    flags.DEFINE_float(
        "start_timeout_seconds",
        60.0,
        "How long all workers may take to come.",
        flag_values=options,
    )
    return _allow_dashes(options)


def _doctor(options, others):
    from tf_avgstrategy.tools import doctor

    _check_no_more(others)
    _check_positive(options, "parameters")
    if options.parameters != int(options.parameters):
        raise flags.Error(
            "--parameters must be a whole number, such as 25e6, not "
            f"{options.parameters:g}."
        )
    _check_positive(options, "step_ms")
    _check_positive(options, "start_timeout_seconds")
    if options.workers is not None:
        return _doctor_here(options)
    return doctor.examine(
        options.communicator or "auto",
        num_parameters=int(options.parameters),
        step_seconds=options.step_ms and options.step_ms / 1000,
        start_timeout_seconds=options.start_timeout_seconds,
    )


def _doctor_here(options):
    """Runs the command on each of several workers of this machine."""
    from tf_avgstrategy.tools import doctor

    names = ("parameters", "step_ms", "start_timeout_seconds")
    script = ["-m", "tf_avgstrategy.tools.cli", "doctor"]
    script += [
        f"--{name}={options[name].value}"
        for name in names
        if options[name].value is not None
    ]
    try:
        doctor.check_no_workers()
        return launcher.launch(
            script,
            num_workers=options.workers,
            communicator=options.communicator or "collective",
            quiet=True,
        )
    except (ValueError, ImportError) as error:
        print(f"tf-avgstrategy doctor: {error}", file=sys.stderr)
        return 2 if isinstance(error, launcher.LaunchError) else 1


def _check_positive(options, name):
    value = options[name].value
    if value is not None and not 0 < value < math.inf:
        raise flags.Error(f"--{name} must be a number > 0, not {value:g}.")


def _check_no_more(others):
    if others:
        raise flags.Error(f"There must be options alone, not {others[0]!r}.")


def _launch_options():
    options = _options()
    flags.DEFINE_integer(
        "workers",
        1,
        "Number of processes that train together.",
        lower_bound=1,
        flag_values=options,
    )
    flags.DEFINE_integer(
        "devices_per_worker",
        None,
        "GPUs for each worker, virtual CPU devices where there are no GPUs. "
        "None: an equal share of the GPUs, or one CPU device.",
        lower_bound=1,
        flag_values=options,
    )
    flags.DEFINE_enum(
        "communicator",
        "collective",
        launcher.COMMUNICATORS,
        "TensorFlow's own collectives, or horovod.",
        flag_values=options,
    )
    flags.DEFINE_boolean(
        "quiet_workers",
        False,
        "Show the output of rank 0 alone, and the last lines of a worker "
        "that fails.",
        flag_values=options,
    )
    flags.DEFINE_integer(
        "max_restarts",
        0,
        "How often all workers are started again after one has failed. With "
        "BackupAndRestore training goes on from the last backup.",
        lower_bound=0,
        flag_values=options,
    )
    return _allow_dashes(options)


def _launch(options, script):
    if not script:
        raise flags.Error(
            "The path of a script must follow the options, or -m and a module."
        )
    try:
        return launcher.launch(
            script,
            num_workers=options.workers,
            devices_per_worker=options.devices_per_worker,
            communicator=options.communicator,
            quiet=options.quiet_workers,
            max_restarts=options.max_restarts,
        )
    except (launcher.LaunchError, ImportError) as error:
        print(f"tf-avgstrategy launch: {error}", file=sys.stderr)
        return 2 if isinstance(error, launcher.LaunchError) else 1


def _build_horovod_options():
    options = _options()
    for name, help_text in (
        ("with_nccl", "Use NCCL among GPUs."),
        ("with_mpi", "Use MPI beside Gloo."),
        ("rebuild", "Build again what was built before."),
    ):
        flags.DEFINE_boolean(name, False, help_text, flag_values=options)
    return _allow_dashes(options)


def _build_horovod(options, others):
    _check_no_more(others)
    try:
        horovod_build.build(
            with_nccl=options.with_nccl,
            with_mpi=options.with_mpi,
            rebuild=options.rebuild,
            install=True,
        )
    except horovod_build.HorovodBuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _average_options():
    options = _options()
    # Options may follow files here.
    options.set_gnu_getopt(True)
    flags.DEFINE_string(
        "output",
        None,
        "Where the mean is written: a file of the kind that is averaged "
        "(.keras, .weights.h5, prefix of a checkpoint, SavedModel). It may be "
        "one of those.",
        flag_values=options,
    )
    flags.DEFINE_list(
        "weights",
        None,
        "A number >= 0 for each file, such as 2,1. None: equal ones.",
        flag_values=options,
    )
    flags.DEFINE_string(
        "refresh_batch_norm",
        None,
        "PACKAGE.MODULE:FUNCTION, which returns a tf.data.Dataset. One pass "
        "over it gives BatchNormalization the statistics of its rows. For "
        ".keras files.",
        flag_values=options,
    )
    return _allow_dashes(options)


def _average(options, paths):
    from tf_avgstrategy.files import checkpoint_averaging

    if not paths or options.output is None:
        raise flags.Error("There must be files to average, and --output.")
    weights = options.weights and _floats(options.weights)
    dataset = options.refresh_batch_norm and _call(options.refresh_batch_norm)
    try:
        checkpoint_averaging.average_models(
            paths,
            weights,
            output=options.output,
            refresh_batch_norm=dataset,
        )
    except (ValueError, OSError) as error:
        print(f"tf-avgstrategy average: {error}", file=sys.stderr)
        return 1
    return 0


def _plot_options():
    options = _options()
    options.set_gnu_getopt(True)
    flags.DEFINE_string(
        "output",
        "run.png",
        "The picture: .png, .pdf, .svg.",
        flag_values=options,
    )
    flags.DEFINE_boolean(
        "compare",
        False,
        "Show totals of the runs in place of parts of rounds and stragglers.",
        flag_values=options,
    )
    return _allow_dashes(options)


def _plot(options, paths):
    if not paths:
        raise flags.Error(
            "There must be files that PeriodicAveraging(log_file=...) wrote."
        )
    try:
        runs = [plots.read(path) for path in paths]
        plots.draw(runs, options.output, is_comparison=options.compare)
    except (ValueError, OSError) as error:
        print(f"tf-avgstrategy plot: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(
            f"tf-avgstrategy plot: {error}. Run `pip install matplotlib`.",
            file=sys.stderr,
        )
        return 1
    print(options.output)
    return 0


def _floats(texts):
    try:
        return [float(text) for text in texts]
    except ValueError as error:
        raise flags.Error(f"--weights must be numbers: {error}.") from error


def _call(name):
    """Returns what a function returns, of a module here or installed."""
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), function)()
    except (ValueError, ImportError, AttributeError) as error:
        raise flags.Error(
            "--refresh_batch_norm must name a function, as "
            f"package.module:function: {error}."
        ) from error
    finally:
        sys.path.remove("")


# So that `doctor` can start itself on workers.
if __name__ == "__main__":
    main()
