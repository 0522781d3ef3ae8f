# `make run` serves the app, `make test` tests it; each sets up all that it needs, in .venv and nowhere else.

SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
# pip's own settings apply; packages that are there already and satisfy requirements.txt are left alone
PIP := $(PY) -m pip --disable-pip-version-check install
SELF := $(MAKE)
GET := .ci/get

.PHONY: help run test-fast test test-all record check types bench bench-gpu bench-load mutants check-kernels docs picture resolve
.DEFAULT_GOAL := help

help:
	@echo "make run        serve the app on http://localhost:8501"
	@echo "make test-fast  the tests without torch and without a browser: a minute"
	@echo "make test       every test, slow programs by their recording and a daily sample of them run again"
	@echo "make test-all   every test and every recorded program run again, four ranks, and coverage"
	@echo "make record     run the recorded programs that are missing or stale, and keep what they give"
	@echo "make check      ruff, formatting, mypy --strict"
	@echo "make bench      print speed and size against their targets"
	@echo "make bench-load print how twenty and fifty sessions at once fare, on this machine alone"
	@echo "make mutants    change 300 single lines, one after the other, and print which change no test notices"
	@echo "make bench-gpu  time Triton's kernels against the vendor's, where there is a GPU"
	@echo "make check-kernels  compile every kernel for GPUs old and new, without one, and check the result"
	@echo "make docs       write the tables of README.md and docs/ again"
	@echo "make picture    take the README's picture again"
	@echo "make resolve    check that PyPI's CUDA build of torch and a CPU build both satisfy requirements.txt"

# The pages are served as soon as their own packages are there; torch and the rest follow in the background, in a process
# group of their own so that Ctrl-C stops the server only. The page that measures reads the status files named below.
run: $(VENV)/.pages-ready
	@set -m; \
	if [ ! $(VENV)/.measuring-ready -nt requirements.txt ]; then \
	    echo "Installing what measuring needs in the background (log: $(VENV)/measuring.log)"; \
	    $(SELF) --no-print-directory $(VENV)/.measuring-ready > $(VENV)/measuring.log 2>&1 < /dev/null & \
	fi; \
	exec $(PY) -m streamlit run app.py

# One worker a core; a worker that imports torch takes about 1 GB. ARGS: more for pytest, as ARGS="-k flash".
PYTEST := $(PY) -m pytest -n auto --dist loadgroup
COVERAGE := --cov=calc --cov=kernels --cov=measure --cov=pages --cov-report=term:skip-covered

test-fast: $(VENV)/.testing-ready
	$(PYTEST) --fast $(ARGS)

test: $(VENV)/.measuring-ready $(VENV)/.browser-ready
	$(PYTEST) --recorded=sample $(ARGS)

test-all: $(VENV)/.measuring-ready $(VENV)/.browser-ready
	$(PYTEST) --recorded=all --ranks=4 $(COVERAGE) $(ARGS)

# Each result is kept as soon as it is there: what was broken off goes on from where it was.
record: $(VENV)/.measuring-ready
	$(PYTEST) --recorded=write -m recorded $(ARGS)

check: $(VENV)/.measuring-ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(MAKE) --no-print-directory types

types: $(VENV)/.measuring-ready
	$(PY) -m mypy --strict calc kernels measure pages app.py

bench: $(VENV)/.measuring-ready $(VENV)/.browser-ready
	$(PY) -m tests.bench

bench-load: $(VENV)/.testing-ready
	$(PY) -m tests.bench_load $(ARGS)

# Hours on two cores; ARGS="--fast --count 60 --seed 2" for fewer, without torch.
mutants: $(VENV)/.measuring-ready
	$(PY) -m tests.mutants $(ARGS)

bench-gpu: $(VENV)/.measuring-ready
	@$(PY) -m tests.bench_gpu

# About ten minutes on two cores; writes kernels/compiled.csv, by which kernels choose what they tune over.
check-kernels: $(VENV)/.measuring-ready
	$(PY) -m tests.check_kernels
	$(PY) -m pytest -q tests/kernels/test_compiled.py

