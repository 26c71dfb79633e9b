# Each target does its own set-up: a virtual environment in .venv, from the pins in constraints.txt.
#   make demo · make check · make test · make test-all · make lint · make docs · make bench
# PYTHON chooses the interpreter that .venv is made with: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Where make dist puts what it builds.
DIST ?= dist
# Backends whose frameworks live in one environment, and the one that needs its own.
TOGETHER := deepspeed horovod accelerate
ALONE := .venv-colossalai
PACKAGES := . $(TOGETHER:%=backends/%) backends/colossalai
# What is built in besides, where the system has the library for it.
WITH_deepspeed := $(if $(wildcard /usr/include/libaio.h),--with nvme)
# Where metrics can go besides: with the pins of these they leave the frameworks no room.
LOGGERS := .venv-loggers
# Where checkpoints can go besides: likewise.
STORES := .venv-stores
# And Ray, which brings much that nothing else needs.
RAY := .venv-ray
# Any torch that pyproject.toml admits: make test-torch TORCH=2.8.0 PYTHON=python3.10
TORCH ?= 2.8.0
OTHER ?= .venv-torch-$(TORCH)
# Tests that start whole programs; most others share ranks that run already.
PROGRAMS := $(addprefix tests/integration/,bench bench_report cli docs examples install)
# Suites of tests that run at once; each has processes of its own, and often waits for them. What
# each has taken is shown at the end.
LANES ?= 3
SIDE_BY_SIDE = $(BIN)/python tests/side_by_side.py --lanes $(LANES)
SUITES = $(SIDE_BY_SIDE) \
  "unit=$(BIN)/python -m pytest tests/unit" \
  "integration=$(BIN)/python -m pytest $(ONLY) tests --ignore tests/unit --ignore tests/migrate --ignore tests/compat --ignore tests/cluster $(PROGRAMS:%=--ignore %)" \
  "programs=$(BIN)/python -m pytest $(ONLY) $(PROGRAMS)" \
  $(foreach name,$(TOGETHER),"$(name)=$(BIN)/python -m pytest $(ONLY) backends/$(name)") \
  "colossalai=$(ALONE)/bin/python -m pytest $(ONLY) backends/colossalai tests/survey" \
  "torch=$(BIN)/python -m pytest $(ONLY) backends/torch backends/template" \
  "migrate=$(BIN)/python -m pytest $(ONLY) tests/migrate tests/compat" \
  "matrix=$(BIN)/python measure/strategies/matrix.py --cover"
# The kit against what is PyTorch's own.
KIT := --pyargs unipar.testing --world-sizes 2 --strategy single --strategy ddp --strategy fsdp
PINS := pyproject.toml constraints.txt
# A machine with a GPU, and often without network: a folder of wheels for its Python, which is taken
# along; the environment that is made from it beside the torch of PYTHON; and where records go.
GPU_PYTHON ?= 3.12
GPU_WHEELS ?= wheels-gpu
GPU_ENV := .venv-gpu
GPU_OUT ?= docs/gpu
# Threads of one process; the tests and examples start several.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo check test test-all test-cluster installed test-torch test-matrix tables compare reliability lint format docs dist bench bench-faces constraints clean \
  wheels-gpu test-gpu bench-gpu gpu-environment

help:
	@echo "make demo    train a small GPT on two processes, and resume it under another strategy"
	@echo "make check   check style and types, and run the unit tests and a part of the kit"
	@echo "make test    run the tests, those of the backends' frameworks included"
	@echo "make test-all  run them at greater length too, and make test-matrix and test-cluster"
	@echo "make test-cluster  run on clusters that are started here: Slurm of two nodes, and others; as root"
	@echo "make test-torch TORCH=2.8.0  run what rests on torch with another torch, for the docs"
	@echo "make test-matrix  resume every strategy's checkpoint under every other, for the docs"
	@echo "make tables  measure every framework's strategies, for the docs"
	@echo "make compare  run unipar bench with every framework on two examples, for the docs"
	@echo "make reliability  let ranks and hosts fail and kill runs, for the docs; an hour, and best as root"
	@echo "make lint    check style and types"
	@echo "make docs    build the documentation into docs/_build/html"
	@echo "make dist    build the packages, unipar and every backend, as wheels and sources into dist/"
	@echo "make bench   measure overhead, memory and checkpoint speed"
	@echo "make bench-faces  measure unipar.compat beside the frameworks themselves, for the docs"
	@echo "make wheels-gpu  put the wheels into wheels-gpu that the next two need, which need no network"
	@echo "make test-gpu   run what a single GPU can prove, for the docs; beside the torch of PYTHON"
	@echo "make bench-gpu  measure training on it beside loops written by hand, for the docs"
	@echo "make format  rewrite the sources in the project's style"
	@echo "make clean   remove the environments and everything built"

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

