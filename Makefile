# Two commands for everybody: `make demo` and `make test`. Only Python 3.11+, a C++ compiler and make are needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MINUTES ?= 10
FAST := not exhaustive and not dist and not inductor and not slow and not gpu and not te

help:
	@echo "make demo     train a small language model on two processes (under 8 minutes, installation included)"
	@echo "make test     all tests that need no GPU, without the sweeps of make exhaustive and the clients of make matrix"
	@echo "make check    lint, types and fast tests, for people who work on mfsdp"
	@echo "make exhaustive  the rest of the sweeps of which make test runs a sample: before a release"
	@echo "make goldens  accept the listings as they are now; read the diff"
	@echo "make fuzz     random modules, sharded at random, against their unsharded selves (MINUTES=10)"
	@echo "make bench    steps side by side on a slow link (root, Linux); results in bench-out"
	@echo "make bench-mixture  the same of a mixture of experts, four ranks"
	@echo "make gpu      the tests that need a CUDA GPU, one for all ranks if need be (SYSTEM=1: with this machine's own Python)"
	@echo "make bench-gpu  steps on one GPU beside FSDP2's and Megatron-FSDP's (SYSTEM=1 as well)"
	@echo "make te       builds TransformerEngine in an environment of its own (7 GB, some ten minutes) and runs its tests"
	@echo "make matrix   fast tests, and those with clients, on several versions of torch, each in an environment of its own (VERSIONS=\"2.11.0 2.15.0\")"
	@echo "make clean    remove what these commands made"

demo: $(VENV)/.demo compiler
	$(BIN)/python examples/demo/train.py $(ARGS)

test: $(VENV)/.test compiler browser
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not exhaustive and not gpu and not te and not clients" $(ARGS)

exhaustive: $(VENV)/.test compiler
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m exhaustive $(ARGS)

check: $(VENV)/.test
	@$(MAKE) --no-print-directory -j2 lint types quick

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

quick:
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "$(FAST)" $(ARGS)

goldens: $(VENV)/.test
	$(BIN)/python -m pytest --accept -m "not gpu and not te" $$(grep -l 'golden(' tests/test_*.py)
	@git --no-pager diff --stat -- tests/goldens || true

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: $(VENV)/.demo compiler
	$(BIN)/python examples/bench/bench.py $(ARGS)

bench-mixture: $(VENV)/.demo compiler
	$(BIN)/python examples/bench/mixture.py $(ARGS)

fuzz: $(VENV)/.test
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(ARGS)

# SYSTEM=1: $(PYTHON) with what it has installed and the sources in front; no environment is made, nothing downloaded.
RUN := $(if $(SYSTEM),PYTHONPATH="$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON),$(BIN)/python)
INSTALLED := $(if $(SYSTEM),,$(VENV)/.test)
gpu: $(INSTALLED)
	@found=$$($(RUN) -c "import torch; print(torch.cuda.is_available())") || exit 1; \
	if [ "$$found" = True ]; then $(RUN) -m pytest -m gpu --record gpu-record $(ARGS); \
	else echo "make gpu: no CUDA GPU here, nothing was run"; fi

bench-gpu: $(INSTALLED)
	$(RUN) examples/bench/gpu.py $(ARGS)

TE := .cache/te
te:
	PYTHON="$(PYTHON)" sh tests/te/build.sh $(TE)
	$(TE)/bin/python -m pytest -m te $(ARGS)

# PyPI's torch for Linux is a CUDA build of some gigabytes, which needs no GPU.
VERSIONS ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
matrix:
	@for v in $(VERSIONS); do \
	  env=.cache/matrix/$$v; \
	  { test -x $$env/bin/python || $(PYTHON) -m venv $$env; } && grep -v "^torch==" constraints.txt > $$env/constraints.txt && \
	  $$env/bin/python -m pip install --quiet "torch==$$v" && \
	  $$env/bin/python -m pip install --quiet --constraint $$env/constraints.txt --editable '.[clients]' "torch==$$v" && \
	  echo "torch $$v" && { $$env/bin/python -m pytest -n 2 --dist loadfile -m "clients or ($(FAST))" $(ARGS) > $$env/log.txt 2>&1; tail -n 20 $$env/log.txt | grep -E "^(FAILED|ERROR)|passed|failed"; } || \
	  echo "torch $$v: see $$env/log.txt"; \
	done

$(VENV)/bin/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	  { echo "mfsdp needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo $(VENV)/.test $(VENV)/.docs: $(VENV)/.%: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$*]'
	@touch $@

compiler:
	@command -v "$${CXX:-g++}" >/dev/null || command -v clang++ >/dev/null || \
	  echo "No C++ compiler found (g++ or clang++; Debian: apt-get install g++). Inductor needs one: tests of generated code are skipped, and the demo runs with lowering=\"eager\"."

browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	  echo "No Chromium found (Debian: apt-get install chromium): tests of the report in a browser are skipped."

clean:
	rm -rf $(VENV) .cache build dist site demo-out bench-out curve-out parallel-out gpu-record bench-gpu-out *.egg-info src/*.egg-info .mypy_cache .ruff_cache .hypothesis .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help demo test exhaustive check lint types quick goldens docs fuzz bench bench-mixture gpu bench-gpu te matrix compiler browser clean
