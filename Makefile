# The two commands of the README are `make demo` and `make test`. Each installs
# what it needs into a virtual environment of this folder, once.

PYTHON ?= python3
PYTHON_OLDEST ?= $(PYTHON)
VENV := .venv
OLDEST := .venv-oldest
TORCH := .venv-torch
DOCS := .venv-docs
SOURCES := tf_avgstrategy tests examples benchmarks
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: demo test check unit wheel test-oldest test-build-file format bench docs \
    clean

# The last run is one of 2 workers with 2 replicas each.
demo: $(VENV)/.installed
	rm -f mnist.jsonl
	$(VENV)/bin/python examples/mnist.py --period=0
	$(VENV)/bin/python examples/mnist.py --period=1
	$(VENV)/bin/tf-avgstrategy launch --workers=2 --quiet_workers \
	    examples/mnist.py --replicas=2 --period=16
	$(VENV)/bin/python examples/plot_mnist.py

test: check unit wheel

check: $(VENV)/.installed
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/ruff check $(SOURCES)

unit: $(VENV)/.horovod
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
	grep -q 'name="//tf_avgstrategy/averaging:averaging"' build/bazel.xml

format: $(VENV)/.installed
	$(VENV)/bin/ruff format $(SOURCES)
	$(VENV)/bin/ruff check --fix $(SOURCES)

# All benchmarks with small settings, from the beginning: network.py and
# scaling.py go on with files that are there. Each says in its own words how to run it
# whole. PyTorch is measured beside the others.
bench: $(VENV)/.horovod $(TORCH)/.installed
	rm -rf build/bench && mkdir -p build/bench
	$(VENV)/bin/python benchmarks/step_overhead.py \
	    --output=build/bench/step_overhead.json
	$(VENV)/bin/python benchmarks/round.py --megabytes=1,10 --workers=2 \
	    --output=build/bench/round.json
	$(VENV)/bin/python benchmarks/network.py --hosts=2 --rates=100mbit,none \
	    --megabytes=1,10 --periods=1,16 --seconds=0.5 \
	    --output=build/bench/network.json --picture=build/bench/network.png
	$(VENV)/bin/python benchmarks/scaling.py --rates=100mbit,500mbit \
	    --megabytes=1,10 --seconds=1 \
	    --output=build/bench/scaling.json --picture=build/bench/scaling.png
	$(VENV)/bin/python benchmarks/convergence.py --tasks=images --seeds=1 \
	    --steps=64 --output=build/bench/convergence.json

# The site: open build/docs/index.html. With --quiet, warnings would not end it.
docs: $(DOCS)/.installed
	$(DOCS)/bin/mkdocs build

clean:
	rm -rf build dist $(VENV) $(VENV)-wheel $(OLDEST) $(TORCH) $(DOCS) \
	    *.egg-info

$(VENV)/.installed: requirements/dev.txt setup.cfg
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --requirement requirements/dev.txt
	$(VENV)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

# Compiled from source, a few minutes, once: the wheel is kept in ~/.cache.
$(VENV)/.horovod: $(VENV)/.installed
	(command -v cmake && command -v g++ && command -v ip) >/dev/null || \
	    (apt-get update -qq && apt-get install -y -qq cmake g++ make iproute2)
	$(VENV)/bin/tf-avgstrategy build-horovod
	touch $@

$(TORCH)/.installed: requirements/torch.txt
	$(PYTHON) -m venv $(TORCH)
	$(TORCH)/bin/python -m pip install --quiet --requirement requirements/torch.txt
	touch $@

$(DOCS)/.installed: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --requirement requirements/docs.txt
	touch $@

$(OLDEST)/.installed: requirements/oldest.txt setup.cfg
	$(PYTHON_OLDEST) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --requirement requirements/oldest.txt
	$(OLDEST)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@
