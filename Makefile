# Each target does all of its own set-up; the first one to run installs the environment, later ones start at once.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Another Python 3.11 than the one that is found: make PYTHON=/path/to/python3.11
PYTHON ?=
PYTHON312 ?=
VENV := .venv
PYTHON312_VENV := .venv-python312
MCORE_VENV := .venv-mcore-
# Versions of megatron-core that want Python 3.12; 0.16.1 runs on both, for what is compared bit for bit.
MCORE_VERSIONS := 0.17.1 0.18.2 0.19.2
DOCS_VENV := .venv-docs
NPU_VENV := .venv-npu
REPORT_VENV := .venv-report
LAUNCH_VENV := .venv-launch
CUDA_VENV := .venv-cuda
RIVAL_VENV := .venv-rival
AXE := axe-core@4.14.1
TRL_VENV := .venv-trl
TINKER_VENV := .venv-tinker
VERL_VENV := .venv-verl
VERIFIERS_VENV := .venv-verifiers
FRAMEWORKS_VENV := .venv-frameworks
AG2_VENV := .venv-ag2
SUITES_VENV := .venv-suites
SUFFIX_VENV := .venv-suffix
GYM_VENV := .venv-gym

.PHONY: help env test test-first test-all test-each-change test-each-change-kernels test-each-change-ranks test-each-change-runs test-each-change-benchmarks test-each-change-rest test-each-change-matrix lint types format test-slow test-clones test-anywhere test-anywhere-quick test-matrix test-matrix-quick test-npu test-trl tinker test-tinker test-tinker-quick test-verl test-verifiers test-frameworks test-recipes suites test-suites test-suffix test-report test-cuda test-hosts test-launch test-launch-quick python312 cuda demo gpu-demo paying calculator mcp search coding openai-agents langgraph gym gym-environment frameworks agent recipes demo-core learning algorithms sparse teacher bench gpu-check gpu-bench gpu-first rival flags docs figures clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: ## install the environment (.venv) that the other targets run in
	@tools/make_environment $(VENV) requirements/cpu.lock 3.11 $(PYTHON)

FIRST = $(VENV)/bin/python -m pytest -m "not each_change and not slow"

test: lint types ## what to run first: lint, types, the heart of every promise; 8 minutes on 2 cores
	$(FIRST) --numprocesses 2 --no-loadscope-reorder

test-first: env
	$(FIRST)

test-all: ## what CI runs for each change: make test and all other tests that are fast enough; 30 minutes
	@echo "Now style, types and nine lots of tests, three at once; each is shown when it is through, in some 15 minutes."
	$(MAKE) --jobs 3 --keep-going --output-sync=line $(LOTS)

# Several at once, for all mostly wait: for ranks, or for what they have started. The longest begin, and the shortest
# end.
LOTS := lint types test-each-change-ranks test-first test-each-change-kernels test-each-change-runs test-each-change-benchmarks test-each-change-rest test-tinker-quick test-launch-quick test-anywhere-quick test-each-change-matrix
EACH_CHANGE = $(VENV)/bin/python -m pytest -m "each_change and not slow"
OF_RANKS := tests/distributed
OF_RUNS := tests/e2e
OF_KERNELS := tests/kernels tests/rehearsal
OF_BENCHMARKS := tests/e2e/test_benchmarks.py
test-each-change: test-each-change-ranks test-each-change-runs test-each-change-kernels test-each-change-benchmarks test-each-change-rest

test-each-change-ranks: env
	$(EACH_CHANGE) $(OF_RANKS)

test-each-change-runs: env
	$(EACH_CHANGE) $(OF_RUNS) --ignore=$(OF_BENCHMARKS)

test-each-change-benchmarks: env
	$(EACH_CHANGE) $(OF_BENCHMARKS)

test-each-change-kernels: env
	$(EACH_CHANGE) $(OF_KERNELS)

test-each-change-rest: env
	$(EACH_CHANGE) $(addprefix --ignore=,$(OF_RANKS) $(OF_RUNS) $(OF_KERNELS))

# With its environments in one turn: between two targets, others would take it.
test-each-change-matrix:
	$(MAKE) test-matrix-quick

lint: env ## check the style, of code and of prose
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m tools.check_english
	$(VENV)/bin/python -m tools.check_house

types: env ## check the types
	$(VENV)/bin/mypy

format: env ## format the code
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

test-slow: env ## the tests that take too long for each change
	$(VENV)/bin/python -m pytest -m slow

