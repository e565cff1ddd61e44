# Two commands for people and CI alike: `make demo` and `make test`. Both set themselves up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: setup demo test check format clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	@echo "Installing SGLang and the rest: 11 GB on disk, some minutes"
	$(BIN)/pip install --quiet -e ".[test,dev]"
	touch $@

demo: setup
	$(BIN)/precache-sglang demo

# Two workers: a test waits for its server to start most of the time.
test: setup
	$(BIN)/python -m pytest -n 2 $(ARGS)

# Format, lint; then types and imports of the built wheel, unpacked in another place.
check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tests/check_wheel.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
