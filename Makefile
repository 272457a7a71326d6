# `make demo` trains a real drafter under supervision, `make test` runs every check, `make lab` leaves a Proxmox cluster
# with real containers running on loopback, to play in, `make site` builds the documentation.
#
# TORCH is what pip is asked for, and thereby which build of torch is taken. The default is the tested version as your
# package index has it (on Linux often a CUDA build of several GB). On a laptop, point it at PyTorch's CPU wheels:
#   make demo TORCH='torch==2.13.0 --index-url URL'    (the URL is on PyTorch's "Get started" page, platform CPU)
TORCH  ?= torch==2.13.0
PYTHON ?= python3
VENV   ?= .venv
MODEL  ?= $(HOME)/.cache/specctl/models/SmolLM2-135M-Instruct

PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check -q
TESTS  ?= tests

.PHONY: demo lab test lint chaos pictures site clean

demo: $(VENV)/.trainer
	@scripts/need tmux
	@$(VENV)/bin/python scripts/fetch_smollm2.py $(MODEL)
	$(VENV)/bin/specctl launch local --config configs/smollm2-cpu.yaml

test: $(VENV)/.dev
	@scripts/need tmux git sshd lxc-start mmdebstrap newuidmap sudo fish busybox chromium
	@$(VENV)/bin/python scripts/fetch_smollm2.py $(MODEL)
	$(MAKE) --no-print-directory lint
	$(VENV)/bin/python -m pytest -n 4 --dist worksteal $(TESTS) || scripts/again $$? $(VENV)/bin/python

lab: $(VENV)/.trainer
	$(VENV)/bin/python lab up

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

# Launches, faults and verbs by a seed, and an oracle that looks from outside: docs/chaos.md. Without SEED another one
# every time; what it finds is printed with its seed.
LAUNCHES ?= 100
LANES    ?= 4

chaos: $(VENV)/.dev
	@scripts/need tmux sshd lxc-start mmdebstrap newuidmap sudo fish
	$(VENV)/bin/python -m tests.lab.chaos --launches $(LAUNCHES) --lanes $(LANES) $(if $(SEED),--seed $(SEED))

# The documentation as a site in build/site, which fetches nothing from elsewhere. (With -q mkdocs would count no warning,
# and --strict refuse nothing.) To search it, serve it:
# python3 -m http.server -d build/site
site: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

pictures: $(VENV)/.trainer
	$(VENV)/bin/python scripts/pictures.py docs/pictures

$(VENV)/bin/python:
	@scripts/need ensurepip
	$(PYTHON) -m venv $(VENV)

$(VENV)/.trainer: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install -c constraints.txt $(TORCH)
	$(PIP) install -c constraints.txt -e '.[trainer,top,plot,report]'
	@touch $@

$(VENV)/.dev: $(VENV)/.trainer tests/trainer/loaders.txt
	$(PIP) install -c constraints.txt -e '.[trainer,dev]'
	$(PIP) install --no-deps -r tests/trainer/loaders.txt
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
