# make train and make test need nothing but Python 3.11 or newer and a package registry. If the active python3 has the
# packages that the target needs, in the same major versions, make uses it: NumPy for make train on a CPU, else those of
# requirements*.txt. Otherwise make creates a .venv, and keeps it up to date. PYTHON=... names another interpreter.

LISTED := $(shell nvidia-smi -L 2>/dev/null | grep '^GPU')
REQUIREMENTS := $(if $(filter test% sanitize,$(MAKECMDGOALS)),$(wildcard requirements*.txt),$(if $(LISTED),\
    requirements.txt requirements-gpu.txt,$(if $(filter bench,$(MAKECMDGOALS)),requirements.txt)))
ifeq ($(origin PYTHON), undefined)
NAME := $(if $(REQUIREMENTS),[a-z][a-z0-9_-]*,numpy)
PACKAGES := $(shell grep -oh '^$(NAME)==[0-9]*\.' $(or $(REQUIREMENTS),requirements.txt))
PYTHON := $(shell [ "$$VIRTUAL_ENV" != "$(CURDIR)/.venv" ] && python3 -c 'import sys, importlib.metadata as installed; \
    assert sys.version_info >= (3, 11); wanted = [word.split("==") for word in sys.argv[1:]]; \
    assert all(installed.version(name).startswith(major) for name, major in wanted)' $(PACKAGES) 2>/dev/null \
    && echo python3 || echo .venv/bin/python)
ENVIRONMENT := $(if $(filter .venv/%,$(PYTHON)),.venv/requirements-$(words $(REQUIREMENTS)))
endif
CPU_BUILDS := https://download.pytorch.org/whl/cpu
# Evaluated when a recipe needs it, once the environment exists. If the trainer cannot use the GPU, llmc.gpu.device says
# why, and the recipe runs on the CPU.
GPU = $(if $(LISTED),$(shell $(PYTHON) -m llmc.gpu.device))
TRAINER = $(if $(GPU),train_gpt2_cuda.py,train_gpt2.py)
STEPS ?= 1000
RUN ?= runs/first
MODEL ?= d4
ARGS ?= -b 16 -t 64
SANITIZE ?= (3-97 and (C64x or C240x or C1600x)) or (grouped and 3-97 and (2-2 or 3-3-80 or 1-1-64)) or update \
    or stochastic or few_parts \
    or (matmuls and (97-240 or 168-504 or C240-1000 or C64-391) and not grads and not cublaslt) \
    or (a_pass_is and (C240 or C576 or C256) and bfloat16 and not 40) \
    or (drawing and 300-0 and (choice0 or choice4 or choice9)) \
    or (token_is and C192) \
    or (grouped and 3-63 and (9-3-16 or 3-1-64 or 3-1-128) and not two) \
    or (swiglu and (129-64 or 130-72) and 2) or (forward_rope and 3-97 and (4-2-16 or 9-3)) \
    or (3-97 and (C240-V or C576) and (rmsnorm or rope or swiglu)) \
    or (fp8 and (prepare or 97-208 or (129-208 and 2) or (attention_backward and 105))) \
    or (normalized and (63 or 130)) or (on_a_gpu and (16-97 or fp8-97))

help:
	@echo "make train       train a small GPT-2 on the English in Python's standard library: three minutes, no download"
	@echo "make look        one training step of that model, as a page that you can click: look.html"
	@echo "make page        the same of a smaller model, which also trains in the page: page/index.html, to publish"
	@echo "make test        parity with PyTorch on small models, formats, errors; on a GPU, some cases of each kernel's tests"
	@echo "make test-gpu    every case, on a GPU"
	@echo "make test-124M   parity of random GPT-2 124M, B=4, T=64, all kernels compiled: some minutes, 14 GB of memory"
	@echo "make bench       step time and memory against PyTorch on this machine (a GPU: ten minutes)"
	@echo "make check       on a GPU: one batch through both trainers, every activation and gradient side by side"
	@echo "make profile     on a GPU: where the time of a step goes, kernel by kernel"
	@echo "make sanitize    the kernels' tests under compute-sanitizer: memory, races, uninitialized reads, barriers"
	@echo "make clean       remove the data that make train made (.venv and runs/ stay)"
	@echo "Settings: PYTHON=... (use that interpreter, no .venv), STEPS=$(STEPS) and RUN=$(RUN) (of make train)"

train: $(ENVIRONMENT) data/pyprose_train.bin
	$(PYTHON) $(TRAINER) -e d4 -i data/pyprose -b 16 -t 64 -x $(STEPS) -o $(RUN) --print_every 20 -s 0 -y 1 \
	    || { status=$$?; echo "(make train: STEPS= is its -x, RUN= its -o)" >&2; exit $$status; }
	@$(PYTHON) generate.py $(RUN) --prompt "The " --tokens 500 --temperature 0.7 2>/dev/null
	@echo
	@echo "more text:     $(PYTHON) generate.py $(RUN) --prompt \"Return \" --temperature 0.7"
	@echo "look inside:   make look RUN=$(RUN)"
	@echo "its losses:    $(PYTHON) dev/plot_log.py $(RUN)      (a picture; needs matplotlib)"
	@echo "train longer:  make train RUN=runs/second STEPS=5000  (Ctrl-C stops it; the same command goes on)"

