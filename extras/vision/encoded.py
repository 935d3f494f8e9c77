"""Images as they are stored, encoded, in a file or in memory."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

from hybridengine.model.attachments import Attachment
from hybridengine.run.errors import DataError

__all__ = ["MAX_BYTES", "EncodedImage", "read_image"]

MAX_BYTES = 1 << 28  # of a file: 256 MiB


class EncodedImage(Attachment):
    """An image as the attachment that a prompt carries."""

    @staticmethod
    def of_bytes(where: str, data: bytes) -> Attachment:
        return Attachment(where, hashlib.sha256(data).hexdigest(), data=data)

    @staticmethod
    def of_file(where: str, path: Path) -> Attachment:
        """Raises DataError for a file that cannot be read."""
        return Attachment(where, hashlib.sha256(_read(where, path)).hexdigest(), str(path))


def read_image(image: Attachment) -> bytes:
    """Return the encoded bytes; DataError where the file has changed."""
    if not image.path:
        return image.data
    data = _read(image.where, Path(image.path))
    if hashlib.sha256(data).hexdigest() != image.sha256:
        raise DataError(
            f"{image.where}: the image {image.path} has changed since the data was tokenised; "
            "restore it, or set HYBRIDENGINE_CACHE to a new folder and start the run again"
        )
    return data


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
