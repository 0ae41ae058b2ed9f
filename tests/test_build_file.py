"""`BUILD` says what the code imports, no more and no less."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = "tf_avgstrategy"
RUNNER = "tests/run_pytest.py"


def _rules():
    """The rules of the file, as dicts. Bazel's syntax is Python's."""
    rules = []
    for node in ast.parse((ROOT / "BUILD").read_text()).body:
        call = getattr(node, "value", None)
        if isinstance(call, ast.Call) and call.func.id.startswith("py_"):
            rule = {
                keyword.arg: ast.literal_eval(keyword.value)
                for keyword in call.keywords
                if keyword.arg != "data"
            }
            rules.append({"kind": call.func.id, **rule})
    return rules


RULES = _rules()
BY_SOURCE = {rule["srcs"][-1]: rule for rule in RULES}


def _dependencies(path):
    """Names of the rules that a file's imports need."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            source = _source_of(name)
            if source is not None:
                found.add(":" + BY_SOURCE[source]["name"])
    return found


def _source_of(name):
    first, *rest = name.split(".")
    if first == PACKAGE:
        # From the deepest module that there is: names may be objects.
        for candidate in [*rest[:1], "__init__"]:
            if (ROOT / PACKAGE / f"{candidate}.py").exists():
                return f"{PACKAGE}/{candidate}.py"
    for folder in ("tests", "tests/integration"):
        if (ROOT / folder / f"{first}.py").exists():
            return f"{folder}/{first}.py"
    return None


def _files(kind):
    if kind == "py_test":
        return sorted((ROOT / "tests").rglob("test_*.py"))
    if kind == "py_binary":
        return sorted((ROOT / "examples").glob("*.py"))
    return sorted((ROOT / PACKAGE).glob("*.py"))


@pytest.mark.parametrize("kind", ["py_library", "py_test", "py_binary"])
def test_every_file_has_its_rule(kind):
    files = {str(path.relative_to(ROOT)) for path in _files(kind)}
    listed = {
        rule["srcs"][-1]
        for rule in RULES
        if rule["kind"] == kind and not rule.get("testonly")
    }
    assert listed == files


@pytest.mark.parametrize("source", sorted(BY_SOURCE))
def test_dependencies_are_the_imports(source):
    rule = BY_SOURCE[source]
    expected = _dependencies(ROOT / source)
    if rule["kind"] == "py_test":
        assert rule["srcs"][0] == rule["main"] == RUNNER
        expected.add(":conftest")
        if source.startswith("tests/integration/"):
            expected.add(":integration_conftest")
    assert set(rule.get("deps", [])) == expected
    assert rule.get("deps", []) == sorted(rule.get("deps", []))


def test_names_are_unique():
    names = [rule["name"] for rule in RULES]
    assert len(set(names)) == len(names)
