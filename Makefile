# Everything happens in .venv, made from python3 and constraints.txt on first use.
# For a machine without an NVIDIA GPU, the smaller torch: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt

TEST_PROCESSES ?= 2

.PHONY: demo test test-all lint bench clean

demo: .venv/.for-demo
	@out=ampguard-runs/demo-$$(date +%Y%m%d-%H%M%S); \
	$(BIN)/ampguard run --out $$out examples/mae_photos.py; status=$$?; \
	echo "demo: the training stopped itself on its NaN loss (its own exit status, $$status, is passed on by ampguard run)"; \
	grep -q '"cause": "fp16-overflow"' $$out/report.json

# One thread each: the tests' own processes share the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile

# Every test function that is not slow, with one or two of its parameter sets.
test: lint
	$(PYTEST) --sampled

test-all: lint
	$(PYTEST)

lint: .venv/.for-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.for-test
	@for figure in bench/*/run.py; do echo "== $$figure"; $(BIN)/python $$figure || exit 1; done

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the pinned versions need Python 3.11 or newer")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing torch and the build tools into .venv (once; some minutes) ..."
	@$(INSTALL) torch
	@$(INSTALL) hatchling editables
	@touch $@

.venv/.for-demo: .venv/.torch pyproject.toml
	@$(INSTALL) --no-build-isolation -e '.[examples]'
	@touch $@

.venv/.for-test: .venv/.torch pyproject.toml
	@echo "installing what the tests need into .venv (once) ..."
	@$(INSTALL) --no-build-isolation -e '.[examples,dev,frameworks]'
	@$(INSTALL) --no-deps timm
	@touch $@ .venv/.for-demo
