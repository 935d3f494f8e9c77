BIN := .venv/bin
PY := $(BIN)/python

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-long test test-architectures test-security test-dropins test-trainers test-exhaustive test-sanitized lint check bench claims dist cuda-check site clean
.PHONY: gpu-report gpu-rehearsal gpu-pack

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv with everything and build the extension (once; later runs do what changed)
	@tools/setup_env.sh

demo: ## GRPO on a real 135M model, two ranks, about two minutes on two cores after set-up
	@tools/setup_env.sh demo
	@$(PY) examples/demo/prepare.py
	@$(BIN)/hybridengine grpo examples/demo/config.yaml

SEED := 1
LONG := runs/demo_long
BASE := .cache/demo/smollm2-135m-instruct
demo-long: setup ## SFT, then GRPO, and the curve over both (SEED=2: another seed)
	@$(PY) examples/demo/prepare.py
	@test -f $(LONG)/before/summary.json || $(BIN)/hybridengine grpo examples/demo_long/grpo.yaml \
	  model.path=$(BASE) trainer.total_training_steps=1 trainer.default_local_dir=$(LONG)/before
	@$(BIN)/hybridengine sft examples/demo_long/sft.yaml seed=$(SEED) \
	  trainer.default_local_dir=$(LONG)/seed_$(SEED)/sft
	@$(BIN)/hybridengine grpo examples/demo_long/grpo.yaml seed=$(SEED) \
	  model.path=$(LONG)/seed_$(SEED)/sft/final trainer.default_local_dir=$(LONG)/seed_$(SEED)/grpo
	@$(PY) examples/demo_long/draw.py $(LONG)

TEST := OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -q -n 2 --dist worksteal
test: setup ## The tests, two at a time (GPU tests run where there is a GPU)
	@$(TEST) -m "not exhaustive"

HYPOTHESIS_SEED := $(shell date +%s)
test-exhaustive: setup ## The long tests that `make test` leaves out: each has a cheaper sibling there
	@$(TEST) -m exhaustive
	@echo "new examples of the property tests: HYPOTHESIS_SEED=$(HYPOTHESIS_SEED)"
	@$(TEST) -m "hypothesis and not exhaustive" --hypothesis-profile=new --hypothesis-seed=$(HYPOTHESIS_SEED)

test-security: setup ## What every process of a run listens on, and what it does with others' bytes
	@$(TEST) tests/run/security tests/extras/remote/test_vllm_server.py::test_what_a_server_listens_on_and_answers

CALLS := 1000000
test-sanitized: setup ## Tests and random calls of the extension under sanitizers (CALLS=20000: fewer)
	@$(PY) -m tools.sanitize address --calls $(CALLS)
	@$(PY) -m tools.sanitize thread

test-architectures: setup ## Every model type, and 90 architectures against vLLM's loader; their docs
	@$(PY) -m pytest -q tests/architectures/all_model_types.py
	@$(PY) -m pytest -q tests/architectures/all_architectures.py

test-dropins: setup ## Run verl's, TRL's and others' own tests with ours in place; docs/dropins.md
	@$(PY) -m tools.dropins

test-trainers: setup ## Run verl, TRL and others as their users do, with our weight sync
	@$(PY) -m tools.trainers

lint: setup ## ruff, clang-format, mypy and import-linter, changing nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror
	@tools/lint_package.sh
	@$(BIN)/mypy

check: lint ## lint, types and the fast tests, in under three minutes
	@$(TEST) -m "not multirank and not slow and not exhaustive"

bench: setup ## Time every operator against its baselines on this machine
	@$(PY) -m benchmarks

CLAIMS :=
claims: setup ## Measure the claims of docs/figures.md again (CLAIMS="3 5": these)
	@$(PY) -m tools.claims $(CLAIMS)

dist: setup ## Build sdist and wheel into dist/; try every way to install them in an empty environment
	@tools/check_dist.sh

PARTS :=
gpu-report: ## On a GPU machine, with its own python3: build, test and measure (docs/gpu.md)
	@$${PYTHON:-python3} tools/gpu_report.py $(PARTS)

gpu-rehearsal: ## Without a GPU: the same with a GPU machine's software, as far as it goes
	@$${PYTHON:-python3} tools/gpu_rehearsal.py

gpu-pack: ## Without a GPU: extension, compiled kernels, packages for a GPU machine without network
	@$${PYTHON:-python3} tools/gpu_rehearsal.py environment build triton pack

cuda-check: setup ## Compile the CUDA sources (no GPU needed); registers, shared memory, spills
	@$(PY) tools/cuda_check.py

site: setup ## Build the documentation as a site in build/site; every link is checked
	@$(PY) -m pip install -qq "mkdocs-material>=9.6" "mkdocstrings[python]>=1"
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs -q build

clean: ## Remove builds, caches and runs, but not .venv
	rm -rf build dist runs .cache compile_commands.json hybridengine/_C*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
