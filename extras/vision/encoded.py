"""An image as a data file has it, and how it is decoded: no code of a file runs.

Pillow opens the formats of `_FORMATS` only; some of its others start programs (EPS: Ghostscript).
The size is read from the header and checked before any pixel is decoded.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from hybridengine.run.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["MAX_BYTES", "MAX_PIXELS", "EncodedImage"]

MAX_PIXELS = 1 << 26  # of an image that is decoded: 8,192 x 8,192, 192 MiB as RGB
MAX_BYTES = 1 << 28  # of a file: 256 MiB, more than MAX_PIXELS take without compression
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


@dataclass(frozen=True)
class EncodedImage:
    """An image as it is stored, in a file or in memory.

    where: row of a data file, or tool, that it is from; for messages.
    sha256: of the encoded bytes.
    path: of its file; empty where `data` has the bytes.
    """

    where: str
    sha256: str
    path: str = ""
    data: bytes = b""

    @staticmethod
    def of_bytes(where: str, data: bytes) -> EncodedImage:
        return EncodedImage(where, hashlib.sha256(data).hexdigest(), data=data)

    @staticmethod
    def of_file(where: str, path: Path) -> EncodedImage:
        """Raises DataError for a file that cannot be read."""
        return EncodedImage(where, hashlib.sha256(_read(where, path)).hexdigest(), str(path))

    @property
    def name(self) -> str:
        """Its file, or the hash of an image in memory: its name in rollout files."""
        return self.path or f"sha256:{self.sha256}"

    def read(self) -> bytes:
        """Return the encoded bytes; DataError where the file has changed."""
        if not self.path:
            return self.data
        data = _read(self.where, Path(self.path))
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise DataError(
                f"{self.where}: the image {self.path} has changed since the data was tokenised; "
                "restore it, or set HYBRIDENGINE_CACHE to a new folder and start the run again"
            )
        return data

    def decode(self) -> Image:
        """Return its pixels as RGB; transparent ones are white.

        Raises DataError, with the row, for what is no image and for one of too many pixels.
        """
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(BytesIO(self.read()), formats=_FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise DataError(
                        f"{self.where}: the image {self.name} has {width} x {height} pixels, more "
                        f"than {MAX_PIXELS:,}; shrink it"
                    )
                return _as_rgb(image)
        except UnidentifiedImageError:
            reason = f"it is in none of the formats {', '.join(_FORMATS)}"
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            if isinstance(error, DataError):
                raise
            reason = str(error)
        raise DataError(f"{self.where}: the image {self.name} cannot be decoded: {reason}")


def _read(where: str, path: Path) -> bytes:
    """Return the content of a file that a row names: a regular one of at most MAX_BYTES."""
    try:
        with open(path, "rb", opener=_open_regular) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= MAX_BYTES:
                return file.read(MAX_BYTES) or b""
    except OSError as error:
        raise DataError(
            f"{where}: the image {path} cannot be read ({error.strerror}); paths are relative to "
            "the folder of the data file"
        ) from None
    raise DataError(
        f"{where}: the image {path} has {size:,} bytes, more than {MAX_BYTES:,}; shrink it"
    )


def _open_regular(path: str, flags: int) -> int:
    """Open a file that neither waits for a writer, as a FIFO, nor has no end, as some devices."""
    if stat.S_ISREG(os.stat(path).st_mode):  # first: to open a device may have an effect
        file = os.open(path, flags | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(file).st_mode):  # it may be another one by now
            return file
        os.close(file)
    raise OSError(errno.EINVAL, "not a regular file")


def _as_rgb(image: Image) -> Image:
    from PIL import Image as images

    if not image.has_transparency_data:
        return image.convert("RGB")
    opaque = images.new("RGBA", image.size, "white")
    opaque.alpha_composite(image.convert("RGBA"))
    return opaque.convert("RGB")
