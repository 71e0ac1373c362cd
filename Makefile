PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test quick lint bench clean

run: $(STAMP)
	$(BIN)/gqa-tvm demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

quick: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "not slow"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python bench/against_onnxruntime.py

clean:
	rm -rf $(VENV) build dist *.egg-info

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@
