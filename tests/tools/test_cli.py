import re
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import tf_avgstrategy as avg
from tf_avgstrategy.tools import cli
from tf_avgstrategy.tools import doctor
from tf_avgstrategy.tools import horovod_build
from tf_avgstrategy.tools import launcher


def run(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["tf-avgstrategy", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    return exit_info.value.code, capsys.readouterr()


class TestDoctor:
    @pytest.fixture
    def examined(self, monkeypatch):
        """The arguments of `examine`, which returns 1."""
        calls = []

        def examine(communicator, **options):
            calls.append((communicator, options))
            return 1

        monkeypatch.setattr(doctor, "examine", examine)
        return calls

    @pytest.fixture
    def launched(self, monkeypatch):
        """The arguments of `launch`, which returns 1."""
        calls = []

        def launch(script, **options):
            calls.append((script, options))
            return 1

        monkeypatch.setattr(launcher, "launch", launch)
        return calls

    def test_prints_versions_and_devices(self, capsys, monkeypatch):
        code, output = run(capsys, monkeypatch, "doctor")
        assert not code
        for line in (
            f"tf_avgstrategy {avg.__version__}",
            f"tensorflow {tf.__version__}: supported",
            f"keras {keras.__version__}: supported",
            "device CPU:0",
        ):
            assert line in output.out

    def test_says_what_a_version_should_be(self, capsys, monkeypatch):
        monkeypatch.setattr(keras, "__version__", "2.1")
        code, output = run(capsys, monkeypatch, "doctor")
        assert code == 1
        assert "keras 2.1: not supported, needs >= 3.5, < 4.0" in output.out

    def test_defaults(self, capsys, monkeypatch, examined):
        code, _ = run(capsys, monkeypatch, "doctor")
        assert code == 1
        options = {
            "num_parameters": 25_000_000,
            "step_seconds": None,
            "start_timeout_seconds": 60,
        }
        assert examined == [("auto", options)]

    def test_options(self, capsys, monkeypatch, examined):
        arguments = [
            *("--communicator=horovod", "--parameters=3e3", "--step-ms=250"),
            "--start_timeout_seconds=5",
        ]
        run(capsys, monkeypatch, "doctor", *arguments)
        options = {
            "num_parameters": 3000,
            "step_seconds": 0.25,
            "start_timeout_seconds": 5,
        }
        assert examined == [("horovod", options)]

    @pytest.mark.parametrize(
        ("communicator", "used"),
        [([], "collective"), (["--communicator=horovod"], "horovod")],
    )
    def test_starts_itself_on_local_workers(
        self, capsys, monkeypatch, launched, communicator, used
    ):
        options = ["--workers=3", "--step_ms=0.5", "--parameters=7"]
        code, _ = run(capsys, monkeypatch, "doctor", *options, *communicator)
        assert code == 1
        ((script, settings),) = launched
        assert script == [
            *("-m", "tf_avgstrategy.tools.cli", "doctor", "--parameters=7.0"),
            *("--step_ms=0.5", "--start_timeout_seconds=60.0"),
        ]
        assert settings == {
            "num_workers": 3,
            "communicator": used,
            "quiet": True,
        }

    @pytest.mark.parametrize(
        ("argument", "message"),
        [
            ("--parameters=0.5", "must be a whole number, such as 25e6, not"),
            ("--parameters=0", "--parameters must be a number > 0, not 0."),
            ("--parameters=inf", "--parameters must be a number > 0, not inf"),
            ("--parameters=many", "--parameters=many: could not convert"),
            ("--step_ms=0", "--step_ms must be a number > 0, not 0."),
            ("--step_ms=-3", "--step_ms must be a number > 0, not -3."),
            ("--step_ms=nan", "--step_ms must be a number > 0, not nan."),
            ("--start_timeout_seconds=0", "must be a number > 0, not 0."),
            ("--workers=1", "--workers=1: 1 is not"),
            ("--communicator=mpi", "<collective|horovod>"),
        ],
    )
    def test_refuses_other_options(
        self, capsys, monkeypatch, examined, launched, argument, message
    ):
        code, output = run(capsys, monkeypatch, "doctor", argument)
        assert code == 2
        assert output.err.startswith("tf-avgstrategy doctor: ")
        assert message in output.err
        assert f"Received: ['{argument}']. See `tf-avgstrategy doctor" in (
            output.err
        )
        assert not examined
        assert not launched

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ("{", "TF_CONFIG: must be JSON"),
            (
                '{"cluster": {"worker": ["a:1", "b:1"]}, '
                '"task": {"type": "worker", "index": 0}}',
                "--workers is for a process that belongs to no cluster",
            ),
        ],
    )
    def test_starts_no_workers_in_a_cluster(
        self, capsys, monkeypatch, launched, config, message
    ):
        monkeypatch.setenv("TF_CONFIG", config)
        code, output = run(capsys, monkeypatch, "doctor", "--workers=2")
        assert code == 1
        assert output.err.startswith(f"tf-avgstrategy doctor: {message}")
        assert not launched

    def test_says_how_to_get_horovod(self, capsys, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        options = ["--workers=2", "--communicator=horovod"]
        code, output = run(capsys, monkeypatch, "doctor", *options)
        assert code == 1
        assert "Run `tf-avgstrategy build-horovod`" in output.err


class TestLaunch:
    @pytest.fixture
    def launched(self, monkeypatch):
        """The arguments of `launch`, which returns 7."""
        calls = []

        def launch(script, **options):
            calls.append((script, options))
            return 7

        monkeypatch.setattr(launcher, "launch", launch)
        return calls

    def test_what_follows_the_script_is_its_own(
        self, capsys, monkeypatch, launched
    ):
        script = ["train.py", "--workers=9", "-m", "--help", "--", "--unknown"]
        options = [
            *("--workers", "4", "--devices_per_worker=2"),
            *("--communicator=horovod", "--quiet_workers"),
        ]
        code, _ = run(capsys, monkeypatch, "launch", *options, *script)
        assert code == 7
        assert launched == [
            (
                script,
                {
                    "num_workers": 4,
                    "devices_per_worker": 2,
                    "communicator": "horovod",
                    "quiet": True,
                    "max_restarts": 0,
                },
            )
        ]

    @pytest.mark.parametrize(
        "script", [["train.py"], ["-m", "train", "--workers=3"], ["-m"]]
    )
    def test_defaults(self, capsys, monkeypatch, launched, script):
        run(capsys, monkeypatch, "launch", *script)
        assert launched == [
            (
                script,
                {
                    "num_workers": 1,
                    "devices_per_worker": None,
                    "communicator": "collective",
                    "quiet": False,
                    "max_restarts": 0,
                },
            )
        ]

    def test_dashes_are_as_good(self, capsys, monkeypatch, launched):
        run(
            capsys,
            monkeypatch,
            *("launch", "--devices-per-worker=2", "--quiet-workers", "a.py"),
        )
        assert launched[0][1]["devices_per_worker"] == 2
        assert launched[0][1]["quiet"]

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ([], "The path of a script must follow"),
            (["--workers=2"], "The path of a script must follow"),
            (["--workers=0", "a.py"], "--workers=0: 0 is not"),
            (["--workers=x", "a.py"], "--workers=x: invalid literal"),
            (["--devices_per_worker=0", "a.py"], "0 is not"),
            (["--communicator=mpi", "a.py"], "<collective|horovod>"),
            (["--worker=2", "a.py"], "Did you mean: workers"),
            (["--workers"], "Missing value for flag --workers"),
        ],
    )
    def test_refuses_other_options(
        self, capsys, monkeypatch, launched, arguments, message
    ):
        code, output = run(capsys, monkeypatch, "launch", *arguments)
        assert code == 2
        assert output.err.startswith("tf-avgstrategy launch: ")
        assert message in output.err
        assert f"Received: {arguments}. See `tf-avgstrategy launch --help`" in (
            output.err
        )
        assert not launched

    def test_what_cannot_be_started_is_a_usage_error(self, capsys, monkeypatch):
        code, output = run(capsys, monkeypatch, "launch", "no_such_file.py")
        assert code == 2
        assert output.err.startswith("tf-avgstrategy launch: `script` must")
        assert "Received: ['no_such_file.py']. Correct" in output.err

    def test_says_how_to_get_horovod(self, capsys, monkeypatch):
        def launch(*_, **__):
            raise ImportError("Run `tf-avgstrategy build-horovod`.")

        monkeypatch.setattr(launcher, "launch", launch)
        code, output = run(capsys, monkeypatch, "launch", "a.py")
        assert code == 1
        assert output.err == (
            "tf-avgstrategy launch: Run `tf-avgstrategy build-horovod`.\n"
        )


