"""A class for each token, such as names of persons and places.

Shape legend: B samples of a batch, L tokens of the longest one, M most words of one without a token, K classes,
T counted tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveInt

from ptpipe import JSON, StageError
from ptpipe_torch.data.column import Column, value_range
from ptpipe_torch.data.column_info import ArrayInfo, ColumnInfo
from ptpipe_torch.data.tokens import LENGTH
from ptpipe_torch.model.signature import BATCH, TensorSpec
from ptpipe_torch.task.class_task import ClassTask
from ptpipe_torch.task.classification import f1_of, per_class
from ptpipe_torch.task.soft_targets import class_divergence
from ptpipe_torch.task.task import Metric

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

IGNORE = -1
"""The target of tokens that don't count: padding, and the further tokens of a word."""
MISSED = "missed"
"""The target of words that no token stands for, as a tokenizer has none or truncation cut them: see `missed_words`."""
OUTSIDE = "O"
"""The tag of words of no entity."""
TAGS = "tags"
"""The target of tokens."""
_OUTPUT = "logits"


class TokenClassification(ClassTask):
    """Networks return `logits`, float32 (B, L, K); the target is `tags`, int64 (B, L), numbers of classes.

    Where the classes are O, B-x and I-x (IOB2), the primary metric is the F1 of whole entities, as CoNLL-2003 counts
    them (Tjong Kim Sang and De Meulder, 2003): one is right where its type, first and last token are.
    """

    length: PositiveInt | Literal["length"] = LENGTH
    """L, or its symbol."""
    has_missed: bool = False
    """Whether there is a second target, `missed`, int64 (B, M): words without a token count as predicted to be O, or
    where there is no O as none of the classes."""

    @property
    def targets(self) -> Mapping[str, ColumnInfo]:
        tags = {TAGS: ArrayInfo(dtype="int64", shape=(self.length,))}
        return tags | ({MISSED: ArrayInfo(dtype="int64", shape=("words",))} if self.has_missed else {})

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(_OUTPUT, "float32", (BATCH, self.length, self.num_classes)),)

    @property
    def class_scores(self) -> Mapping[str, int]:
        return {_OUTPUT: 2}

    @property
    def has_entities(self) -> bool:
        """Whether the classes are those of IOB2."""
        prefixes = {name[:2] for name in self.class_names}
        return {OUTSIDE, "B-"} <= prefixes <= {OUTSIDE, "B-", "I-"}

    @property
    def metrics(self) -> tuple[Metric, ...]:
        f1 = Metric("f1", higher_is_better=True, is_fraction=True)
        accuracy = Metric("token_accuracy", higher_is_better=True, is_fraction=True)
        metrics = (accuracy, Metric("loss", higher_is_better=False))
        return (f1, *metrics) if self.has_entities else metrics

    def losses(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Cross-entropy, averaged over a sample's tokens that count; 0 where none does."""
        tags_BL = targets[TAGS]
        weights_K = self._weights(tags_BL.device)
        losses_BL = token_losses(outputs[_OUTPUT], tags_BL, weights_K, self.label_smoothing)
        return mean_of_counted(losses_BL, tags_BL)

    def teacher_losses(
        self,
        outputs: Mapping[str, torch.Tensor],
        teacher_outputs: Mapping[str, torch.Tensor],
        targets: Mapping[str, torch.Tensor],
        temperature: float,
    ) -> torch.Tensor:
        """KL divergence from the teacher's classes, averaged over a sample's tokens that count."""
        losses_BL = class_divergence(outputs[_OUTPUT], teacher_outputs[_OUTPUT], 2, temperature)
        return mean_of_counted(losses_BL, targets[TAGS])

    def sums(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The confusion matrix of tokens, rows are tags; entities right, found and there; losses without smoothing.

        `counted`: tokens that count, and words without one.
        """
        import torch

        predicted_BL, tags_BL = self._of_words(outputs[_OUTPUT].argmax(2), targets)
        cells_T = (tags_BL * self.num_classes + predicted_BL)[(tags_BL != IGNORE) & (predicted_BL != IGNORE)]
        sums = {
            "confusion": torch.bincount(cells_T, minlength=self.num_classes**2),
            "counted": (tags_BL != IGNORE).sum(),
            "loss": self.with_label_smoothing(0.0).losses(outputs, targets).double().sum(),
        }
        return sums | ({"entities": self._entities(predicted_BL, tags_BL).sum(0)} if self.has_entities else {})

    def figures(self, sums: Mapping[str, npt.NDArray[Any]], num_samples: int) -> dict[str, JSON]:
        confusion_KK = sums["confusion"].reshape(self.num_classes, self.num_classes)
        figures: dict[str, JSON] = {
            "token_accuracy": int(confusion_KK.trace()) / max(1, int(sums["counted"])),
            "loss": float(sums["loss"]) / num_samples,
            "class_names": list(self.class_names),
            "per_class": [*per_class(confusion_KK, self.class_names)],
            "confusion": [[int(count) for count in row] for row in confusion_KK],
        }
        if "entities" in sums:
            num_right, num_predicted, num_there = map(int, sums["entities"])
            figures |= {
                "f1": 2 * num_right / max(1, num_predicted + num_there),
                "precision": num_right / num_predicted if num_predicted else None,
                "recall": num_right / num_there if num_there else None,
            }
        return figures

    def samples(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`prediction`, int64 (B, L), -1 where none counts; `score`: the fraction of the tokens that is right."""
        classes_BL = outputs[_OUTPUT].argmax(2)
        predicted_BL = classes_BL.masked_fill(targets[TAGS] == IGNORE, IGNORE)
        own_BL, tags_BL = self._of_words(classes_BL, targets)
        return {"prediction": predicted_BL, "score": mean_of_counted((own_BL == tags_BL).float(), tags_BL)}

    def sample_sums(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        import torch

        predicted_BL, tags_BL = self._of_words(outputs[_OUTPUT].argmax(2), targets)
        counted_BL = tags_BL != IGNORE
        sums = {
            "token_accuracy": torch.stack([(predicted_BL == tags_BL).sum(1), counted_BL.sum(1)], dim=1),
            "loss": self.with_label_smoothing(0.0).losses(outputs, targets).double(),
        }
        if self.has_entities:
            right_B, found_B, there_B = self._entities(predicted_BL, tags_BL).unbind(1)
            sums["f1"] = torch.stack([right_B, found_B + there_B], dim=1)
        return sums

    def metric_values(
        self, totals: Mapping[str, npt.NDArray[np.float64]], num_samples: int
    ) -> dict[str, npt.NDArray[np.float64]]:
        values = {
            "token_accuracy": fraction_of(totals["token_accuracy"]),
            "loss": totals["loss"] / num_samples,
        }
        return {"f1": f1_of(totals["f1"]), **values} if self.has_entities else values

    def worst_sums(self, sums: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """No token is right; as many entities are found as were, at least one, and none is right."""
        import numpy as np

        worst = {"token_accuracy": sums["token_accuracy"] * [0, 1]}
        return worst | ({"f1": np.maximum(sums["f1"], 1) * [0, 1]} if "f1" in sums else {})

    def undefined(self, figures: Mapping[str, JSON], split: str) -> list[str]:
        """An F1 without an entity."""
        has_none = self.has_entities and figures["recall"] is None
        return [f"{split} has no entity: F1 is undefined there and counts as 0"] if has_none else []

    def check_targets(self, split: str, targets: Mapping[str, Column]) -> None:
        check_token_targets(split, targets[TAGS], self.num_classes, "classes")

    def target_bytes(
        self, targets: Mapping[str, Column], order_N: npt.NDArray[np.int64]
    ) -> Iterator[bytes | memoryview]:
        """Those of the tags of words, whatever tokens stand for them."""
        import torch

        from ptpipe_torch.task.target_bytes import name_bits

        bits_K = name_bits(self.class_names)
        for row in range(len(order_N)):
            of_row = {name: torch.from_numpy(column.take(order_N[row : row + 1])) for name, column in targets.items()}
            words_L = self._of_words(of_row[TAGS], of_row)[1][0].numpy()
            yield bits_K[words_L[words_L != IGNORE]].tobytes() + b"|"

    def _of_words(
        self, predicted_BL: torch.Tensor, targets: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the predicted and the right classes of tokens, (B, L), with those of words without one among them."""
        import torch

        tags_BL = targets[TAGS]
        if not self.has_missed:
            return predicted_BL, tags_BL
        missed_BM = targets[MISSED]
        missed_tags_BM = (missed_BM % self.num_classes).masked_fill(missed_BM == IGNORE, IGNORE)
        nothing = self.class_names.index(OUTSIDE) if OUTSIDE in self.class_names else IGNORE
        places_BL = torch.arange(tags_BL.shape[1], device=tags_BL.device).expand_as(tags_BL)
        # A word that is missed stands before the token at its place.
        order_BL = torch.cat([missed_BM // self.num_classes, places_BL], 1).argsort(stable=True, dim=1)
        predicted_BL = torch.cat([torch.full_like(missed_BM, nothing), predicted_BL], 1).gather(1, order_BL)
        return predicted_BL, torch.cat([missed_tags_BM, tags_BL], 1).gather(1, order_BL)

    def _entities(self, predicted_BL: torch.Tensor, tags_BL: torch.Tensor) -> torch.Tensor:
        """Return the numbers of entities that are right, predicted and there: int64 (B, 3)."""
        import torch

        # Tokens that don't count, such as the further ones of a word, must not divide an entity.
        order_BL = (tags_BL == IGNORE).int().argsort(stable=True, dim=1)
        tags_BL, predicted_BL = tags_BL.gather(1, order_BL), predicted_BL.gather(1, order_BL)
        predicted_BL = predicted_BL.masked_fill(tags_BL == IGNORE, IGNORE)
        (begins_BL, types_BL, ends_BL), (own_begins_BL, own_types_BL, own_ends_BL) = (
            self._bounds(of_BL) for of_BL in (tags_BL, predicted_BL)
        )
        right_BL = begins_BL & own_begins_BL & (types_BL == own_types_BL) & (ends_BL == own_ends_BL)
        return torch.stack([right_BL.sum(1), own_begins_BL.sum(1), begins_BL.sum(1)], dim=1)

    def _bounds(self, tags_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return whether an entity begins at each token, the type of the token's entity, and where it ends.

        An I-x that continues no entity of type x begins one, as in CoNLL's own script.
        """
        import torch
        from torch.nn.functional import pad

        names = (*self.class_names, OUTSIDE)  # the last one is found at -1, IGNORE
        types = sorted({name[2:] for name in names})
        type_K = torch.tensor([types.index(name[2:]) for name in names], device=tags_BL.device)
        is_inside_K = torch.tensor([name != OUTSIDE for name in names], device=tags_BL.device)
        is_b_K = torch.tensor([name.startswith("B-") for name in names], device=tags_BL.device)
        types_BL, is_inside_BL = type_K[tags_BL], is_inside_K[tags_BL]
        continues_BL = is_inside_BL[:, 1:] & is_inside_BL[:, :-1] & (types_BL[:, 1:] == types_BL[:, :-1])
        begins_BL = is_inside_BL & ~pad(continues_BL & ~is_b_K[tags_BL][:, 1:], (1, 0))
        goes_on_BL = pad((is_inside_BL & ~begins_BL)[:, 1:], (0, 1))
        positions_L = torch.arange(tags_BL.shape[1], device=tags_BL.device)
        last_BL = torch.where(is_inside_BL & ~goes_on_BL, positions_L, tags_BL.shape[1])
        return begins_BL, types_BL, last_BL.flip(1).cummin(1).values.flip(1)


def missed_words(
    places_M: npt.NDArray[np.int64], tags_M: npt.NDArray[np.int64], num_classes: int
) -> npt.NDArray[np.int64]:
    """Return what stands for words without a token in the target `missed`, (M,), whose rows end in `IGNORE`.

    `places_M`: how many tokens of the text stand before each. `tags_M`: their classes.
    """
    return places_M * num_classes + tags_M


def token_losses(
    logits_BLK: torch.Tensor,
    targets_BL: torch.Tensor,
    weights_K: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the cross-entropy of each token, float32 (B, L), 0 where the target is `IGNORE`.

    `weights_K` and `label_smoothing`: as in `ClassTask`.
    """
    from torch.nn.functional import cross_entropy

    logits_BKL = logits_BLK.float().transpose(1, 2)
    tensors = logits_BKL, targets_BL, weights_K
    return cross_entropy(*tensors, reduction="none", ignore_index=IGNORE, label_smoothing=label_smoothing)


def fraction_of(totals_R2: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the first number of each row over the second one, (R,); 0 where that is 0."""
    import numpy as np

    return np.asarray(totals_R2[:, 0] / np.maximum(1, totals_R2[:, 1]))


def mean_of_counted(values_BL: torch.Tensor, targets_BL: torch.Tensor) -> torch.Tensor:
    """Return the mean of each sample's values over its tokens that count, (B,); 0 where none does."""
    counted_BL = targets_BL != IGNORE
    return (values_BL * counted_BL).sum(1) / counted_BL.sum(1).clamp(min=1)


def check_token_targets(split: str, column: Column, num_classes: int, plural: str) -> None:
    """Raise StageError where a target is neither a class nor `IGNORE`. `plural`: what the classes are called."""
    for tag in value_range(column):
        if not IGNORE <= tag < num_classes:
            raise StageError(f"split {split} has the target {tag}; {plural} are numbered 0 to {num_classes - 1}")
