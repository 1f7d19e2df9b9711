PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean

help:
	@echo "make demo    install, fetch a small model and real reviews, annotate them, show the result"
	@echo "make test    install and run the test suite"
	@echo "make lint    check style, formatting and types"
	@echo "make clean   remove the environment, caches, builds and the demo's output"
	@echo "Variables:   PYTHON=python3.12 chooses the interpreter; PIP_ARGS=... goes to pip install"

demo: $(VENV)/.stamp-demo
	$(BIN)/python -m batchrun.demo
	$(BIN)/batchrun job=demo output.path=out/demo

test: $(VENV)/.stamp-dev
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) out dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find batchrun kernels tests -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not on the PATH; give another: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "make: $(PYTHON) is Python %d.%d, and batchrun needs 3.11 or later; give another: make PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) -e '.[gguf]'
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@
