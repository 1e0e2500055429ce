"""What `reduce_range: auto` decides on."""

from __future__ import annotations

import platform

import pytest
import torch

from ptpipe_quant.cpu import wants_reduced_range

CPUINFO = "processor\t: 0\nmodel name\t: any\nflags\t\t: fpu sse2 avx2 {}\nbogomips: 4000\n"


@pytest.mark.parametrize(
    ("flags", "reduced"),
    [
        ("", {"fbgemm", "x86", "onednn"}),
        ("avx512f avx512_vnni", set()),
        ("avx_vnni", {"fbgemm", "x86"}),  # only oneDNN has kernels for it
        ("avx512_vnnix", {"fbgemm", "x86", "onednn"}),
    ],
)
def test_without_vnni_the_range_is_reduced(tmp_path, flags, reduced) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(CPUINFO.format(flags))
    for backend in ("fbgemm", "x86", "onednn", "qnnpack"):
        decided, reason = wants_reduced_range(backend, architecture="x86_64", cpuinfo=cpuinfo)
        assert decided is (backend in reduced)
        assert reason


def test_an_unknown_processor_gets_the_safe_answer(tmp_path) -> None:
    decided, reason = wants_reduced_range("fbgemm", architecture="AMD64", cpuinfo=tmp_path / "none")
    assert decided
    assert "can't be read" in reason


def test_other_architectures_need_none(tmp_path) -> None:
    assert not wants_reduced_range("onednn", architecture="aarch64", cpuinfo=tmp_path / "none")[0]


@pytest.mark.skipif(platform.machine() != "x86_64" or platform.system() != "Linux", reason="reads Linux's x86 flags")
def test_it_agrees_with_torch() -> None:
    if not hasattr(torch.cpu, "get_capabilities"):
        pytest.skip(f"torch {torch.__version__} does not tell")
    found = torch.cpu.get_capabilities()
    assert wants_reduced_range("fbgemm")[0] is not found["avx512_vnni"]
    assert wants_reduced_range("onednn")[0] is not (found["avx512_vnni"] or found["avx_vnni"])
