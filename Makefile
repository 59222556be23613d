# make quickstart   environment, then train, score and use a small MAT on the embedded corpus (no download)
# make test         environment, then the tests, those of README and docs too (ARGS=tests/pages chooses those)
# make check        environment, then style, types of the public surface, and which package imports which
# make browser      environment, then the demo's page in a real browser: /usr/bin/chromium, or what CHROMIUM names
# make hf-tests     environment, then Hugging Face's own model tests on every family (ARGS="-k Test_multipath" chooses)
# make test-oldest  an environment of its own with the oldest versions that pyproject.toml allows, then the tests
# make test-newest  an environment of its own with the newest releases, then the tests
# make bench        environment, then the speed benchmarks (minutes; close other programs)

PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
OLDEST := $(VENV)-oldest
NEWEST := $(VENV)-newest
ARGS ?=
# The browser and Hugging Face's tests have targets of their own. tests/conftest.py orders the files.
SUITE := --numprocesses 2 --dist loadfile --no-loadscope-reorder --ignore tests/browser --ignore tests/hf_common
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup quickstart test browser check bench hf-tests test-oldest test-newest
.DELETE_ON_ERROR:

setup: $(VENV)/ready

# constraints.txt pins what was tested, and keeps pip from replacing torch by a newer build. pip would compile the
# modules on one core; some of them are written for other versions of Python, and cannot be compiled. Tests of
# packages, the many models of Transformers and packages of which little is used are compiled when they are imported.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[dev]'
	$(RUN) -m compileall -qq -j 0 -x '/(tests?|transformers/models|pip|setuptools|statsmodels|networkx|pygments|fontTools)/' $(VENV)/lib src || true
	touch $@

quickstart: setup
	$(RUN) scripts/quickstart.py

test: setup
	OMP_NUM_THREADS=1 $(RUN) -m pytest $(SUITE) $(ARGS)

browser: setup
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests/browser $(ARGS)

check: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	# it needs Python 3.11
	[ ! -x $(VENV)/bin/lint-imports ] || $(VENV)/bin/lint-imports --cache-dir build/import-linter

bench: setup
	$(RUN) benchmarks/speed/speed.py marian
	$(RUN) benchmarks/speed/speed.py mat

# The tests are no part of the wheel of Transformers: the first line fetches its source distribution, once.
hf-tests: setup
	$(RUN) tests/hf_common/hf_sdist.py
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests/hf_common --numprocesses 2 $(ARGS)

test-oldest: $(OLDEST)/ready
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest $(SUITE) --ignore tests/pages $(ARGS)

$(OLDEST)/ready: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-oldest.txt \
		--editable '.[dev]'
	touch $@

# It is made anew each time, as releases come out. A newer torch would bring gigabytes of CUDA.
test-newest:
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' \
		"$$(grep '^torch==' constraints.txt)"
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest $(SUITE) $(ARGS)