# What to run before each commit: two minutes or three.
check: LANES := 2
check: $(VENV)/.dev
	$(SIDE_BY_SIDE) \
	  "style=$(BIN)/ruff check ." \
	  "format=$(BIN)/ruff format --check ." \
	  "types=$(BIN)/pyright" \
	  "unit=$(BIN)/python -m pytest -q tests/unit" \
	  "kit=$(BIN)/python -m pytest -q -m 'not thorough' $(KIT)"

# The fast tests come first, so that what is plainly broken is known within a minute or two, and
# then the longest, so that none is left alone at the end. Each backend has processes of its own,
# for frameworks change torch when they are imported.
test: ONLY := -m 'not thorough'
test: installed
	$(SUITES)
	@echo "Left to make test-all: the tests marked thorough, and every pair of strategies."

test-all: installed $(LOGGERS)/.ready $(STORES)/.ready
	$(SUITES)
	$(LOGGERS)/bin/python -m pytest tests/unit/callbacks/test_loggers.py tests/unit/callbacks/test_prometheus.py
	$(STORES)/bin/python -m pytest tests/integration/fit/test_s3.py
	$(MAKE) --no-print-directory test-matrix
	$(MAKE) --no-print-directory test-cluster

# Real clusters on this machine. Debian has what they take: apt install slurm-wlm munge iproute2
test-cluster: $(VENV)/.dev $(RAY)/.ready
	$(BIN)/python -m pytest tests/cluster --ignore tests/cluster/test_ray.py
	$(RAY)/bin/python -m pytest tests/cluster/test_ray.py

# The two environments have nothing in common, and pip keeps one core busy.
installed:
	@$(MAKE) --no-print-directory --jobs 2 $(VENV)/.backends $(ALONE)/.backends

# Beside it PYTHON chooses the interpreter. An environment is several GB, for a torch of the index
# brings CUDA, and is left for the next call.
test-torch: $(OTHER)/.ready
	$(OTHER)/bin/python measure/strategies/torches.py --command "make test-torch TORCH=$(TORCH)"
	$(OTHER)/bin/python measure/pages/generate.py

# Every pair of strategies.
test-matrix: $(VENV)/.backends $(ALONE)/.backends
	$(BIN)/python measure/strategies/matrix.py
	$(BIN)/python measure/pages/generate.py

tables: $(VENV)/.backends $(ALONE)/.backends
	$(BIN)/python measure/strategies/tables.py
	$(BIN)/python measure/pages/generate.py

compare: $(VENV)/.backends $(ALONE)/.backends
	$(BIN)/python measure/speed/frameworks.py
	$(BIN)/python measure/pages/generate.py

reliability: $(VENV)/.backends
	$(BIN)/python measure/reliability/hangs.py
	$(BIN)/python measure/reliability/faults.py
	$(BIN)/python measure/reliability/kills.py
	$(BIN)/python measure/reliability/elastic.py
	$(BIN)/python measure/pages/generate.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

# With the tools of this environment, and nothing from the network: each package first as an archive
# of its sources, and a wheel from that.
dist: $(VENV)/.dev
	rm -rf $(DIST)
	$(foreach package,$(PACKAGES),$(BIN)/python -m build --no-isolation --outdir $(DIST) $(package) &&) true

bench: $(VENV)/.dev
	$(BIN)/python measure/speed/run.py

bench-faces: $(VENV)/.backends $(ALONE)/.backends
	$(BIN)/python measure/speed/faces.py
	$(BIN)/python measure/pages/generate.py

wheels-gpu: $(VENV)/.backends
	$(BIN)/python measure/gpu/wheels.py $(GPU_WHEELS) --python $(GPU_PYTHON)

test-gpu: gpu-environment
	$(GPU_ENV)/bin/python measure/gpu/tests.py --output $(GPU_OUT)/tests.json --command "make test-gpu"
	@echo "For the docs: put it into docs/gpu, and run $(BIN)/python measure/pages/generate.py"

bench-gpu: gpu-environment
	$(GPU_ENV)/bin/python measure/gpu/bench.py --output $(GPU_OUT)/bench.json --command "make bench-gpu"
	@echo "For the docs: put it into docs/gpu, and run $(BIN)/python measure/pages/generate.py"

gpu-environment:
	@$(PYTHON) measure/gpu/environment.py $(GPU_ENV) $(GPU_WHEELS)

# A stamp older than the pins means that the install is made again; otherwise it is left alone.
$(VENV)/.demo: $(PINS) | $(BIN)/python
	@echo "Installing what the demo needs into $(VENV); once, and it takes a few minutes."
	@$(PIP) install -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(PINS) | $(BIN)/python
	@echo "Installing the development tools into $(VENV); once, and it takes a few minutes."
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.demo $@

