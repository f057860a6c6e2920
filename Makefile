# The commands of the project; CI (.ci/run) calls the same ones. `make` alone lists them.
# Needs Python 3.11, 3.12 or 3.13 with venv, and a registry that pip can reach; everything else goes into .venv.
# Another interpreter: make PYTHON=/path/to/python3.12. Another torch: make TORCH=2.14. Arguments for a command:
# make demo ARGS="--steps 60".

# Tests start hundreds of processes: without its compiled form each would compile the package, and pytest the tests.
unexport PYTHONDONTWRITEBYTECODE

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?=
ARGS ?=
# Which tests run of those that take turns (tests/support/sampling.py).
TURN ?=

VENV := .venv
# Which build of FBGEMM, a file of a set: fbgemm, for CPUs, or fbgemm-gpu.
FBGEMM := fbgemm
# A python for `make gpu` that has CUDA builds of torch and FBGEMM, TorchRec, and what requirements/cpu.txt and demo.txt
# name, and pytest; left empty, they go into .venv-gpu.
GPU_PYTHON ?=
# Which set of torch, FBGEMM and TorchRec, that load together: what .venv was made with, else 2.13.
TORCH ?= $(or $(shell cat $(VENV)/.torch 2>/dev/null),2.13)
SET := requirements/torch-$(TORCH)
BIN := $(VENV)/bin
# Tests run in a process per core and one more, 4 at most: many wait, and many start some ten processes. One process:
# ARGS="-n 0".
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
WORKERS := -n $(shell echo $$(( $(CORES) < 3 ? $(CORES) + 1 : 4 ))) --dist worksteal
# -qq: errors only.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input
PINS := -c requirements/constraints.txt -c $(SET)/torch.txt
SAY := printf '[setup] %s\n'

