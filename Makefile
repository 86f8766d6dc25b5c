# `make setup` creates .venv with the package and everything that the tests need; the other targets run it first.

PYTHON ?= python3
VENV := .venv
CLIENTS := $(VENV)/clients
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# What starts no processes runs beside what does. A file is run by one worker: its tests share what is slow to make.
PYTEST := $(BIN)/pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder

.PHONY: help setup demo test test-fast test-full clients network browser lint docs bench format clean

help:
	@echo "make demo       profile, plan and train a small GPT on four local processes"
	@echo "make test       everything that CI checks"
	@echo "make test-fast  the tests that start no processes, for editing"
	@echo "make test-full  the same as make test, with the slow sweeps, torchtitan and two hosts"
	@echo "make bench      every goal with its measured figure, in one table; QUICK=1 for less"
	@echo "make docs       the documentation as a site, in site/"
	@echo "make format     format and fix the sources"
	@echo "make clean      remove .venv and caches"

setup: $(VENV)/.ready

# Twice quiet: errors are shown, pages of warnings in some environments are not.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "penstock needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV) || { apt-get update && apt-get install --yes python3-venv && $(PYTHON) -m venv $(VENV); }
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --quiet --editable '.[torch,dev]'
	touch $@

demo: setup
	$(BIN)/penstock demo

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: lint browser
	$(PYTEST) -m 'not full'

test-fast: setup
	$(PYTEST) -m 'not full and not processes'

test-full: lint browser clients network
	$(PYTEST)

# Programs that the drop-in runs have an environment of their own, since they pin packages. It sees those of $(VENV).
clients: $(CLIENTS)/.ready

# Two hosts are two network namespaces, which iproute2 creates.
network:
	@command -v ip >/dev/null || { apt-get update && apt-get install --yes --no-install-recommends iproute2; }

PACKAGES := 'import sysconfig; print(sysconfig.get_path("purelib"))'

$(CLIENTS)/.ready: $(VENV)/.ready
	$(BIN)/python -m venv --clear $(CLIENTS)
	$(BIN)/python -c $(PACKAGES) > $$($(CLIENTS)/bin/python -c $(PACKAGES))/packages-of-setup.pth
	PIP_CONSTRAINT=constraints.txt $(CLIENTS)/bin/pip install --quiet --quiet --editable '.[clients]'
	touch $@

# The interactive page is tested in Debian's browser.
browser:
	@command -v chromium >/dev/null || { apt-get update && apt-get install --yes --no-install-recommends chromium; }

# QUICK=1 measures smaller sizes with fewer repeats.
bench: setup
	$(BIN)/python benchmarks/summary.py $(if $(QUICK),--quick)

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # with --quiet, warnings would not count
	@echo "Open site/index.html, or run $(BIN)/mkdocs serve"

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .hypothesis
