# Two commands for a new machine: `make demo` and `make test`. Both create .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := .venv-core
PIP := -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

# Two workers of one thread each: with more, they would compete for the same processors.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 20

.PHONY: demo test test-core test-others test-gpu test-thorough coverage lint format docs bench schema hooks release clean

demo: $(VENV)/.installed
	$(BIN)/ptpipe run manifests/mnist_qat.yaml

test: $(VENV)/.installed
	$(PYTEST)

# The core and the reporters, where torch is not installed.
test-core: $(CORE)/.installed
	OMP_NUM_THREADS=1 $(CORE)/bin/python -m pytest -n 2 tests/ptpipe tests/plugins/ptpipe_report

# For .ci/run, with PTPIPE_PASSED_TO: what has not passed there, with the site that `docs` has built.
test-others: docs test-core
	PTPIPE_PASSED_IN="$$PTPIPE_PASSED_TO" PTPIPE_PASSED_TO= PTPIPE_SITE="$(CURDIR)/build/site" $(PYTEST)

# The tests that need CUDA devices, and see them; several of them need two.
test-gpu: $(VENV)/.installed
	$(BIN)/python -m pytest -m gpu

# Also every combination of the long tests, and 20 kills of each training: two hours.
test-thorough: $(VENV)/.installed
	PTPIPE_THOROUGH=1 PTPIPE_KILLS=20 $(PYTEST)

coverage: $(VENV)/.installed
	$(PYTEST) --cov --cov-report=term:skip-covered --cov-report=html

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/commit_subject.py

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.installed
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

schema: $(VENV)/.installed
	$(BIN)/ptpipe schema > manifests/schema.json

# Git runs the checks of .pre-commit-config.yaml at every commit from then on.
hooks: $(VENV)/.installed
	$(BIN)/pre-commit install

release: $(VENV)/.installed
	.ci/release $(BIN)/python

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --editable '.[dev,docs]'
	touch $@

$(CORE)/.installed: pyproject.toml constraints.txt .ci/requirements.py
	$(PYTHON) -m venv --clear $(CORE)
	$(PYTHON) .ci/requirements.py core > $(CORE)/requirements.txt
	$(CORE)/bin/python $(PIP) --requirement $(CORE)/requirements.txt
	$(CORE)/bin/python $(PIP) --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) $(CORE) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage* dist build
