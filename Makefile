# What a person does with this repository, a word each; `make` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
EXPERIMENT ?= quickstart
RANKS ?= 2
# The set that is installed in VENV, else the CUDA set if this host has an NVIDIA GPU. `make STACK=cpu ...` decides otherwise.
INSTALLED := $(shell cat $(VENV)/installed 2>/dev/null)
STACK ?= $(or $(INSTALLED),$(shell nvidia-smi -L >/dev/null 2>&1 || [ -e /dev/nvidia0 ] && echo gpu || echo cpu))
# Who asks for the CPU on a GPU host gets it: training refuses to use the CPU there only because torch sees no GPU.
ifeq ($(STACK) $(filter file,$(origin STACK)),cpu )
export CUDA_VISIBLE_DEVICES :=
endif
# FBGEMM's builds for CPU and for CUDA have the same files: one goes before the other comes.
OTHER_FBGEMM := $(if $(filter gpu,$(STACK)),fbgemm-gpu-cpu,fbgemm-gpu)
# Where the tests of the GPU program run: VENV on a host that has the GPU set anyway.
GPU_VENV ?= $(if $(filter gpu,$(STACK)),$(VENV),.venv-gpu)
# Processes that share the test files out; each starts gloo ranks of its own.
JOBS ?= 2
# Tests start many processes: each would compile the package again where bytecode is not kept.
unexport PYTHONDONTWRITEBYTECODE
# Extra words for pip, for instance an index that has CPU-only builds of torch (much smaller, same results).
PIP_FLAGS ?=
TORCHREC := torchrec==1.9.2
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)

PY := $(VENV)/bin/python
# uv installs several times faster than pip, which installs uv into VENV where there is none; `make UV= ...` does without it.
# uv does not read pip's configuration: it is told pip's index, and if it fails, pip installs. Neither compiles bytecode
# here, because most modules are never imported.
UV ?= $(or $(shell command -v uv),$(VENV)/bin/uv)
PIP_INDEX = $${PIP_INDEX_URL:-$$($(PY) -m pip config get global.index-url 2>/dev/null)}
WITH_UV = { index=$(PIP_INDEX); env $${index:+UV_DEFAULT_INDEX=$$index} $(UV) pip install --python $(PY) -q \
	--index-strategy unsafe-best-match $(PIP_FLAGS) $(1); }
WITH_PIP = $(PY) -m pip install --disable-pip-version-check --no-compile $$([ -t 1 ] || echo -qq) $(PIP_FLAGS)
# $(call install,WHAT); make splits a call at its commas, so sets of extras have names.
install = $(if $(UV),$(WITH_UV) || )$(WITH_PIP) $(1)
TORCHX := $(VENV)/bin/torchx --log_level WARNING
RUNTIME_SET = -e '.[$(STACK),serve]'
DEV_SET = -e '.[$(STACK),dev]'
RAW := datasets/raw/quickstart.tsv
RUN := runs/$(EXPERIMENT)
NEXT := quickstart_dlrm_dcn

.PHONY: help
help:  ## this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

.PHONY: train
train: $(VENV)/installed  ## install, make a data set with a known best AUC, prepare, plan, train on 2 ranks, evaluate
	@[ -e datasets/quickstart/dataset.json ] || [ -e $(RAW) ] || $(PY) -m pipeline generate data=quickstart output=$(RAW)
	@[ -e datasets/quickstart/dataset.json ] || $(PY) -m pipeline prepare data=quickstart source=$(RAW)
	@$(PY) -m pipeline plan experiment=$(EXPERIMENT) world_size=$(RANKS) brief=true
	@$(TORCHX) run -s local_cwd pipeline.train -j 1x$(RANKS) -- experiment=$(EXPERIMENT) planner=file
	@$(PY) -m pipeline evaluate run=$(RUN) split=test importance_rows=4096
	@echo "picture     $(RUN)/report.html, all of it as one page: open it in a browser"
	@echo "next        $(TORCHX) run -s local_cwd pipeline.train -j 1x$(RANKS) -- experiment=$(NEXT)"

.PHONY: install
install: $(VENV)/installed  ## make .venv with the GPU set where there is an NVIDIA GPU, else the CPU set

.PHONY: doctor
doctor: $(VENV)/installed  ## check versions, operations, GPU, shared memory and disk
	@$(PY) -m pipeline doctor

.PHONY: test
test: $(VENV)/installed-dev  ## the default test suite, no GPU needed: about 9 CPU minutes on a quiet machine
	@TIMEFORMAT='CPU time %U s + %S s in system calls, %R s in all'; \
		time OMP_NUM_THREADS=1 $(PY) -m pytest -m "not long and not campaign and not gpu" -n $(JOBS) --dist worksteal

.PHONY: test-long
test-long: $(VENV)/installed-dev  ## the tests that take seconds each; CI runs them too
	@OMP_NUM_THREADS=1 $(PY) -m pytest -m "long and not campaign and not gpu" -n $(JOBS) --dist worksteal

.PHONY: test-gpu
test-gpu:  ## the tests of the GPU program, in .venv-gpu: on the shadow GPU where there is no GPU
	@$(MAKE) --no-print-directory VENV=$(GPU_VENV) STACK=gpu $(GPU_VENV)/installed-dev
	@OMP_NUM_THREADS=1 $(GPU_VENV)/bin/python -m pytest -m gpu tests/gpu -n $(JOBS) --dist worksteal

