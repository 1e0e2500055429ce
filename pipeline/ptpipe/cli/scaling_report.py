"""What `ptpipe scaling` tells: measured figures, fits, predictions, and all that these assume."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ptpipe.scaling import (
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
"""Round the ring in a step, by mode; what the other modes send is no all-reduce of the gradients."""
_NOISE = 0.05
"""By how much an efficiency is off on a machine that does other things too."""


@dataclass(frozen=True)
class Network:
    """What the user says of the network to predict for; None: as measured."""

    latency_us: float | None = None
    bandwidth_gbit_s: float | None = None

    def link(self, measured: Link | None) -> Link | None:
        """The link to predict with; None where neither measurement nor user says enough."""
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
    images_per_worker: int
    """In a batch."""


@dataclass(frozen=True)
class Report:
    """All that is told."""

    subject: Subject
    throughputs: tuple[Throughput, ...]
    """That of one worker first."""
    amdahl: Mapping[str, Amdahl]
    """By mode, where it could be fitted."""
    all_reduce: tuple[AllReduceTime, ...]
    fit: LinkFit | None
    link: Link | None
    """What the predictions take: as fitted, or as the user gave it."""
    gradient_bytes: Mapping[str, float]
    predictions: Mapping[str, Sequence[Prediction]]
    """By mode, where there is a model of what the mode sends."""
    assumptions: tuple[str, ...]
    notices: tuple[str, ...]

    @property
    def alone(self) -> Throughput:
        """That of one worker."""
        return self.throughputs[0]

    @property
    def modes(self) -> list[str]:
        """Those of more than one worker."""
        return list(dict.fromkeys(item.mode for item in self.throughputs if item.workers > 1))

    def speedup(self, item: Throughput) -> float:
        """Times one worker's throughput."""
        return item.images_per_s / self.alone.images_per_s

    def efficiency(self, item: Throughput) -> float:
        """Share of the throughput that so many workers would have if none waited."""
        return self.speedup(item) / item.workers

    def facts(self) -> dict[str, object]:
        """As JSON."""
        fit = self.fit
        return {
            **asdict(self.subject),
            "measured": [
                {**asdict(item), "speedup": self.speedup(item), "efficiency": self.efficiency(item)}
                for item in self.throughputs
            ],
            "amdahl_serial_share": {mode: law.serial_share for mode, law in self.amdahl.items()},
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
        """The efficiency that Amdahl's law predicts, where it could be fitted."""
        law = self.amdahl.get(mode)
        return law.efficiency(workers) if law else None


@dataclass(frozen=True)
class Figures:
    """What was measured, and on how many processors."""

    throughputs: tuple[Throughput, ...]
    all_reduce: tuple[AllReduceTime, ...]
    gradient_bytes: Mapping[str, float]
    num_cpus: int
    notices: tuple[str, ...] = ()


def make_report(subject: Subject, figures: Figures, network: Network = Network()) -> Report:
    """Fit and predict. Workers that share processors are left out of the fits where there are others."""
    alone, *several = figures.throughputs
    workers = {item.workers for item in several}
    crowded = {number for number in workers if number > figures.num_cpus}
    left_out = crowded if crowded < workers else set()
    amdahl = {}
    for mode in dict.fromkeys(item.mode for item in several):
        fitting = [item for item in several if item.mode == mode and item.workers not in left_out]
        law = fit_amdahl({1: alone.images_per_s, **{item.workers: item.images_per_s for item in fitting}})
        if law is not None:
            amdahl[mode] = law
    fit = fit_link([time for time in figures.all_reduce if time.workers not in left_out])
    link = network.link(fit.link if fit else None)
    sizes = {mode: size for mode, size in figures.gradient_bytes.items() if mode in PASSES}
    predictions = {mode: predict(alone.step_s, size, link, passes=PASSES[mode]) for mode, size in sizes.items() if link}
    notices = [*figures.notices, *_notices(workers, crowded, left_out, figures.num_cpus)]
    report = Report(
        subject,
        figures.throughputs,
        amdahl,
        figures.all_reduce,
        fit,
        link,
        sizes,
        predictions,
        _assumptions(subject, alone, predictions, network, bool(amdahl)),
        (),
    )
    return replace(report, notices=(*notices, *_doubts(report, len(workers - left_out))))


def _notices(
    workers: Collection[int], crowded: Collection[int], left_out: Collection[int], num_cpus: int
) -> Sequence[str]:
    if not workers:
        return ["one number of workers only: nothing can be fitted; measure two or more, as with --workers 1,2"]
    if not crowded:
        return []
    numbers = " and ".join(map(str, sorted(crowded)))
    ending = "left out of the fits" if left_out else "so this shows the machine's limits, not the method's"
    return [f"{numbers} workers shared {num_cpus} processor{'s' * (num_cpus > 1)}: {ending}"]


def _doubts(report: Report, num_fitted: int) -> list[str]:
    """Where the figures and the laws don't agree, or can't be seen to."""
    lines = []
    for mode in report.modes:
        law = report.amdahl.get(mode)
        if law is None:
            lines.append(f"{mode}: more workers were slower than one, which Amdahl's law has no words for")
        elif law.serial_share == 0:
            lines.append(f"{mode}: no serial share to be seen: the speedup was ideal or better")
    here = report.predictions if report.fit and report.link == report.fit.link else {}
    for item in report.throughputs:
        row = next((row for row in here.get(item.mode, ()) if row.workers == item.workers), None)
        if row and report.efficiency(item) < row.efficiency_low - _NOISE:
            lines.append(
                f"{item.mode}, {item.workers} workers: {report.efficiency(item):.0%} is less than messages explain: "
                "the workers held each other up by more than that (memory, caches and cores that they share, other "
                "work on this machine)"
            )
    if report.amdahl and num_fitted == 1:
        lines.append("two numbers of workers only: the serial share has nothing to be checked by; measure a third")
    return lines


def _assumptions(
    subject: Subject, alone: Throughput, modes: Collection[str], network: Network, has_amdahl: bool
) -> tuple[str, ...]:
    lines = []
    if modes:
        lines += [
            f"every worker computes {subject.images_per_worker} images a batch in {1000 * alone.step_s:.3g} ms a step, "
            "as one alone does: same processor, one thread, nothing shared",
            "all gradients go once a step round a ring, which takes 2 (p - 1) latency + 2 (p - 1) / p size / bandwidth "
            "with p workers (Thakur et al. 2005, Patarasuk and Yuan 2009)",
            "the range is from nothing hidden behind computing to all of it, as far as the backward pass, 2/3 of the "
            "step, is long enough",
            _network_words(network),
            "nobody waits for a slow worker, for data or for a checkpoint",
        ]
    if "fsdp" in modes:
        lines.append("fsdp goes three times round the ring instead of twice (Rajbhandari et al. 2020)")
    if has_amdahl:
        lines.append(
            "Amdahl's law (1967): a fixed share of the time that an image takes is not divided among workers; where "
            "each worker keeps its batch, a step then takes longer with every worker: the gloomier prediction"
        )
    return tuple(lines)


def _network_words(network: Network) -> str:
    given = []
    if network.latency_us is not None:
        given.append(f"latency ({network.latency_us:g} us)")
    if network.bandwidth_gbit_s is not None:
        given.append(f"bandwidth ({network.bandwidth_gbit_s:g} Gbit/s)")
    if len(given) == 2:
        return f"{' and '.join(given)} are those given, the same between all workers"
    here = (
        "measured by messages between processes of this one machine, on which training may have a quicker way: a "
        "network of machines needs its own"
    )
    if given:
        return f"{given[0]} is that given; the rest was {here}"
    return f"latency and bandwidth were {here}, by --latency-us and --bandwidth-gbit-s"