docs: $(VENV)/.testing-ready
	$(PY) -m tests.docs

picture: $(VENV)/.measuring-ready $(VENV)/.browser-ready
	$(PY) -m tests.pages.picture

# A dry run reads the wheels' metadata only (fast-deps), so this takes seconds and no gigabytes.
CPU_BUILD ?= --extra-index-url https://download.pytorch.org/whl/cpu
DRY_RUN := $(PIP) --dry-run --ignore-installed --no-cache-dir --use-feature=fast-deps -r requirements.txt
PYPI_ALONE := env -u PIP_FIND_LINKS -u PIP_INDEX_URL -u PIP_EXTRA_INDEX_URL -u PIP_CONSTRAINT PIP_CONFIG_FILE=/dev/null
LOG := $(VENV)/resolve.log
CHOSEN := grep '^Would install' $(LOG) | grep -oE '(torch|triton)-[^ ]+' | xargs
resolve: $(VENV)/.pages-ready
	@$(PYPI_ALONE) $(DRY_RUN) > $(LOG) 2>&1 || { tail -5 $(LOG); exit 1; }
	@chosen=$$($(CHOSEN)); echo "PyPI alone: $$chosen"; case "$$chosen" in *+*) echo "not PyPI's build"; exit 1;; esac
	@$(DRY_RUN) $(CPU_BUILD) > $(LOG) 2>&1 || { tail -5 $(LOG); exit 1; }
	@chosen=$$($(CHOSEN)); echo "CPU build: $$chosen"; case "$$chosen" in *+cpu*) ;; *) echo "no CPU build in: $(CPU_BUILD)"; exit 1;; esac

# --- set-up, by stamp files in .venv

# A virtual environment that works is kept; Python 3.11 or newer is looked for under its usual names, and got where that can be.
$(VENV)/.made:
	@if ! $(PY) -m pip --version > /dev/null 2>&1; then \
	    python=$$($(GET) python $(PYTHON)) && "$$python" -m venv $(VENV) || exit 1; \
	fi
	@touch $@

# What the pages and the command line need: no torch.
$(VENV)/.pages-ready: requirements.txt | $(VENV)/.made
	@$(PY) -m tests.requirements pages > $(VENV)/pages-requirements.txt
	$(PIP) --quiet -r $(VENV)/pages-requirements.txt
	@touch $@

# The same, and what tests it.
$(VENV)/.testing-ready: requirements.txt | $(VENV)/.made
	@$(PY) -m tests.requirements pages tests > $(VENV)/testing-requirements.txt
	$(PIP) --quiet -r $(VENV)/testing-requirements.txt
	@touch $@

# The system's Chromium or Playwright's own.
$(VENV)/.browser-ready: | $(VENV)/.measuring-ready
	@$(GET) chromium $(PY)
	@touch $@

# Status for the page that measures: .measuring-installing holds the process id of an installation under way,
# .measuring-failed says that the last one failed (its log: measuring.log), .measuring-ready that all is there.
$(VENV)/.measuring-ready: requirements.txt | $(VENV)/.pages-ready
	@lock=$(VENV)/.measuring-installing; \
	until (set -o noclobber; echo $$$$ > $$lock) 2> /dev/null; do \
	    if kill -0 "$$(cat $$lock)" 2> /dev/null; then echo "Waiting for the installation in the background"; sleep 5; else rm -f $$lock; fi; \
	done; \
	trap 'rm -f '$$lock EXIT; \
	if [ $@ -nt requirements.txt ]; then exit 0; fi; \
	rm -f $@ $(VENV)/.measuring-failed; \
	echo "Installing requirements.txt (PyTorch is large: this can take minutes)"; \
	if $(PIP) --quiet -r requirements.txt; then touch $@; else touch $(VENV)/.measuring-failed; exit 1; fi
