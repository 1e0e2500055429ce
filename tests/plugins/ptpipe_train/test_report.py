"""What trainings add to reports: curves of what they recorded."""

from __future__ import annotations

from types import SimpleNamespace

from ptpipe import Outcome, RunFinished, StageFinished
from ptpipe.sections import Facts, Mark, Plot, Text, Topic
from ptpipe_train import TrainConfig
from ptpipe_train.report import report_sections


def sections(num_epochs: int, **metrics):
    history = [
        {"epoch": n, "lr": 0.1, "train_loss": 2.0 / n, "val_accuracy": 0.9, "val_loss": 1.0 / n}
        for n in range(1, num_epochs + 1)
    ]
    metrics = {"history": history, "num_steps": 7, "workers": [{}], **metrics}
    stages = (
        StageFinished("net", "model.x", Outcome.DONE, 1.0, "k", {"history": history}),
        StageFinished("train", "train.supervised", Outcome.DONE, 1.0, "k", metrics),
        StageFinished("later", "train.supervised", Outcome.SKIPPED, 0.0, "k"),
    )
    plan = {"net": SimpleNamespace(config=None)}
    plan |= {name: SimpleNamespace(config=TrainConfig(lr=0.1)) for name in ("train", "later")}
    return list(report_sections(plan, RunFinished("r", "n", None, 0, 1.0, stages)))


def test_a_training_has_the_curves_of_its_losses_and_of_the_primary_metric():
    (section,) = sections(3)
    assert (section.title, section.topic, section.stage_id) == ("Training: train", Topic.TRAINING, "train")
    loss, accuracy, facts = section.blocks
    assert [series.name for series in loss.series] == ["train loss", "val loss"]
    assert [(point.x, point.y) for point in loss.series[0].points] == [(1, 2.0), (2, 1.0), (3, 2.0 / 3)]
    assert [series.name for series in accuracy.series] == ["val accuracy"]
    assert facts.facts == (("num_steps", 7),)


def test_restarts_are_marked_where_they_were():
    (section,) = sections(3, restarted_at_epochs=[0.5, 1.25])
    for plot in (block for block in section.blocks if isinstance(block, Plot)):
        assert plot.marks == (Mark("restarted", "x", 0.5), Mark("restarted", "x", 1.25))


def test_one_epoch_has_numbers_and_no_curve():
    (section,) = sections(1)
    assert [type(block) for block in section.blocks] == [Text, Facts, Facts]
    assert ("val_accuracy", 0.9) in section.blocks[1].facts


def test_a_training_without_history_has_no_section():
    assert sections(3, history=None) == []
