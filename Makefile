# make serve: the model that ships with Winnow at localhost:8000.   make demo: one answer of it,
# with 4-bit state.   make test: every check.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
# What xgrammar needs but triton, 1.3 GB that a CPU never runs.
GRAMMAR_NEEDS := apache-tvm-ffi transformers
HOST ?= 127.0.0.1
PORT ?= 8000
# Processes of tests.
JOBS ?= 2

.PHONY: serve demo test lint format types unit bench-cpu clean

serve: $(VENV)/.run
	$(BIN)/winnow serve --host $(HOST) --port $(PORT)

demo: $(VENV)/.run
	$(BIN)/winnow -v generate --chat "Tell me a story about a fox." --max-tokens 160 \
		--temperature 0.7 --seed 1 --kv-format nvfp4 --index-format nvfp4

test: lint types unit

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev $(VENV)/.browser
	$(BIN)/pytest --numprocesses $(JOBS) --dist loadfile

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-cpu: $(VENV)/.dev
	$(BIN)/python benchmarks/cpu_against_transformers.py

$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e . $(GRAMMAR_NEEDS)
	$(PIP) --no-deps xgrammar
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) -e '.[dev]'
	touch $@

# Where apt-get may install it; elsewhere the test of the page is skipped and says so.
$(VENV)/.browser: $(VENV)/.run
	command -v chromium || { test "$$(id -u)" = 0 && command -v apt-get && apt-get -qq update \
		&& apt-get -qq install --no-install-recommends chromium; } >/dev/null || true
	touch $@

clean:
	rm -rf build $(VENV)
