# Every target creates .venv on first use and installs the locked versions; repeating a command does not reinstall.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Every pip call carries the locked versions, those of isolated builds included.
PIP := PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test check lint types figures bench docs clean

demo: $(VENV)/.lab
	$(BIN)/specgrad demo $(ARGS)

test: $(VENV)/.dev
	$(BIN)/pytest --numprocesses auto $(ARGS)

check: lint types figures test

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.dev
	$(BIN)/mypy

figures: $(VENV)/.lab
	$(BIN)/specgrad reproduce --preset quick --out specgrad-figures $(ARGS)

bench: $(VENV)/.lab
	for file in benchmarks/bench_*.py; do $(BIN)/python $$file || exit 1; done

docs: $(VENV)/.dev
	$(PIP) -e '.[docs]'
	$(BIN)/pdoc --docformat google --math --output-directory docs/build specgrad

$(VENV)/.lab: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specgrad needs Python >= 3.11; run make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[lab]'
	touch $@

$(VENV)/.dev: $(VENV)/.lab
	$(PIP) -e '.[lab,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist docs/build specgrad-demo specgrad-figures
