"""Classes of tokens: losses, entities, and what of a batch counts.

Shape legend: B samples, L tokens, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.nn.functional import cross_entropy

from ptpipe import StageError
from ptpipe_torch import ArrayColumn, ArrayInfo, RaggedColumn, Task, TokenClassification
from ptpipe_torch.task.token_classification import missed_words

NAMES = ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")
K, IGNORE = len(NAMES), -1
TASK = TokenClassification(class_names=NAMES)
MISSING = TokenClassification(class_names=NAMES, has_missed=True)
PLAIN = TokenClassification(class_names=("noun", "verb", "other"))
Tensors = dict[str, torch.Tensor]


def batch(lengths: Sequence[int], seed: int = 0, num_classes: int = K) -> tuple[Tensors, Tensors]:
    """Random logits and tags of texts of these lengths, some of whose tokens don't count."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    tags_BL = torch.randint(IGNORE, num_classes, shape, generator=generator)
    for row, length in enumerate(lengths):
        tags_BL[row, length:] = IGNORE
    return {"logits": torch.randn(*shape, num_classes, generator=generator)}, {"tags": tags_BL}


def of_tags(
    tags: Sequence[Sequence[str | None]], predicted: Sequence[Sequence[str]], task: TokenClassification = TASK
) -> tuple[Tensors, Tensors]:
    """Logits of these predictions; None: a token that doesn't count."""
    names, length = task.class_names, max(map(len, tags))
    tags_BL = torch.full((len(tags), length), IGNORE)
    logits_BLK = torch.randn(len(tags), length, len(names), generator=torch.Generator().manual_seed(1))
    for row, (of_row, own) in enumerate(zip(tags, predicted, strict=True)):
        for place, (tag, name) in enumerate(zip(of_row, own, strict=True)):
            tags_BL[row, place] = IGNORE if tag is None else names.index(tag)
            logits_BLK[row, place, names.index(name)] = 9
    return {"logits": logits_BLK}, {"tags": tags_BL}


def figures(outputs: Tensors, targets: Tensors, task: TokenClassification = TASK) -> dict[str, Any]:
    sums = {name: total.numpy() for name, total in task.sums(outputs, targets).items()}
    return task.figures(sums, len(targets["tags"]))


