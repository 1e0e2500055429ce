"""Decoding of images, and a column of image files that are decoded on demand.

Shape legend: N images, B of a batch, C channels, H height, W width.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO

from ptpipe import StageError
from ptpipe_torch.data.column import Column
from ptpipe_torch.data.resizing import Resizing
from ptpipe_torch.files import open_regular

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL.Image import Image as PILImage


FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "BMP": (".bmp",),
        "JPEG": (".jpeg", ".jpg", ".jfif"),
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
_ORIENTATION_TAG = 0x0112
_UPRIGHT = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Pillow's numbers of the transpositions (`Image.Transpose`) that undo an EXIF orientation."""
_FIRST_ON_SIDE = 5
"""From this orientation on, height and width change places."""


@dataclass(frozen=True)
class ImageDecoder:
    """How an image becomes pixels.

    The shorter side is resized to `resize` pixels (bilinear, antialiased), then the centre is cropped; without
    `resize`, both sides are resized.
    """

    size: int | tuple[int, int]
    """Height and width that it gets; one number: both."""
    resize: int | None
    channels: int
    """3: RGB; 1: grey."""
    max_pixels: int = MAX_PIXELS
    """A larger image, or one that is larger after resizing, is refused before it is decoded."""

    @property
    def height_and_width(self) -> tuple[int, int]:
        """Height and width."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    def empty(self, num_images: int) -> npt.NDArray[np.uint8]:
        """Return an array for pixels, uint8 (B, H, W, C)."""
        import numpy as np

        return np.empty((num_images, *self.height_and_width, self.channels), dtype=np.uint8)

    def pixels(self, image: PILImage, name: str) -> npt.NDArray[np.uint8]:
        """Decode an opened image: uint8 (H, W, C). Raises StageError, with its name, for one that becomes too large."""
        import numpy as np

        height, width = self.height_and_width if self.resize is None else (self.resize, self.resize)
        if self.resize is not None and (scale := self.resize / min(image.size)) > 1:
            check_size(image, name, self.max_pixels, scale)
        # JPEG decodes faster at 1/2, 1/4 or 1/8 scale; twice the target size loses nothing visible.
        is_on_side = orientation(image) >= _FIRST_ON_SIDE
        image.draft(None, (2 * height, 2 * width) if is_on_side else (2 * width, 2 * height))
        pixels = in_8_bits(upright(image), name, self.channels)
        fitted = Resizing(shorter_side=self.resize).fit(pixels, self.height_and_width)
        return np.asarray(fitted).reshape(*self.height_and_width, self.channels)


def orientation(image: PILImage) -> int:
    """Return the EXIF orientation, 1 to 8, of an opened image; 1 where it has none, or metadata that is damaged.

    That of a TIFF file is 1: Pillow itself turns it. That of a PNG file may come behind its pixels, once it is loaded.
    """
    if "exif" not in image.info:
        return 1
    try:
        value = image.getexif().get(_ORIENTATION_TAG)
    except Exception:  # noqa: BLE001  # Pillow's parsers raise exceptions of any type
        return 1
    return value if value in _UPRIGHT else 1


def upright(image: PILImage) -> PILImage:
    """Decode an opened image; return it as it is meant to be seen, by its EXIF orientation."""
    from PIL import Image

    image.load()
    number = orientation(image)
    return image if number == 1 else image.transpose(Image.Transpose(_UPRIGHT[number]))


def in_8_bits(image: PILImage, name: str, channels: int) -> PILImage:
    """Return the image in RGB, or with one channel in grey; 16-bit grey is scaled to 8 bits.

    Raises StageError, with its name, for pixels of another range: which of their values is white is not known.
    """
    import numpy as np
    from PIL import Image

    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns when it drops transparency
    if image.mode == "F":
        raise StageError(f"{name} has floating-point pixels: save it with 8 or 16 bits, or use data.arrays")
    if image.mode.startswith("I"):  # Pillow would clip the values at 255
        values_HW = np.asarray(image)
        low, high = values_HW.min(), values_HW.max()
        if image.mode == "I" and (low < 0 or high > 65_535 or 0 < high < 256):  # also of 16 bits in some formats
            raise StageError(f"{name} has pixels of {low} to {high} in 32 bits: save it with 8 or 16 bits")
        image = Image.fromarray((values_HW >> 8).astype(np.uint8))
    return image.convert("RGB" if channels == 3 else "L")


@dataclass(frozen=True, eq=False)
class ImageFileColumn(Column):
    """Image files that are decoded on demand, so that a data set of any size fits in memory; see `ImageDecoder`."""

    root: Path
    paths_N: npt.NDArray[np.bytes_]
    """UTF-8, relative to `root`, parts joined by `/`."""
    size: int | tuple[int, int]
    resize: int | None
    channels: int
    max_pixels: int = MAX_PIXELS

    def __len__(self) -> int:
        return len(self.paths_N)

    @property
    def decoder(self) -> ImageDecoder:
        """How the images become pixels."""
        return ImageDecoder(self.size, self.resize, self.channels, self.max_pixels)

    def path(self, index: int) -> Path:
        """Return the file of the sample `index`."""
        relative: bytes = self.paths_N[index]
        return self.root / relative.decode()

    def take(self, indices_B: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Return pixels, uint8 (B, H, W, C). Raises StageError, with the path, for a file that is no such image."""
        decoder = self.decoder
        pixels_BHWC = decoder.empty(len(indices_B))
        for row, index in enumerate(indices_B):
            path = self.path(index)
            with open_image_file(path, self.max_pixels) as image:
                pixels_BHWC[row] = decoder.pixels(image, str(path))
        return pixels_BHWC


