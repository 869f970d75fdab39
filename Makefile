PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
NATIVE := $(wildcard plsp_kernels/native/*.c plsp_kernels/native/*.h)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench clean

help:
	@echo "make demo    set up, then run the whole pipeline on scikit-learn's digits with ambiguous labels"
	@echo "make test    set up, then run the whole test suite"
	@echo "make lint    set up, then ruff and mypy"
	@echo "make bench   set up, then measure everything against the eager reference (about 25 minutes)"
	@echo "make format  let ruff rewrite the code in the project's style"
	@echo "make clean   remove the environment and caches"

setup: $(STAMP)

$(STAMP): requirements-dev.lock pyproject.toml setup.py $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --requirement requirements-dev.lock
	$(RUN) -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

demo: $(STAMP)
	$(RUN) -m plsp_train

# One thread per worker: the suite is many small operators, and two workers fill two cores.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses 2

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(STAMP)
	$(RUN) -m benchmarks

format: $(STAMP)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
