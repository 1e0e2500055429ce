"""A column of image files that are decoded on demand.

Shape legend: N images, B of a batch, C channels, H height, W width.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO

from ptpipe import StageError
from ptpipe_torch.data.column import Column
from ptpipe_torch.files import open_regular

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL.Image import Image as PILImage


FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "BMP": (".bmp",),
        "JPEG": (".jpeg", ".jpg"),
        "PNG": (".png",),
        "PPM": (".pgm", ".ppm"),
        "TIFF": (".tif", ".tiff"),
        "WEBP": (".webp",),
    }
)
"""Pillow's names of the formats that are decoded, whatever a file is called, with their suffixes. Pillow knows more,
and starts a program for some of them: Ghostscript for EPS."""
MAX_PIXELS = 50_000_000
"""Default limit of an image's size: decoding takes up to 16 bytes per pixel, and a file of a few kilobytes can have any
number of them."""


@dataclass(frozen=True, eq=False)
class ImageFileColumn(Column):
    """Image files that are decoded on demand, so that a data set of any size fits in memory.

    The shorter side is resized to `resize` pixels (bilinear, antialiased), then a centre square of `size` pixels is
    cropped.
    """

    root: Path
    paths_N: npt.NDArray[np.bytes_]
    """UTF-8, relative to `root`, parts joined by `/`."""
    size: int
    resize: int
    channels: int
    """3: RGB; 1: grey."""
    max_pixels: int = MAX_PIXELS
    """A larger image, or one that is larger after resizing, is refused before it is decoded."""

    def __len__(self) -> int:
        return len(self.paths_N)

    def take(self, indices_B: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Return pixels, uint8 (B, H, W, C). Raises StageError, with the path, for a file that is no such image."""
        import numpy as np

        pixels_BHWC = np.empty((len(indices_B), self.size, self.size, self.channels), dtype=np.uint8)
        for row, path in enumerate(self.paths_N[indices_B]):
            pixels_BHWC[row] = self._decode(self.root / path.decode())
        return pixels_BHWC

    def _decode(self, path: Path) -> npt.NDArray[np.uint8]:
        import numpy as np
        from PIL import Image

        try:
            # Pillow warns of damaged metadata, and of images below `max_pixels`.
            with warnings.catch_warnings(action="ignore"), open_regular(path) as file, _open_image(file) as image:
                self._check_size(path, *image.size)
                # JPEG decodes faster at 1/2, 1/4 or 1/8 scale; twice the target size loses nothing visible.
                image.draft(None, (2 * self.resize, 2 * self.resize))
                square = self._fit(image)
        except FileNotFoundError as error:
            raise StageError(f"{path} is gone; put it back, or rerun the data stage with --fresh") from error
        except StageError:
            raise
        except Image.DecompressionBombError as error:  # beyond what `max_pixels` can be raised to
            raise StageError(f"{path} has more pixels than max_pixels: {self.max_pixels}; remove it") from error
        except Exception as error:  # PIL's parsers raise exceptions of any type
            raise StageError(f"{path} can't be read as an image: {str(error) or type(error).__name__}") from error
        return np.asarray(square).reshape(self.size, self.size, self.channels)

    def _check_size(self, path: Path, width: int, height: int) -> None:
        scale = self.resize / min(width, height)
        num_pixels = width * height * max(1, scale) ** 2
        if num_pixels > self.max_pixels:
            after = f" ({num_pixels:.0f} after resizing)" if scale > 1 else ""
            raise StageError(
                f"{path} has {width} x {height} pixels{after}, more than max_pixels: {self.max_pixels}; "
                "remove it, make it smaller, or raise max_pixels"
            )

    def _fit(self, image: PILImage) -> PILImage:
        import numpy as np
        from PIL import Image

        if image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")  # Pillow warns when it drops transparency
        if image.mode in ("I", "I;16", "I;16B", "I;16L"):
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))  # Pillow would clip 16-bit values at 255
        image = image.convert("RGB" if self.channels == 3 else "L")
        scale = self.resize / min(image.size)
        width, height = (max(self.resize, round(side * scale)) for side in image.size)
        if (width, height) != image.size:
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        left, top = (width - self.size) // 2, (height - self.size) // 2
        return image.crop((left, top, left + self.size, top + self.size))


def _open_image(file: BinaryIO) -> PILImage:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(file, formats=tuple(FORMATS))
    except UnidentifiedImageError as error:
        raise ValueError(f"it is none of {', '.join(FORMATS)}") from error
