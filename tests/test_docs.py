"""What the pages say is so: examples run, links lead somewhere."""

import doctest
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

import tf_avgstrategy as avg

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MODULES = sorted(
    path.stem
    for path in (ROOT / "tf_avgstrategy").glob("*.py")
    if ">>>" in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(f"tf_avgstrategy.{name}")
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        exec(compile(block, page.name, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def test_changelog_opens_with_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"## \[([^]]+)\]", changelog)[1] == avg.__version__


def test_readme_diff_is_about_names_that_exist():
    readme = (ROOT / "README.md").read_text()
    for name in re.findall(r"tf_avgstrategy\.(\w+)", readme):
        assert name in avg.__all__


def test_contributing_lists_every_module():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for path in (ROOT / "tf_avgstrategy").glob("*.py"):
        assert path.name.startswith("_") or f"`{path.name}`" in page


class TestMnist:
    PATH = ROOT / "examples" / "mnist.py"

    def test_is_short_enough_to_be_read(self):
        assert len(self.PATH.read_text().splitlines()) < 100

    def test_runs_as_a_script_with_flags(self, tmp_path):
        done = subprocess.run(
            [
                sys.executable,
                self.PATH,
                "--period=16",
                "--epochs=1",
                "--replicas=2",
            ],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
        )
        assert (tmp_path / "mnist.png").stat().st_size > 10_000
        row = re.search(
            r"^period 16 +([\d.]+) +[\d.]+ +(\d+)", done.stdout, re.M
        )
        # 63 batches, a round after every 16th and before the validation.
        assert int(row[2]) == 4
        # Ten classes: guessing gives 0.1. Seen: 0.5 to 0.8.
        assert float(row[1]) > 0.3
