# One line of real command each. `make run` and `make test` are all a fresh machine needs.
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: install run test test-full test-gpu bench check fmt

install: $(INSTALLED)

# torch first and by version: asked for as a dependency, pip may take another and much larger build
$(INSTALLED): pyproject.toml
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet -e '.[dev,transformers,plot,gpu]'
	touch $@

run: install
	$(BIN)/moeloom run --ranks 4 --nodes 2 --exchange hybrid --check

test: install
	$(BIN)/python -m pytest

test-full: install
	MOELOOM_TEST_EXAMPLES=5000 $(BIN)/python -m pytest --timeout 3600

# on a machine that has a GPU and torch already
test-gpu:
	python3 -m pytest -m gpu

bench: install
	$(BIN)/python -m benchmarks

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
