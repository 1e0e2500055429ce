# Two commands for a new machine: `make demo` and `make test`. Both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-thorough lint format bench schema clean

demo: $(VENV)/.installed
	$(BIN)/ptpipe run manifests/mnist_qat.yaml

# Two files at once, of one thread each: with more they would wait for each other's processors.
test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Also each combination of long tests, and 20 kills of each training: an hour.
test-thorough: $(VENV)/.installed
	PTPIPE_THOROUGH=1 PTPIPE_KILLS=20 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

schema: $(VENV)/.installed
	$(BIN)/ptpipe schema > manifests/schema.json

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
