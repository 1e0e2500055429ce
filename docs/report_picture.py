"""Draw docs/report.png: the first screen of a run's report, as a browser shows it.

    ptpipe run manifests/mnist_qat.yaml
    python docs/report_picture.py artifacts/runs/RUN/report.html

Needs Chromium (Debian: chromium) and Pillow (installed with torchvision). Leaves nothing behind but the picture.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT = 1180, 1590
SCALE = 1.5
"""Pixels of the picture for one of the page, so that it is sharp on a dense display."""
NUM_COLORS = 128


def draw(report: Path) -> Image.Image:
    """Return the top of the page."""
    chromium = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
    if chromium is None:
        sys.exit("there is no chromium")
    with TemporaryDirectory() as folder:
        options = ["--headless=new", "--hide-scrollbars", "--disable-gpu", f"--user-data-dir={folder}/profile"]
        options += [f"--window-size={WIDTH},{HEIGHT}", f"--force-device-scale-factor={SCALE}"]
        options += ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses it to root
        picture = Path(folder) / "picture.png"
        command = [chromium, *options, f"--screenshot={picture}", report.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603  # a file of the user's
        return Image.open(picture).convert("RGB").quantize(NUM_COLORS, Image.Quantize.MAXCOVERAGE)


if __name__ == "__main__":
    draw(Path(sys.argv[1])).save(ROOT / "docs" / "report.png", optimize=True)
