# Shortcuts for contributors; CONTRIBUTING.md explains them. Run them in the virtual environment.
PYTHON ?= python

.PHONY: dev native check test full interpreter imports

dev: ## install the clone, editable, with every tool
	$(PYTHON) -m pip install -c constraints.txt -e '.[dev]'

native: ## compile what changed in native/ and put it into the editable install
	$(PYTHON) -m pip install -q --no-build-isolation --no-deps -e .

check: ## format, lint, types, import contract
	$(PYTHON) -m pytest tests/house

test: ## every fast test
	$(PYTHON) -m pytest -n 2

full: ## the tests that take long
	$(PYTHON) -m pytest -n 2 -m full

interpreter: ## the large GPU kernels in Triton's interpreter
	$(PYTHON) -m pytest -n 2 -m interpreter

imports: ## what an editor finds: fails for an import that pyright cannot resolve
	$(PYTHON) -m pyright
