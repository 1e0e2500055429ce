"""The report of `ptpipe scaling`: measurements, fits, predictions, and the assumptions behind them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ptpipe_elastic.scaling.fit import (
    AllReduceTime,
    Amdahl,
    Link,
    LinkFit,
    Prediction,
    Throughput,
    fit_amdahl,
    fit_link,
    predict,
)

PASSES = {"ddp": 2, "fsdp": 3}
"""Around the ring per step, by mode; other modes communicate more than all-reduces of the gradients."""
_NOISE = 0.05
"""How far a measured efficiency may be off on a machine that has other work too."""


@dataclass(frozen=True)
class Network:
    """The network to predict for, as the user gave it; None: as measured."""

    latency_us: float | None = None
    bandwidth_gbit_s: float | None = None

    def link(self, measured: Link | None) -> Link | None:
        """The link to predict with; None if neither the measurement nor the user gives both values."""
        alpha_s = measured.alpha_s if measured else None
        beta = measured.beta_s_per_byte if measured else None
        if self.latency_us is not None:
            alpha_s = 1e-6 * self.latency_us
        if self.bandwidth_gbit_s is not None:
            beta = 8e-9 / self.bandwidth_gbit_s
        return Link(alpha_s, beta) if alpha_s is not None and beta is not None else None


@dataclass(frozen=True)
class Subject:
    """What was measured."""

    manifest: str
    stage: str
    kind: str
    samples_per_worker: int
    """Per batch."""


@dataclass(frozen=True)
class Report:
    """Everything that is printed."""

    subject: Subject
    throughputs: tuple[Throughput, ...]
    """One worker first."""
    amdahl: Mapping[str, Amdahl]
    """By mode, if it could be fitted."""
    all_reduce: tuple[AllReduceTime, ...]
    fit: LinkFit | None
    link: Link | None
    """The link that predictions use: fitted, or given by the user."""
    gradient_bytes: Mapping[str, float]
    predictions: Mapping[str, Sequence[Prediction]]
    """By mode, for modes with a model of their communication."""
    assumptions: tuple[str, ...]
    notices: tuple[str, ...]

    @property
    def single(self) -> Throughput:
        """The throughput of one worker."""
        return self.throughputs[0]

    @property
    def modes(self) -> list[str]:
        """The measured modes of more than one worker."""
        return list(dict.fromkeys(item.mode for item in self.throughputs if item.workers > 1))

    def speedup(self, item: Throughput) -> float:
        """Throughput relative to one worker's."""
        return item.samples_per_s / self.single.samples_per_s

    def efficiency(self, item: Throughput) -> float:
        """Speedup divided by the number of workers."""
        return self.speedup(item) / item.workers

    def facts(self) -> dict[str, object]:
        """The report as JSON."""
        fit = self.fit
        return {
            **asdict(self.subject),
            "measured": [
                {**asdict(item), "speedup": self.speedup(item), "efficiency": self.efficiency(item)}
                for item in self.throughputs
            ],
            "amdahl_serial_fraction": {mode: law.serial_fraction for mode, law in self.amdahl.items()},
            "all_reduce": {
                "times": [asdict(time) for time in self.all_reduce],
                "fit": {**asdict(fit.link), "relative_error": fit.error} if fit else None,
                "assumed": asdict(self.link) if self.link else None,
            },
            "gradient_bytes": dict(self.gradient_bytes),
            "predicted": {
                mode: [{**asdict(row), "efficiency_amdahl": self.by_amdahl(mode, row.workers)} for row in rows]
                for mode, rows in self.predictions.items()
            },
            "assumptions": list(self.assumptions),
            "notices": list(self.notices),
        }

    def by_amdahl(self, mode: str, workers: int) -> float | None:
        """The efficiency that Amdahl's law predicts; None if it could not be fitted."""
        law = self.amdahl.get(mode)
        return law.efficiency(workers) if law else None


@dataclass(frozen=True)
class Measurements:
    """The measured values, and the number of processors that they were measured on."""

    throughputs: tuple[Throughput, ...]
    all_reduce: tuple[AllReduceTime, ...]
    gradient_bytes: Mapping[str, float]
    num_cpus: int
    notices: tuple[str, ...] = ()


