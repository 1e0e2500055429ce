"""Encoded images as members of tar shards.

Shape legend: B images of a batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from typing import Annotated, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ptpipe_torch.data.images import MAX_PIXELS, ImageDecoder, open_image
from ptpipe_torch.data.shards import ArrayMembers, Member, MemberFormat, RaggedMembers

StoredSide: TypeAlias = Annotated[int, Field(ge=1, le=8192)]
StoredSize: TypeAlias = StoredSide | tuple[StoredSide, StoredSide]
"""As an `ImageDecoder` has it."""


class ImageMembers(MemberFormat):
    """Encoded images, which become pixels as those of an `ImageFileColumn` do."""

    kind: Literal["image"] = "image"
    size: StoredSize
    resize: StoredSide | None
    channels: Literal[1, 3] = 3
    max_pixels: int = Field(default=MAX_PIXELS, ge=1)

    def decode(self, members: Iterable[Member], num_rows: int) -> npt.NDArray[np.uint8]:
        decoder = ImageDecoder(self.size, self.resize, self.channels, self.max_pixels)
        pixels_BHWC = decoder.empty(num_rows)
        for row, name, content in members:
            with open_image(BytesIO(content), name, self.max_pixels) as image:
                pixels_BHWC[row] = decoder.pixels(image, name)
        return pixels_BHWC


AnyFormat: TypeAlias = Annotated[ImageMembers | ArrayMembers | RaggedMembers, Field(discriminator="kind")]
"""As a record has it."""
