.DEFAULT_GOAL := help
.PHONY: help install style check test zoo lab docs-test proofs long-proofs engines newest gpu docs clean

help:  ## List these targets
	@grep -E '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | awk -F':.*?## ' '{printf "  %-11s %s\n", $$1, $$2}'

install:  ## Install in editable mode, with development tools and commit hooks
	python -m pip install -c constraints.txt -e '.[dev]'
	pre-commit install

style:  ## Fix lint errors and format the code
	ruff check --fix .
	ruff format .

check:  ## Lint, format, types, import contracts (part of CI)
	ruff check .
	ruff format --check .
	pyright
	lint-imports

test:  ## Run the tests (part of CI)
	OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile

zoo:  ## Run the tests of drafters/zoo and decode/lossy (part of CI where they or what they import changed)
	OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile -m "zoo and not proof and not gpu"

lab:  ## Run the tests of scripts/lab (part of CI where its files changed)
	OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile -m "lab and not proof and not gpu and not docs" tests/lab

docs-test:  ## Run every documented command at a tiny size; open the site and reports in a browser (8 minutes)
	OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile -m docs

proofs:  ## Run slow tests of up to five minutes each (an hour); a green run writes docs/proofs.md
	python scripts/proofs.py

long-proofs:  ## Test mutants of whole modules and restarts of 32 processes (20 minutes); writes docs/proofs.md too
	python scripts/proofs.py --long

engines:  ## Serve exports in vLLM, llama.cpp, transformers, authors' loops, or in ENGINES="vllm==0.31.0 ..."; writes docs/engines.md
	python scripts/engines/run.py $(ENGINES)

newest:  ## Run a quarter of the tests with the newest releases, in another environment; writes docs/newest.json
	python scripts/newest.py

gpu:  ## List what is to be measured on a GPU; python scripts/gpu.py run measures it, and continues
	python scripts/gpu.py list

docs:  ## Build the documentation site; open site/index.html
	python scripts/build_site.py

clean:  ## Remove caches and builds (never outputs/)
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist site