def make_report(subject: Subject, measured: Measurements, network: Network = Network()) -> Report:
    """Fit and predict. Workers that had to share processors are excluded from the fits, if there are others."""
    single, *several = measured.throughputs
    workers = {item.workers for item in several}
    crowded = {number for number in workers if number > measured.num_cpus}
    excluded = crowded if crowded < workers else set()
    amdahl = {}
    for mode in dict.fromkeys(item.mode for item in several):
        fitting = [item for item in several if item.mode == mode and item.workers not in excluded]
        law = fit_amdahl({1: single.samples_per_s, **{item.workers: item.samples_per_s for item in fitting}})
        if law is not None:
            amdahl[mode] = law
    fit = fit_link([time for time in measured.all_reduce if time.workers not in excluded])
    link = network.link(fit.link if fit else None)
    sizes = {mode: size for mode, size in measured.gradient_bytes.items() if mode in PASSES}
    predictions = {
        mode: predict(single.step_s, size, link, passes=PASSES[mode]) for mode, size in sizes.items() if link
    }
    notices = [*measured.notices, *_notices(workers, crowded, excluded, measured.num_cpus)]
    report = Report(
        subject,
        measured.throughputs,
        amdahl,
        measured.all_reduce,
        fit,
        link,
        sizes,
        predictions,
        _assumptions(subject, single, predictions, network, bool(amdahl)),
        (),
    )
    return replace(report, notices=(*notices, *_doubts(report, len(workers - excluded))))


def _notices(
    workers: Collection[int], crowded: Collection[int], excluded: Collection[int], num_cpus: int
) -> Sequence[str]:
    if not workers:
        return ["only one number of workers: nothing can be fitted; measure two or more, as with --workers 1,2"]
    if not crowded:
        return []
    numbers = " and ".join(map(str, sorted(crowded)))
    ending = "excluded from the fits" if excluded else "so this shows the limits of the machine, not of the method"
    return [f"{numbers} workers shared {num_cpus} processor{'s' * (num_cpus > 1)}: {ending}"]


def _doubts(report: Report, num_fitted: int) -> list[str]:
    """Where the measurements contradict the laws, or are too few to test them."""
    lines = []
    for mode in report.modes:
        law = report.amdahl.get(mode)
        if law is None:
            lines.append(f"{mode}: more workers were slower than one, which Amdahl's law can't describe")
        elif law.serial_fraction == 0:
            lines.append(f"{mode}: no measurable serial fraction: the speedup was ideal or better")
    here = report.predictions if report.fit and report.link == report.fit.link else {}
    for item in report.throughputs:
        row = next((row for row in here.get(item.mode, ()) if row.workers == item.workers), None)
        if row and report.efficiency(item) < row.efficiency_low - _NOISE:
            lines.append(
                f"{item.mode}, {item.workers} workers: an efficiency of {report.efficiency(item):.0%} is lower than "
                "communication explains: shared memory bandwidth, caches and cores, or other work on this machine, "
                "slowed the workers down too"
            )
    if report.amdahl and num_fitted == 1:
        lines.append("only two numbers of workers: nothing to check the serial fraction against; measure a third")
    return lines


def _assumptions(
    subject: Subject, single: Throughput, modes: Collection[str], network: Network, has_amdahl: bool
) -> tuple[str, ...]:
    lines = []
    if modes:
        lines += [
            f"each worker computes {subject.samples_per_worker} samples per batch in {1000 * single.step_s:.3g} ms per "
            "step, as a single worker does: same processor, one thread, nothing shared",
            "all gradients are all-reduced once per step on a ring of p workers, which takes 2 (p - 1) latency + "
            "2 (p - 1) / p size / bandwidth (Thakur et al. 2005, Patarasuk and Yuan 2009)",
            "the range is from no overlap of communication and computation to as much as fits into the backward pass, "
            "2/3 of the step",
            _network_words(network),
            "no worker waits for a slower one, for data or for a checkpoint",
        ]
    if "fsdp" in modes:
        lines.append("fsdp takes three passes around the ring instead of two (Rajbhandari et al. 2020)")
    if has_amdahl:
        lines.append(
            "Amdahl's law (1967): a fixed fraction of the time per image is not divided among workers; as each worker "
            "keeps its batch size, a step takes longer with every worker: the more pessimistic prediction"
        )
    return tuple(lines)


def _network_words(network: Network) -> str:
    given = []
    if network.latency_us is not None:
        given.append(f"latency ({network.latency_us:g} us)")
    if network.bandwidth_gbit_s is not None:
        given.append(f"bandwidth ({network.bandwidth_gbit_s:g} Gbit/s)")
    if len(given) == 2:
        return f"{' and '.join(given)} as given, the same between all workers"
    here = (
        "measured by messages between processes of this one machine, where training may use something faster; "
        "for a network of machines give both"
    )
    if given:
        return f"{given[0]} as given; the rest was {here}"
    return f"latency and bandwidth were {here}, with --latency-us and --bandwidth-gbit-s"
