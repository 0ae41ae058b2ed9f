import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import tf_avgstrategy as avg
from tf_avgstrategy import cli


def run(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["tf-avgstrategy", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    return exit_info.value.code, capsys.readouterr()


class TestDoctor:
    def test_prints_versions_and_devices(self, capsys, monkeypatch):
        code, output = run(capsys, monkeypatch, "doctor")
        assert not code
        for line in (
            f"tf_avgstrategy {avg.__version__}",
            f"tensorflow {tf.__version__}: supported",
            f"keras {keras.__version__}: supported",
            "device /device:CPU:3",
        ):
            assert line in output.out

    def test_says_what_a_version_should_be(self, capsys, monkeypatch):
        monkeypatch.setattr(cli.importlib.metadata, "version", lambda _: "2.1")
        code, output = run(capsys, monkeypatch, "doctor")
        assert code == 1
        assert "keras 2.1: not supported, needs >= 3.5, < 4.0" in output.out


@pytest.mark.parametrize("arguments", [(), ("launch",), ("doctor", "more")])
def test_anything_else_prints_the_usage(capsys, monkeypatch, arguments):
    code, output = run(capsys, monkeypatch, *arguments)
    assert code == 2
    assert output.err.startswith("Usage: tf-avgstrategy COMMAND")


def test_the_command_is_installed():
    command = [
        sys.executable,
        "-c",
        "from tf_avgstrategy import cli; cli.main()",
    ]
    done = subprocess.run(
        [*command, "doctor"], capture_output=True, text=True, check=True
    )
    assert "supported" in done.stdout
