"""Runs to report: one with everything in it, and whatever a test makes of it."""

from __future__ import annotations

import dataclasses
import json
import random
import struct
import zlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest

from ptpipe import Notice, Outcome, Section
from ptpipe.sections import (
    Dot,
    DotPlot,
    DotSeries,
    Facts,
    HeatMap,
    Image,
    ImageGrid,
    Mark,
    Plot,
    Point,
    Series,
    Table,
    Text,
    Topic,
)
from ptpipe_report.html.report import render

AT = datetime(2026, 7, 1, 12, tzinfo=UTC)


VOID = {"meta", "img", "br", "link", "input", "hr"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    parent: Element | None
    children: list[Element] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Page(HTMLParser):
    """A page taken apart. Fails for an end tag that does not fit, or an element that is not closed."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {}, None)
        self.at, self.elements = self.root, []
        self.feed(html)
        self.close()
        assert self.at is self.root, f"{self.at.tag} is not closed"

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} repeats an attribute: {names}"
        element = Element(tag, {name: value or "" for name, value in attrs}, self.at)
        self.at.children.append(element)
        self.elements.append(element)
        if tag not in VOID:
            self.at = element

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.at.tag == tag, f"</{tag}> closes {self.at.tag}"
        self.at = self.at.parent

    def handle_data(self, data):
        element = self.at
        while element is not None:
            element.texts.append(data)
            element = element.parent

    def all(self, tag: str, class_: str | None = None) -> list[Element]:
        return [
            of
            for of in self.elements
            if of.tag == tag and (class_ is None or class_ in of.attributes.get("class", "").split())
        ]

    def one(self, tag: str, class_: str | None = None) -> Element:
        (found,) = self.all(tag, class_)
        return found


def png(side_px: int = 8, noisy: bool = False) -> bytes:
    """Return a gray picture: Pillow is not there where the reporters are tested without torch."""
    pixels = random.Random(7).randbytes(side_px**2) if noisy else bytes([128]) * side_px**2
    rows = b"".join(b"\0" + pixels[start : start + side_px] for start in range(0, side_px**2, side_px))
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", side_px, side_px, 8, 0, 0, 0, 0),
        b"IDAT": zlib.compress(rows),
        b"IEND": b"",
    }
    packed = (
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def model_row(name: str, size_bytes: int, accuracy: float, ms: float, **more: Any) -> dict[str, Any]:
    drop = round(0.9913 - accuracy, 6)
    cell = {"batch_size": 1, "threads": "one", "num_threads": 1, "median_ms": ms, "low_ms": 0.95 * ms}
    cell |= {"high_ms": 1.04 * ms, "ratio": ms / 0.31, "ratio_low": ms / 0.33, "ratio_high": ms / 0.29}
    cell |= {"speed": "baseline" if name == "pretrain" else "faster", "noise": 0.02, "round_ratios": [1.0, 0.9]}
    bounds = {} if name == "pretrain" else {"drop_low": drop - 0.002, "drop_high": drop + 0.002, "num_flips": 12}
    return {
        "name": name,
        "format": "onnx int8",
        "size_bytes": size_bytes,
        "size_ratio": size_bytes / 1_692_915,
        "accuracy": accuracy,
        "drop": drop,
        **bounds,
        "metrics": {"accuracy": accuracy},
        "latency": [cell],
        **more,
    }


def compared(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    metrics = [{"name": "accuracy", "higher_is_better": True, "is_fraction": True}]
    known = {"data": "mnist", "split": "test", "num_samples": 10_000, "metrics": metrics, "baseline": "pretrain"}
    return {**known, "method": "rounds", "rows": [*rows], **more}


ROWS = (
    model_row("pretrain", 1_692_915, 0.9913, 0.31),
    model_row("qat", 434_197, 0.9901, 0.139),
    model_row("onnx", 438_713, 0.9901, 0.07),
)


def output(type_name: str, **summary: Any) -> dict[str, Any]:
    return {"output": {"type": type_name, "digest": "d" * 64, "size_bytes": 1, "summary": summary}}


def verdict(decision: str, reason: str = "as it is", **facts: Any) -> dict[str, Any]:
    return output("Verdict", **{"candidate": "onnx", **facts}, decision=decision, reason=reason, fail_undecided=False)


def every_block(word: str = "cat") -> tuple[Any, ...]:
    """A block of every kind, with the word wherever text is."""
    points = tuple(Point(float(x), x * x, x * x - 1.0, x * x + 1.0, label=word if x < 3 else "") for x in range(5))
    lines = (Series(word, points), Series("more", points[:2], is_line=False))
    return (
        Text(f"about {word}"),
        Facts(((f"{word}_ms", 1.5), ("who", word), ("nothing", None)), title=word),
        Table((word, "size_bytes", "note"), ((word, 1500, word), ("b", 2.5, None)), title=word),
        Plot(word, word, word, lines, (Mark(word, "y", 2.0),)),
        DotPlot(word, word, (word, "dog"), (DotSeries(word, (Dot(0.5, 0.1, 0.9), Dot(low=0.0, high=1.0))),)),
        HeatMap(word, word, word, (word, "dog"), (word, "dog"), ((5.0, 1.0), (0.0, 7.0)), is_confusion=True),
        ImageGrid((Image(png(), word),), title=word),
    )


@pytest.fixture
def run(script):
    """A run with gates, a comparison, sections, a notice and a file to ship."""
    (script.folder / "manifest.yaml").write_text("version: 1\nname: mnist-qat\n", encoding="utf-8")
    file = script.folder / "onnx" / "model.onnx"
    file.parent.mkdir()
    file.write_bytes(b"0" * 1234)
    statement = {"subject": [{"name": "model.onnx", "digest": {"sha256": "5e" * 32}}]}
    file.with_name("model.onnx.intoto.json").write_text(json.dumps(statement), encoding="utf-8")
    machine = {"processor": "a processor", "num_cpus": 2, "num_threads": 1, "system": "Linux", "architecture": "x86_64"}
    environment = {"ptpipe": "0.1.0", "python": "3.11.7", "machine": machine}
    history = [{"epoch": 1, "train_loss": 0.5}, {"epoch": 2, "train_loss": 0.2}]
    stages = [
        script.stage("data", "data.mnist", Outcome.CACHED, notices=("digits in place of mnist",)),
        script.stage("pretrain", "train.supervised", metrics={"history": history}, environment=environment),
        script.stage("onnx", "export.onnx", deliverables=(file.absolute(),)),
        script.stage("compare", "eval.compare", outputs=output("Comparison", **compared(*ROWS))),
        script.stage("accuracy", "gate.accuracy", outputs=verdict("passed", max_drop=0.003, accuracy=0.99)),
        script.stage("size", "gate.size", outputs=verdict("passed")),
    ]
    upstream = {"pretrain": ("data",), "onnx": ("pretrain",), "compare": ("pretrain", "onnx", "data")}
    upstream |= {"accuracy": ("compare",), "size": ("compare",), "data": ()}
    started = dataclasses.replace(script.started(stages), upstream=upstream)
    sections = (Section("Also this", every_block()), Section("Curves", every_block(), Topic.TRAINING))
    return started, dataclasses.replace(script.ended(stages), sections=sections)


@pytest.fixture
def rendered():
    """Render a run, with changes to its end, and take the page apart."""

    def make(run, notices=(), record=None, **changes) -> Page:
        started, finished = run
        notices = [Notice("", text) for text in notices]
        return Page(render(started, dataclasses.replace(finished, **changes), notices, record, AT))

    return make


@pytest.fixture
def kit() -> SimpleNamespace:
    """What tests make runs of."""
    return SimpleNamespace(
        png=png,
        model_row=model_row,
        compared=compared,
        rows=ROWS,
        output=output,
        verdict=verdict,
        every_block=every_block,
    )
