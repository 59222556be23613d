# make quickstart   environment, then train, score and use a small MAT on the embedded corpus (no download)
# make test         environment, then the tests
# make check        environment, then style
# make bench        environment, then the speed benchmarks (minutes; close other programs)
# make hf-tests     environment, then Hugging Face's own model tests on every family (needs HF_COMMON)

PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
HF_COMMON ?= ../shared/hf_common
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup quickstart test check bench hf-tests
.DELETE_ON_ERROR:

setup: $(VENV)/ready

# constraints.txt pins what was tested, and keeps pip from replacing torch by a newer build.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: setup
	$(RUN) scripts/quickstart.py

test: setup
	OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses 2 --dist loadfile

check: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

bench: setup
	$(RUN) benchmarks/speed/speed.py marian
	$(RUN) benchmarks/speed/speed.py mat

hf-tests: setup
	PYTHON="$(CURDIR)/$(RUN)" HF_COMMON="$(HF_COMMON)" bash tests/hf_tests.sh
