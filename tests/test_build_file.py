"""The `BUILD` of each folder says what its code imports, and no more."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = "tf_avgstrategy"
FOLDERS = sorted(
    str(path.parent.relative_to(ROOT))
    for top in (PACKAGE, "tests", "examples")
    for path in (ROOT / top).rglob("BUILD")
)


def _rules(folder):
    """The rules of a folder, as dicts. Bazel's syntax is Python's."""
    rules = []
    for node in ast.parse((ROOT / folder / "BUILD").read_text()).body:
        call = getattr(node, "value", None)
        if isinstance(call, ast.Call) and call.func.id.startswith("py_"):
            rule = {"kind": call.func.id}
            for keyword in call.keywords:
                rule[keyword.arg] = _value(folder, keyword.value)
            rules.append(rule)
    return rules


def _value(folder, node):
    """A literal, or the files that a glob finds."""
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    patterns = ast.literal_eval(node.args[0])
    exclude = [ast.literal_eval(k.value) for k in node.keywords]
    found, left_out = (
        {p.name for each in names for p in (ROOT / folder).glob(each)}
        for names in (patterns, sum(exclude, []))
    )
    return sorted(found - left_out)


def _sources(folder, rule):
    names = rule.get("srcs")
    if rule["kind"] == "py_tests":
        names = [p.name for p in (ROOT / folder).glob("test_*.py")]
    return [ROOT / folder / name for name in names]


def _dependencies(folder, rule):
    """Labels of the rules that the imports of a rule's files need."""
    found = set()
    for path in _sources(folder, rule):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {_label(name) for name in names}
    found -= {None, f"//{folder}:{rule.get('name')}"}
    return {label.removeprefix(f"//{folder}:").strip() for label in found}


def _label(name):
    first, *rest = name.split(".")
    for folder in ("tests", "tests/integration"):
        if (ROOT / folder / f"{first}.py").exists():
            return f"//{folder}:support"
    if first != PACKAGE:
        return None
    if rest and (ROOT / PACKAGE / rest[0]).is_dir():
        return f"//{PACKAGE}/{rest[0]}:{rest[0]}"
    if rest and (ROOT / PACKAGE / f"{rest[0]}.py").exists():
        return f"//{PACKAGE}:{rest[0].lstrip('_')}"
    return f"//{PACKAGE}:{PACKAGE}"


def _full(folder, label):
    """A label with its folder and its name, less this folder's."""
    if label.startswith(":"):
        return label[1:]
    place, _, name = label.removeprefix("//").partition(":")
    return f"//{place}:{name or place.rpartition('/')[2]}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_dependencies_are_the_imports(folder):
    for rule in _rules(folder):
        expected = _dependencies(folder, rule)
        if rule["kind"] == "py_tests":
            # conftest.py, which pytest imports.
            own = "support" if folder == "tests" else "//tests:support"
            expected.add(own)
            if (ROOT / folder / "conftest.py").exists():
                expected.add("support")
        given = rule.get("deps", [])
        assert {_full(folder, label) for label in given} == expected
        assert given == sorted(given)


def test_every_file_has_its_rule():
    listed = {
        path
        for folder in FOLDERS
        for rule in _rules(folder)
        for path in _sources(folder, rule)
    }
    files = {
        path
        for top in (PACKAGE, "tests", "examples")
        for path in (ROOT / top).rglob("*.py")
    }
    scripts = ("install_wheel.py", "run_pytest.py", "site_checks.py")
    assert files - listed == {ROOT / "tests" / name for name in scripts}


def test_names_are_unique():
    for folder in FOLDERS:
        names = [rule["name"] for rule in _rules(folder) if "name" in rule]
        assert len(set(names)) == len(names)
