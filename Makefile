# `make quickstart` and `make test` do all on a fresh machine: they make the virtual environment themselves.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: quickstart quickstart-smoke test lint format real-model

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/python benchmarks/quickstart/quickstart.py

quickstart-smoke: $(VENV)/.installed
	$(BIN)/python benchmarks/quickstart/quickstart.py --smoke --out runs/quickstart-smoke

real-model: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[gguf]'
	$(BIN)/python benchmarks/real_model/run.py

test: $(VENV)/.installed lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/sizes.py

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
