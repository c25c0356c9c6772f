# Set-up is two commands: `make demo` and `make test`. Everything goes into .venv.

PYTHON ?= python3
BIN := .venv/bin

# Prints what a tier has cost, at its end.
TIER = $(BIN)/python tests/support/tier.py $@ $(BIN)/python -m pytest --dist loadgroup

.PHONY: demo test test-all lint unit core more docs cluster matrix patches-check
.PHONY: benchmark cold scale endurance signals clean

demo: .venv/installed
	$(BIN)/python -m torchrun_hpc --nproc_per_node=2 examples/ddp.py

# What a newcomer and CI run first: every capability once, for real.
test: lint unit core

# And the rest: beside stock torchrun, faults, launchers, documentation, frameworks.
test-all: test more

.venv/installed: pyproject.toml requirements-dev.txt
	@echo Installing torch and the tools of development into .venv: a minute or two
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --requirement requirements-dev.txt --editable .
	touch $@

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# These wait for nothing: a third process would only collect all tests once more.
unit: .venv/installed
	$(TIER) -n 2 --timeout=850 tests/unit

core: .venv/installed
	tests/support/cluster/install.sh
	$(TIER) -n 3 --timeout=850 tests/core

# The slowest rooms come first. Otherwise one of them would run alone at the end.
FIRST := $(patsubst %,tests/more/%/,faults documentation frameworks launchers)
MORE := $(FIRST) $(filter-out $(FIRST),$(wildcard tests/more/*/))
more: docs .venv/frameworks
	tests/support/cluster/install.sh all
	tests/more/packaging/install.sh
	$(TIER) -n 3 --timeout=850 --no-loadscope-reorder $(RERUNS) $(MORE)

# The site of the documentation, in build/site.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo The site is in build/site/index.html

.venv/docs: .venv/installed requirements-docs.txt
	$(BIN)/pip install --quiet --requirement requirements-docs.txt
	touch $@

# Lightning, Accelerate, Transformers, DeepSpeed and torchvision: 300 MB more.
.venv/frameworks: .venv/installed requirements-frameworks.txt tests/more/frameworks/install.sh
	tests/more/frameworks/install.sh $(BIN)
	touch $@

# A shell on the login node of a Slurm cluster of three nodes, on this machine.
cluster: .venv/installed
	tests/support/cluster/install.sh
	$(BIN)/python -m tests.support.cluster.shell

# Releases of torch, all or those of TORCH="2.4 2.13", in throw-away environments: a few
# minutes each.
matrix: .venv/installed
	tests/support/cluster/install.sh
	$(BIN)/python tests/releases/run.py $(TORCH)

# The patches for torchrun itself, on all releases or those of TORCH.
patches-check: .venv/installed
	$(BIN)/python patches/check.py $(TORCH)
	tests/support/cluster/install.sh all
	$(BIN)/python -m pytest tests/more/patches/test_patches.py

# Speed, as ratios: eleven minutes. The plots of the documentation are drawn anew.
benchmark: .venv/installed
	tests/support/cluster/install.sh
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/launch.py --record
	$(BIN)/python benchmarks/direct.py
	$(BIN)/python benchmarks/rendezvous.py --record
	$(BIN)/python benchmarks/plots.py
	$(BIN)/python benchmarks/stderr.py
	$(BIN)/python benchmarks/doctor.py

# The start on a slow file system with an empty cache, as ratios: twenty minutes.
cold: .venv/installed
	tests/support/cluster/install.sh
	$(BIN)/python benchmarks/cold.py

# A job on 64 nodes: five minutes, and 16 GiB of memory.
scale: .venv/installed
	tests/support/cluster/install.sh
	$(BIN)/python benchmarks/scale.py

# An hour with a restart every minute.
endurance: .venv/installed
	tests/support/cluster/install.sh
	$(BIN)/python benchmarks/endurance.py

# 500 signals at random moments of a launch: half an hour.
signals: .venv/installed
	tests/support/cluster/install.sh
	$(BIN)/python benchmarks/signals.py

clean:
	rm -rf .launchers .packaging .venv build .hypothesis .mypy_cache .pytest_cache .ruff_cache
