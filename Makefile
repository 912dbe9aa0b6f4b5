# `make demo` and `make test` set everything up themselves, in .venv; nothing outside it is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Kernels are small in the tests: one thread a worker is faster than threads that wait for each other.
TEST_ENV := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 TOKENIZERS_PARALLELISM=false
WORKERS ?= 2

.PHONY: help demo report test test-fast test-all test-kernels conformance sweep fuzz releases lint docs catalogue bench bench-passes bench-gains bench-compile clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo    compile a small transformer, show what each pass did, check it against eager'
	@echo 'make test    run the tests (WORKERS=2 processes, PYTEST_ARGS=...)'
	@echo 'make test-fast  those of the matcher, the rewriter, the stages and the flow, and a sample of the examples: two minutes'
	@echo 'make test-all   also those marked slow, which repeat in breadth what others show'
	@echo 'make sweep   every operator of torch against eager (WORKERS=2 processes, SWEEP_ARGS=..., see --help); takes hours'
	@echo 'make test-kernels  every firing example of every rule through kernels, and the programs in tests/kernels'
	@echo 'make fuzz    random programs against eager, for TIME=600 seconds (FIRST=0, SEED=, WORKERS=2, CODEGEN=eager|inductor|both)'
	@echo 'make conformance PYTORCH_TESTS=path   PyTorch'\''s own Inductor tests with Triptych in Inductor'\''s place'
	@echo '             (MODE=kernels|eager|stock|aot_eager, K=regular expression, WORKERS=2, CONFORMANCE_ARGS=...)'
	@echo 'make releases  the fast tests on every supported torch release (RELEASES="2.11 2.15")'
	@echo 'make lint    ruff and mypy'
	@echo 'make docs    build the documentation, docs/_build/html/index.html'
	@echo 'make catalogue  write docs/passes.md and docs/passes/ from the passes (make docs does it too)'
	@echo 'make report  build the script and style of the report page (needs node; what it builds is checked in)'
	@echo 'make bench   eager, Inductor and Triptych on thirty models (MODELS="bert gpt2", BENCH_ARGS=..., see bench/suite.py --help)'
	@echo 'make bench-passes  time of the passes, ours and those of Inductor side by side'
	@echo 'make bench-gains   what each pass gains, with it and without (BENCH_ARGS=..., see bench/gains.py --help)'
	@echo 'make bench-compile  compile times, ours and Inductor'\''s: cold, warm, second process (BENCH_ARGS=..., see bench/compile_time.py --help)'
	@echo 'make clean   remove .venv, caches and build output'

demo: $(VENV)/.package-installed
	$(BIN)/triptych demo

PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: $(VENV)/.installed
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS)

test-fast: $(VENV)/.installed
	$(PYTEST) -m 'fast and not slow' $(PYTEST_ARGS)

test-all: $(VENV)/.installed
	OPTIMISED_KERNELS=1 $(PYTEST) $(PYTEST_ARGS)

sweep: $(VENV)/.installed
	$(TEST_ENV) $(BIN)/python -m tests.sweep --workers $(WORKERS) $(SWEEP_ARGS)

test-kernels: $(VENV)/.installed
	ALL_KERNELS=1 OPTIMISED_KERNELS=1 $(PYTEST) tests/kernels $(PYTEST_ARGS)

# SEED=17 shows and judges one program; otherwise a campaign over the seeds from FIRST on. Finds go to fuzz-found/.
TIME ?= 600
FIRST ?= 0
CODEGEN ?= eager
fuzz: $(VENV)/.installed
	$(TEST_ENV) $(BIN)/python -m tests.fuzz --codegen $(CODEGEN) \
		$(if $(SEED),--seed $(SEED),--first $(FIRST) --time $(TIME) --workers $(WORKERS))

# With no path, it says how to get PyTorch's tests.
MODE ?= kernels
conformance: $(VENV)/.installed
	$(TEST_ENV) $(BIN)/python tests/conformance/run.py $(PYTORCH_TESTS) --mode $(MODE) --match '$(K)' \
		--workers $(WORKERS) $(CONFORMANCE_ARGS)

releases:
	$(PYTHON) tests/releases.py $(RELEASES) --workers $(WORKERS)

lint: $(VENV)/.lint-installed
	$(BIN)/ruff check src tests bench docs examples
	$(BIN)/mypy

docs: catalogue $(VENV)/.docs-installed
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html
	@echo 'docs/_build/html/index.html'

# CATALOGUE_ARGS=--check writes nothing and fails where a page is stale
catalogue: $(VENV)/.installed
	$(BIN)/python docs/catalogue.py $(CATALOGUE_ARGS)

report: report/node_modules/.installed
	cd report && npm run --silent check && npm run --silent build

report/node_modules/.installed: report/package.json report/package-lock.json
	cd report && npm ci --silent
	@touch $@

# MODELS="bert gpt2" and BENCH_ARGS="--mode training" choose; see bench/suite.py --help
bench: $(VENV)/.installed
	$(BIN)/python bench/suite.py $(MODELS) $(BENCH_ARGS)

bench-passes: $(VENV)/.installed
	$(BIN)/python bench/pass_time.py

bench-gains: $(VENV)/.installed
	$(BIN)/python bench/gains.py $(BENCH_ARGS)

bench-compile: $(VENV)/.installed
	$(BIN)/python bench/compile_time.py $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist docs/_build .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamps come last, so a broken install is tried again.
# numpy: torch warns on import without it
$(VENV)/.package-installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing torch and the package into $(VENV); the first time takes some minutes'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e . numpy
	@touch $@

$(VENV)/.installed: $(VENV)/.package-installed
	@echo 'installing the test tools into $(VENV)'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/.lint-installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[lint]'
	@touch $@

$(VENV)/.docs-installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@
