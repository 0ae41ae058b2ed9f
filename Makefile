# The two commands of the README are `make demo` and `make test`. Each installs
# what it needs into a virtual environment of this folder, once.

PYTHON ?= python3
PYTHON_OLDEST ?= $(PYTHON)
VENV := .venv
OLDEST := .venv-oldest
SOURCES := tf_avgstrategy tests examples benchmarks
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: demo test check unit wheel test-oldest test-build-file format bench clean

demo: $(VENV)/.installed
	$(VENV)/bin/python examples/mnist.py

test: check unit wheel

check: $(VENV)/.installed
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/ruff check $(SOURCES)

unit: $(VENV)/.installed
	$(VENV)/bin/python -m pytest

# Without the demo's and the tests' packages, from a folder that is not this
# one: what is imported can only be what was built.
wheel: $(VENV)/.installed
	rm -rf build/wheel && mkdir -p build/wheel
	$(VENV)/bin/python -m build --wheel --outdir build/wheel .
	$(VENV)/bin/python tests/install_wheel.py build/wheel $(VENV)-wheel

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -m core

# Debian's Bazel reads BUILD without a network.
test-build-file:
	command -v bazel >/dev/null || (apt-get update -qq && \
	    apt-get install -y -qq bazel-bootstrap)
	mkdir -p build
	bazel --batch query 'kind("py_.*", //...)' --output=xml >build/bazel.xml
	grep -q 'name="//:averager"' build/bazel.xml

format: $(VENV)/.installed
	$(VENV)/bin/ruff format $(SOURCES)
	$(VENV)/bin/ruff check --fix $(SOURCES)

bench: $(VENV)/.installed
	$(VENV)/bin/python benchmarks/step_overhead.py

clean:
	rm -rf build dist $(VENV) $(VENV)-wheel $(OLDEST) *.egg-info

$(VENV)/.installed: requirements/dev.txt setup.cfg
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --requirement requirements/dev.txt
	$(VENV)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

$(OLDEST)/.installed: requirements/oldest.txt setup.cfg
	$(PYTHON_OLDEST) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --requirement requirements/oldest.txt
	$(OLDEST)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@
