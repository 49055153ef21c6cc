.DEFAULT_GOAL := help
.PHONY: help install style check test docs-test proofs long-proofs engines newest gpu docs clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | awk -F':.*?## ' '{printf "  %-11s %s\n", $$1, $$2}'

install:  ## Editable install with development tools, and the commit hooks
	python -m pip install -c constraints.txt -e '.[dev]'
	pre-commit install

style:  ## Mend what can be mended
	ruff check --fix .
	ruff format .

check:  ## Lint, format, types, import contracts: CI's first half
	ruff check .
	ruff format --check .
	pyright
	lint-imports

test:  ## CI's second half
	OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile

docs-test:  ## Every documented command, run at a tiny size; the site and the reports in a browser (8 minutes)
	OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile -m docs

proofs:  ## Proofs of up to five minutes each (45 minutes); a green run writes docs/proofs.md
	python scripts/proofs.py

long-proofs:  ## Mutants of whole modules, restarts of 32 processes (20 minutes); the same
	python scripts/proofs.py --long

# An engine that starts imports thousands of modules, which are compiled once where that is kept.
engines:  ## Serve exports in vLLM and the authors' loops, installed apart; writes docs/engines.md
	vllm=$$(bash scripts/engines/install.sh .engines/vllm) && \
	  authors=$$(bash scripts/engines/install.sh .engines/authors) || exit; \
	export FOREDRAFT_VLLM_PYTHON=$$vllm FOREDRAFT_AUTHORS_PYTHON=$$authors; \
	unset PYTHONDONTWRITEBYTECODE; \
	OMP_NUM_THREADS=1 python -m pytest -n 2 --dist worksteal -m engine --junitxml=outputs/engines/tests.xml \
	  tests/engines; tests=$$?; python scripts/engines/table.py && exit $$tests

newest:  ## A quarter of the tests with the newest releases, installed apart; writes docs/newest.json
	python scripts/newest.py

gpu:  ## What is to be measured on a GPU; without one it says what that is
	python scripts/gpu.py

docs:  ## The site of these documents, into site/; open site/index.html
	mkdocs build

clean:  ## Remove caches (never outputs/)
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist site
