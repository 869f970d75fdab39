PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed
PYTHON_LOWEST ?= python3.10
VENV_LOWEST ?= .venv-lowest
RUN_LOWEST := $(VENV_LOWEST)/bin/python
STAMP_LOWEST := $(VENV_LOWEST)/.installed
VENV_AUDIT ?= .venv-audit
NATIVE := $(wildcard plsp_*/native/*.[ch] plsp_*/*/native/*.[ch])

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench clean
.PHONY: docs linkcheck coverage sanitize test-lowest gpu-check ptx ptx-sm_80 ptx-sm_90 soak fuzz audit scale

help:
	@echo "make demo         set up, then run the whole pipeline on scikit-learn's digits with ambiguous labels"
	@echo "make test         set up, then run the whole test suite"
	@echo "make lint         set up, then ruff and mypy"
	@echo "make bench        set up, then measure everything against eager PyTorch (long)"
	@echo "make format       let ruff rewrite the code in the project's style"
	@echo "make docs         set up, then build the documentation site into build/docs; warnings are errors"
	@echo "make linkcheck    set up, then check the external links of the documentation (needs a network)"
	@echo "make coverage     set up, then run the test suite and report line and branch coverage"
	@echo "make sanitize     set up, then test the C extensions under the address and undefined-behaviour sanitizers"
	@echo "make ptx          set up, then run the tests of the Triton kernels as compiled PTX in an emulator"
	@echo "make soak         set up, then kill runs at least 300 times and compare them with undisturbed ones"
	@echo "make fuzz         set up, then feed 20,000 broken files to everything that reads files"
	@echo "make audit        set up, then look for known vulnerabilities and list licences (needs a network)"
	@echo "make scale        set up, then train on a set larger than its memory limit and report the peak"
	@echo "make gpu-check    set up, then run tests and benchmark on a GPU, time its kernels, and write one file to send"
	@echo "make test-lowest  run the test suite with the oldest supported versions (needs Python 3.10, several GB)"
	@echo "make clean        remove the environment and caches"

setup: $(STAMP)

$(STAMP): requirements-dev.lock requirements-torch.lock pyproject.toml setup.py $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --no-deps --require-hashes --requirement requirements-dev.lock
	$(RUN) -m pip install --quiet --requirement requirements-torch.lock
	$(RUN) -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

demo: $(STAMP)
	$(RUN) -m plsp_train

# One thread per worker: the suite is many small operators, and two workers fill two cores.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses 2

# A copy of the packages in build/sanitize shadows the checkout: bin/pytest, unlike python -m pytest, does not put the
# working directory first. The runtimes are preloaded because Python itself is not instrumented.
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -Werror
sanitize: $(STAMP)
	rm -rf build/sanitize
	CC=gcc CFLAGS="$(SANITIZE)" PLSP_REQUIRE_NATIVE=1 $(RUN) setup.py --quiet build \
		--build-base build/sanitize --build-lib build/sanitize/lib
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		PYTHONPATH=build/sanitize/lib OMP_NUM_THREADS=1 \
		$(VENV)/bin/pytest --capture=sys -p no:cacheprovider tests/kernels/test_native.py tests/train/test_models_native.py

# On CPU tensors, whether there is a GPU or not. `make -j 2 ptx` runs both targets at once;
# `make ptx PTX_OPTIONS="--ptx-pessimistic --ptx-warps ascending"` chooses other modes.
PTX_OPTIONS ?=
ptx: ptx-sm_80 ptx-sm_90

ptx-sm_80 ptx-sm_90: ptx-%: $(STAMP)
	OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= PYTHONPATH=tests/ptx $(RUN) -m pytest -p emulator.plugin --ptx-target $* \
		$(PTX_OPTIONS) -m "not aot" tests/ptx/small_kernels.py $(wildcard tests/kernels/test_triton*.py)

# Both end with one line of figures and exit with code 1 if anything was found.
SOAK_OPTIONS ?= --kills 300 --torchrun-kills 10 --minutes 60
soak: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) tests/train/soak.py $(SOAK_OPTIONS)

FUZZ_OPTIONS ?= --inputs 20000
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) tests/train/fuzz.py $(FUZZ_OPTIONS)

# In an environment of its own, so that the tools are not what they examine.
audit: $(STAMP)
	$(PYTHON) -m venv $(VENV_AUDIT)
	$(VENV_AUDIT)/bin/python -m pip install --quiet pip-audit pip-licenses
	$(VENV_AUDIT)/bin/python -m pip_audit --strict --disable-pip --require-hashes --requirement requirements-dev.lock
	$(VENV_AUDIT)/bin/python -m pip_audit --strict --disable-pip --no-deps --requirement requirements-torch.lock
	$(VENV_AUDIT)/bin/python -m piplicenses --python $(RUN) --order license

gpu-check: $(STAMP)
	$(RUN) -m benchmarks.gpu_check

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# `make bench -- --quick` hands the option on.
OPTIONS := $(filter --%,$(MAKECMDGOALS))
bench: $(STAMP)
	$(RUN) -m benchmarks $(OPTIONS)

--%:
	@:

format: $(STAMP)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

$(DOCS_STAMP): $(STAMP) requirements-docs.lock
	$(RUN) -m pip install --quiet --no-deps --require-hashes --requirement requirements-docs.lock
	touch $@

# A run on a memory-mapped set of 2.6 GB, sparse on the disk, and its peak memory.
scale: $(STAMP)
	OMP_NUM_THREADS=1 PLSP_TEST_SCALE=1 $(RUN) -m pytest -rP tests/train/test_scale.py -k peak

docs: $(DOCS_STAMP)
	$(RUN) docs/cli_reference.py
	$(RUN) -m sphinx -W --keep-going -n -b html docs build/docs
	@echo "open build/docs/index.html"

linkcheck: $(DOCS_STAMP)
	$(RUN) -m sphinx -b linkcheck docs build/linkcheck

coverage: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses 2 --cov --cov-report=term --cov-report=html

$(STAMP_LOWEST): requirements-lowest.txt pyproject.toml setup.py $(NATIVE)
	$(PYTHON_LOWEST) -m venv $(VENV_LOWEST)
	$(RUN_LOWEST) -m pip install --quiet --requirement requirements-lowest.txt
	$(RUN_LOWEST) -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Tests of the Triton kernels skip themselves: the oldest PyTorch comes with a Triton that is too old for them. This gloo
# looks for its network interface by the host's name, which need not resolve.
test-lowest: $(STAMP_LOWEST)
	OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo $(RUN_LOWEST) -m pytest --numprocesses 2

clean:
	rm -rf $(VENV) $(VENV_LOWEST) $(VENV_AUDIT) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis htmlcov .coverage*
