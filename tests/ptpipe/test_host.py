"""Processor facts, and the fingerprint that measured results depend on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ptpipe import host


def test_a_machine_is_described_and_fingerprinted():
    facts = host.describe()
    assert facts.keys() == {"processor", "num_cpus", "num_threads", "architecture", "system", "host"}
    assert 1 <= facts["num_threads"] <= facts["num_cpus"] <= host.total_cpus() == os.cpu_count()
    json.dumps(facts)
    assert len(host.fingerprint()) == 12
    assert host.fingerprint() == host.fingerprint()


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of eight processors; the path of the file that limits it."""
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    monkeypatch.setattr(host, "PROCESS_CGROUPS", tmp_path / "cgroup")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path / "cpu.max"


@pytest.mark.parametrize(
    ("limit", "want"),
    [(None, 8), ("max 100000\n", 8), ("400000 100000\n", 4), ("150000 100000", 1), ("50000 100000", 1), ("?", 8)],
)
def test_a_containers_limit_counts(eight_cpus: Path, limit: str | None, want: int) -> None:
    if limit is not None:
        eight_cpus.write_text(limit, encoding="ascii")
    assert host.num_threads() == want


@pytest.mark.parametrize(
    ("groups", "limits", "want"),
    [
        ("0::/a.slice/b.service\n", {"a.slice/b.service/cpu.max": "300000 100000"}, 3),
        ("0::/a.slice/b.service\n", {"a.slice/cpu.max": "200000 100000", "a.slice/b.service/cpu.max": "max 100000"}, 2),
        ("0::/../other\n", {"cpu.max": "200000 100000"}, 2),
        ("1:cpu,cpuacct:/d/0\n", {"cpu/d/0/cpu.cfs_quota_us": "250", "cpu/d/0/cpu.cfs_period_us": "50"}, 5),
        ("1:cpu:/docker/0\n", {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("1:cpuset:/x\n0::/\n", {"cpu/x/cpu.cfs_quota_us": "100000", "cpu/x/cpu.cfs_period_us": "100000"}, 8),
    ],
)  # fmt: skip
def test_the_limits_of_all_groups_count(eight_cpus: Path, groups: str, limits: dict[str, str], want: int) -> None:
    """Of the process's own, as systemd and the first version of cgroups have it, and of those around it."""
    (eight_cpus.parent / "cgroup").write_text(groups, encoding="ascii")
    for name, text in limits.items():
        file = eight_cpus.parent / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")
    assert host.usable_cpus() == want


@pytest.mark.parametrize(("value", "want"), [("3", 3), ("3,2", 3), ("64", 8), ("0", 8), ("", 8), ("many", 8)])
def test_the_users_own_limit_counts(eight_cpus: Path, monkeypatch: pytest.MonkeyPatch, value: str, want: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert host.num_threads() == want


def test_limits_are_part_of_the_fingerprint(eight_cpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = host.fingerprint()
    eight_cpus.write_text("200000 100000", encoding="ascii")
    limited = host.fingerprint()
    assert (host.usable_cpus(), host.num_threads()) == (2, 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert (host.usable_cpus(), host.num_threads()) == (2, 1)
    assert len({whole, limited, host.fingerprint()}) == 3


def test_a_system_without_proc_has_a_processor_too(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "CPUINFO", tmp_path / "none")
    assert host.processor_name.__wrapped__()
    assert host.cpu_flags(tmp_path / "none") is None


def test_cpuinfo_is_read(monkeypatch, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Any CPU\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t: other\n")
    monkeypatch.setattr(host, "CPUINFO", cpuinfo)
    assert host.processor_name.__wrapped__() == "Any CPU"
    assert host.cpu_flags(cpuinfo) == {"fpu", "avx2"}


def test_x86_has_several_names(monkeypatch):
    assert all(map(host.is_x86, ("x86_64", "AMD64", "i686")))
    assert not any(map(host.is_x86, ("aarch64", "arm64")))
    monkeypatch.setattr("platform.machine", lambda: "AMD64")
    assert host.is_x86()
