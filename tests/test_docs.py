"""What the pages say is so: examples run, links lead somewhere."""

import doctest
import importlib
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import tf_avgstrategy as avg
from tf_avgstrategy.workers import cluster

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PACKAGE = ROOT / "tf_avgstrategy"
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if ">>>" in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        exec(compile(block, page.name, "exec"), {"__name__": "__main__"})


def test_slurm_recipe_gives_the_cluster_of_a_step(monkeypatch):
    page = (ROOT / "docs" / "launching.md").read_text()
    (block,) = re.findall(r"```py\n(.*?)```", page, re.S)
    step = {
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "n[1-2,7]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
        "SLURM_PROCID": "2",
    }
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TF_CONFIG", "")
    exec(compile(block, "recipe", "exec"), {})
    addresses = ("n1:12345", "n2:12345", "n7:12345")
    assert cluster.from_environment() == (addresses, 2)


def _anchors(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", prose, re.M)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_index_leads_to_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"]({page.name})" in index


def test_changelog_opens_with_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"## \[([^]]+)\]", changelog)[1] == avg.__version__


def test_readme_diff_is_about_names_that_exist():
    readme = (ROOT / "README.md").read_text()
    for name in re.findall(r"tf_avgstrategy\.(\w+)", readme):
        assert name in avg.__all__


def test_contributing_lists_every_module():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for path in PACKAGE.rglob("*.py"):
        is_listed = f"`{path.stem}`" in page or f"`{path.name}`" in page
        assert path.name.startswith("_") or is_listed, path


class TestApiPage:
    """Of what the site's reference is made, see `site_checks.py`."""

    PAGE = (ROOT / "docs" / "api.md").read_text()
    BLOCKS = dict(
        re.findall(r"^::: tf_avgstrategy\.(\w+)\n((?: .+\n)*)", PAGE, re.M)
    )

    def test_has_every_public_name_once(self):
        headings = re.findall(r"^::: tf_avgstrategy\.(\w+)$", self.PAGE, re.M)
        names = set(avg.__all__) - {"__version__"}
        assert sorted(headings) == sorted(names)
        assert "`tf_avgstrategy.__version__`" in self.PAGE

    @pytest.mark.parametrize("name", sorted(BLOCKS))
    def test_lists_members_that_exist(self, name):
        block = re.sub(r"[-\[\],:]", " ", self.BLOCKS[name])
        for member in set(block.split()) - {"options", "members"}:
            assert inspect.getdoc(getattr(getattr(avg, name), member)), member

    @pytest.mark.parametrize("name", sorted(BLOCKS))
    def test_every_public_member_has_a_docstring(self, name):
        public = getattr(avg, name)
        assert public.__doc__
        for member in vars(public) if inspect.isclass(public) else ():
            # Keras says nothing of its `set_model`.
            if member.startswith("_") or member == "set_model":
                continue
            value = getattr(public, member)
            if callable(value) or isinstance(value, property):
                assert inspect.getdoc(value), member


class TestMnist:
    PATH = ROOT / "examples" / "mnist.py"

    def test_is_short_enough_to_be_read(self):
        assert len(self.PATH.read_text().splitlines()) < 100

    def test_is_run_and_drawn_as_the_page_says(self, tmp_path):
        flags = ["--epochs=1", "--replicas=2"]
        for period in (0, 16):
            self.run("mnist.py", f"--period={period}", *flags, cwd=tmp_path)
        table = self.run("plot_mnist.py", cwd=tmp_path).stdout
        assert re.search(r"^one device +0\.\d+ .* 0 +0\.00$", table, re.M)
        # 4000 rows in batches of 64: 63 steps, so 3 rounds and a last one.
        assert re.search(r"^period 16 +0\.\d+ .* 4 +\d\.\d+$", table, re.M)
        assert (tmp_path / "mnist.png").stat().st_size > 10_000

    def run(self, name, *arguments, cwd):
        return subprocess.run(
            [sys.executable, self.PATH.with_name(name), *arguments],
            capture_output=True,
            text=True,
            check=True,
            cwd=cwd,
        )