$(VENV)/.backends: $(VENV)/.dev $(TOGETHER:%=backends/%/pyproject.toml)
	@echo "Installing $(TOGETHER) into $(VENV); once, and it takes a few minutes."
	@$(PIP) install -c constraints.txt $(TOGETHER:%=-e backends/%)
	@$(foreach name,$(TOGETHER),PIP_CONSTRAINT=$(CURDIR)/constraints.txt \
	  $(BIN)/unipar install $(name) --yes $(WITH_$(name)) &&) true
	@touch $@

$(ALONE)/.backends: $(PINS) backends/colossalai/pyproject.toml backends/colossalai/constraints.txt | $(BIN)/python
	@echo "Installing colossalai into $(ALONE); once, and it takes a few minutes."
	@$(BIN)/python -m venv $(ALONE)
	@$(ALONE)/bin/python -m pip --disable-pip-version-check --quiet install \
	  -c backends/colossalai/constraints.txt -e '.[test]' -e backends/colossalai
	@PIP_CONSTRAINT=$(CURDIR)/backends/colossalai/constraints.txt \
	  $(ALONE)/bin/unipar install colossalai --yes
	@touch $@

$(LOGGERS)/.ready: pyproject.toml | $(BIN)/python
	@echo "Installing wandb, mlflow, trackio and prometheus-client into $(LOGGERS); once, and it takes a few minutes."
	@$(BIN)/python -m venv $(LOGGERS)
	@grep '^torch==' constraints.txt > $(LOGGERS)/torch.txt
	@$(LOGGERS)/bin/python -m pip --disable-pip-version-check --quiet install \
	  -c $(LOGGERS)/torch.txt -e '.[tensorboard,wandb,mlflow,trackio,prometheus,test]'
	@touch $@

# s3fs first: it takes few versions of what both rest on, and pip would try all of moto's others.
$(STORES)/.ready: pyproject.toml | $(BIN)/python
	@echo "Installing s3fs and moto into $(STORES); once, and it takes a few minutes."
	@$(BIN)/python -m venv $(STORES)
	@grep -E '^(torch|fsspec)==' constraints.txt > $(STORES)/pins.txt
	@$(STORES)/bin/python -m pip --disable-pip-version-check --quiet install \
	  -c $(STORES)/pins.txt -e '.[s3,test]'
	@$(STORES)/bin/python -m pip freeze --exclude-editable > $(STORES)/installed.txt
	@$(STORES)/bin/python -m pip --disable-pip-version-check --quiet install \
	  -c $(STORES)/installed.txt 'moto[server]>=5'
	@touch $@

$(RAY)/.ready: pyproject.toml | $(BIN)/python
	@echo "Installing Ray into $(RAY); once, and it takes a few minutes."
	@$(BIN)/python -m venv $(RAY)
	@grep -E '^(torch|cloudpickle)==' constraints.txt > $(RAY)/pins.txt
	@$(RAY)/bin/python -m pip --disable-pip-version-check --quiet install \
	  -c $(RAY)/pins.txt -e '.[ray,test]'
	@touch $@

# The pins but for torch's, and for setuptools', of which some torches want an older one (2.11: <82).
# transformers imports torchao where it is installed, and torchao 0.18 cannot be with torch 2.8.
$(OTHER)/.ready: $(PINS)
	@echo "Installing torch $(TORCH) into $(OTHER); once, and it is several GB."
	@$(PYTHON) -m venv $(OTHER)
	@{ grep -Ev '^(torch|setuptools)==' constraints.txt; echo 'torch==$(TORCH)'; } > $(OTHER)/constraints.txt
	@$(OTHER)/bin/python -m pip --disable-pip-version-check --quiet --no-cache-dir install \
	  -c $(OTHER)/constraints.txt -e '.[bench,examples,$(if $(filter 2.8.%,$(TORCH)),,fp8,)peers,tensorboard,test]'
	@touch $@

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
	echo 'deepspeed==0.19.8' > $(VENV)/frameworks.txt
	UV_PYTHON_DOWNLOADS=never $(BIN)/uv pip compile --quiet --universal --python-version 3.10 \
	  --extra dev --no-annotate --no-header --constraints $(VENV)/torch.txt \
	  pyproject.toml $(VENV)/frameworks.txt --output-file $(VENV)/resolved.txt --upgrade
	{ grep '^#' constraints.txt; \
	  grep -Ev '^(nvidia-|cuda-|triton==)' $(VENV)/resolved.txt; } > $(VENV)/constraints.txt
	mv $(VENV)/constraints.txt constraints.txt

clean:
	rm -rf $(VENV) $(ALONE) $(LOGGERS) $(STORES) $(RAY) .venv-torch-* $(GPU_ENV) wheels-gpu docs/_build build dist .pytest_cache .ruff_cache .hypothesis
