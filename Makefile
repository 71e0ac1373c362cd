PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Running needs no oracle: onnxruntime is installed for tests and benchmarks only.
RUN := $(VENV)/.installed-run
DEV := $(VENV)/.installed-dev
# Other random calls every day; PARITY_SEED=20422 repeats those of one.
PARITY_SEED ?= $(shell expr $$(date +%s) / 86400)
PARITY_CALLS ?= 2000

# Sizes of the wheel's prebuilt library, which serves every CPU of this architecture.
WHEEL_HEAD_SIZES ?= 64,80,96,128,256
WHEEL_LIBRARY := dist/libgqa-$(subst x86_64,x86-64,$(shell uname -m)).so

.PHONY: run test quick parity lint bench wheel clean

run: $(RUN)
	$(BIN)/gqa-tvm demo

test: $(DEV)
	$(BIN)/python -m pytest -n 2 --dist worksteal

quick: $(DEV)
	$(BIN)/python -m pytest -n 2 -m "not slow"

parity: $(DEV)
	@echo "PARITY_SEED=$(PARITY_SEED) PARITY_CALLS=$(PARITY_CALLS)"
	GQA_TVM_PARITY_SEED=$(PARITY_SEED) GQA_TVM_PARITY_CALLS=$(PARITY_CALLS) \
		$(BIN)/python -m pytest -n 2 --dist worksteal tests/test_operator_matches_onnxruntime.py

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(DEV)
	$(BIN)/python bench/run.py --selection quick

wheel: $(RUN)
	$(BIN)/gqa-tvm build --head-sizes $(WHEEL_HEAD_SIZES) -o $(WHEEL_LIBRARY)
	GQA_TVM_WHEEL_LIBRARY=$(WHEEL_LIBRARY) $(BIN)/python -m pip wheel --quiet --no-deps -w dist .

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(RUN): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e ".[build,cli]"
	touch $@

$(DEV): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@