def entities(names: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """The reference: type, first and last token of each entity, as CoNLL's script finds them, token by token."""
    kind, first = "", 0
    for place, name in enumerate([*names, "O"]):
        prefix, _, other = name.partition("-")
        ends = kind and (prefix in ("O", "B") or other != kind)
        if ends:
            yield kind, first, place - 1
        if prefix != "O" and (prefix == "B" or not kind or ends):
            first = place
        kind = "" if prefix == "O" else other


def expected_figures(
    tags: Sequence[Sequence[str | None]], predicted: Sequence[Sequence[str]]
) -> tuple[float, float | None, float | None]:
    """F1, precision and recall."""
    num_right = num_predicted = num_there = 0
    for of_row, own in zip(tags, predicted, strict=True):
        counted = [(tag, name) for tag, name in zip(of_row, own, strict=True) if tag is not None]
        there, found = set(entities([tag for tag, _ in counted])), set(entities([name for _, name in counted]))
        num_right, num_predicted = num_right + len(there & found), num_predicted + len(found)
        num_there += len(there)
    precision = num_right / num_predicted if num_predicted else None
    recall = num_right / num_there if num_there else None
    f1 = 2 * precision * recall / (precision + recall) if precision and recall else 0.0
    return f1, precision, recall


class TestLosses:
    def test_a_samples_loss_is_the_mean_over_its_tokens_that_count(self) -> None:
        outputs, targets = batch([7, 3, 5])
        expected = [
            cross_entropy(logits_LK, tags_L, ignore_index=IGNORE)
            for logits_LK, tags_L in zip(outputs["logits"], targets["tags"], strict=True)
        ]
        torch.testing.assert_close(TASK.losses(outputs, targets), torch.stack(expected))

    def test_padding_changes_nothing(self) -> None:
        outputs, targets = batch([4, 2])
        longer = (
            {"logits": torch.cat([outputs["logits"], torch.full((2, 3, K), 50.0)], 1)},
            {"tags": torch.cat([targets["tags"], torch.full((2, 3), IGNORE)], 1)},
        )
        torch.testing.assert_close(TASK.losses(*longer), TASK.losses(outputs, targets))
        one, other = figures(outputs, targets), figures(*longer)
        assert one.pop("loss") == pytest.approx(other.pop("loss"), rel=1e-6) and one == other

    def test_a_sample_of_which_no_token_counts_has_no_loss_and_no_gradient(self) -> None:
        outputs, targets = batch([3, 3])
        targets["tags"][1], targets["tags"][0] = IGNORE, 2
        logits = outputs["logits"].requires_grad_()
        losses_B = TASK.losses(outputs, targets)
        losses_B.sum().backward()
        assert losses_B[1] == 0 and losses_B[0] > 0
        assert logits.grad is not None and not logits.grad[1].any() and logits.grad[0].any()
        assert TASK.samples(outputs, targets)["score"][1] == 0

    def test_weights_of_classes_weight_tokens(self) -> None:
        outputs, targets = batch([6, 4, 1])
        weights = (2.0, 0.5, 1.0, 0.0, 3.0)
        weighted = TASK.model_copy(update={"class_weights": weights}).losses(outputs, targets)
        tags_BL = targets["tags"]
        plain_BL = cross_entropy(outputs["logits"].transpose(1, 2), tags_BL, reduction="none", ignore_index=IGNORE)
        of_token = torch.tensor([*weights, 0.0])[tags_BL]
        torch.testing.assert_close(weighted, (plain_BL * of_token).sum(1) / (tags_BL != IGNORE).sum(1).clamp(min=1))

    def test_smoothed_labels_of_tokens_are_torchs_and_no_figure_has_them(self) -> None:
        outputs, targets = batch([6, 4, 1])
        weighted = TASK.model_copy(update={"class_weights": (2.0, 0.5, 1.0, 0.0, 3.0)})
        smoothed, tags_BL = weighted.with_label_smoothing(0.2), targets["tags"]
        losses_BL = cross_entropy(
            outputs["logits"].transpose(1, 2),
            tags_BL,
            torch.tensor(weighted.class_weights),
            reduction="none",
            ignore_index=IGNORE,
            label_smoothing=0.2,
        )
        expected_B = losses_BL.sum(1) / (tags_BL != IGNORE).sum(1).clamp(min=1)
        torch.testing.assert_close(smoothed.losses(outputs, targets), expected_B)
        assert torch.equal(smoothed.sums(outputs, targets)["loss"], weighted.sums(outputs, targets)["loss"])
        assert torch.equal(smoothed.sample_sums(outputs, targets)["loss"], weighted.losses(outputs, targets).double())

    def test_half_precision_is_summed_in_float32(self) -> None:
        outputs, targets = batch([5, 5])
        halved = {"logits": outputs["logits"].bfloat16()}
        assert TASK.losses(halved, targets).dtype == torch.float32
        exact = {"logits": halved["logits"].float()}
        torch.testing.assert_close(TASK.losses(halved, targets), TASK.losses(exact, targets))


class TestEntities:
    CASES: tuple[tuple[str, str, tuple[int, int, int]], ...] = (
        ("B-PER I-PER O", "B-PER I-PER O", (1, 1, 1)),
        ("B-PER I-PER O", "B-PER O O", (0, 1, 1)),
        ("B-PER O O", "B-PER I-PER O", (0, 1, 1)),
        ("B-PER I-PER O", "B-LOC I-LOC O", (0, 1, 1)),
        ("B-PER I-PER O", "B-PER B-PER O", (0, 2, 1)),
        ("B-PER B-PER O", "B-PER B-PER O", (2, 2, 2)),
        ("O I-PER I-PER", "O B-PER I-PER", (1, 1, 1)),
        ("I-PER I-LOC O", "B-PER B-LOC O", (2, 2, 2)),
        ("B-PER I-LOC O", "B-PER O O", (1, 1, 2)),
        ("B-PER I-LOC I-LOC", "B-PER B-LOC I-LOC", (2, 2, 2)),
        ("O O O", "O O O", (0, 0, 0)),
        ("O O O", "B-PER O B-LOC", (0, 2, 0)),
        ("B-PER O B-LOC", "O O O", (0, 0, 2)),
        ("B-PER _ I-PER", "B-PER O I-PER", (1, 1, 1)),
        ("B-PER _ I-PER", "B-PER B-LOC I-PER", (1, 1, 1)),
        ("_ B-PER _", "B-LOC B-PER I-PER", (1, 1, 1)),
        ("_ _ _", "B-LOC B-PER I-PER", (0, 0, 0)),
    )  # fmt: skip

    @pytest.mark.parametrize(("tags", "predicted", "expected"), CASES, ids=[f"{one}, {own}" for one, own, _ in CASES])
    def test_of_one_text(self, tags: str, predicted: str, expected: tuple[int, int, int]) -> None:
        of_row = [None if tag == "_" else tag for tag in tags.split()]
        outputs, targets = of_tags([of_row], [predicted.split()])
        assert TASK.sums(outputs, targets)["entities"].tolist() == list(expected)

    @settings(max_examples=150)
    @given(st.data())
    def test_f1_is_that_of_a_count_token_by_token(self, data: st.DataObject) -> None:
        lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
        one = st.sampled_from([*NAMES, None])
        tags = [data.draw(st.lists(one, min_size=length, max_size=length)) for length in lengths]
        own = st.sampled_from(NAMES)
        predicted = [[tag if tag and data.draw(st.booleans()) else data.draw(own) for tag in of_row] for of_row in tags]
        found = figures(*of_tags(tags, predicted))
        f1, precision, recall = expected_figures(tags, predicted)
        assert found["f1"] == pytest.approx(f1)
        assert (found["precision"], found["recall"]) == (pytest.approx(precision), pytest.approx(recall))

    def test_the_order_of_the_classes_does_not_matter(self) -> None:
        other = TokenClassification(class_names=("O", "I-PER", "B-PER", "I-LOC", "B-LOC"))
        tags = [["B-PER", "I-PER", "O", None, "B-LOC"], ["I-LOC", None, "I-LOC", "O", "B-PER"]]
        predicted = [["B-PER", "I-PER", "B-LOC", "O", "B-LOC"], ["B-LOC", "O", "I-LOC", "O", "O"]]
        assert other.sums(*of_tags(tags, predicted, other))["entities"].tolist() == [3, 4, 4]
        assert TASK.sums(*of_tags(tags, predicted))["entities"].tolist() == [3, 4, 4]

    @pytest.mark.parametrize(
        ("names", "has"),
        [
            (("O", "B-x", "I-x"), True), (("O", "B-x", "I-x", "B-y"), True), (("O", "B-x"), True),
            (("noun", "verb"), False), (("B-x", "I-x"), False), (("O", "B-x", "I-x", "E-x"), False),
        ],
    )  # fmt: skip
    def test_f1_is_the_primary_metric_of_iob2(self, names: tuple[str, ...], has: bool) -> None:
        task = TokenClassification(class_names=names)
        assert task.has_entities == has
        metrics = ["token_accuracy", "loss"]
        assert [metric.name for metric in task.metrics] == (["f1", *metrics] if has else metrics)
        sums = task.sums(*batch([3], num_classes=len(names)))
        assert ("entities" in sums) == has


class TestWordsWithoutAToken:
    """They count as words that nothing was predicted for."""

    @settings(max_examples=100)
    @given(st.data())
    def test_figures_are_those_of_all_words(self, data: st.DataObject) -> None:
        num_words = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
        one = st.sampled_from(NAMES)
        tags = [data.draw(st.lists(one, min_size=number, max_size=number)) for number in num_words]
        predicted = [[tag if data.draw(st.booleans()) else data.draw(one) for tag in of_row] for of_row in tags]
        has_token = [[data.draw(st.booleans()) for _ in of_row] for of_row in tags]
        outputs, targets = with_missed(tags, predicted, has_token, MISSING)
        everything = [
            [name if has else "O" for name, has in zip(*pair, strict=True)]
            for pair in zip(predicted, has_token, strict=True)
        ]
        found = figures(outputs, targets, MISSING)
        f1, precision, recall = expected_figures(tags, everything)
        assert found["f1"] == pytest.approx(f1)
        assert (found["precision"], found["recall"]) == (pytest.approx(precision), pytest.approx(recall))
        pairs = [pair for rows in zip(tags, everything, strict=True) for pair in zip(*rows, strict=True)]
        assert found["token_accuracy"] == pytest.approx(np.mean([tag == name for tag, name in pairs]))
        assert np.sum(found["confusion"]) == len(pairs)
        of_samples = MISSING.sample_sums(outputs, targets)
        totals = {name: of.double().sum(0).numpy()[None] for name, of in of_samples.items()}
        assert MISSING.metric_values(totals, len(tags))["f1"] == pytest.approx([f1])

    def test_entities_that_are_cut_or_have_a_gap(self) -> None:
        tags = [["B-PER", "I-PER", "I-PER", "O", "B-LOC"], ["B-PER", "I-PER", "I-PER", "O", "O"]]
        has_token = [[True, True, False, False, False], [True, False, True, True, True]]
        sums = MISSING.sums(*with_missed(tags, tags, has_token, MISSING))
        assert sums["entities"].tolist() == [0, 3, 3]  # a gap divides what is predicted in two

    def test_where_no_class_stands_for_nothing(self) -> None:
        task = PLAIN.model_copy(update={"has_missed": True})
        tags = [["noun", "verb", "noun"], ["other", "noun"]]
        outputs, targets = with_missed(tags, tags, [[True, False, True], [True, False]], task)
        found = figures(outputs, targets, task)
        assert found["token_accuracy"] == pytest.approx(3 / 5)
        assert found["confusion"] == [[2, 0, 0], [0, 0, 0], [0, 0, 1]]
        kept = task.samples(outputs, targets)
        torch.testing.assert_close(kept["score"], torch.tensor([2 / 3, 1 / 2]))
        assert kept["prediction"].shape == targets["tags"].shape

    def test_the_loss_is_that_of_tokens(self) -> None:
        outputs, targets = with_missed([["O", "B-PER"]], [["O", "O"]], [[True, False]], MISSING)
        assert MISSING.losses(outputs, targets) == TASK.losses(outputs, {"tags": targets["tags"]})


def with_missed(
    tags: Sequence[Sequence[str]],
    predicted: Sequence[Sequence[str]],
    has_token: Sequence[Sequence[bool]],
    task: TokenClassification,
) -> tuple[Tensors, Tensors]:
    """A first token of no word, then a token and one that doesn't count for each word, unless it has none."""
    own_tags: list[list[str | None]] = [[None] for _ in tags]
    own_predicted = [[task.class_names[0]] for _ in tags]
    missed: list[list[int]] = [[] for _ in tags]
    for row, words in enumerate(zip(tags, predicted, has_token, strict=True)):
        for tag, name, has in zip(*words, strict=True):
            if has:
                own_tags[row] += [tag, None]
                own_predicted[row] += [name, task.class_names[-1]]
            else:
                place, number = np.array([len(own_tags[row])]), np.array([task.class_names.index(tag)])
                missed[row] += missed_words(place, number, task.num_classes).tolist()
    outputs, targets = of_tags(own_tags, own_predicted, task)
    most = max(map(len, missed))
    targets["missed"] = torch.tensor([[*of, *[IGNORE] * (most - len(of))] for of in missed], dtype=torch.int64)
    return outputs, targets


class TestFigures:
    @settings(max_examples=25)
    @given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=2, max_size=4), st.booleans())
    def test_they_are_the_same_whatever_the_batches(self, parts: list[list[int]], has_entities: bool) -> None:
        task = TASK if has_entities else PLAIN
        batches = [batch(lengths, seed, task.num_classes) for seed, lengths in enumerate(parts)]
        every = [task.sums(*part) for part in batches]
        totals = {name: sum(part[name].numpy() for part in every) for name in every[0]}
        longest = max(map(max, parts))

        def together(values: list[torch.Tensor], fill: float) -> torch.Tensor:
            whole = [torch.full((len(of), longest, *of.shape[2:]), fill, dtype=of.dtype) for of in values]
            for into, of in zip(whole, values, strict=True):
                into[:, : of.shape[1]] = of
            return torch.cat(whole)

        outputs = {"logits": together([of["logits"] for of, _ in batches], 7.0)}
        targets = {"tags": together([of["tags"] for _, of in batches], IGNORE)}
        found, expected = task.figures(totals, sum(map(len, parts))), figures(outputs, targets, task)
        assert found.pop("loss") == pytest.approx(expected.pop("loss"), rel=1e-5)
        assert found == expected

    def test_those_of_tokens(self) -> None:
        tags = [["noun", "verb", None, "noun"], ["other", "noun", "noun", None]]
        predicted = [["noun", "noun", "verb", "noun"], ["other", "verb", "noun", "noun"]]
        outputs, targets = of_tags(tags, predicted, PLAIN)
        found = figures(outputs, targets, PLAIN)
        assert found["token_accuracy"] == pytest.approx(4 / 6)
        assert found["confusion"] == [[3, 1, 0], [1, 0, 0], [0, 0, 1]]
        assert found["class_names"] == ["noun", "verb", "other"] and len(found["per_class"]) == 3
        assert found["loss"] == pytest.approx(PLAIN.losses(outputs, targets).mean().item(), rel=1e-6)
        assert not {"f1", "precision", "recall"} & found.keys()

    def test_where_no_token_counts(self) -> None:
        found = figures(*of_tags([[None, None]], [["O", "B-PER"]]))
        assert (found["f1"], found["precision"], found["recall"]) == (0, None, None)
        assert found["token_accuracy"] == found["loss"] == 0

    def test_every_metric_is_among_them(self) -> None:
        for task in (TASK, PLAIN):
            found = figures(*batch([4, 2], num_classes=task.num_classes), task)
            assert {metric.name for metric in task.metrics} <= found.keys()