python312:
	@tools/make_environment $(PYTHON312_VENV) requirements/python312.lock 3.12 $(PYTHON312)

$(addprefix mcore-,0.16.1 $(MCORE_VERSIONS)): mcore-%: python312
	@tools/make_environment $(MCORE_VENV)$* requirements/megatron-core-$*.lock --on $(PYTHON312_VENV)

test-matrix: env mcore-0.16.1 $(addprefix mcore-,$(MCORE_VERSIONS)) ## every version of megatron-core, an hour; Python 3.12, 6 GB of disk
	$(VENV)/bin/python -m tools.run_matrix

test-matrix-quick: env mcore-0.16.1 mcore-$(lastword $(MCORE_VERSIONS))
	$(VENV)/bin/python -m tools.run_matrix --quick $(lastword $(MCORE_VERSIONS))

test-npu: env ## Ascend without an NPU: the real torch_npu over stand-ins for CANN; MINDSPEED= and VLLM_ASCEND= name clones to try with
	@tools/make_environment $(NPU_VENV) requirements/npu.lock --on $(VENV)
	NPU_PYTHON=$(NPU_VENV)/bin/python $(VENV)/bin/python -m pytest tests/npu

test-trl: env ## losses beside TRL's and its weight syncs, in an environment of its own
	@tools/make_environment $(TRL_VENV) requirements/trl.lock --on $(VENV)
	$(TRL_VENV)/bin/python -m pytest --target test-trl tests/trl

test-verl: env ## weight syncs of verl's into a real vLLM, compared, in an environment of its own
	@tools/make_environment $(VERL_VENV) requirements/verl.lock --on $(VENV)
	$(VERL_VENV)/bin/python -m pytest --target test-verl tests/verl

frameworks:
	@tools/make_environment $(FRAMEWORKS_VENV) requirements/frameworks.lock 3.11 $(PYTHON)

test-frameworks: env frameworks ## agents of a dozen frameworks through the gateway, in environments of their own
	@npm install --silent --no-save --prefix $(FRAMEWORKS_VENV) @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.197
	@tools/make_environment $(AG2_VENV) requirements/ag2.lock --on $(FRAMEWORKS_VENV)
	FRAMEWORKS_PYTHON=$(FRAMEWORKS_VENV)/bin/python AG2_PYTHON=$(AG2_VENV)/bin/python $(VENV)/bin/python -m pytest --target test-frameworks tests/frameworks

test-recipes: frameworks gym-environment ## recipes with reasoning-gym and with agents of frameworks, on a real vLLM
	FRAMEWORKS_VENV=$(FRAMEWORKS_VENV) $(GYM_VENV)/bin/python -m pytest --target test-recipes tests/libraries

suites: env
	@tools/make_environment $(SUITES_VENV) requirements/suites.lock --on $(VENV)

# With a Node of its own: MCP's suite needs 22, which Debian 12 lacks.
test-suites: suites ## lm-eval against megatron-rl serve, schemathesis against the gateway, MCP's suite against the example's client
	@npm install --silent --no-save --prefix $(SUITES_VENV) @modelcontextprotocol/conformance@0.1.16 node@22.23.3
	$(SUITES_VENV)/bin/python -m pytest --target test-suites tests/suites

test-verifiers: env ## a real environment server of verifiers, in an environment of its own
	@tools/make_environment $(VERIFIERS_VENV) requirements/verifiers.lock 3.11 $(PYTHON)
	VERIFIERS_PYTHON=$(VERIFIERS_VENV)/bin/python $(VENV)/bin/python -m pytest --target test-verifiers tests/verifiers

test-suffix: env ## drafts from earlier responses on a real vLLM, with arctic-inference in an environment of its own; compiles it
	@tools/make_environment $(SUFFIX_VENV) requirements/suffix.lock --on $(VENV)
	$(SUFFIX_VENV)/bin/python -m pytest --target test-suffix -m slow -k suffix tests/sidecar/test_vllm_speculation.py

