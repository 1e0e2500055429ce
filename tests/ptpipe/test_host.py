"""Which machine this is."""

from __future__ import annotations

import json
import os

from ptpipe import host


def test_a_machine_is_described_and_fingerprinted():
    facts = host.describe()
    assert facts.keys() == {"processor", "num_cpus", "architecture", "system", "host"}
    assert 1 <= facts["num_cpus"] <= os.cpu_count()
    json.dumps(facts)
    assert len(host.fingerprint()) == 12
    assert host.fingerprint() == host.fingerprint()


def test_another_number_of_processors_is_another_machine(monkeypatch):
    before = host.fingerprint()
    monkeypatch.setattr(host, "describe", lambda facts=host.describe(): {**facts, "num_cpus": 999})  # noqa: B008
    assert host.fingerprint() != before


def test_a_system_without_proc_has_a_processor_too(monkeypatch):
    def absent(self, **_):
        raise FileNotFoundError

    monkeypatch.setattr("ptpipe.host.Path.read_text", absent)
    assert host._processor()