def test_what_is_kept_of_a_sample() -> None:
    outputs, targets = of_tags([["O", None, "B-PER"], ["O", "O", "O"]], [["O", "B-LOC", "O"], ["O", "O", "B-LOC"]])
    kept = TASK.samples(outputs, targets)
    assert kept["prediction"].tolist() == [[4, IGNORE, 4], [4, 4, 0]] and kept["prediction"].dtype == torch.int64
    torch.testing.assert_close(kept["score"], torch.tensor([1 / 2, 2 / 3]))


@pytest.mark.parametrize("tag", [-2, K, 2**40])
def test_a_tag_that_is_no_class_is_refused(tag: int) -> None:
    for column in (RaggedColumn(np.array([0, tag, IGNORE]), np.array([0, 3]), IGNORE), ArrayColumn(np.array([[tag]]))):
        with pytest.raises(StageError, match=rf"^split val has the target {tag}; classes are numbered 0 to 4$"):
            TASK.check_targets("val", {"tags": column})
    TASK.check_targets("val", {"tags": RaggedColumn(np.array([IGNORE, 0, K - 1]), np.array([0, 3]), IGNORE)})


def test_the_facts_are_stored() -> None:
    fixed = TokenClassification(class_names=NAMES, length=12, class_weights=(1, 0, 2, 3, 0.5))
    for task, length in ((TASK, "length"), (fixed, 12)):
        assert Task.from_json(task.to_json()) == task
        assert task.targets == {"tags": ArrayInfo(dtype="int64", shape=(length,))}
        assert str(task.outputs[0]) == f"logits (batch, {length}, 5) float32"
        assert task.class_scores == {"logits": 2}
    assert [str(of.spec(name)) for name, of in MISSING.targets.items()][1] == "missed (batch, words) int64"
    assert Task.from_json(MISSING.to_json()) == MISSING


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"class_weights": (1.0,)}, "class_weights has a number for each class"),
        ({"class_weights": (1.0, -1.0)}, "greater than or equal to 0"),
        ({"class_names": ()}, "at least 1 item"),
        ({"length": 0}, "greater than 0"),
        ({"length": "tokens"}, "'length'"),
    ],
)
def test_facts_that_can_not_be(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TokenClassification(**{"class_names": ("a", "b")} | facts)
