# Everything this project needs, from a bare Debian 12 or 13 on: make demo, make test.
#
# The virtual environment is .venv/; the Debian packages that are missing are installed with apt-get, through sudo
# where the user is not root. Nothing else is written outside this folder but the guest kernel (see rxe/README.md).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
SOURCES := pyproject.toml build_verbs.py $(wildcard pyverbs_lite/ffi/cdef/*.h pyverbs_lite/ffi/src/*.c)
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test lint types host-tests device-tests soak bench bench-quick packages clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

demo: $(VENV)/installed ## two processes do one of everything over RDMA; every byte is checked
	rxe/run --timeout 300 $(BIN)/python examples/quickstart.py

test: lint types host-tests device-tests ## all checks and all tests

lint: $(VENV)/developed ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/developed ## mypy --strict
	$(BIN)/mypy
	$(BIN)/mypy build_verbs.py $(wildcard examples/*.py)
	$(BIN)/mypy bench
	MYPYPATH=rxe $(BIN)/mypy --scripts-are-modules rxe/run rxe/_kernel.py rxe/_machine.py rxe/guest.py
	MYPYPATH=rxe $(BIN)/mypy --scripts-are-modules rxe/build

host-tests: $(VENV)/developed ## the tests that need no RDMA device
	rxe/run --timeout 60 true # builds the guest kernel, if it is going to be needed
	$(BIN)/python -m pytest -q -m "not rdma" --cov=pyverbs_lite --cov-report= --durations=5
	$(BIN)/coverage report --include='$(PURE)' --show-missing --fail-under=100

device-tests: $(VENV)/developed ## the tests that need one: on this machine's, else on the soft-RoCE guest's
	rxe/run --timeout 1080 $(BIN)/python -m pytest -q -m rdma --durations=5

soak: $(VENV)/developed ## 200 peers do to one server what they can, for two minutes (SOAK_SECONDS= SOAK_PEERS= SOAK_SEED=)
	PYTHONPATH=tests rxe/run --timeout $$(($${SOAK_SECONDS:-120} + 600)) $(BIN)/python -m soak

# The layers that know no device; the host's tests cover them completely, branches included.
comma := ,
empty :=
space := $(empty) $(empty)
PURE_MODULES := errors _homes enums/* _base/access _memory/arena _base/args _control/auth _memory/buddy \
	_memory/buffer _base/check _memory/pages _base/random _base/resource attr backoff endpoint gid grh \
	_objects/flow_members _cm/private_data qp_fsm remote _control/frames wire _memory/accelerator _memory/dlpack \
	_memory/keeper
PURE := $(subst $(space),$(comma),$(PURE_MODULES:%=pyverbs_lite/%.py))

bench: $(VENV)/benched ## everything measured beside C and the peers; writes docs/performance.md (about five minutes)
	$(BIN)/python -m bench

bench-quick: $(VENV)/benched ## what the layer costs beside C and the peers, without a device (half a minute)
	$(BIN)/python -m bench --quick

packages: ## install the Debian packages that are missing
	@tools/packages $(SUDO)

$(VENV)/bin/python:
	@tools/packages $(SUDO)
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python $(SOURCES)
	$(PIP) install --editable .
	@touch $@

$(VENV)/developed: $(VENV)/bin/python $(SOURCES)
	$(PIP) install --editable '.[dev]'
	@touch $@ $(VENV)/installed

$(VENV)/benched: $(VENV)/bin/python $(SOURCES)
	@MORE="python3-pyverbs perftest" tools/packages $(SUDO)
	$(PIP) install --editable '.[bench]'
	@touch $@ $(VENV)/installed

clean: ## remove what was built here; the guest kernel stays in the user's cache
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .coverage .hypothesis
	rm -f pyverbs_lite/ffi/_verbs*.so