class TestBuildHorovod:
    @pytest.fixture
    def built(self, monkeypatch):
        calls = []
        monkeypatch.setattr(
            horovod_build, "build", lambda **options: calls.append(options)
        )
        return calls

    @pytest.mark.parametrize(
        "arguments, chosen",
        [
            ([], set()),
            (["--with_nccl", "--rebuild"], {"with_nccl", "rebuild"}),
            (["--with-nccl", "--with-mpi"], {"with_nccl", "with_mpi"}),
            (["--with-nccl=true", "--nowith-mpi"], {"with_nccl"}),
        ],
    )
    def test_builds_with_what_is_asked_for(
        self, capsys, monkeypatch, built, arguments, chosen
    ):
        code, _ = run(capsys, monkeypatch, "build-horovod", *arguments)
        assert not code
        names = ("with_nccl", "with_mpi", "rebuild")
        expected = {name: name in chosen for name in names}
        assert built == [{**expected, "install": True}]

    def test_prints_why_it_failed(self, capsys, monkeypatch):
        def build(**_):
            raise horovod_build.HorovodBuildError("No compiler. Install g++.")

        monkeypatch.setattr(horovod_build, "build", build)
        code, output = run(capsys, monkeypatch, "build-horovod")
        assert code == 1
        assert output.err == "No compiler. Install g++.\n"


