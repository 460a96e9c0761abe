# make reproduce   run every notebook in full and compare it with the record (MODEL=..., FAST=1, ONLY=04,07)
# make test        lint, types, unit tests, and every notebook once in its fast form
# make lab         open the first notebook in JupyterLab
# make bench       what sharing a prefix saves, beside transformers' own caches and vLLM
# make engines     audit transformers, llama.cpp, vLLM and OpenVINO, each in an environment of its own (ENGINE=vllm)
# make mutants     break the pools by one small change at a time, and see whether the check notices (SAMPLE=300)
# make html        the notebooks as web pages whose switches work without kernel and network
#
# Each of them makes the environment .venv first, and again only when a requirements file changes.

SHELL := /bin/sh
PYTHON ?=
MODEL ?=
FAST ?=
ONLY ?=
ENGINE ?= transformers llama_cpp vllm openvino
SAMPLE ?= 300
BIN := .venv/bin

REPRODUCE = $(BIN)/python ci/reproduce.py $(if $(MODEL),--model "$(MODEL)") $(if $(filter-out 0 false False,$(FAST)),--fast) $(if $(ONLY),--only "$(ONLY)")

.PHONY: reproduce accept test lab bench engines mutants html clean

reproduce: .venv
	@$(REPRODUCE)

accept: .venv
	@$(REPRODUCE) --accept

test: .venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest
	@$(BIN)/python ci/reproduce.py --fast
	@$(BIN)/python ci/lines.py

lab: .venv
	$(BIN)/jupyter lab notebooks/01_kv_cache_fundamentals.ipynb

.venv: .venv/.complete
.venv/.complete: requirements.txt ci/requirements.txt pyproject.toml ci/setup.sh
	@PYTHON="$(PYTHON)" sh ci/setup.sh

bench: .venv
	@$(BIN)/python ci/bench.py

engines: .venv
	@for engine in $(ENGINE); do echo "== $$engine"; PYTHON="$(PYTHON)" sh ci/engines/$$engine.sh || exit; done
	@$(BIN)/python ci/engines_table.py

mutants: .venv
	@$(BIN)/python tests/mutants.py --sample $(SAMPLE)

html: .venv
	@$(BIN)/python ci/export.py

clean:
	rm -rf build .venv
