# Every target works from a fresh clone with Python 3.11 or newer, make and network access to the package
# index: it makes .venv, installs what is missing and fetches the model first. Nothing is done twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
ROOMS := tracing engine harness evals regression

# One thread a process: a second one on a busy core makes everything several times slower.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test check format bench bench-tracing model model-gemma types sim sim-mutants

help:
	@echo 'make demo    three replicas, one planted defect, two verdicts (about 3 minutes after installation)'
	@echo 'make test    all tests'
	@echo 'make check   format, lint, types and the tidy test'
	@echo 'make format  rewrite the source the way make check wants it'
	@echo 'make bench   tokens a second, side by side with transformers'
	@echo 'make bench-tracing  what log, spans and metrics cost (about 6 minutes)'
	@echo 'make sim     thousands of simulated lives of the scheduler; make sim SEED=n replays one with a trace'
	@echo 'make sim-mutants  planted defects, and how many seeds it takes to find each'
	@echo 'make model   fetch SmolLM2-135M-Instruct into the cache folder; make model-gemma: Gemma 3 270M'

# The stamp is written last, so an installation that was cut off is done again.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "expected Python 3.11 or newer, got %s: make PYTHON=python3.x" % sys.version)'
	@test -x $(BIN)/python || $(PYTHON) -m venv --clear $(VENV) || \
	  { rm -rf $(VENV); echo 'expected a Python that can make a virtual environment: install python3-venv' >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25'
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[engine,evals,dev]'
	@touch $@

model: $(INSTALLED)
	$(BIN)/firstdiff model pull smollm2-135m

model-gemma: $(INSTALLED)
	$(BIN)/firstdiff model pull gemma3-270m

demo: model
	$(BIN)/firstdiff demo

test: model model-gemma
	FIRSTDIFF_REQUIRE_MODEL=1 $(BIN)/python -m pytest $(ARGS)

bench-tracing: model
	$(BIN)/python tests/bench/bench_tracing.py $(ARGS)

bench: model
	$(BIN)/python tests/bench/bench_engine.py $(ARGS)

sim: $(INSTALLED)
	$(BIN)/python tests/sim/sim.py $(if $(SEED),--seed $(SEED)) $(ARGS)

sim-mutants: $(INSTALLED)
	$(BIN)/python tests/sim/mutants.py

# mypy wants folders named like the imports; the links below show it the rooms under their import name.
types:
	@mkdir -p build/types/firstdiff
	@for room in $(ROOMS); do ln -sfn ../../../$$room build/types/firstdiff/$$room; done

check: $(INSTALLED) types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy build/types/firstdiff
	$(BIN)/python -m pytest -q tests/unit/test_tidy.py

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
