"""Each test needs a process of its own: an import happens once a process."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from textwrap import dedent

import pytest

from ...forks import Fork

pytestmark = pytest.mark.usefixtures("fork_server")

REPORT = """
def declared():
    import torch
    return [name for name in ("nms", "qnms") if hasattr(torch.ops.torchvision, name)]

def left_behind():
    import sys
    return [name for name in sys.modules if name.partition(".")[0] == "torchvision"]
"""


def run_python(code: str, first_on_path: Path | None = None) -> str:
    with Fork(execute, dedent(REPORT) + dedent(code), str(first_on_path or "")) as fork:
        out, err = fork.communicate(timeout=120)
    assert fork.returncode == 0, err
    return out.strip()


def execute(program: str, first_on_path: str) -> None:
    assert "torchvision" not in sys.modules
    warnings.simplefilter("error")
    if first_on_path:
        sys.path.insert(0, first_on_path)
    exec(program, {"__name__": "__main__"})


@pytest.fixture
def stand_in(tmp_path: Path):
    """Put a package named torchvision, with this source, in front of the real one."""

    def make(source: str) -> Path:
        package = tmp_path / "torchvision"
        package.mkdir()
        (package / "__init__.py").write_text("from torchvision import extension\n" + dedent(source))
        (package / "extension.py").write_text("")
        return tmp_path

    return make


def test_the_installed_torchvision_can_be_imported_and_used():
    output = run_python("""
        import torch
        from ptpipe_torch.torchvision_compat import torchvision
        tv = torchvision()
        assert torchvision() is tv
        from torchvision import datasets, transforms
        pixels = transforms.functional.to_pil_image(torch.rand(3, 40, 40))
        images = transforms.Compose([transforms.Resize(32), transforms.ToTensor()])(pixels)[None]
        print(tuple(tv.models.resnet18(num_classes=7).eval()(images).shape), datasets.MNIST.__name__)
    """)
    assert output == "(1, 7) MNIST"


def test_an_operator_that_was_only_declared_says_so_when_called():
    output = run_python("""
        import torch
        from ptpipe_torch.torchvision_compat import torchvision
        tv = torchvision()
        if tv.extension._has_ops():
            print("refused")  # the real operator is there: nothing was declared
        else:
            try:
                torch.ops.torchvision.nms(torch.rand(2, 4), torch.rand(2), 0.5)
            except NotImplementedError:
                print("refused")
    """)
    assert output == "refused"


def test_nothing_is_declared_where_torchvision_works(stand_in):
    folder = stand_in("models = 'works'")
    assert run_python(
        "from ptpipe_torch.torchvision_compat import torchvision; print(torchvision().models, declared())", folder
    ) == ("works []")


def test_another_failure_is_passed_on_and_leaves_nothing(stand_in):
    folder = stand_in("raise RuntimeError('compiled with different CUDA major versions')")
    output = run_python(
        """
        from ptpipe_torch.torchvision_compat import torchvision
        for _ in range(2):
            try:
                torchvision()
            except RuntimeError as error:
                print(error, declared(), left_behind())
        """,
        folder,
    )
    assert output.splitlines() == ["compiled with different CUDA major versions [] []"] * 2


def test_a_cure_that_does_not_help_is_taken_back(stand_in):
    folder = stand_in("raise RuntimeError('operator torchvision::nms does not exist')")
    output = run_python(
        """
        from ptpipe_torch.torchvision_compat import torchvision
        for _ in range(2):  # a second try would fail on a schema that is declared already
            try:
                torchvision()
            except RuntimeError as error:
                print(error)
        print(declared(), left_behind())
        """,
        folder,
    )
    assert output.splitlines() == ["operator torchvision::nms does not exist"] * 2 + ["[] []"]


def test_a_missing_torchvision_is_an_import_error(stand_in):
    folder = stand_in("raise ModuleNotFoundError('no torchvision here')")
    output = run_python(
        """
        from ptpipe_torch.torchvision_compat import torchvision
        try:
            torchvision()
        except ImportError as error:
            print(error, declared())
        """,
        folder,
    )
    assert output == "no torchvision here []"
