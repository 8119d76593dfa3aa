# `make help` lists the targets. Every target that needs Python sets up .venv first.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:

PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.installed
COMPOSE ?= docker compose
CHROMIUM ?= /usr/bin/chromium
SANITIZER ?= compute-sanitizer
TOOL ?= memcheck
export PATH := $(CURDIR)/.venv/bin:$(PATH)

# `make test-gpu PY=python3` uses an interpreter that has the packages already.
ifeq ($(origin PY),command line)
STAMP :=
endif

# A word for the shell, whatever is in it.
quoted = '$(subst ','\'',$(1))'

# Flags of `make serve`; each is passed on when it is set.
SERVE_FLAGS = $(if $(MODEL),--model $(call quoted,$(MODEL))) \
  $(if $(DRAFT_MODEL),--draft-model $(call quoted,$(DRAFT_MODEL))) \
  $(if $(ALGORITHM),--algorithm $(call quoted,$(ALGORITHM))) \
  $(if $(PLACEMENT),--placement $(call quoted,$(PLACEMENT))) \
  $(if $(DTYPE),--dtype $(call quoted,$(DTYPE))) $(if $(CERTS),--certs $(call quoted,$(CERTS)))

# Without compiling: of the 14,000 modules that are installed a quarter is ever imported, and Python
# compiles those when they are. The services' are compiled by set-up, once for all their processes.
INSTALL := -m pip install --no-compile --no-warn-conflicts --constraint constraints.txt
SERVICES := gateway.__main__, services.cli.__main__, services.target.__main__, services.draft.__main__

IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

.PHONY: help setup triton protos fmt check check-format check-lint check-types check-protos \
  check-imports test test-wheel test-clone test-browser screenshots soak test-kernels test-gpu sanitize serve certs demo bench \
  bench-drafters bench-async bench-http bench-split bench-start bench-gpu bench-experts bench-tp bench-tp-draft load load-gateway load-target load-draft \
  tune fuzz test-clients up down clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with everything pinned; does nothing when up to date

