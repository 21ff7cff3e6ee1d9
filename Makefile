# Every target makes what it needs: on a fresh clone `make test` is the only step.
PYTHON ?= python3
PY := .venv/bin/python

# at most four workers, each with its share of the cores: more would wait for one another
CORES := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
WORKERS := $(shell echo $$(( $(CORES) < 4 ? $(CORES) : 4 )))
PYTEST := OMP_NUM_THREADS=$(shell echo $$(( $(CORES) / $(WORKERS) ))) \
          $(PY) -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help test demo lint slow slow-sample deep old-transformers bench clean

help:  ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | while IFS='|' read -r name does; \
		do printf 'make %-12s %s\n' "$$name" "$$does"; done

test: .venv/.ready  ## run the whole default suite
	@$(PYTEST)

demo: .venv/.ready  ## train a small Llama with fused functions
	@$(PY) examples/train_llama.py

lint: .venv/.ready  ## check format, lint and types
	$(PY) -m ruff format --check
	$(PY) -m ruff check
	$(PY) -m mypy

slow: .venv/.ready  ## run the tests that take minutes each
	@$(PYTEST) -m slow

# the slow tests of one op; 5 is pytest's exit status when it finds none
SAMPLE ?= rms_norm-gemma
slow-sample: .venv/.ready  ## run the slow tests of one op, SAMPLE=rms_norm-gemma
	@$(PYTEST) -m slow -k '$(SAMPLE)' || { status=$$?; [ $$status -eq 5 ] || exit $$status; \
		echo 'no slow test is named after $(SAMPLE)'; }

deep: .venv/.ready  ## draw 1,000 examples for each law
	@HYPOTHESIS_PROFILE=deep $(PYTEST) -m '' property_tests

# without TRL, which wants a newer one
old-transformers: .venv-4.57/.ready  ## run the tests of the adapters with transformers 4.57
	@OMP_NUM_THREADS=1 .venv-4.57/bin/python -m pytest -n $(WORKERS) --dist worksteal tests/test_adapters*.py

bench: .venv/.bench  ## measure speed and memory against other implementations
	@$(PY) -m benchmarks

clean:  ## remove the environment, caches and builds
	rm -rf .venv .venv-4.57 build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# constraints do not reach an isolated build, so setuptools comes first and builds in place
.venv/.ready: pyproject.toml constraints.txt
	@echo 'setting up .venv: minutes on the first run'
	@$(PYTHON) -m venv .venv
	@$(PY) -m pip install -q -c constraints.txt setuptools
	@$(PY) -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

.venv-4.57/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -m venv .venv-4.57
	@grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > .venv-4.57/constraints.txt
	@.venv-4.57/bin/python -m pip install -q -c .venv-4.57/constraints.txt setuptools
	@.venv-4.57/bin/python -m pip install -q -c .venv-4.57/constraints.txt --no-build-isolation \
		-e '.[hf]' 'transformers==4.57.*' peft pytest pytest-xdist hypothesis matplotlib tqdm numpy
	@touch $@

.venv/.bench: .venv/.ready
	@$(PY) -m pip install -q -c constraints.txt --no-build-isolation -e '.[bench]'
	@touch $@
