"""docs/demo.py draws console text on a grid of cells."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("PIL")
from PIL import Image, ImageFont

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def demo():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "demo.py")))


def column_of_first_ink(demo, text: str, row: int = 0) -> int:
    image = demo.draw(text).convert("RGBA")
    cell_px = round(ImageFont.truetype(demo.FONTS[False], demo.FONT_PX).getlength("M"))
    top = demo.PADDING_PX + row * demo.LINE_PX
    for x in range(demo.PADDING_PX, image.width):
        if any(sum(image.getpixel((x, y))[:3]) > 300 for y in range(top, top + demo.LINE_PX)):
            return (x - demo.PADDING_PX) // cell_px
    pytest.fail("nothing drawn")


@pytest.mark.parametrize("indent", [0, 2, 40])
def test_leading_spaces_are_kept(demo, indent) -> None:
    try:
        ImageFont.truetype(demo.FONTS[False], demo.FONT_PX)
    except OSError:
        pytest.skip("the DejaVu Sans Mono fonts are not installed")
    assert column_of_first_ink(demo, "x" * 50 + "\n" + " " * indent + "\x1b[1;32mMM\x1b[0m", row=1) == indent


def test_the_picture_is_small_and_sharp() -> None:
    picture = ROOT / "docs" / "demo.png"
    assert picture.stat().st_size < 300_000
    with Image.open(picture) as image:
        assert image.width >= 1600
