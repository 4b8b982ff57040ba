# Everything from a fresh clone: `make train`, `make test`. Needs python3 (3.11 or newer) with venv, and make.

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/gpt.py:tiny
# Extra arguments: make train ARGS="--config.train.num_steps=20", make test ARGS="-k ring"
ARGS ?=
PYTEST_WORKERS ?= -n auto --maxprocesses=4 --dist=loadfile

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help train test quick docs lint types format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: $(INSTALLED) ## train a tiny GPT on simulated devices (CONFIG=..., ARGS=...)
	$(BIN)/python -m launch.train --config=$(CONFIG) $(ARGS)

test: $(INSTALLED) lint types ## lint, types, then the whole test suite (ARGS=...)
	$(BIN)/python -m pytest $(PYTEST_WORKERS) $(ARGS)

quick: $(INSTALLED) ## the tests that take a few seconds each at most
	$(BIN)/python -m pytest $(PYTEST_WORKERS) -m "not slow" $(ARGS)

docs: $(INSTALLED) ## the documentation site in build/site; a broken link is an error
	$(BIN)/python -m mkdocs build --strict -f .ci/mkdocs.yml

lint: $(INSTALLED) ## ruff: rules and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED) ## mypy
	$(BIN)/mypy

format: $(INSTALLED) ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the virtual environment with all caches inside the tree
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installs again only when what is to be installed has changed.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[plan,docs,test]'
	@touch $@
