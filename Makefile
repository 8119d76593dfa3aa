# `make help` lists the targets. Every target that needs Python sets up .venv first.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:

PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.installed
COMPOSE ?= docker compose
export PATH := $(CURDIR)/.venv/bin:$(PATH)

# `make test-gpu PY=python3` uses an interpreter that has the packages already.
ifeq ($(origin PY),command line)
STAMP :=
endif

# Flags of `make serve`; each is passed on when it is set.
SERVE_FLAGS := $(if $(MODEL),--model $(MODEL)) $(if $(DRAFT_MODEL),--draft-model $(DRAFT_MODEL)) \
  $(if $(ALGORITHM),--algorithm $(ALGORITHM)) $(if $(PLACEMENT),--placement $(PLACEMENT)) \
  $(if $(DTYPE),--dtype $(DTYPE))

.PHONY: help setup protos fmt check check-format check-lint check-types check-protos \
  check-imports test test-gpu serve demo bench bench-gpu load up down clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with everything pinned; does nothing when up to date

.venv/.installed: pyproject.toml constraints.txt
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[gateway,engine,dev]'
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
	$(PY) -m pytest -n 2 $(ARGS)

test-gpu: $(STAMP) ## the tests that need a CUDA device
	$(PY) -m pytest -m gpu $$(find tests -name 'test_*_gpu.py') $(ARGS)

serve: $(STAMP) ## target, draft and gateway in the foreground; MODEL= DRAFT_MODEL= ALGORITHM= PLACEMENT= DTYPE=
	@exec $(PY) -m services.serve $(SERVE_FLAGS) $(ARGS)

demo: $(STAMP) ## a streamed chat against a running `make serve`
	@$(PY) -m gateway.demo $(ARGS)

bench: $(STAMP) ## tokens/s and accepted length, speculation on and off; ARGS="--help"
	@$(PY) -m tests.bench $(ARGS)

bench-gpu: $(STAMP) ## forwards on one GPU, each beside its floor
	@$(PY) -m tests.bench.gpu

load: $(STAMP) ## closed-loop load on a running gateway; ARGS="--help"
	@$(PY) -m tests.load $(ARGS)

up: ## the three services in containers, in the background
	$(COMPOSE) up --build --detach

down: ## stop and remove the containers
	$(COMPOSE) down

clean: ## remove caches and logs, keep .venv
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .run build dist
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
