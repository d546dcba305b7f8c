"""What the stages of one run share: the loaded target, the prompts, the MLflow run, and every stage with its
key.
"""

import platform
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from data.errors import UserError
from data.files import canonical_hash
from data.prompt_cache import cached_prompts
from data.prompt_sources import Prompt
from data.prompts import encode_prompt, neutralise, prompts_digest, special_ids
from distill.identity import gpu, machine, model_form
from distill.model_files import check_ids, read_config, read_tokenizer
from distill.models import load_target, read_eos_ids
from distill.recipe import Recipe
from distill.redact import redact
from distill.resolve import model_digest, resolve_model
from distill.stages import Say, Stage
from evaluation.evaluate import EvaluateConfig

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from data.records import Samples
    from distill.models import Target
    from distill.processes import Processes
    from distill.tracking import Tracker
    from evaluation.decoder.drafters import DraftModel

IMPORTANCE_TEXTS = 16
"""Samples of the select split that the importance of layers and dimensions is measured on."""


@dataclass
class Run:
    """One run of a recipe. What is heavy is made on first use: a run with nothing left to do loads no
    model.
    """

    recipe: Recipe
    runs_dir: Path
    say: Say
    stack: ExitStack
    """Closed when the run ends, with the error that ended it."""
    processes: "Processes | None" = None
    """Those that share sampling and training; None where this process does all."""
    afresh: bool = False
    """Sample anew, also what finished samplings hold."""

    @property
    def cache(self) -> Path:
        """Converted and made models, shared by all recipes."""
        return self.runs_dir / "cache"

    @property
    def signal_temperature(self) -> float:
        """The temperature of the kept signals, of the loss and of its held-out checks: the serving one, and 1
        where that is 0, unless the recipe names another."""
        return self.recipe.train.temperature or self.recipe.serving.temperature or 1.0

    @property
    def kept_signal_temperature(self) -> float | None:
        """The temperature of the signals that sampling keeps; None where training asks the target itself."""
        return None if self.recipe.train.signal == "live" else self.signal_temperature

    @property
    def metric(self) -> Literal["greedy", "sampled", "argmax"]:
        """The acceptance that the serving mode turns into speed."""
        serving = self.recipe.serving
        return "greedy" if serving.temperature == 0 else serving.draft_sampling

    @property
    def held_out(self) -> int:
        """Prompts sampled for selection, and for the test on seen and on unseen templates: as many as are
        measured.
        """
        return self.recipe.evaluate.prompts

    @cached_property
    def tracker(self) -> "Tracker":
        """The MLflow run of this recipe run; it ends with the run, and says how."""
        from distill.tracking import Tracker

        recipe = self.recipe
        tracker = Tracker.start(
            recipe.resolved(), recipe.name, recipe.target.name, self.runs_dir, place=self.place
        )
        return self.stack.enter_context(tracker)

    @property
    def place(self) -> str:
        """This machine and runs folder, where one process at a time works on the recipe."""
        return canonical_hash([platform.node(), str(self.runs_dir.resolve())])

    def end_killed(self) -> None:
        """Close in MLflow what the process before this one, which was killed or failed, left open."""
        from distill.tracking import end_killed

        end_killed(self.runs_dir, self.recipe.name, self.recipe.target.name, self.place)

    @cached_property
    def device(self) -> str:
        """The GPU where there is one. Raises `UserError` where torch cannot use it: what is meant for a GPU
        would go on for weeks without a word.
        """
        import torch

        if torch.cuda.is_available():
            return "cuda"
        if (there := gpu()) is not None:
            raise UserError(
                f"torch {torch.__version__} cannot use this machine's {there[0]}: update its driver, or set "
                "CUDA_VISIBLE_DEVICES to nothing (CUDA_VISIBLE_DEVICES= make ...) to work on the CPU"
            )
        return "cpu"

    @cached_property
    def target_folder(self) -> Path:
        """The target as a Hugging Face directory; converted or downloaded the first time."""
        return resolve_model(self.recipe.target.model, self.recipe.target.revision, self.cache)

    @cached_property
    def target(self) -> "Target":
        """The loaded target."""
        return load_target(self.recipe.target, self.cache, self.device)

    def full_target(self) -> "PreTrainedModel":
        """The target without quantisation, loaded anew at each call."""
        import torch

        from distill.models import load_model

        model = load_model(self.target_folder, getattr(torch, self.recipe.target.dtype))
        return model.requires_grad_(False).eval().to(self.device)

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The target's tokenizer alone."""
        return read_tokenizer(self.target_folder)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end an answer of the target, without its weights."""
        return read_eos_ids(self.target_folder, self.tokenizer)

    @cached_property
    def loaded_prompts(self) -> list[Prompt]:
        """Prompts of all sources as they stand there: the stages' keys know of no tokenizer."""
        data = self.recipe.data
        return cached_prompts(
            data.prompts, splits=data.splits, seed=self.recipe.seed, folder=self.cache / "prompts"
        )

    @cached_property
    def prompts(self) -> list[tuple[Prompt, list[int]]]:
        """Prompts and their token ids, without those that hold special tokens or are longer than the recipe
        allows.
        """
        data, tokenizer = self.recipe.data, self.tokenizer
        loaded = neutralise(tokenizer, self.loaded_prompts)
        encoded, refused, special = [], [], special_ids(tokenizer)
        for prompt in loaded:
            try:
                encoded.append((prompt, encode_prompt(tokenizer, prompt, special)))
            except UserError as error:
                refused.append(str(error))
        if not encoded:
            raise UserError(
                f"the target in {self.target_folder} can use none of {len(loaded)} prompts, the first since "
                f"{refused[0]}"
            )
        if refused:
            self.say(f"{len(refused)} of {len(loaded)} prompts are left out, the first since {refused[0]}")
        vocab_size = read_config(self.target_folder).get_text_config().vocab_size
        check_ids([max(ids) for _, ids in encoded], vocab_size, f"{self.target_folder}: the tokenizer")
        kept = [(prompt, ids) for prompt, ids in encoded if len(ids) <= data.max_prompt_tokens]
        if len(kept) < len(encoded):
            dropped = f"{len(encoded) - len(kept)} of {len(encoded)} prompts"
            self.say(f"{dropped} are left out: longer than data.max_prompt_tokens = {data.max_prompt_tokens}")
        if not kept:
            raise UserError(
                f"no prompt has at most {data.max_prompt_tokens} tokens: raise data.max_prompt_tokens"
            )
        for split, needed in (("train", 1), ("select", 1), ("test", 2)):
            there = sum(prompt.split == split for prompt, _ in kept)
            if there < needed:
                raise UserError(
                    f"the {split} split has {there} prompts and needs {needed} at least: "
                    "add prompts, or change data.splits"
                )
        return kept

    @cached_property
    def stages(self) -> dict[str, Stage]:
        """Every stage with its key, from the recipe and from digests of what it reads; loads no model."""
        from evaluation.store import tracking_uri

        recipe, root = self.recipe, self.runs_dir / self.recipe.name
        part = recipe.resolved()
        sampled = {
            "seed": recipe.seed,
            "sample": recipe.sample.identity(),
            "held_out": self.held_out,
            "dtype": recipe.target.dtype,
            "max_prompt_tokens": recipe.data.max_prompt_tokens,
            "signal_temperature": self.kept_signal_temperature,
        }
        if recipe.train.signal == "hidden_half":
            sampled["signal"] = "float16"
        if recipe.train.signal == "topk":
            sampled["signal"] = recipe.train.top_k
        if recipe.train.signal == "features":
            sampled["signal"] = "features"
        if recipe.target.quantization != "none":
            sampled["quantization"] = recipe.target.quantization
        read = {
            "target": model_digest(self.target_folder, self.cache),
            "prompts": prompts_digest(self.loaded_prompts),
        }
        if self.sampling_drafter_folder is not None:
            read["drafter"] = self._digest(recipe.sample.drafter, self.sampling_drafter_folder)
        sample = Stage("sample", root, sampled, read)
        trained = {
            "seed": recipe.seed,
            "draft": recipe.draft.identity(),
            "train": recipe.train.identity(),
            "metric": self.metric,
        }
        if recipe.train.signal == "live":  # kept signals have it in the samples' key
            trained["temperature"] = self.signal_temperature
        train = Stage("train", root, trained, {"init": self._init_digest()}, (sample,))
        measured = {"seed": recipe.seed, "evaluate": part["evaluate"], "serving": part["serving"]}
        evaluate = Stage("evaluate", root, measured, {"machine": machine()}, (sample, train))
        select = Stage("select", root, {}, {"store": redact(tracking_uri(self.runs_dir))}, (train, evaluate))
        export = Stage("export", root, {"export": part["export"]}, {}, (sample, train, evaluate))
        return {stage.name: stage for stage in (sample, train, evaluate, select, export)}

    @cached_property
    def samples(self) -> "Samples":
        """What the sampling stage wrote."""
        from data.records import open_samples

        return open_samples(self.stages["sample"].directory)

    def initial_drafter(self) -> "DraftModel":
        """The drafter as it is before training; the same each time."""
        from distill.drafter import build_drafter

        ids = self.target.model.get_input_embeddings().weight.shape[0]
        counts = token_counts(self.samples.where(split="train"), ids)
        texts = [record.input_ids for record in self.samples.where(split="select")[:IMPORTANCE_TEXTS]]
        return build_drafter(self.recipe.draft, self.target, counts, self.cache, self.candidate, texts)

    def candidate(self, reference: str) -> Path:
        """The folder of a candidate registered in MLflow."""
        from distill.candidates import resolve_candidate

        return resolve_candidate(reference, self.runs_dir)

    @cached_property
    def init_folder(self) -> Path | None:
        """The folder that the drafter starts from; None where it is cut out of the target."""
        draft = self.recipe.draft
        if draft.init.from_ == "target":
            return None
        return self._folder(draft.init.from_, draft.revision, "draft.init.from")

    @cached_property
    def sampling_drafter_folder(self) -> Path | None:
        """The folder of the drafter that sampling speculates with; None where it does not."""
        drafter = self.recipe.sample.drafter
        return None if drafter is None else self._folder(drafter, None, "sample.drafter")

    def _folder(self, model: str, revision: str | None, what: str) -> Path:
        if model_form(model) == "candidate":
            return self.candidate(model)
        return resolve_model(model, revision, self.cache, what)

    def _init_digest(self) -> str:
        folder = self.init_folder
        return "target" if folder is None else self._digest(self.recipe.draft.init.from_, folder)

    def _digest(self, model: str | None, folder: Path) -> str:
        from distill.candidates import drafter_digest

        candidate = model is not None and model_form(model) == "candidate"
        return drafter_digest(folder) if candidate else model_digest(folder, self.cache)


def samples_digest(samples: "Samples", config: EvaluateConfig) -> str:
    """16 hex digits for the data that a drafter is measured on: equal ones make two measurements
    comparable.
    """
    texts = [[record.prompt_id, record.temperature, record.input_ids] for record in samples]
    return canonical_hash([texts, config.prompts, config.max_new_tokens])


def token_counts(samples: "Samples", vocab_size: int) -> "Tensor":
    """How often each id occurs in `samples`, in answers and in what they copy from: int64 `[vocab_size]`."""
    import torch

    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for record in samples:
        counts += torch.bincount(torch.tensor(record.input_ids), minlength=vocab_size)
    return counts
