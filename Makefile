# One command for each job; `make` lists them. Variables: PYTHON (interpreter for .venv), ARGS (passed on), JOBS.
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
SOURCES := $(wildcard core distensor_server distensor_tui tests benchmarks examples distributions)
DISTRIBUTIONS := . distributions/distensor-server distributions/distensor-tui
DEFINITIONS := pyproject.toml constraints.txt $(wildcard distributions/*/pyproject.toml distributions/*/hatch_build.py)
JOBS ?= 2
ARGS ?=

.DEFAULT_GOAL := help
COMPOSE := docker compose -f installers/hub/compose.yaml
.PHONY: help dev demo test check lint format types layers wheels proto parity bench bench-provider bench-distro bench-hub \
	gallery soak cloud-up cloud-down cloud-hub cloud-api sandbox-up clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "ARGS='...' is passed on to demo, test, parity, the benchmarks and soak; PYTHON=... chooses the interpreter of $(VENV)."

dev: $(STAMP) ## create .venv (Python 3.11 or newer) and install everything into it; again only when a definition changed

demo: $(STAMP) ## train a small language model over a hub, two nodes and four workers on this machine
	@$(PY) -m distensor demo $(ARGS)

test: $(STAMP) ## the tests
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow" $(ARGS)

check: ## all that CI does: lint, types, layers, tests, wheels
	@.ci/run

lint: $(STAMP) ## ruff: rules and format, nothing is changed
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m ruff format --check $(SOURCES)

format: $(STAMP) ## ruff: repair what it can and format
	$(PY) -m ruff check --fix $(SOURCES)
	$(PY) -m ruff format $(SOURCES)

types: $(STAMP) ## mypy --strict
	$(PY) -m mypy core distensor_server distensor_tui $(wildcard benchmarks/*.py examples/*.py)

layers: $(STAMP) ## import-linter: which package may import which
	$(VENV)/bin/lint-imports

wheels: $(VENV)/.builder ## the three sdists, and from each its wheel, into dist/, with SHA256SUMS for the installers
	rm -rf dist
	for folder in $(DISTRIBUTIONS); do $(PY) -m build --outdir dist "$$folder" || exit 1; done
	cp constraints.txt dist/
	cd dist && $(abspath $(PY)) -c 'import hashlib, pathlib; [print(hashlib.sha256(p.read_bytes()).hexdigest(), "", p.name, sep=" ") for p in sorted(pathlib.Path().iterdir()) if p.suffix in (".whl", ".txt")]' > SHA256SUMS.new && mv SHA256SUMS.new SHA256SUMS

proto: $(STAMP) ## regenerate the stubs of the control protocol
	cd core && ../$(PY) -m grpc_tools.protoc --plugin=protoc-gen-mypy=../$(VENV)/bin/protoc-gen-mypy \
		-I. --python_out=. --grpc_python_out=. --mypy_out=. distensor/proto/control.proto

parity: $(STAMP) ## every model on every mesh against one process, an hour; writes docs/parity.md and docs/parity.json
	$(PY) benchmarks/parity.py --write docs $(ARGS)

bench: $(STAMP) ## the benchmarks, each prints its table
	@for file in $(filter-out benchmarks/parity.py benchmarks/provider.py benchmarks/distro.py benchmarks/distro_report.py benchmarks/gallery.py benchmarks/hub.py,$(wildcard benchmarks/[a-z]*.py)); do echo "== $$file"; $(PY) "$$file" $(ARGS) || exit 1; done

bench-provider: $(STAMP) ## what supervisor and dashboard cost, each figure with its bar
	$(PY) benchmarks/provider.py $(ARGS)

bench-distro: $(STAMP) ## loss against bytes of the DisTrO family, an hour at the small size; goes on where it was stopped
	$(PY) benchmarks/distro.py $(ARGS)

bench-hub: $(STAMP) ## a hub with 1,000 to 10,000 streams of nodes: CPU for a message, memory, time until nodes are back
	$(PY) benchmarks/hub.py $(ARGS)

gallery: $(STAMP) ## pictures of the dashboard in docs/gallery, from a real job on two nodes
	$(PY) benchmarks/gallery.py $(ARGS)

cloud-up: ## hub with HTTP API, PostgreSQL, Prometheus and Grafana by Docker; see docs/hub.md
	$(COMPOSE) up --build --detach $(ARGS)

cloud-down: ## end these; what they keep stays
	$(COMPOSE) down $(ARGS)

cloud-hub: $(STAMP) ## a hub from this folder: ARGS="--database postgresql://hub@host/hub"
	$(PY) -m distensor hub $(ARGS)

cloud-api: $(STAMP) ## a hub with the HTTP API from this folder, the same ARGS
	$(PY) -m distensor cloud $(ARGS)

sandbox-up: $(STAMP) ## a hub and eight workers as processes of this machine, until Ctrl-C; prints a trainer's token
	$(PY) installers/hub/sandbox.py $(ARGS)

soak: $(STAMP) ## the tests that take minutes
	$(PY) -m pytest -m slow $(ARGS)

clean: ## remove what the other jobs made, .venv too
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): $(DEFINITIONS) | $(PY)
	@echo "Installing into $(VENV): about 1.4 GB, one to three minutes ..."
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[dev,worker]' -e distributions/distensor-server -e distributions/distensor-tui
	@touch $@

# Who wants only the wheels needs no PyTorch: seconds instead of minutes.
$(VENV)/.builder: pyproject.toml constraints.txt | $(PY)
	@$(PY) -c 'import build' 2>/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt build
	@touch $@

# A candidate counts only if it can make a virtual environment: Debian ships python3 without ensurepip.
$(PY):
	@for python in $(if $(PYTHON),"$(PYTHON)",python3.11 python3.12 python3.13 python3.14 python3); do \
		if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "Creating $(VENV) with $$("$$python" --version)"; \
			exec "$$python" -m venv --clear $(VENV); \
		fi; \
		found="$$found; $$python: $$("$$python" --version 2>/dev/null || echo not found)"; \
	done; \
	echo "disTensor needs Python 3.11 or newer with its modules venv and ensurepip (Debian: apt install python3-venv)." >&2; \
	echo "Tried $${found#; }." >&2; \
	echo "Name another one with: make dev PYTHON=/path/to/python3.11" >&2; \
	exit 1