.venv/.installed: pyproject.toml constraints.txt
	@if ! .venv/bin/python -c '$(IS_NEW_ENOUGH)' 2> /dev/null; then
	  $(PYTHON) -c '$(IS_NEW_ENOUGH)' || { echo "Outrider needs Python 3.11 or newer; $(PYTHON) is" \
	    "$$($(PYTHON) --version 2>&1). Name another: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	  echo "set-up: a new .venv of $$($(PYTHON) --version)"
	  rm -rf .venv
	  $(PYTHON) -m venv .venv
	fi
	echo "set-up: installing into .venv; the first time takes a few minutes, most of it for torch"
	.venv/bin/python $(INSTALL) --quiet pip # that of Python 3.11 takes twice as long
	.venv/bin/python $(INSTALL) --editable '.[gateway,engine,tracing,dev]' \
	  | sed -u -e 's/^Installing collected.*/Installing all of them; torch alone takes a minute/' \
	    -e '/^\(Collecting\|Installing\|  Downloading.* MB)\)/!d' -e 's/^\(.\{100\}\).*/\1 …/'
	env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c 'import $(SERVICES)'
	touch $@

protos: $(STAMP) ## write shared/pb/ from protos/
	$(PY) -m protos.generate

fmt: $(STAMP) ## sort imports and format
	$(PY) -m ruff check --fix-only --quiet .
	$(PY) -m ruff format --quiet .

check: $(STAMP) ## lint, types, contracts, import rules: under a minute
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target --keep-going \
	  check-types check-format check-lint check-protos check-imports
	@echo "check: all passed"

check-format:
	@echo "== ruff format"; $(PY) -m ruff format --check --quiet .

check-lint:
	@echo "== ruff"; $(PY) -m ruff check --quiet .

check-types:
	@echo "== mypy --strict"; $(PY) -m mypy

check-protos:
	@echo "== buf lint"; buf lint protos
	@echo "== buf breaking"; .ci/buf-breaking
	@echo "== stub drift"; $(PY) -m protos.generate --check 2>&1 | sed '/^Writing mypy/d'

check-imports:
	@echo "== import rules"; $(PY) -m pytest -q -p no:cacheprovider tests/test_import_rules.py

test: $(STAMP) ## every test that needs no GPU
	$(PY) -m pytest -n 2 --dist worksteal $(ARGS)

test-wheel: $(STAMP) ## pip install of the built wheels into empty environments, then `outrider serve`
	$(PY) -m tests.wheel_install $(ARGS)

test-clone: $(STAMP) ## a clone without anything installed: `make serve`, then the README's requests
	$(PY) -m tests.clone_install $(ARGS)

test-browser: $(STAMP) ## the playground in headless Chromium; CHROMIUM=/usr/bin/chromium
	@test -x "$(CHROMIUM)" || { echo "there is no Chromium at $(CHROMIUM): install it (Debian: apt-get install chromium)" \
	  "or say where it is, CHROMIUM=PATH" >&2; exit 1; }
	CHROMIUM=$(CHROMIUM) $(PY) -m pytest -m browser tests/browser $(ARGS)

screenshots: $(STAMP) ## write docs/images/ from a running demo in headless Chromium
	CHROMIUM=$(CHROMIUM) $(PY) -m tests.browser.screenshots

triton: $(STAMP) # comes with torch's CUDA builds alone
	@$(PY) -c 'import triton' 2>/dev/null || $(PY) $(INSTALL) --quiet triton

test-kernels: triton ## Triton's kernels on the CPU, in Triton's interpreter
	TRITON_INTERPRET=1 $(PY) -m pytest -n 2 --dist worksteal -m interpreter tests/shared/kernels tests/shared/runtime tests/shared/speculation tests/bench $(ARGS)

test-gpu: $(STAMP) ## the tests that need a CUDA device
	$(PY) -m pytest -m gpu $$(find tests -name 'test_*_gpu.py') $(ARGS)

# Without torch's cache of freed memory, in which a bad address would be a good one.
sanitize: $(STAMP) ## a few kernel tests under NVIDIA's compute-sanitizer; SANITIZER= TOOL=memcheck
	@command -v "$(SANITIZER)" > /dev/null || { echo "there is no $(SANITIZER): it comes with the CUDA toolkit;" \
	  "say where it is, SANITIZER=PATH" >&2; exit 1; }
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool $(TOOL) --target-processes all --error-exitcode 9 \
	  $(PY) -m pytest -m gpu tests/shared/kernels/test_split_plan_gpu.py tests/shared/kernels/test_fused_gpu.py \
	  tests/shared/kernels/test_attention_gpu.py -k "split_plan or rotation or norm or any_page_size" $(ARGS)

soak: $(STAMP) ## an engine under random traffic and bad drafts; ARGS="--minutes 5 --device cuda"
	$(PY) -m tests.soak $(ARGS)

serve: $(STAMP) ## target, draft and gateway in the foreground; MODEL= DRAFT_MODEL= ALGORITHM= PLACEMENT= DTYPE= CERTS=
	@exec $(PY) -m services.cli serve $(SERVE_FLAGS) $(ARGS)

certs: $(STAMP) ## a trial authority with server and client certificates in .certs/
	@$(PY) -m services.certs $(ARGS)

demo: $(STAMP) ## a streamed chat against a running `make serve`
	@$(PY) -m services.demo $(ARGS)

bench: $(STAMP) ## tokens/s and accepted length, speculation on and off; on a GPU an 8B's, and one table of all aims
	@$(PY) -m tests.bench.choose $(ARGS)

bench-drafters: $(STAMP) ## every drafter of the demo on the same prompts; ARGS="--prompts FILE"
	@$(PY) -m tests.bench.drafters $(ARGS)

bench-async: $(STAMP) ## plain, synchronous and ahead, draft and target on a GPU each; ARGS="--help"
	@$(PY) -m tests.bench.ahead $(ARGS)

bench-http: $(STAMP) ## what a client gets over HTTP: bursts, closed loops, Poisson arrivals; ARGS="--help"
	@$(PY) -m tests.bench.http $(ARGS)

bench-split: $(STAMP) ## the same with drafts on a second GPU, beside the embedded head; ARGS="--help"
	@$(PY) -m tests.bench.http --modes plain,eagle3,eagle3-remote,standalone-remote --concurrency 1,8,32,64,1 $(ARGS)

bench-start: $(STAMP) ## the parts of a target's start, to the first token; ARGS="--widen DIR --algorithm EAGLE3"
	@$(PY) -m tests.bench.start $(ARGS)

bench-gpu: $(STAMP) ## on one GPU, beside the floor: forwards, rounds, plain decode by the engine, kernels
	@$(PY) -m tests.bench.gpu
	@$(PY) -m tests.bench.engine_gpu
	@$(PY) -m tests.bench.attention
	@$(PY) -m tests.bench.products

bench-experts: $(STAMP) ## on one GPU, mixtures of experts beside their floors; ARGS="--shapes deepseek-v3"
	@$(PY) -m tests.bench.experts $(ARGS)

bench-tp: $(STAMP) ## one model on one GPU and on two; ARGS="--sizes 1 4"
	@$(PY) -m tests.bench.tensor_parallel $(ARGS)

bench-tp-draft: $(STAMP) ## a draft's trees on one GPU and on two; ARGS="--model 8b"
	@$(PY) -m tests.bench.draft_parallel $(ARGS)

load: $(STAMP) ## load on a running gateway, closed or open loop; ARGS="--help"
	@$(PY) -m tests.load $(ARGS)

load-gateway: $(STAMP) ## what the gateway itself costs, in front of a target without a model
	@$(PY) -m tests.load.gateway $(ARGS)

load-target: $(STAMP) ## gRPC load on a running target, to its knee
	@$(PY) -m tests.load.target $(ARGS)

load-draft: $(STAMP) ## gRPC load on a running draft, to its knee
	@$(PY) -m tests.load.draft $(ARGS)

tune: $(STAMP) ## the best tree shape, placement and concurrency for a workload; ARGS="--help"
	@$(PY) -m tests.tune $(ARGS)

# Each in an environment of its own: their dependencies do not fit together, or ours.
CLIENTS := sdk litellm aiperf guidellm lm_eval smg openai_agents pydantic_ai instructor llama_index aider suites node

fuzz: $(STAMP) ## nearly right requests to every route of a gateway, drafts that break the protocol; ARGS="--requests 100000 --seed 7"
	@$(PY) -m tests.fuzz $(ARGS)

test-clients: $(STAMP) $(CLIENTS:%=.venv-clients/%/.installed) ## other people's clients; ARGS="--only aiperf"
	@$(PY) -m tests.clients --environments .venv-clients $(ARGS)

.venv-clients/%/.installed: tests/clients/%.txt
	@$(PYTHON) -m venv .venv-clients/$*
	.venv-clients/$*/bin/python -m pip install --quiet --requirement $<
	touch $@

# Without npm there is nothing to install, and the client of Node is skipped by name.
.venv-clients/node/.installed: tests/clients/package.json
	@mkdir -p .venv-clients/node
	cp $< .venv-clients/node/
	if command -v npm > /dev/null; then (cd .venv-clients/node && npm install --silent && node node_modules/@anthropic-ai/claude-code/install.cjs); touch $@; fi

up: ## the three services in containers, in the background
	$(COMPOSE) up --build --detach

down: ## stop and remove the containers
	$(COMPOSE) down

clean: ## remove caches and logs, keep .venv
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .run build dist
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
