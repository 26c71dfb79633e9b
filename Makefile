# Each target does its own set-up: a virtual environment in .venv, from the pins in constraints.txt.
#   make demo · make test · make lint · make docs · make bench
# PYTHON chooses the interpreter that .venv is made with: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PINS := pyproject.toml constraints.txt
# Threads of one process; the tests and examples start several.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint format docs bench constraints clean

help:
	@echo "make demo    train a small GPT on two processes, and resume it under another strategy"
	@echo "make test    run all tests"
	@echo "make lint    check style and types"
	@echo "make docs    build the documentation into docs/_build/html"
	@echo "make bench   measure overhead, memory and checkpoint speed"
	@echo "make format  rewrite the sources in the project's style"
	@echo "make clean   remove .venv and everything built"

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

# The fast tests come first, so that what is plainly broken is known within a minute or two.
test: $(VENV)/.dev
	$(BIN)/python -m pytest tests/unit
	$(BIN)/python -m pytest --ignore=tests/unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/run.py

# A stamp older than the pins means that the install is made again; otherwise it is left alone.
$(VENV)/.demo: $(PINS) | $(BIN)/python
	@echo "Installing what the demo needs into $(VENV); once, and it takes a few minutes."
	@$(PIP) install -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(PINS) | $(BIN)/python
	@echo "Installing the development tools into $(VENV); once, and it takes a few minutes."
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.demo $@

$(BIN)/python:
	@command -v $(PYTHON) > /dev/null || { \
	  echo "There is no '$(PYTHON)' here. Name a Python 3.10 or newer:" >&2; \
	  echo "make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "unipar needs Python 3.10 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)" >&2; \
	  echo "Choose another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "'$(PYTHON)' cannot make virtual environments." >&2; \
	  echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# One resolution for every Python from 3.10 on, with torch as constraints.txt has it. What torch
# pins itself (CUDA, Triton) is left out: it differs from build to build of the same torch.
constraints: | $(BIN)/python
	$(PIP) install uv
	grep '^torch==' constraints.txt > $(VENV)/torch.txt
	UV_PYTHON_DOWNLOADS=never $(BIN)/uv pip compile --quiet --universal --python-version 3.10 \
	  --extra dev --no-annotate --no-header --constraints $(VENV)/torch.txt \
	  pyproject.toml --output-file $(VENV)/resolved.txt --upgrade
	{ grep '^#' constraints.txt; \
	  grep -Ev '^(nvidia-|cuda-|triton==)' $(VENV)/resolved.txt; } > $(VENV)/constraints.txt
	mv $(VENV)/constraints.txt constraints.txt

clean:
	rm -rf $(VENV) docs/_build build dist .pytest_cache .ruff_cache .hypothesis
