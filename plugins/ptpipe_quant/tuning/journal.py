"""What a search has found so far, on disk: a killed one resumes from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ptpipe import Context, atomic_path
from ptpipe_quant.tuning.trials import Choice, Trial, choice_of, trial_of
from ptpipe_torch import Model

_FILE, _FOLDER = "journal.json", "best-{}"


class Journal:
    """Trials, the choices to try, and the best model, in the stage's scratch folder.

    The folder of a model is complete before the journal names it, and one that is no longer named is removed after.
    """

    def __init__(self, ctx: Context) -> None:
        self._folder = ctx.scratch
        self._inputs = {port: list(digests) for port, digests in ctx.input_digests.items()}
        self.trials: list[Trial] = []
        self.chains: list[list[Choice]] = []
        """The choices to try, for each remedy."""
        self.seconds = 0.0
        """How long all trials took. No part of a trial, which is the same wherever it is made."""
        self._best: int | None = None
        content = self._read()
        if content is not None and content["inputs"] == self._inputs:
            self.trials = [trial_of(item) for item in content["trials"]]
            self.chains = [[choice_of(item) for item in chain] for chain in content["chains"]]
            self._best, self.seconds = content["best"], content["seconds"]

    def found(self, choice: Choice) -> Trial | None:
        """Return the trial of a choice, None if there was none."""
        return next((trial for trial in self.trials if trial.choice == choice), None)

    def set_chains(self, chains: list[list[Choice]]) -> None:
        """Keep the choices to try."""
        self.chains = chains
        self._write()

    def add(self, trial: Trial, model: Model, seconds: float) -> None:
        """Keep a trial, and its model if it is the best so far."""
        is_best = all(trial.rank > other.rank for other in self.trials)
        before = self._best
        self.trials.append(trial)
        self.seconds += seconds
        if is_best:
            self._best = len(self.trials)
            folder = self._model_folder(self._best)
            shutil.rmtree(folder, ignore_errors=True)  # half written before a kill
            folder.mkdir(parents=True)
            model.save(folder)
        self._write()
        if is_best and before is not None:
            shutil.rmtree(self._model_folder(before), ignore_errors=True)

    def best_model(self, like: Model) -> Model:
        """Return the best model. `like`: what may call the same functions of the user's."""
        assert self._best is not None
        model = Model.load(self._model_folder(self._best))
        return model.with_source_functions(like.recipe.builder.source_functions)

    def _model_folder(self, number: int) -> Path:
        return self._folder / _FOLDER.format(number)

    def _read(self) -> Mapping[str, Any] | None:
        try:
            content: Mapping[str, Any] = json.loads((self._folder / _FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return content

    def _write(self) -> None:
        content = {
            "inputs": self._inputs,
            "chains": [[asdict(choice) for choice in chain] for chain in self.chains],
            "trials": [asdict(trial) for trial in self.trials],
            "best": self._best,
            "seconds": self.seconds,
        }
        with atomic_path(self._folder / _FILE) as path:
            path.write_text(json.dumps(content), encoding="utf-8")
