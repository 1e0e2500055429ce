"""Which machine this is."""

from __future__ import annotations

import json
import os

from ptpipe import machine


def test_a_machine_is_described_and_fingerprinted():
    facts = machine.describe()
    assert facts.keys() == {"processor", "num_cpus", "architecture", "system", "host"}
    assert 1 <= facts["num_cpus"] <= os.cpu_count()
    json.dumps(facts)
    assert len(machine.fingerprint()) == 12
    assert machine.fingerprint() == machine.fingerprint()


def test_another_number_of_processors_is_another_machine(monkeypatch):
    before = machine.fingerprint()
    monkeypatch.setattr(machine, "describe", lambda facts=machine.describe(): {**facts, "num_cpus": 999})  # noqa: B008
    assert machine.fingerprint() != before


def test_a_system_without_proc_has_a_processor_too(monkeypatch):
    def absent(self, **_):
        raise FileNotFoundError

    monkeypatch.setattr("ptpipe.machine.Path.read_text", absent)
    assert machine._processor()
