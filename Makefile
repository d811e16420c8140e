# Two commands are all that a fresh clone needs: `make generate` and `make test`.
#
#   make serve
#   make generate ARGS='--prompt "Once upon a time" --max-tokens 40 --stream'
#   make PYTHON=/opt/python3.12/bin/python3 install

.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := --prompt "The capital of France is" --max-tokens 16

.PHONY: help
help:
	@echo "make generate   answer a prompt with a small real model (ARGS='--prompt …' for another)"
	@echo "make serve      serve the small model on http://127.0.0.1:8000, tracing on (ARGS='MODEL --port …')"
	@echo "make test       run every test (ARGS='tests/memory -x' for some)"
	@echo "make check      ruff and mypy"
	@echo "make bench      run the benchmarks"
	@echo "make install    only set up $(VENV)"
	@echo "make clean      remove what was built"

.PHONY: install
install: $(INSTALLED)

# Made again when pyproject.toml changes or the interpreter behind it is gone.
$(INSTALLED): pyproject.toml $(if $(shell $(BIN)/python -c '' 2>/dev/null || echo gone),FORCE)
	@scripts/setup-venv $(VENV) $(PYTHON)
	@touch $@

.PHONY: FORCE
FORCE:

.PHONY: generate
generate: $(INSTALLED)
	@$(BIN)/vtserve generate $(or $(ARGS),$(DEMO))

.PHONY: serve
serve: $(INSTALLED)
	@exec $(BIN)/vtserve serve --alloc-trace $(ARGS)

.PHONY: test
test: $(INSTALLED)
	@$(BIN)/python -m pytest $(ARGS)

.PHONY: check
check: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/mypy

.PHONY: bench
bench: $(INSTALLED)
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script; done

.PHONY: clean
clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find app engine tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