# What .venv must hold, and where: it is remade when a requirement changes, and when the folder was moved or copied
# (its scripts would go on running the original's code).
REQUIREMENTS := $(sort $(wildcard requirements/*.txt) $(foreach file,torch $(FBGEMM) torchrec,$(SET)/$(file).txt))
WANTED := $(CURDIR) $(shell cat $(REQUIREMENTS) | cksum)
ifneq ($(strip $(WANTED)),$(strip $(shell cat $(VENV)/.pinned 2>/dev/null)))
.PHONY: $(VENV)/.pinned
endif
# What may be inside a kernel, as torch_ecrec/runtime/kernel_cache.py has it: where one changed, all are compiled again.
KERNELS := $(wildcard torch_ecrec/codec/*.py torch_ecrec/layout/*.py torch_ecrec/records/*.py torch_ecrec/records/optimizers/*.py torch_ecrec/records/tiers/*.py torch_ecrec/runtime/*.py torch_ecrec/client/pooling.py torch_ecrec/storage/row_ids.py torch_ecrec/storage/seen.py torch_ecrec/compat/numba.py torch_ecrec/compat/python.py torch_ecrec/errors.py)

# Do they load together? (An FBGEMM of another torch, or the CUDA one over the CPU one, does not.)
define LOADED
import torch, fbgemm_gpu, torchrec
print("torch", torch.__version__, "| fbgemm", fbgemm_gpu.__version__, "| torchrec", torchrec.__version__)
endef
export LOADED
# What `make gpu` wants of a python, .venv-gpu's or GPU_PYTHON. (What FBGEMM logs where it does not load says no more.)
define GPU_LOADED
import logging, sys
logging.disable()
try:
    import torch
    if torch.version.cuda is None:
        sys.exit(
            f"error: torch {torch.__version__} of {sys.executable} has no CUDA. If pip brought it, pip was told to prefer"
            " CPU builds: rm -r .venv-gpu, then PIP_CONFIG_FILE=/dev/null make gpu, without PIP_FIND_LINKS and the like;"
            " or name a python that has CUDA builds: make gpu GPU_PYTHON=/path/to/python (docs/gpu.md)"
        )
    import fbgemm_gpu, torchrec, numba, msgspec, xxhash, zstandard, fsspec, psutil, pytest, pytest_timeout
except (ImportError, OSError) as error:
    why = " ".join(str(error).split())
    sys.exit(f"error: {sys.executable}: {why} (wanted: requirements/cpu.txt, demo.txt, TorchRec, pytest, pytest-timeout)")
endef
export GPU_LOADED

.PHONY: help setup demo test test-slow lint fmt type bench gpu docs site wheel dist clean distclean

help:
	@echo "make setup      .venv with a pinned set (TORCH=2.13 or 2.14), the package (editable), the kernels compiled"
	@echo "make demo       train a DLRM, kill a server, compare with the undisturbed run   ARGS=\"--steps 60 ...\""
	@echo "make test       the test suite, minutes (TURN=N: another share of it; all)      ARGS=\"tests/unit/test_codec.py ...\""
	@echo "make test-slow  what is marked slow: the same faults in their whole width (hours)  ARGS=\"-k simulation ...\""
	@echo "make lint       ruff: rules and format      make fmt   ruff: repair both"
	@echo "make type       mypy, strict                make docs  what the documents say of themselves"
	@echo "make site       the documents as a site, build/site/index.html; warnings are errors"
	@echo "make bench      measure                                                         ARGS=..."
	@echo "make gpu        what a machine with a GPU can show -> build/gpu   GPU_PYTHON=/path/to/python  ARGS=\"--parts streams\""
	@echo "make wheel      build dist/*.whl            make clean caches and build outputs (distclean: .venv too)"
	@echo "make dist       sdist and wheel, checked: as PyPI would take them; the container file is linted"

setup: $(VENV)/.warm
	@:

demo: setup
	@$(BIN)/torch-ecrec demo $(ARGS)

test: setup
	@$(BIN)/python -m pytest $(WORKERS) $(if $(TURN),--turn $(TURN)) $(ARGS)

test-slow: setup
	@$(BIN)/python -m pytest $(WORKERS) -m slow $(if $(TURN),--turn $(TURN)) $(ARGS)

lint: $(VENV)/.installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

fmt: $(VENV)/.installed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

type: $(VENV)/.installed
	@$(BIN)/mypy

bench: setup
	@$(BIN)/torch-ecrec bench $(or $(ARGS),train)

# Without a GPU nothing is installed. All of it is to end within ten minutes, unless the parts would have less than five.
# `make` ends with 2 whatever failed; the command's own exit codes are in docs/gpu.md.
gpu: BEGUN := $(shell date +%s)
gpu:
	@if ! nvidia-smi -L >/dev/null 2>&1 && [ ! -e /dev/nvidia0 ] && [ ! -e /dev/dxg ]; then \
	    echo "error: no GPU here: nvidia-smi lists none. Run it where one is, with its driver (docs/gpu.md)" >&2; exit 2; \
	fi
ifeq ($(strip $(GPU_PYTHON)),)
	@$(MAKE) --no-print-directory VENV=.venv-gpu FBGEMM=fbgemm-gpu setup
	@.venv-gpu/bin/python -W ignore -c "$$GPU_LOADED"
	@left=$$(( 590 - $$(date +%s) + $(BEGUN) )); \
	.venv-gpu/bin/torch-ecrec bench gpu --limit $$(( left > 300 ? left : 300 )) $(ARGS)
else
	@$(GPU_PYTHON) -W ignore -c "$$GPU_LOADED"
	@$(GPU_PYTHON) -m torch_ecrec bench gpu $(ARGS)
endif

docs: $(VENV)/.installed
	@$(BIN)/python -m pytest -q tests/unit/test_docs.py tests/unit/test_guide.py tests/unit/test_troubleshooting.py

# Without --quiet, which leaves warnings out before --strict could count them. NO_MKDOCS_2_WARNING: the theme's
# advertisement of what comes after MkDocs.
site: $(VENV)/.installed
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean $(ARGS)
	@echo "build/site/index.html"

# build/lib is removed first: setuptools would ship modules deleted since the last build.
wheel: $(VENV)/.installed
	@rm -rf build/lib build/bdist.*
	@$(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps --no-build-isolation -w dist .
	@ls -l dist/*.whl

# What a release is made of: the wheel is built from the sdist, as others would.
dist: $(VENV)/.installed
	@$(PIP) $(PINS) -r requirements/dist.txt
	@rm -rf build/lib build/bdist.* dist
	@$(BIN)/python -m build --no-isolation -o dist . >/dev/null
	@$(BIN)/twine check --strict dist/*
	@$(BIN)/hadolint deploy/Containerfile
	@ls -l dist

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find torch_ecrec examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f $(VENV)/.warm .venv-gpu/.warm

distclean: clean
	rm -rf $(VENV) .venv-gpu demo

# --- .venv, in three stages, each with its stamp ---------------------------------------------------------------------

# 1. The interpreter and the pinned set. A .venv without a stamp was interrupted or made by hand: pip completes it.
$(VENV)/.pinned:
	@python=""; \
	for candidate in $(or $(PYTHON),python3.11 python3); do \
	    if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        python=$$candidate; break; \
	    fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "error: needs Python 3.11 or later, found none as: $(or $(PYTHON),python3.11 python3)" >&2; \
	    echo "       install it, or name it: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	if ! $$python -c 'import venv, ensurepip' 2>/dev/null; then \
	    echo "error: $$python has no venv module (Debian and Ubuntu: apt install python3.11-venv)" >&2; exit 1; \
	fi; \
	version=$$($$python -c 'import platform; print(platform.python_version())'); \
	case $$version in 3.11.*|3.12.*|3.13.*) ;; *) version="$$version (3.11 to 3.13 are tested)";; esac; \
	if [ ! -e $(SET)/torch.txt ]; then \
	    echo "error: no set for TORCH=$(TORCH); there are: $(sort $(wildcard requirements/torch-*))" >&2; exit 1; \
	fi; \
	$(SAY) "Python $$version, torch $(TORCH) -> $(VENV)"; \
	if [ -e $(VENV)/.pinned ] || ! $(BIN)/python -c 'import pip' 2>/dev/null; then $$python -m venv --clear $(VENV); fi; \
	$(SAY) "torch (the big one)"; \
	$(PIP) $(PINS) -r $(SET)/torch.txt; \
	$(SAY) "$(FBGEMM), Numba and what TorchRec needs"; \
	$(PIP) $(PINS) -r $(SET)/$(FBGEMM).txt -r requirements/cpu.txt; \
	$(SAY) "TorchRec, without its dependencies"; \
	$(PIP) --no-deps -r $(SET)/torchrec.txt; \
	$(SAY) "tools: plot, site, lint, types, tests"; \
	$(PIP) $(PINS) -r requirements/demo.txt -r requirements/http.txt -r requirements/site.txt \
	    -r requirements/dev.txt; \
	$(PIP) --no-deps -r requirements/axe.txt; \
	$(SAY) "loaded: $$($(BIN)/python -W ignore -c "$$LOADED")"; \
	echo $(TORCH) > $(VENV)/.torch; \
	echo "$(WANTED)" > $@; \
	$(SAY) "pinned set complete after $$SECONDS s"

# 2. The package itself, editable, with its console script.
$(VENV)/.installed: $(VENV)/.pinned setup.py pyproject.toml
	@$(SAY) "torch-ecrec (editable)"
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

# 3. The Numba kernels, compiled into the cache once, so that no process of a job compiles (or all of them at once do).
$(VENV)/.warm: $(VENV)/.installed $(KERNELS)
	@$(SAY) "compiling the kernels"
	@$(BIN)/torch-ecrec warm
	@touch $@
