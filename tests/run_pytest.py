"""Runs pytest on the files that are given. The `main` of Bazel's tests."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["-n", "0", *sys.argv[1:]]))
