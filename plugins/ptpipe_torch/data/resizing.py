"""How images of any size become those of a data set. Imports neither torch nor numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import PositiveInt

from ptpipe_torch.facts import Facts

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage


class Resizing(Facts):
    """Bilinear and antialiased, as Pillow computes it, then a centre crop."""

    shorter_side: PositiveInt | None = None
    """Pixels that the shorter side gets, before the crop; the other one keeps the aspect ratio. None: both sides get
    the size of the data set, and nothing is cropped."""

    def fit(self, image: PILImage, size_HW: tuple[int, int]) -> PILImage:
        """Return an image of `size_HW`. `shorter_side` is at least the larger one of its sides."""
        from PIL import Image

        height, width = size_HW
        if self.shorter_side is None:
            return image.resize((width, height), Image.Resampling.BILINEAR)
        scale = self.shorter_side / min(image.size)
        resized_width, resized_height = (max(self.shorter_side, round(side * scale)) for side in image.size)
        if (resized_width, resized_height) != image.size:
            image = image.resize((resized_width, resized_height), Image.Resampling.BILINEAR)
        left, top = (resized_width - width) // 2, (resized_height - height) // 2
        return image.crop((left, top, left + width, top + height))

    def describe(self, size_HW: tuple[int, int]) -> str:
        """Return it in words, for a data set of images of `size_HW`."""
        size = f"{size_HW[0]} x {size_HW[1]}"
        if self.shorter_side is None:
            return f"height and width to {size}"
        return f"shorter side to {self.shorter_side}, then a centre crop of {size}"
