# make demo   shows the fleet working on this machine: real agents, a real gateway, real workers, a results file
# make test   runs the test suite; make test-faults breaks whole fleets, a test each; make test-chart tests the Helm chart;
#             make test-agents runs codex, Claude Code, opencode and mini-swe-agent through the gateway; make test-door runs
#             verifiers' own client against `rollouts env-server` (400 MB to install)
# make chaos  breaks a fleet for about eight minutes and prints one JSON line; SEED=n repeats a run
# make pictures draws those of the README anew, from a fleet that runs
# make soak   watches a fleet's memory and file descriptors for half an hour; MINUTES=n for another time
# Each is enough on its own in a fresh clone: it makes .venv, installs what it needs, and runs.

VENV   := .venv
BIN    := $(VENV)/bin
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $$p && break; done)
# Test processes: three for each core, as most tests wait for processes that they have started.
JOBS   ?= $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) * 3 )))

# The agents that the gateway is tried with, as they were: a new version may change what it sends.
NPM_AGENTS := @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.197 opencode-ai@1.18.33
PIP_AGENTS := mini-swe-agent==2.4.6

# Hundreds of processes start in the tests: none should have to compile what another one has.
test test-faults test-chart: export PYTHONDONTWRITEBYTECODE =
test test-faults test-chart: export PYTHONPYCACHEPREFIX = $(CURDIR)/$(VENV)/bytecode

.PHONY: demo demo-llm test test-faults test-chart test-agents test-door check bench chaos soak pictures clean

demo: $(VENV)/.demo
	$(BIN)/rollouts demo --out demo-results.jsonl --overwrite

demo-llm: $(VENV)/.llm
	$(BIN)/rollouts demo --llm --out demo-results.jsonl --overwrite

test: $(VENV)/.dev
	$(BIN)/pytest -n $(JOBS) --dist loadgroup --ignore tests/helm --ignore tests/faults $(ARGS)

test-faults: $(VENV)/.dev
	$(BIN)/pytest -n $(JOBS) --dist loadgroup tests/faults $(ARGS)

test-chart: $(VENV)/.dev
	$(BIN)/pytest -n $(JOBS) --dist loadgroup tests/helm $(ARGS)

test-agents: $(VENV)/.dev $(VENV)/.agents
	AGENTS_BIN=$(CURDIR)/$(VENV)/agents/node_modules/.bin:$(CURDIR)/$(VENV)/agents/bin \
		$(BIN)/pytest -m agents tests/workers/gateway/test_real_agents.py $(ARGS)

test-door: $(VENV)/.verifiers
	$(BIN)/pytest -n $(JOBS) --dist loadgroup tests/door $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: $(VENV)/.dev
	missed=0; for benchmark in $(filter-out %/bench_soak.py,$(wildcard tests/benchmarks/bench_*.py)); do \
		PYTHONPATH=tests $(BIN)/python $$benchmark || missed=1; done; exit $$missed

chaos: $(VENV)/.dev
	$(BIN)/python tests/chaos/run.py --rollouts 1000 --workers 3 $(if $(SEED),--seed $(SEED)) $(ARGS)

soak: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python tests/benchmarks/bench_soak.py $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

pictures: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python tests/pictures.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, and none was found on PATH"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml
	@echo "installing into $(VENV) ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[local]'
	@touch $@

$(VENV)/.llm: $(VENV)/.python pyproject.toml
	@echo "installing into $(VENV) ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[local,llm]'
	@touch $@

$(VENV)/.verifiers: $(VENV)/.dev
	@echo "installing verifiers into $(VENV) ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,verifiers]'
	@touch $@

# What cannot be installed is told, and its test skipped: not every network reaches both registries.
$(VENV)/.agents: Makefile
	@echo "installing agents into $(VENV)/agents ..."
	$(PYTHON) -m venv $(VENV)/agents
	-npm install --silent --no-audit --no-fund --prefix $(VENV)/agents $(NPM_AGENTS)
	-$(VENV)/agents/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_AGENTS)
	@touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml
	@echo "installing into $(VENV) ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
