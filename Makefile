# make demo: tokens out of a small checkpoint with 4-bit state.   make test: every check.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= build/demo

.PHONY: demo test lint format types unit bench-cpu clean

demo: $(VENV)/.run
	rm -rf $(DEMO)
	$(BIN)/winnow make-tiny $(DEMO)/plain
	$(BIN)/winnow convert $(DEMO)/plain $(DEMO)/nvfp4 --experts nvfp4 --linear mxfp8
	@echo "Random weights, so the text means nothing; the path is the real one:"
	@echo "NVFP4 experts, NVFP4 KV and index cache, a prompt longer than the selection window."
	$(BIN)/winnow -v generate $(DEMO)/nvfp4 --prompt-file docs/architecture.md --max-tokens 32 \
		--temperature 0 --kv-format nvfp4 --index-format nvfp4 --json

test: lint types unit

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(BIN)/pytest

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-cpu: $(VENV)/.dev
	$(BIN)/python benchmarks/cpu_against_transformers.py

$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf build $(VENV)
