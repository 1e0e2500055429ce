"""Points of curves: as they happen, each once, and whole after a cached or resumed training."""

from __future__ import annotations

import math

import pytest

from ptpipe import Progress
from ptpipe_report.trackers.curves import Curves, Point


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def curves(clock):
    return Curves(clock)


def training(step, loss):
    return Progress("train", 8 * step, 80, "samples", {"epoch": 1, "step": step, "loss": loss, "lr": 0.1})


def epoch(number, accuracy):
    return Progress("train", 80, 80, "samples", {"epoch": number, "val_accuracy": accuracy})


def test_steps_arrive_about_once_a_second_and_the_last_at_the_end(curves, clock, script):
    assert list(curves.progress(training(1, 2.0))) == [Point("train/loss", 2.0, 1), Point("train/lr", 0.1, 1)]
    clock.now_s = 0.5
    assert list(curves.progress(training(2, 1.5))) == []
    clock.now_s = 1.1
    assert [point.step for point in curves.progress(training(3, 1.0))] == [3, 3]
    clock.now_s = 1.2
    assert list(curves.progress(training(4, 0.5))) == []
    last = list(curves.finished(script.stage("train", "train.supervised")))
    assert last == [Point("train/loss", 0.5, 4), Point("train/lr", 0.1, 4)]


def test_an_epoch_arrives_as_it_ends_and_never_twice(curves, script):
    list(curves.progress(training(1, 2.0)))
    list(curves.progress(training(2, 1.0)))
    found = list(curves.progress(epoch(2, 0.9)))
    assert found == [Point("train/loss", 1.0, 2), Point("train/lr", 0.1, 2), Point("train/epoch/val_accuracy", 0.9, 2)]
    history = [{"epoch": number, "val_accuracy": number / 2} for number in (1, 2)]
    stage = script.stage("train", "train.supervised", metrics={"history": history, "val_accuracy": 0.9})
    assert list(curves.finished(stage)) == [
        Point("train/epoch/val_accuracy", 0.5, 1),  # before the interruption
        Point("train/result/val_accuracy", 0.9, 0),
    ]


def test_other_progress_counts_its_own_unit(curves):
    event = Progress("calibrate", 32, 64, "images", {"saturated": 0.25, "layer": "conv1"})
    assert list(curves.progress(event)) == [Point("calibrate/saturated", 0.25, 32)]


def test_only_finite_numbers_are_points(curves, script):
    metrics = {"a": math.nan, "b": True, "c": "text", "d": None, "e": 3, "f": math.inf, "g": [1, 2]}
    assert list(curves.finished(script.stage("s", "k", metrics=metrics))) == [Point("s/result/e", 3, 0)]


def test_a_comparison_has_a_point_for_each_model_and_column(curves, script):
    stage = next(stage for stage in script.mnist() if stage.stage_id == "compare")
    found = {point.name: point.value for point in curves.finished(stage)}
    assert found["compare/onnx/accuracy"] == 0.9883
    assert found["compare/onnx/size"] == 438_713
    assert found["compare/onnx/batch 1, 1 thread"] == 0.0411
    assert found["compare/pretrain/drop"] == 0
