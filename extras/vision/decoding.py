"""Decode an image: no code of a file runs.

Pillow opens the formats of `_FORMATS` only; some of its others start programs (EPS: Ghostscript).
The size is read from the header and checked before any pixel is decoded.
"""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from hybridengine.model.attachments import Attachment
from hybridengine.run.errors import DataError
from hybridengine.vision.encoded import read_image

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["MAX_PIXELS", "decode_image"]

MAX_PIXELS = 1 << 26  # of an image that is decoded: 8,192 x 8,192, 192 MiB as RGB
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def decode_image(image: Attachment) -> Image:
    """Return the pixels of an image as RGB; transparent ones are white.

    Raises DataError, with the row, for what is no image and for one of too many pixels.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(read_image(image)), formats=_FORMATS) as decoded:
            width, height = decoded.size
            if width * height > MAX_PIXELS:
                raise DataError(
                    f"{image.where}: the image {image.name} has {width} x {height} pixels, more "
                    f"than {MAX_PIXELS:,}; shrink it"
                )
            return _as_rgb(decoded)
    except UnidentifiedImageError:
        reason = f"it is in none of the formats {', '.join(_FORMATS)}"
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, DataError):
            raise
        reason = str(error)
    raise DataError(f"{image.where}: the image {image.name} cannot be decoded: {reason}")


def _as_rgb(image: Image) -> Image:
    from PIL import Image as images

    if not image.has_transparency_data:
        return image.convert("RGB")
    opaque = images.new("RGBA", image.size, "white")
    opaque.alpha_composite(image.convert("RGBA"))
    return opaque.convert("RGB")
