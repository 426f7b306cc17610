# Everything a clone needs: `make demo` shows the product at work, `make test` runs the quick tests.
# Prerequisites: make, python3 (3.11 or newer) and its venv module (Debian: apt install make python3-venv).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# How many processes run the simulations, and how many the tests: those mostly wait, for servers, processes and leases.
JOBS ?= 2
TEST_JOBS ?= 3
SOURCES := $(shell find src examples -type f -not -path '*/__pycache__/*' -not -name '.*') pyproject.toml README.md

.PHONY: help demo test test-all lint simulate chaos soak mutants bench bench-paired docs clean

help:
	@echo "make demo    index the Python files of this environment with two workers, and hurt them meanwhile"
	@echo "make test    the quick tests, on the sources: about three minutes (TESTS= names files or folders)"
	@echo "make test-all  all tests, on each event loop, on the installed package: about a quarter of an hour"
	@echo "make lint    ruff, mypy, import-linter, what is written twice, the sizes of files and functions, and the prose"
	@echo "make simulate  10,000 runs of a simulated fleet in trouble"
	@echo "make chaos   100,000 messages on each kind of server, with everything killed, frozen and cut off (BACKENDS= MESSAGES= SEED=)"
	@echo "make soak    offload pools and loop threads, used hard; nothing may be left behind (RUNS= CONCURRENCY= DEADLINE_MS= TIMEOUT_PER_RUN= RACE_ROUNDS=)"
	@echo "make mutants the faults of scripts/mutants.toml, planted one at a time: the tests must catch 95 % of them (MUTANTS=)"
	@echo "make bench   the benchmarks, beside those of peers"
	@echo "make bench-paired  this code's speed beside that of an earlier revision (BASE= BENCH=)"
	@echo "make docs    the documentation as a site, in site/"
	@echo "make clean   remove the virtual environment and what the tools left behind"

demo: $(VENV)/installed
	$(BIN)/mainspring demo

# Tests start hundreds of processes, which shall find compiled code even if the environment forbids to write any to the tree.
test test-all: export PYTHONDONTWRITEBYTECODE :=
test test-all: export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/bytecode
PYTEST = $(BIN)/python -m pytest --numprocesses $(TEST_JOBS) --dist worksteal --max-worker-restart 0

# The same tests in the same order each time, with the same examples of Hypothesis. None may take longer by itself (seconds).
OWN_TIME_LIMIT ?= 0.5
test: $(VENV)/editable
	$(PYTEST) -p no:randomly -o own_time_limit=$(OWN_TIME_LIMIT) $(TESTS)

test-all: $(VENV)/installed-dev
	$(PYTEST) --full $(TESTS)

lint: $(VENV)/editable
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/pylint --disable=all --enable=duplicate-code --min-similarity-lines=12 --score=n src/mainspring
	$(BIN)/python scripts/check_sizes.py
	$(BIN)/python scripts/check_prose.py

# Ten thousand times five minutes of a fleet in five hours' trouble; SEEDS says how many. In so much of it no handler just works:
# a tenth as many runs are of a busy fleet in less, and as many of a fleet that claims ahead, as its messages take milliseconds.
# As many more are of supervised services.
SEEDS ?= 10000
simulate: $(VENV)/editable
	PYTHONPATH=scripts $(BIN)/mainspring simulate simulated_group:build --seeds $(SEEDS) --jobs $(JOBS) --duration 5m --times 60
	PYTHONPATH=scripts $(BIN)/mainspring simulate simulated_group:build --seeds $$((($(SEEDS) + 9) / 10)) --jobs $(JOBS) --duration 2m --times 10 --per-minute 30
	PYTHONPATH=scripts $(BIN)/mainspring simulate simulated_group:build_bursts --seeds $$((($(SEEDS) + 9) / 10)) --jobs $(JOBS) --duration 2m --times 60 \
		--rate slow_call=0.02 --rate slow_handler=0.0005 --rate hanging_handler=0.0002 --rate failing_handler=0.01 --rate swallowing_handler=0.0002
	$(BIN)/python tests/services/service_simulation.py --seeds $$((($(SEEDS) + 9) / 10))

# Minutes on each backend whose server is installed. BACKENDS names some (sqlite,redis,postgres,nats), SEED repeats a run.
BACKENDS ?=
MESSAGES ?= 100000
SEED ?=
chaos: $(VENV)/installed-dev
	$(BIN)/python tests/chaos --messages $(MESSAGES) $(if $(BACKENDS),--backends $(BACKENDS)) $(if $(SEED),--seed $(SEED))

# A few minutes; how much is said by the environment: RUNS, CONCURRENCY, DEADLINE_MS, TIMEOUT_PER_RUN, and RACE_ROUNDS of
# each race of loop threads.
RACE_ROUNDS ?= 10000
soak: $(VENV)/editable
	$(BIN)/python scripts/soak.py
	MAINSPRING_RACE_ROUNDS=$(RACE_ROUNDS) $(BIN)/python -m pytest -q --full tests/threads/test_loop_thread_races.py

# MUTANTS: arguments of the script, as "--only 3 7" or --check.
MUTANTS ?=
mutants: $(VENV)/editable
	$(BIN)/python scripts/mutants.py --jobs $(JOBS) $(MUTANTS)

# BENCH names some of them, or says --quick: make bench BENCH="redis --quick"
BENCH ?=
bench: $(VENV)/installed-dev
	$(BIN)/python benchmarks/run.py $(BENCH)

# This code beside an earlier revision, in turns: make bench-paired BASE=v0.1 BENCH="redis --quick"
BASE ?= HEAD~1
bench-paired: $(VENV)/installed-dev
	$(BIN)/python benchmarks/paired.py $(BASE) $(BENCH)

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is older than 3.11; say which to use: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo "make: $(PYTHON) has no venv module (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# pip builds a wheel of the project and installs that, so the tests see what a user gets, not the source tree.
$(VENV)/installed: $(VENV)/created $(SOURCES)
	$(PIP) install .
	@touch $@
	@rm -f $(VENV)/editable

$(VENV)/installed-dev: $(VENV)/created $(SOURCES)
	$(PIP) install '.[dev]'
	@touch $@ $(VENV)/installed
	@rm -f $(VENV)/editable

# The environment imports the sources themselves, so that a change of them needs no installation.
$(VENV)/editable: $(VENV)/created pyproject.toml
	$(PIP) install --editable '.[dev]'
	@touch $@
	@rm -f $(VENV)/installed $(VENV)/installed-dev

$(VENV)/installed-docs: $(VENV)/created $(SOURCES)
	$(PIP) install '.[docs]'
	@touch $@ $(VENV)/installed
	@rm -f $(VENV)/editable