@contextmanager
def open_image_file(path: Path, max_pixels: int) -> Iterator[PILImage]:
    """Open an image file; see `open_image`."""
    try:
        file = open_regular(path)
    except FileNotFoundError as error:
        raise StageError(f"{path} is gone; put it back, or rerun the data stage with --fresh") from error
    except OSError as error:
        raise StageError(_unreadable(str(path), error)) from error
    with file, open_image(file, str(path), max_pixels) as image:
        yield image


@contextmanager
def open_image(file: BinaryIO, name: str, max_pixels: int) -> Iterator[PILImage]:
    """Open an image of one of `FORMATS`, whose pixels are decoded when they are first used.

    Raises StageError, with its name, where that is impossible, where it has more pixels than `max_pixels`, and for
    whatever goes wrong with it inside the `with`.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        # Pillow warns of damaged metadata, and of images below `max_pixels`.
        with warnings.catch_warnings(action="ignore"), Image.open(file, formats=tuple(FORMATS)) as image:
            check_size(image, name, max_pixels)
            yield image
    except StageError:
        raise
    except UnidentifiedImageError as error:
        raise StageError(_unreadable(name, f"it is none of {', '.join(FORMATS)}")) from error
    except Image.DecompressionBombError as error:  # beyond what `max_pixels` can be raised to
        raise StageError(f"{name} has more pixels than max_pixels: {max_pixels}; remove it") from error
    except Exception as error:  # PIL's parsers raise exceptions of any type
        raise StageError(_unreadable(name, error)) from error


def check_size(image: PILImage, name: str, max_pixels: int, scale: float = 1.0) -> None:
    """Raise StageError, with the image's name, where it has more pixels than `max_pixels` once its sides are scaled."""
    num_pixels = image.width * image.height * scale**2
    if num_pixels > max_pixels:
        after = f" ({num_pixels:.0f} after resizing)" if scale > 1 else ""
        raise StageError(
            f"{name} has {image.width} x {image.height} pixels{after}, more than max_pixels: {max_pixels}; "
            "remove it, make it smaller, or raise max_pixels"
        )


def _unreadable(name: str, reason: Exception | str) -> str:
    return f"{name} can't be read as an image: {str(reason) or type(reason).__name__}"
