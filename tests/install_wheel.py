"""Installs a wheel where nothing else of the project is, and imports it.

python tests/install_wheel.py FOLDER_OF_THE_WHEEL ENVIRONMENT
"""

import pathlib
import subprocess
import sys
import tempfile
import venv

_ROOT = pathlib.Path(__file__).parent.parent
_CHECK = """
import pathlib, sys
import tf_avgstrategy as avg
assert pathlib.Path(avg.__file__).is_relative_to(sys.prefix), avg.__file__
missing = [name for name in avg.__all__ if not hasattr(avg, name)]
assert not missing, missing
strategy = avg.ParameterAveragingStrategy(["CPU:0"])
print(avg.__version__, "imported from", avg.__file__)
"""


def main(wheel_folder, environment):
    (wheel,) = pathlib.Path(wheel_folder).glob("*.whl")
    environment = pathlib.Path(environment).resolve()
    python = environment / "bin" / "python"
    if not python.exists():
        venv.create(environment, with_pip=True)
    pip = [python, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "uninstall", "--yes", "tf_avgstrategy"], check=True)
    # With the wheel's own requirements, at the versions that were tested.
    pins = _ROOT / "requirements" / "dev.txt"
    install = [*pip, "install", "--constraint", pins, wheel.resolve()]
    subprocess.run(install, check=True)
    subprocess.run([*pip, "check"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-c", _CHECK], check=True, cwd=folder)
        command = environment / "bin" / "tf-avgstrategy"
        subprocess.run([command, "doctor"], check=True, cwd=folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
