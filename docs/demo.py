"""Draw docs/demo.png: what the console shows of a real run of manifests/mnist_qat.yaml, about a minute on two cores.

    python docs/demo.py

Needs MNIST (as the manifest does), Pillow (installed with torchvision) and the DejaVu Sans Mono fonts (Debian:
fonts-dejavu-core). Leaves nothing behind but the picture.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from ptpipe import run
from ptpipe.events import Event, Progress
from ptpipe_report import ConsoleReporter

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = "manifests/mnist_qat.yaml"
COLUMNS = 126
FONT_PX, LINE_PX, PADDING_PX = 26, 36, 44
"""Twice the size at which README shows it, so that it is sharp on a dense display."""
FONTS = {False: "DejaVuSansMono.ttf", True: "DejaVuSansMono-Bold.ttf"}
BACKGROUND, FOREGROUND = (22, 24, 29), (208, 211, 216)
NORMAL = [(22, 24, 29), (224, 108, 117), (126, 190, 122), (216, 180, 104), (97, 150, 220), (190, 132, 210),
          (92, 184, 192), (208, 211, 216)]  # fmt: skip
BRIGHT = [(92, 97, 107), *NORMAL[1:]]
THEME = TerminalTheme(BACKGROUND, FOREGROUND, NORMAL, BRIGHT)
NUM_COLORS = 64


class FinishedStages(ConsoleReporter):
    """The console without its progress lines, which a terminal replaces by the line of the finished stage."""

    def event(self, event: Event) -> None:
        """Leave out progress."""
        if not isinstance(event, Progress):
            super().event(event)


def record_run() -> str:
    """Run the manifest from scratch in a temporary folder; return the console's text with its ANSI codes."""
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, color_system="truecolor", width=COLUMNS, highlight=False, _environ={}
    )
    with TemporaryDirectory() as folder, chdir(folder):
        Path("manifests").symlink_to(ROOT / "manifests")
        run(MANIFEST, reporters=[FinishedStages(console)])
    return f"\x1b[2m$\x1b[0m ptpipe run {MANIFEST}\n{file.getvalue()}"


def draw(ansi_text: str) -> Image.Image:
    """Draw text with ANSI codes in a dark panel with round corners, cell by cell, so that every column is aligned."""
    fonts = {is_bold: ImageFont.truetype(name, FONT_PX) for is_bold, name in FONTS.items()}
    cell_px = round(fonts[False].getlength("M"))
    lines = Text.from_ansi(ansi_text.rstrip("\n")).split(allow_blank=True)
    size = (2 * PADDING_PX + max(line.cell_len for line in lines) * cell_px, 2 * PADDING_PX + len(lines) * LINE_PX)
    image = Image.new("RGBA", size, (*BACKGROUND, 0))
    pen = ImageDraw.Draw(image)
    pen.rounded_rectangle((0, 0, size[0] - 1, size[1] - 1), radius=PADDING_PX // 2, fill=BACKGROUND)
    for row, line in enumerate(lines):
        for column, (character, style) in enumerate(styled_characters(line)):
            place = (PADDING_PX + column * cell_px, PADDING_PX + row * LINE_PX)
            pen.text(place, character, fill=color_of(style), font=fonts[bool(style.bold)])
    return image.quantize(NUM_COLORS, Image.Quantize.FASTOCTREE)


def styled_characters(line: Text) -> Iterator[tuple[str, Style]]:
    """Yield every character of a line with its style; all are one cell wide."""
    for text, style, _ in line.render(Console(color_system="truecolor", _environ={})):
        yield from ((character, style or Style.null()) for character in text)


def color_of(style: Style) -> tuple[int, int, int]:
    """Return the foreground color; dim text is blended with the background."""
    color = tuple(style.color.get_truecolor(THEME)) if style.color else FOREGROUND
    if style.dim:
        color = tuple((3 * a + 2 * b) // 5 for a, b in zip(color, BACKGROUND, strict=True))
    return color[0], color[1], color[2]


if __name__ == "__main__":
    draw(record_run()).save(ROOT / "docs" / "demo.png", optimize=True)
