# Set-up is two commands: `make demo` and `make test`. Everything goes into .venv.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint unit docs dropin cluster-test cluster matrix patches-check
.PHONY: benchmark clean

demo: .venv/installed
	$(BIN)/python -m torchrun_hpc --nproc_per_node=2 examples/ddp.py

test: lint unit docs dropin cluster-test

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

# In CI, what has failed is run once more.
unit: .venv/installed
	$(BIN)/python -m pytest -n 3 tests/unit || { test -n "$$CI" && \
		$(BIN)/python -m pytest --last-failed --last-failed-no-failures=none tests/unit; }

# The site of the documentation, in build/site.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo The site is in build/site/index.html

.venv/docs: .venv/installed requirements-docs.txt
	$(BIN)/pip install --quiet --requirement requirements-docs.txt
	touch $@

dropin: .venv/installed
	$(BIN)/python -m pytest -n 3 --dist loadfile tests/dropin

# Files that take minutes, first: what is left at the end runs alone.
LONG := tests/frameworks $(patsubst %,tests/cluster/test_%.py,\
	faults documentation examples doctor restarts suggested_lines rendezvous releases launchers)
cluster-test: .venv/frameworks
	tests/cluster/install.sh
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder \
		$(LONG) tests/cluster

# Lightning, Accelerate, Transformers, DeepSpeed and torchvision: 300 MB more.
.venv/frameworks: .venv/installed requirements-frameworks.txt tests/frameworks/install.sh
	tests/frameworks/install.sh $(BIN)
	touch $@

# A shell on the login node of a Slurm cluster of three nodes, on this machine.
cluster: .venv/installed
	tests/cluster/install.sh
	$(BIN)/python tests/cluster/shell.py

# Releases of torch, all or those of TORCH="2.4 2.13", in throw-away environments: a few
# minutes each. Writes docs/compatibility.md.
matrix: .venv/installed
	tests/cluster/install.sh
	$(BIN)/python tests/matrix.py $(TORCH)

# The patches for torchrun itself, on all releases or those of TORCH.
patches-check: .venv/installed
	$(BIN)/python patches/check.py $(TORCH)
	tests/cluster/install.sh
	$(BIN)/python -m pytest tests/cluster/test_patches.py

# Speed, as ratios: eleven minutes. The plots of the documentation are drawn anew.
benchmark: .venv/installed
	tests/cluster/install.sh
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/launch.py --record
	$(BIN)/python benchmarks/direct.py
	$(BIN)/python benchmarks/rendezvous.py --record
	$(BIN)/python benchmarks/plots.py
	$(BIN)/python benchmarks/stderr.py
	$(BIN)/python benchmarks/doctor.py

clean:
	rm -rf .launchers .venv build .hypothesis .mypy_cache .pytest_cache .ruff_cache
