"""The next token: perplexity, and what of a batch counts.

Shape legend: B samples, L tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.nn.functional import cross_entropy

from ptpipe import StageError
from ptpipe_torch import ArrayInfo, LanguageModeling, RaggedColumn, Task

V, IGNORE = 7, -1
TASK = LanguageModeling(vocabulary_size=V)
Tensors = dict[str, torch.Tensor]


def batch(lengths: Sequence[int], seed: int = 0) -> tuple[Tensors, Tensors]:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    next_BL = torch.randint(0, V, shape, generator=generator)
    for row, length in enumerate(lengths):
        next_BL[row, length:] = IGNORE
    return {"logits": torch.randn(*shape, V, generator=generator) * 2}, {"next_tokens": next_BL}


def token_losses(outputs: Tensors, targets: Tensors) -> list[list[float]]:
    """The reference: minus the logarithm of the probability of each token that counts, token by token."""
    losses: list[list[float]] = []
    for logits_LV, next_L in zip(outputs["logits"].double().tolist(), targets["next_tokens"].tolist(), strict=True):
        losses.append([])
        for logits_V, token in zip(logits_LV, next_L, strict=True):
            if token != IGNORE:
                losses[-1].append(math.log(sum(map(math.exp, logits_V))) - logits_V[token])
    return losses


def figures(outputs: Tensors, targets: Tensors) -> dict[str, Any]:
    sums = {name: total.numpy() for name, total in TASK.sums(outputs, targets).items()}
    return TASK.figures(sums, len(targets["next_tokens"]))


def test_perplexity_is_over_all_tokens_and_the_loss_over_samples() -> None:
    outputs, targets = batch([6, 1, 3])
    losses = token_losses(outputs, targets)
    every = [loss for of in losses for loss in of]
    found = figures(outputs, targets)
    assert found["perplexity"] == pytest.approx(math.exp(sum(every) / 10), rel=1e-5)
    assert found["loss"] == pytest.approx(sum(sum(of) / len(of) for of in losses) / 3, rel=1e-5)
    assert math.log(found["perplexity"]) != pytest.approx(found["loss"], rel=1e-3)
    assert found["num_tokens"] == 10
    torch.testing.assert_close(
        TASK.losses(outputs, targets), torch.tensor([sum(of) / len(of) for of in losses]), rtol=1e-5, atol=1e-6
    )


def test_smoothed_tokens_are_torchs_and_no_figure_has_them() -> None:
    outputs, targets = batch([6, 1, 3])
    smoothed, next_BL = TASK.with_label_smoothing(0.1), targets["next_tokens"]
    options = {"reduction": "none", "ignore_index": IGNORE, "label_smoothing": 0.1}
    losses_BL = cross_entropy(outputs["logits"].transpose(1, 2), next_BL, **options)
    expected_B = losses_BL.sum(1) / (next_BL != IGNORE).sum(1)
    torch.testing.assert_close(smoothed.losses(outputs, targets), expected_B)
    assert not torch.allclose(TASK.losses(outputs, targets), expected_B)
    for own, other in zip(smoothed.sums(outputs, targets).values(), TASK.sums(outputs, targets).values(), strict=True):
        assert torch.equal(own, other)


def test_accuracy_is_over_all_tokens() -> None:
    next_BL = torch.tensor([[1, 2, 3], [4, IGNORE, IGNORE]])
    logits_BLV = torch.zeros(2, 3, V)
    for row, place, token in ((0, 0, 1), (0, 1, 5), (0, 2, 3), (1, 0, 4), (1, 1, 0), (1, 2, 6)):
        logits_BLV[row, place, token] = 5
    found = figures({"logits": logits_BLV}, {"next_tokens": next_BL})
    assert found["next_token_accuracy"] == 3 / 4
    kept = TASK.samples({"logits": logits_BLV}, {"next_tokens": next_BL})
    assert kept["prediction"].tolist() == [[1, 5, 3], [4, IGNORE, IGNORE]]
    losses_B = TASK.losses({"logits": logits_BLV}, {"next_tokens": next_BL})
    assert kept["score"].equal(-losses_B) and losses_B[0] > losses_B[1] > 0


def test_a_uniform_guess_has_the_perplexity_of_the_vocabulary() -> None:
    _, targets = batch([5, 2])
    found = figures({"logits": torch.zeros(2, 5, V)}, targets)
    assert found["perplexity"] == pytest.approx(V, rel=1e-6)


def test_padding_changes_nothing() -> None:
    outputs, targets = batch([4, 2])
    longer = (
        {"logits": torch.cat([outputs["logits"], torch.full((2, 3, V), 80.0)], 1)},
        {"next_tokens": torch.cat([targets["next_tokens"], torch.full((2, 3), IGNORE)], 1)},
    )
    torch.testing.assert_close(TASK.losses(*longer), TASK.losses(outputs, targets))
    assert figures(*longer) == pytest.approx(figures(outputs, targets), rel=1e-6)


def test_padding_has_no_gradient() -> None:
    outputs, targets = batch([4, 2])
    logits = outputs["logits"].requires_grad_()
    TASK.losses(outputs, targets).sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum(2).gt(0).equal(targets["next_tokens"] != IGNORE)


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4))
def test_sums_add_up_whatever_the_batches(parts: list[list[int]]) -> None:
    batches = [batch(lengths, seed) for seed, lengths in enumerate(parts)]
    every = [TASK.sums(*part) for part in batches]
    totals = {name: sum(part[name].numpy() for part in every) for name in every[0]}
    found = TASK.figures(totals, sum(map(len, parts)))
    losses = [of for part in batches for of in token_losses(*part)]
    tokens = [loss for of in losses for loss in of]
    assert found["perplexity"] == pytest.approx(math.exp(sum(tokens) / len(tokens)), rel=1e-5)
    assert found["loss"] == pytest.approx(sum(sum(of) / len(of) for of in losses) / len(losses), rel=1e-5)
    right = sum(int((outputs["logits"].argmax(2) == targets["next_tokens"]).sum()) for outputs, targets in batches)
    assert found["next_token_accuracy"] == right / len(tokens) and found["num_tokens"] == len(tokens)


def test_perplexity_stays_finite() -> None:
    logits_BLV = torch.zeros(1, 1, V)
    logits_BLV[..., 0] = 1e6
    found = figures({"logits": logits_BLV}, {"next_tokens": torch.tensor([[3]])})
    assert math.isfinite(found["perplexity"]) and found["perplexity"] > 1e300 and found["loss"] == 1e6


def test_where_no_token_counts() -> None:
    found = figures({"logits": torch.zeros(1, 2, V)}, {"next_tokens": torch.full((1, 2), IGNORE)})
    assert (found["perplexity"], found["loss"], found["next_token_accuracy"]) == (1, 0, 0)


@pytest.mark.parametrize("token", [-2, V])
def test_a_target_that_is_no_token_is_refused(token: int) -> None:
    column = RaggedColumn(np.array([0, token, IGNORE]), np.array([0, 3]), IGNORE)
    with pytest.raises(StageError, match=rf"^split val has the target {token}; tokens are numbered 0 to 6$"):
        TASK.check_targets("val", {"next_tokens": column})
    TASK.check_targets("val", {"next_tokens": RaggedColumn(np.array([IGNORE, V - 1]), np.array([0, 2]), IGNORE)})


def test_the_facts_are_stored() -> None:
    for task, length in ((TASK, "length"), (LanguageModeling(vocabulary_size=V, length=9), 9)):
        assert Task.from_json(task.to_json()) == task
        assert task.targets == {"next_tokens": ArrayInfo(dtype="int64", shape=(length,))}
        assert str(task.outputs[0]) == f"logits (batch, {length}, 7) float32"
        assert [metric.name for metric in task.metrics] == ["perplexity", "next_token_accuracy", "loss"]
        assert task.class_scores == {"logits": 2}
    with pytest.raises(ValidationError, match="greater than or equal to 2"):
        LanguageModeling(vocabulary_size=1)