OF_CLONES = $(if $(MEGATRON_LM),tests/unit/test_patches.py) $(if $(MEGATRON_LM_TREES),tests/unit/test_upstream_rl.py) $(if $(TRANSFORMER_ENGINE),tests/unit/test_transformer_engine.py) $(if $(NEMO_RL),tests/unit/test_nemo_rl.py) $(if $(VLLM_TESTS),tests/suites/test_vllm_suite.py) $(if $(SKYRL),tests/tinker/test_skyrl_suite.py)
test-clones: $(if $(VLLM_TESTS),suites,env) $(if $(SKYRL),tinker) ## beside sources of other projects: MEGATRON_LM= a clone, MEGATRON_LM_TREES= trees, TRANSFORMER_ENGINE= a release, NEMO_RL= a clone, VLLM_TESTS= vLLM's, SKYRL= a clone
	$(if $(VLLM_TESTS),$(SUITES_VENV),$(if $(SKYRL),$(TINKER_VENV),$(VENV)))/bin/python -m pytest --target test-clones $(or $(strip $(OF_CLONES)),$(error name at least one of them))

test-anywhere: env ## on other processors, with other threads, in other folders: what depends on them; 5 minutes
	$(VENV)/bin/python -m tools.test_anywhere

# The rows that have found most: 2 minutes.
test-anywhere-quick: env
	$(VENV)/bin/python -m tools.test_anywhere "products, 2 threads" SIGINT

test-hosts: env ## engines on other hosts, which are network namespaces; needs root and iproute2
	$(VENV)/bin/python -m pytest --target test-hosts tests/hosts

test-launch: test-launch-quick ## launches: manifests by Kubernetes' schemas, Dockerfiles by a linter, and a Ray cluster
	$(LAUNCH_VENV)/bin/python -m pytest --target test-launch -m slow tests/launch

test-launch-quick: env
	@tools/make_environment $(LAUNCH_VENV) requirements/launch.lock --on $(VENV)
	$(LAUNCH_VENV)/bin/python -m pytest --target test-launch -m "not slow" tests/launch

test-tinker: test-tinker-quick ## Tinker's interface by its own client and the cookbook, in an environment of its own
	$(TINKER_VENV)/bin/python -m pytest --target test-tinker -m slow tests/tinker

tinker: env
	@tools/make_environment $(TINKER_VENV) requirements/tinker.lock --on $(VENV)

test-tinker-quick: tinker
	$(TINKER_VENV)/bin/python -m pytest --target test-tinker -m "not slow" tests/tinker

test-cuda: env cuda ## the environment for GPUs, as far as a machine without one can try it
	CUDA_PYTHON=$(CUDA_VENV)/bin/python $(VENV)/bin/python -m pytest --target test-cuda tests/cuda

test-report: env ## megatron-rl report in a headless Chromium; needs Debian's chromium and chromium-driver, and npm
	@tools/make_environment $(REPORT_VENV) requirements/report.lock --on $(VENV)
	@test -e $(REPORT_VENV)/node_modules/axe-core || npm install --silent --no-save --prefix $(REPORT_VENV) $(AXE)
	$(REPORT_VENV)/bin/python -m pytest --target test-report tests/browser

demo: env ## a tiny model learns to add: vLLM, two Megatron ranks, a picture; some minutes
	$(VENV)/bin/python -m examples.arithmetic.demo

cuda: ## install the environment for GPUs (.venv-cuda): Python 3.12, the CUDA builds of torch and vLLM; 10 GB
	@tools/make_environment $(CUDA_VENV) requirements/cuda.lock 3.12 $(PYTHON312)

gpu-demo: cuda ## the demo in bf16 on one GPU, which trainer and engine share: installs, trains, ends with curve, audit and time
	$(CUDA_VENV)/bin/python -m examples.arithmetic.demo --gpu --out gpu-demo

paying: env ## a game over several turns: a tiny model learns to pay an amount exactly, with real vLLM
	$(VENV)/bin/python -m examples.paying.demo --out paying

calculator: env ## a tool: a tiny model learns to call a calculator, with real vLLM
	$(VENV)/bin/python -m examples.calculator.demo --out calculator

# Another seed, with a folder of its own: make coding SEED=1
SEEDED = $(if $(SEED),--seed $(SEED) --out $@-$(SEED))

mcp: env ## the same, where the tool is a server of MCP
	$(VENV)/bin/python -m examples.calculator.demo --out mcp $(SEEDED) -- --rollout-env examples/calculator/by_mcp.py:Calculator

search: env ## a tool: a tiny model learns to search an index by BM25, with real vLLM
	$(VENV)/bin/python -m examples.search.demo --out search $(SEEDED)

coding: env ## code as a response: a tiny model learns from tests in a sandbox, with real vLLM
	$(VENV)/bin/python -m examples.coding.demo --out coding $(SEEDED)

