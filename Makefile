.PHONY: help install serve test test-fast check conformance sdks proto proto-accept bench bench-kv bench-peers ab-demo fuzz soak soak-simulated soak-processes clean
.DEFAULT_GOAL := help

VENV ?= .venv
export VENV
bin := $(VENV)/bin
baseline := protos/baseline.binpb

# An environment that already has the tests keeps them: `make serve` then has nothing to install.
serve_set = $(if $(wildcard $(bin)/pytest),dev,cpu)

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 15

install: ## .venv with everything for development, pinned
	@scripts/install $(VENV) requirements/dev.txt

serve: ## a whole system on this machine, until Ctrl-C; ARGS="--mode auto" go to `pdserve up`
	@scripts/install $(VENV) requirements/$(serve_set).txt
	@exec $(bin)/pdserve up $(ARGS)

check: install ## lint, types, import law, wire contract, generated files, manifests
	@scripts/check

test: install ## make check, every test, 300 simulated runs of faults
	@scripts/test $(ARGS)

test-fast: install ## every test that starts no real engine; ARGS="-k ladder" go to pytest
	@scripts/tools
	@exec $(bin)/python -m pytest -m "not vllm" --numprocesses 2 --dist loadfile $(ARGS)

soak: install ## faults with new seeds for an hour, simulated and on processes; SOAK_S=600
	@$(MAKE) --no-print-directory --jobs 2 --keep-going soak-simulated soak-processes

soak-simulated:
	@exec $(bin)/pdserve simulate faults --jobs 1 --seconds $${SOAK_S:-3600}

soak-processes:
	@exec $(bin)/python -m tests.faults $(ARGS)

fuzz: install ## 6,000 requests that nobody would write, over HTTP and gRPC; ARGS="--requests 60000"
	@exec $(bin)/python -m tests.fuzz $(ARGS)

conformance: install ## holds every parameter on every route against vLLM's own server; rewrites docs/conformance.md
	@exec $(bin)/python -m tests.conformance docs/conformance.md

sdks: install ## the OpenAI SDK for Node, LangChain and lm-eval on both routes; ARGS="--engine vllm"
	@scripts/install .sdks requirements/sdks.txt
	@npm install --prefix .sdks --no-package-lock --no-audit --no-fund --silent openai@7.59.0
	@exec $(bin)/python -m tests.sdks $(ARGS)

proto: install ## renews pdserve/v1 from protos/ and, where compatible, the baseline
	@$(bin)/buf breaking --against $(baseline) || { echo "make proto-accept, if that is meant" >&2; exit 1; }
	@$(MAKE) --no-print-directory proto-accept

proto-accept: install ## the same for a change that breaks clients on purpose
	@scripts/protos
	@$(bin)/buf build --exclude-source-info -o $(baseline)

bench: ## measures the coordinator's token path; rewrites docs/performance.md
	@scripts/install $(VENV) requirements/bench.txt
	@exec $(bin)/python -m measure.token_path --write docs/performance.md

bench-kv: ## measures KV transfers from process to process; rewrites docs/kv_transfer.md
	@scripts/install $(VENV) requirements/$(serve_set).txt
	@exec $(bin)/python -m measure.kv_transfer --write docs/kv_transfer.md

bench-peers: ## pdserve bench beside vllm bench serve and guidellm, on simulated workers; in docs/bench.md
	@scripts/install $(VENV) requirements/$(serve_set).txt
	@scripts/install .peers requirements/peers.txt
	@exec $(bin)/python -m measure.peers --write docs/bench.md $(ARGS)

ab-demo: ## colocated, disaggregated or auto, on real workers: an experiment and its verdict, ten minutes
	@scripts/install $(VENV) requirements/$(serve_set).txt
	@exec $(bin)/python -m measure.ab.demo $(ARGS)

clean: ## removes what the targets above have made
	@rm -rf $(VENV) .sdks .peers build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
