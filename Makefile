# `make quickstart` and `make test` do all on a fresh machine: they make the virtual environment themselves.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: quickstart quickstart-smoke test test-openenv test-verifiers test-vllm lint format real-model bench

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/python benchmarks/quickstart/quickstart.py

quickstart-smoke: $(VENV)/.installed
	$(BIN)/python benchmarks/quickstart/quickstart.py --smoke --out runs/quickstart-smoke

# train_10k.parquet and search_cache.json of the ARPO authors' repository.
DATA ?= ../shared/data
real-model: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[gguf]'
	$(BIN)/python benchmarks/real_model/run.py --data $(DATA)

# Ours beside the peers, in under 15 minutes; writes benchmarks/RESULTS.md.
bench: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/performance/suite.py

test: $(VENV)/.installed lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Libraries whose pins go with nothing else have environments of their own.
.venv-openenv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-openenv
	.venv-openenv/bin/python -m pip install --quiet --editable '.[openenv-server]' httpx 'pytest>=8' 'pytest-timeout>=2.3'
	touch $@

.venv-verifiers/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python -m pip install --quiet --editable '.[verifiers]' 'pytest>=8' 'pytest-timeout>=2.3'
	touch $@

# torch==2.13.0+cpu is on PyTorch's CPU index: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
.venv-vllm/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --no-deps --requirement constraints-vllm.txt
	.venv-vllm/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

test-openenv: .venv-openenv/.installed
	ARPO_REQUIRE_OPENENV=1 OMP_NUM_THREADS=1 .venv-openenv/bin/python -m pytest tests/interop/test_openenv.py tests/interop/test_openenv_session.py

test-verifiers: .venv-verifiers/.installed
	ARPO_REQUIRE_VERIFIERS=1 OMP_NUM_THREADS=1 .venv-verifiers/bin/python -m pytest tests/interop/test_verifiers.py tests/interop/test_verifiers_traces.py

# vLLM leaves sockets to the garbage collector, which says so in whatever test runs then.
test-vllm: .venv-vllm/.installed
	ARPO_REQUIRE_VLLM=1 OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -W ignore::pytest.PytestUnraisableExceptionWarning \
		tests/arpo_algo/test_vllm_parts.py tests/arpo_algo/test_vllm_async_parts.py tests/arpo_algo/test_vllm_transfer_parts.py tests/serving

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/sizes.py

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