BY_FRAMEWORK = -- --rollout-agent-python $(FRAMEWORKS_VENV)/bin/python --rollout-agent examples/calculator

openai-agents: env frameworks ## the calculator as a tool of an agent of openai-agents, with real vLLM
	$(VENV)/bin/python -m examples.calculator.demo --out openai-agents $(SEEDED) $(BY_FRAMEWORK)/by_openai_agents.py:act

langgraph: env frameworks ## the same with a graph of langgraph
	$(VENV)/bin/python -m examples.calculator.demo --out langgraph $(SEEDED) $(BY_FRAMEWORK)/by_langgraph.py:act

gym-environment: env
	@tools/make_environment $(GYM_VENV) requirements/gym.lock --on $(VENV)

gym: gym-environment ## a mixture of reasoning-gym's tasks, in an environment of its own, with real vLLM
	$(GYM_VENV)/bin/python -m examples.gym.demo --out gym $(SEEDED)

recipes: ## six of these with two seeds each; an hour
	for seed in 0 1; do for recipe in coding search mcp openai-agents langgraph gym; do \
	    $(MAKE) $$recipe SEED=$$seed || exit 1; \
	done; done

agent: env ## the same game in chats with an agent of the openai client alone, with real vLLM
	$(VENV)/bin/python -m examples.agent.demo --out agent

demo-core: env ## the core alone: log-probs and gradients of a tiny Qwen3 in several layouts
	$(VENV)/bin/python -m examples.core_demo

algorithms: env ## every algorithm that has a name learns the demo's task; an hour
	$(VENV)/bin/python -m examples.arithmetic.algorithms

sparse: env ## the same task with rewards that are rare: dynamic sampling and clip-higher, each with and without
	$(VENV)/bin/python -m examples.arithmetic.sparse

teacher: env ## a student half as wide as its teacher learns the demo's task: from rewards, and from the teacher; 10 minutes
	$(VENV)/bin/python -m examples.arithmetic.teacher

learning: env ## what the demo shows, for three seeds and three layouts, with a control; 40 minutes
	$(VENV)/bin/python -m examples.arithmetic.learning

bench: env ## run a benchmark: make bench NAME=weights; all without NAME; those and RECORD=1 go into benchmarks/RESULTS.md
	@$(VENV)/bin/python -m benchmarks $(NAME) $(if $(RECORD),--record)

gpu-check: ## our kernels on a GPU: right? attention: how fast? needs its python3 with torch alone; 9 minutes
	@$(or $(PYTHON),python3) -m benchmarks.gpu_check

rival: ## install TRL with the vLLM that it supports (.venv-rival), for the part of gpu-bench that compares with it; 10 GB
	@tools/make_environment $(RIVAL_VENV) requirements/rival.lock 3.12 $(PYTHON312)

# With PYTHON= it is that one, which has torch for CUDA already.
gpu-bench: $(if $(PYTHON),,cuda) ## the whole system on one GPU, with random weights; 10 minutes, into benchmarks/RESULTS-GPU.md
	@$(or $(PYTHON),.venv-cuda/bin/python) -m benchmarks.gpu_bench

gpu-first: $(if $(PYTHON),,cuda) ## what a first GPU is needed for, most valuable first; 12 minutes, into build/gpu-first/gpu-first.json
	@$(or $(PYTHON),.venv-cuda/bin/python) -m benchmarks.gpu_first

flags: env ## write docs/flags.md from the installed megatron-core, and the tables of docs/algorithms.md
	$(VENV)/bin/python -m megatron_rl.config --docs > docs/flags.md.unfinished
	mv docs/flags.md.unfinished docs/flags.md
	$(VENV)/bin/python -m tools.write_tables

docs: ## build the site of the documents into build/site; a broken link fails it
	@tools/make_environment $(DOCS_VENV) requirements/docs.lock 3.11 $(PYTHON)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet

figures: env ## draw the pictures in docs/images anew from figures.json
	$(VENV)/bin/python -m tools.draw_figures

clean: ## remove the environments and all caches
	rm -rf $(VENV) $(PYTHON312_VENV) $(MCORE_VENV)* $(DOCS_VENV) $(NPU_VENV) $(TRL_VENV) $(VERL_VENV) $(VERIFIERS_VENV) $(FRAMEWORKS_VENV) $(AG2_VENV) $(SUITES_VENV) $(SUFFIX_VENV) $(GYM_VENV) $(REPORT_VENV) $(LAUNCH_VENV) $(CUDA_VENV) $(RIVAL_VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
