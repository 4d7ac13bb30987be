# `make train` and `make test` set up .venv when it is missing; `make .venv` only installs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= stdlib_gpt
# Ranks wait for each other most of the time, so two files of distributed tests at once suit two cores.
TEST_JOBS ?= 2
# One thread per process: ranks of one machine would otherwise fight for its cores.
export OMP_NUM_THREADS ?= 1

.PHONY: train test test-full verify-all lint clean test-checkpoints soak-checkpoints test-faults test-cli soak

# The stamp lies inside the environment, so that removing .venv is enough to begin anew.
$(VENV): $(VENV)/.installed ;

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

train: $(VENV)/.installed
	$(BIN)/lightning-3d train recipe=$(RECIPE) $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -q -n $(TEST_JOBS) --dist loadfile -m "not distributed and not slow"
	$(BIN)/python -m pytest -q -n $(TEST_JOBS) --dist loadfile -m "distributed and not slow"

# Every kind of layout on every kind of model beside one process, in float64; prints the tables.
verify-all: $(VENV)/.installed
	$(BIN)/python -m pytest -q -rP -m slow tests/test_verify_layouts.py

test-full: lint
	$(BIN)/python -m pytest -q

# Every pair of layouts and optimizers, every boundary of a resumed run, every write that fails; files in and out.
CHECKPOINTS := checkpoint_layouts resume epoch_ends failing_writes plain_checkpoints load_from_checkpoint reading export \
  averages compiled finetune generate
test-checkpoints: $(VENV)/.installed
	$(BIN)/python -m pytest -q -n $(TEST_JOBS) -m slow $(foreach f,$(CHECKPOINTS),tests/test_$(f).py)

# A hundred kills, half of them in the middle of a save.
KILLS ?= 100
soak-checkpoints: $(VENV)/.installed
	$(BIN)/python tests/soak_checkpoints.py --kills $(KILLS)

# Every rank fails in every phase, by an exception and by SIGKILL; hangs; signals.
test-faults: $(VENV)/.installed
	$(BIN)/python -m pytest -q -n $(TEST_JOBS) $(foreach f,faults torchrun hangs stopping endings machines stragglers launch script_launcher,tests/test_$(f).py)

# All of the 520 invalid and 200 valid configurations, every bad value of every setting; sweeps;
# W&B on eight ranks; scripts of hydra.main.
test-cli: $(VENV)/.installed
	$(BIN)/python -m pytest -q -n $(TEST_JOBS) -m slow tests/test_invalid_configs.py tests/test_hydra_script.py \
	  $(wildcard tests/test_cli_*.py)

# MINUTES of random kills and automatic resume, then the same run undisturbed: about half as long again.
MINUTES ?= 30
soak: $(VENV)/.installed
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)

clean:
	rm -rf dist build .mypy_cache .pytest_cache .ruff_cache