@pytest.mark.parametrize("arguments", [(), ("start",), ("start", "--help")])
def test_anything_else_prints_the_usage(capsys, monkeypatch, arguments):
    code, output = run(capsys, monkeypatch, *arguments)
    assert code == 2
    assert output.err.startswith("Usage: tf-avgstrategy COMMAND")


@pytest.mark.parametrize("command", ["doctor", "build-horovod"])
@pytest.mark.parametrize(
    "argument, message",
    [("more", "options alone, not 'more'"), ("--more", "flag 'more'")],
)
def test_commands_refuse_arguments(
    capsys, monkeypatch, command, argument, message
):
    code, output = run(capsys, monkeypatch, command, argument)
    assert code == 2
    assert message in output.err
    assert f"Received: ['{argument}']. See" in output.err


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize(
    "command, options",
    [
        ([], []),
        (
            ["doctor"],
            [
                *("help", "workers", "communicator", "parameters"),
                *("step_ms", "start_timeout_seconds"),
            ],
        ),
        (
            ["launch"],
            [
                *("help", "workers", "devices_per_worker"),
                *("communicator", "max_restarts", "quiet_workers"),
            ],
        ),
        (["build-horovod"], ["help", "with_nccl", "with_mpi", "rebuild"]),
        (["average"], ["help", "output", "refresh_batch_norm", "weights"]),
    ],
)
def test_help(capsys, monkeypatch, command, options, option):
    code, output = run(capsys, monkeypatch, *command, option)
    assert not code
    usage = " ".join(["Usage: tf-avgstrategy", *(command or ["COMMAND"])])
    assert output.out.startswith(usage)
    listed = re.findall(r"^  --(\w+): ", output.out, flags=re.MULTILINE)
    assert sorted(listed) == sorted(options)


def test_the_command_is_installed():
    command = [
        sys.executable,
        "-c",
        "from tf_avgstrategy.tools import cli; cli.main()",
    ]
    done = subprocess.run(
        [*command, "doctor"], capture_output=True, text=True, check=True
    )
    assert "supported" in done.stdout


def test_launching_does_not_load_tensorflow():
    # It would take seconds, and memory for as long as workers train.
    code = (
        "import sys; from tf_avgstrategy.tools import cli; sys.argv[1:] = "
        "['launch', '--help']\n"
        "try: cli.main()\n"
        "except SystemExit: print({'tensorflow', 'keras'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"