.PHONY: test-busy
test-busy: $(VENV)/installed-dev  ## the default test suite twice, while other processes keep two cores busy
	@trap 'kill $$(jobs -p)' EXIT; for core in 1 2; do yes >/dev/null & done; \
		$(MAKE) --no-print-directory test; $(MAKE) --no-print-directory test

.PHONY: campaigns
campaigns: $(VENV)/installed-dev  ## the tests that take minutes each
	@OMP_NUM_THREADS=1 $(PY) -m pytest -m campaign
	@OMP_NUM_THREADS=1 $(PY) -m pytest -m "hypothesis and not campaign" --hypothesis-profile=all

.PHONY: notebook
notebook: $(VENV)/installed-dev  ## run the notebook and the examples of the Python page
	@OMP_NUM_THREADS=1 $(PY) -m pytest tests/docs/test_notebook.py tests/docs/test_python_page.py tests/api

.PHONY: faults
faults: $(VENV)/installed-dev  ## plant every fault of tests/faults and write docs/measurements/faults.md
	@rm -f docs/measurements/faults.jsonl
	@OMP_NUM_THREADS=1 FAULT_RECORDS=$(CURDIR)/docs/measurements/faults.jsonl $(PY) -m pytest tests/faults; status=$$?; \
		$(PY) docs/write_measurements.py; exit $$status

.PHONY: check
check: $(VENV)/installed-dev  ## lint, format, types, import contracts
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports

.PHONY: bench
bench: $(VENV)/installed-dev  ## every benchmark that needs no arguments; each prints a ratio measured in one run
	@for file in $$(grep -l __main__ benchmarks/[a-z]*.py | xargs grep -L 'required=True\|add_argument("[a-z]'); do echo "== $$file"; PYTHONPATH=. $(PY) $$file; done

.PHONY: gpu-report
gpu-report: $(VENV)/installed-dev  ## check and measure this machine's GPUs, ten minutes: gpu_report/gpu_report.html
	@PYTHONPATH=. $(PY) -m benchmarks.gpu_report

.PHONY: docs
docs: $(VENV)/installed-docs  ## build the site of docs/, with a search: site/index.html
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "site        site/index.html"

# torch, FBGEMM and their CUDA libraries come in builds for CPU and for CUDA: setup.cfg pins their versions only.
UNLOCKED := torch fbgemm-gpu-cpu triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cuda-cupti \
	nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver \
	nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx

.PHONY: lock
lock:  ## write requirements.lock, versions and SHA-256 of what the images install; needs uv
	@uv pip compile -q --generate-hashes --no-header --no-annotate --python-version 3.11 \
		--python-platform x86_64-unknown-linux-gnu setup.cfg --extra cpu --extra s3 --extra serve -c constraints.txt \
		$(addprefix --no-emit-package ,$(UNLOCKED)) -o requirements.lock

.PHONY: sbom
sbom: $(VENV)/installed  ## write sbom/sbom.cdx.json (CycloneDX) and sbom/licenses.md of what .venv has
	@[ -x sbom/venv/bin/pip-audit ] || { $(PYTHON) -m venv sbom/venv && sbom/venv/bin/python -m pip install -q $(PIP_FLAGS) \
		cyclonedx-bom==7.5.0 pip-licenses==5.5.5 pip-audit==2.10.1; }
	@sbom/venv/bin/cyclonedx-py environment --output-reproducible -o sbom/sbom.cdx.json $(PY)
	@sbom/venv/bin/pip-licenses --python $(PY) --format markdown --order license --output-file sbom/licenses.md >/dev/null
	@echo "components  sbom/sbom.cdx.json"; echo "licences    sbom/licenses.md"

.PHONY: audit
audit: sbom  ## ask PyPI for known vulnerabilities of what .venv has; exit 1 if it knows one, or does not answer
	@sbom/venv/bin/pip-audit --strict --skip-editable --path "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

.PHONY: clean
clean:  ## remove .venv, .venv-gpu, builds and caches; data sets and runs stay
	rm -rf $(VENV) $(GPU_VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torchrec without its dependencies: setup.cfg says why.
$(VENV)/installed: setup.cfg pyproject.toml $(if $(filter-out $(STACK),$(INSTALLED)),other-set)
	@[ -n "$(PYTHON)" ] && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed, found: $$($(or $(PYTHON),python3) --version 2>&1 | head -1)." \
			"Install it (apt install python3.11 python3.11-venv), or say where it is: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@echo "installing the $(STACK) set into $(VENV), once"
	@[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	@! $(PY) -m pip show -qq $(OTHER_FBGEMM) 2>/dev/null || $(PY) -m pip uninstall -qq -y fbgemm-gpu fbgemm-gpu-cpu
	@[ -z "$(UV)" ] || command -v $(UV) >/dev/null || $(WITH_PIP) uv || true
	@$(call install,$(RUNTIME_SET))
	@$(call install,--no-deps $(TORCHREC))
	@$(PY) -m pipeline doctor stack=$(STACK)
	@$(PY) -m pipeline precompile
	@echo $(STACK) > $@

# VENV holds another set than the one that is asked for.
.PHONY: other-set
other-set:

$(VENV)/installed-dev: $(VENV)/installed
	@$(call install,$(DEV_SET))
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed
	@$(call install,-e '.[docs]' -c constraints.txt)
	@touch $@
