# Two commands: `make demo` runs the main job, `make test` the tests; each sets up what it needs.
# A python whose torch was built for a GPU is used as it is; any other gets a .venv of its own.
PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c "import sys; print('%d.%d %d' % (sys.version_info[:2] + (sys.version_info >= (3, 11),)))" 2>/dev/null)
ifneq ($(lastword $(VERSION)),1)
$(error PYTHON=$(PYTHON) is $(or $(firstword $(VERSION)),not there), torchweft needs python 3.11 or newer: install one and name it, as in `make test PYTHON=python3.12`)
endif

GPU_TORCH := $(shell $(PYTHON) -c "import torch; print(torch.version.cuda or torch.version.hip or '')" 2>/dev/null)
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
ifneq ($(GPU_TORCH),)
RUN := PYTHONPATH=src $(PYTHON)
else
RUN := .venv/bin/python
READY := .venv/.ready
DOCS_READY := .venv/.docs-ready
endif

demo: $(READY)  ## the main job: torchweft-demo/index.html
	$(RUN) -m torchweft demo

# One thread a worker: small tensors on threads that outnumber the cores take six times as long.
test slow mutants docs: export OMP_NUM_THREADS = 1
# What numba and inductor compiled is kept for as long as the sources stay as they are; Triton looks
# at the text of a kernel and of all that it calls.
CODE_CACHE ?= $(CURDIR)/.cache
COMPILED := $(CODE_CACHE)/$(shell cat $$(git ls-files src constraints.txt) | sha256sum | cut -c 1-16)
CACHED := test slow compile doctest docs wheel
$(CACHED): export NUMBA_CACHE_DIR ?= $(COMPILED)/numba
$(CACHED): export TRITON_CACHE_DIR ?= $(CODE_CACHE)/triton
$(CACHED): export TORCHINDUCTOR_CACHE_DIR ?= $(COMPILED)/inductor
# The text of a printed loop has the hash of all that it calls: its machine code is kept for longer.
CALLED := constraints.txt src/torchweft/core/private_compilers.py
LOOPS := $(CODE_CACHE)/loops-$(shell cat $(CALLED) | sha256sum | cut -c 1-16)
$(CACHED): export TORCHWEFT_CACHE_DIR ?= $(LOOPS)
# numba's name for the folder of their code
LOOP_CODE := $(COMPILED)/numba/generated_$(shell printf %s $(LOOPS)/generated | sha1sum | cut -c 1-40)
$(CACHED): | $(LOOP_CODE)
$(LOOP_CODE):
	mkdir -p $(@D) $(LOOPS)/numba
	ln -sfn $(LOOPS)/numba $@

test: $(READY)  ## the short suite: natively, then kernels in Triton's interpreter; MATRIX=full: every test
	$(RUN) -m pytest -q -n 2 -m "not slow" --ignore=tests/compile
	TRITON_INTERPRET=1 $(RUN) -m pytest -q -n 2 -m "$(if $(filter full,$(MATRIX)),,kernels and )not slow" tests/contract

slow: $(READY)  ## torch.compile, export, the demo and other tests of minutes
	$(RUN) -m pytest -q -n 2 -m slow --ignore=tests/compile

mutants: $(READY)  ## planted bugs: the short suite must fail with each
	$(RUN) -m tests.mutants

compile: $(READY)  ## every kernel built for sm_90, against the snapshot; MATRIX=full: for sm_80 and gfx942 too
	$(RUN) -m pytest -q -n 2 tests/compile

setup: $(READY)  ## what the other targets need

lint: $(READY)  ## format, style, imports, places of mutants
	$(RUN) -m ruff format --check -q .
	$(RUN) -m ruff check -q .
	$(RUN) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"
	$(RUN) -m tests.mutants --places

types: $(READY)  ## mypy, strict
	$(RUN) -m mypy

doctest: $(READY)  ## every >>> in the sources, the README and the docs
	$(RUN) -m pytest -q --doctest-modules --doctest-glob='*.md' --ignore-glob='docs/*.py' --ignore=docs/_build --ignore=src/torchweft/o3/adapters/nequip_modifier.py --ignore=src/torchweft/reductions/gpytorch.py src README.md docs

docs: $(DOCS_READY)  ## docs/_build/html, with every example run; spelling and links
	$(RUN) -m codespell_lib -I docs/spelling.txt $$(git ls-files '*.md' docs/tutorials src examples)
	rm -rf docs/api/generated docs/sg_execution_times.rst  # pages of what is gone
	$(RUN) -m sphinx -W --keep-going -b html docs docs/_build/html
	$(RUN) docs/check_links.py docs/_build/html

wheel: $(READY)  ## the wheel, built and tried in a venv of its own
	.ci/try-wheel $(lastword $(RUN))

clients:  ## tests with the other libraries (mace-torch, nequip, spconv, gpytorch, ...), in environments of their own
	.ci/try-clients $(PYTHON)

check: $(READY)  ## every contract on this machine's GPU, with a receipt
	$(RUN) -m tests.check

bench: $(READY)  ## times and errors of the named workloads
	$(RUN) -m benchmarks

help:  ## this list
	@sed -nE 's/^([a-z]+):.*## (.*)/\1 \2/p' Makefile | awk '{ t = $$1; $$1 = ""; printf "make %-8s %s\n", t, $$0 }'

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install -q -e '.[demo,dev,md]'
	touch $@

.venv/.docs-ready: .venv/.ready
	$(RUN) -m pip install -q -e '.[docs]'
	touch $@

.PHONY: setup demo test slow mutants compile lint types doctest docs wheel clients check bench help