look: $(ENVIRONMENT)
	@[ -e "$(RUN)" ] || { echo "$(RUN): no such run: make train RUN=$(RUN) makes it" >&2; exit 1; }
	$(PYTHON) look.py $(RUN) --prompt "The cat sat on the mat."

# The page that .github/workflows/page.yml publishes: a model that it can also train.
page: $(ENVIRONMENT) data/pyprose_train.bin
	$(PYTHON) train_gpt2.py -e d2 -i data/pyprose -t 64 -x 1500 -n 125 -q 0.1 -s 0 -o runs/page -y 1
	mkdir -p page
	$(PYTHON) look.py runs/page --prompt "The cat sat on the mat." -o page/index.html --open 0

# The processes share the cores; two threads in each, so that some work is split.
test test-gpu: export OMP_NUM_THREADS := 2
test: $(ENVIRONMENT)
	$(PYTHON) -m ruff check -q
	$(PYTHON) -m pytest -q -n auto --maxprocesses 12 --dist worksteal

test-gpu: $(ENVIRONMENT)
	$(PYTHON) -m pytest -q -n auto --maxprocesses 12 --dist worksteal --every-case

test-124M: $(ENVIRONMENT)
	$(PYTHON) -m pytest -q -m large

bench: $(ENVIRONMENT)
	$(PYTHON) dev/bench.py $(if $(GPU),gpu,cpu)

# On a GPU. check: one batch, compared with NumPy; profile: where the time of a step goes. Another model, MODEL=l4 too:
# make profile MODEL=gpt2_d12.bin ARGS="-b 64"
check profile: $(ENVIRONMENT)
	$(PYTHON) dev/$@_gpu.py -e $(MODEL) $(ARGS)

# Run the kernels' tests, at awkward shapes, under NVIDIA's compute-sanitizer, which comes with the CUDA toolkit.
# memcheck ignores API errors, because cuda.bindings asks the driver for functions that only newer drivers have.
# racecheck checks shared memory only, and skips the matmuls that add up parts in global memory: they take minutes.
sanitize: $(ENVIRONMENT)
	@command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer: not found: it comes with the CUDA toolkit"; exit 1; }
	for tool in memcheck racecheck initcheck synccheck; do \
	    echo "$$tool:"; compute-sanitizer --tool $$tool --error-exitcode 1 --print-limit 5 \
	        $$([ $$tool = memcheck ] && echo --report-api-errors no) \
	        $(PYTHON) -m pytest -q -x tests/test_kernels.py tests/test_kernels_llama.py tests/test_update.py tests/test_matmul.py \
	        tests/test_decode.py tests/test_decode_token.py tests/test_grouped_attention.py tests/test_matmul_swiglu.py tests/test_fp8.py \
	        tests/test_fp8_norm.py tests/test_speedrun.py \
	        -k "($(SANITIZE))$$([ $$tool = racecheck ] && echo ' and not 168-504')" || exit 1; \
	done

clean:
	rm -f data/pyprose_train.bin data/pyprose_val.bin data/pyprose_tokenizer.bin

# llm.c's targets, of which nothing has to be compiled here
train_gpt2:
	@echo "nothing to compile: python train_gpt2.py"

test_gpt2:
	@echo "nothing to compile: python test_gpt2.py"

train_gpt2cu:
	@echo "nothing to compile: python train_gpt2_cuda.py"

train_gpt2fp32cu:
	@echo "nothing to compile: python train_gpt2_cuda.py --dtype float32"

test_gpt2cu:
	@echo "nothing to compile: python test_gpt2.py --backend cuda-bf16"

test_gpt2fp32cu:
	@echo "nothing to compile: python test_gpt2.py --backend cuda"

data/pyprose_train.bin: prepro/pystdlib.py prepro/common.py | $(ENVIRONMENT)
	$(PYTHON) prepro/pystdlib.py --prose

# Linux without a GPU first gets PyTorch's CPU build, which then satisfies the requirements, unless NumPy is enough.
.venv/requirements-%: $(wildcard requirements*.txt)
	@python3 -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"python3 is {sys.version.split()[0]}, \
	expected 3.11 or newer: install one, then make PYTHON=...")'
	python3 -m venv .venv
ifeq ($(if $(REQUIREMENTS),$(LISTED)$(shell uname)), Linux)
	.venv/bin/python -m pip install -q --no-deps --retries 1 --index-url $(CPU_BUILDS) \
	    $$(grep -o '^torch==[0-9.]*' requirements.txt) || \
	    echo "no CPU build of PyTorch from $(CPU_BUILDS): the plain one comes, with its CUDA libraries"
endif
	.venv/bin/python -m pip install -q --progress-bar on $(or $(REQUIREMENTS:%=-r %),numpy -c requirements.txt)
	@touch $@

.PHONY: help train look page test test-gpu test-124M bench check profile sanitize clean \
    train_gpt2 test_gpt2 train_gpt2cu train_gpt2fp32cu test_gpt2cu test_gpt2fp32cu
