"""Rules for Python, from one place: Bazel 8 and later have none of their own.

There, load them from `@rules_python//python:defs.bzl`.
"""

py_binary = native.py_binary
py_library = native.py_library
py_test = native.py_test

def py_tests(deps):
    """A test for each test_*.py of a folder, which pytest runs.

    Args:
        deps: What the tests of the folder import, all together.
    """
    for source in native.glob(["test_*.py"]):
        py_test(
            name = source[:-len(".py")],
            srcs = ["//tests:run_pytest.py", source],
            args = ["$(location %s)" % source],
            main = "//tests:run_pytest.py",
            deps = deps,
        )
