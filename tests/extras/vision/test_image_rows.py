"""Images of a row: every form of verl, TRL and OpenAI, and what is refused."""

from __future__ import annotations

import base64
import json
import os
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hybridengine.run.errors import DataError
from hybridengine.train.data.files import read_files
from hybridengine.vision import EncodedImage, decoding, encoded
from hybridengine.vision.decoding import decode_image
from hybridengine.vision.rows import place_images

COLUMNS = ("images", "image")
RED, BLUE = (255, 0, 0), (0, 0, 255)


def png(colour: tuple[int, ...], mode: str = "RGB") -> bytes:
    content = BytesIO()
    Image.new(mode, (4, 2), colour).save(content, "PNG")
    return content.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "red.png").write_bytes(png(RED))
    (tmp_path / "blue.png").write_bytes(png(BLUE))
    return tmp_path


def place(folder: Path, chat: list[Any], **row: Any) -> tuple[list[Any], list[EncodedImage]]:
    return place_images(f"{folder}/rows.jsonl, line 3", folder, chat, row, COLUMNS)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def colours(images: list[EncodedImage]) -> list[tuple[int, ...]]:
    return [decode_image(image).getpixel((0, 0)) for image in images]  # type: ignore[misc]


URL = "data:image/png;base64," + base64.b64encode(png(RED)).decode()
IMAGE, A, B = {"type": "image"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}


@pytest.mark.parametrize(
    "source",
    [
        png(RED),
        "red.png",
        URL,
        {"bytes": png(RED), "path": "its name where it was"},  # Hugging Face datasets
        {"bytes": None, "path": "red.png"},
        {"image": "red.png"},
        {"image": {"bytes": png(RED)}},
        {"type": "image", "url": URL},
        {"base64": base64.b64encode(png(RED)).decode()},
    ],
)
def test_forms_of_one_image(folder: Path, source: Any) -> None:
    chat, images = place(folder, user("a<image>b"), images=[source])
    assert chat == user([A, IMAGE, B]) and colours(images) == [RED]
    assert images[0].where == f"{folder}/rows.jsonl, line 3, image 0"


def test_places_of_images(folder: Path) -> None:
    both = ["red.png", "blue.png"]
    two = [*user("<image>a"), {"role": "assistant", "content": "b"}, *user("<image>")]
    chat, images = place(folder, two, images=both)
    assert [m["content"] for m in chat] == [[IMAGE, A], "b", [IMAGE]]
    assert colours(images) == [RED, BLUE]
    # TRL: a column alone, a column of one image, and parts that parquet filled with null
    assert place(folder, user("a"), images=both)[0] == user([IMAGE, IMAGE, A])
    assert place(folder, user("a"), image="red.png")[0] == user([IMAGE, A])
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "a"}]
    chat, images = place(folder, user(parts), images=["blue.png"])
    assert chat == user([IMAGE, A]) and colours(images) == [BLUE]
    # OpenAI's parts, beside a column for the others
    url = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    chat, images = place(folder, user([url, A, IMAGE]), images=["blue.png"])
    assert chat == user([IMAGE, A, IMAGE]) and colours(images) == [RED, BLUE]
    # text alone, with and without a column
    assert place(folder, user("<image>")) == (user("<image>"), [])
    assert place(folder, user([A, B]), images=None) == (user("ab"), [])
    call = {"role": "assistant", "tool_calls": [1]}
    assert place(folder, [*user("a"), call])[0][1] == call


@pytest.mark.parametrize(
    ("content", "images", "message"),
    [
        ("<image><image>", ["red.png"], "places for 2 images .* column 'images' has 1"),
        ("a<image>", [], "places for 1 images .* has 0"),
        ("<image>", ["https://e.org/a.png"], "nothing is downloaded; download the images"),
        ("<image>", ["none.png"], "image 0: the image .*none.png cannot be read .*No such file"),
        ("<image>", [3], "image 0 is 3, expected bytes, a path"),
        ("<image>", [{"image": "red.png", "max_pixels": 9}], "'max_pixels', .*mm_processor_kwargs"),
        ("<image>", ["data:image/png,abc"], "expected …;base64"),
        ("<image>", ["data:image/png;base64,*"], "is not base64"),
        ([{"type": "video", "video": "a.mp4"}], None, "video and audio are not supported"),
        ([{"type": "text"}], None, "expected a part of type text, image or image_url"),
        (["text"], None, "a part of a message is 'text'"),
        ([IMAGE], None, "places for 1 images"),
    ],
)
def test_refusals_name_the_row(folder: Path, content: Any, images: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"rows.jsonl, line 3.*{message}"):
        place(folder, user(content), images=images)


def test_the_assistant_shows_no_images(folder: Path) -> None:
    with pytest.raises(DataError, match="line 3: a turn of the assistant has an image"):
        place(folder, [*user("a"), {"role": "assistant", "content": "<image>"}], images=["red.png"])


def test_files_that_are_no_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(data: bytes) -> Image.Image:
        return decode_image(EncodedImage.of_bytes("row 7", data))

    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"  # Pillow runs Ghostscript
    for data in (b"", b"text", postscript):
        with pytest.raises(DataError, match=r"row 7: .* in none of the formats PNG"):
            decode(data)
    with pytest.raises(DataError, match=r"row 7: .* cannot be decoded"):
        decode(png(RED)[:45])
    assert decode(png((255, 0, 0, 0), "RGBA")).getpixel((0, 0)) == (255, 255, 255)
    assert decode(png((9,), "L")).getpixel((0, 0)) == (9, 9, 9)
    monkeypatch.setattr(decoding, "MAX_PIXELS", 7)
    with pytest.raises(DataError, match=r"row 7: .* 4 x 2 pixels, more than 7; shrink it"):
        decode(png(RED))


def test_only_regular_files_of_a_bounded_size_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(folder / "fifo.png")
    (folder / "link.png").symlink_to("/dev/zero")
    for name in ("/dev/zero", "link.png", "fifo.png", "/"):
        with pytest.raises(DataError, match=r"line 3, image 0: .* cannot be read .not a regular"):
            place(folder, user("a"), images=[name])
    with (folder / "huge.png").open("wb") as file:
        file.truncate(1 << 40)  # without a block on the disk
    with pytest.raises(DataError, match="has 1,099,511,627,776 bytes, more than 268,435,456"):
        place(folder, user("a"), images=["huge.png"])
    monkeypatch.setattr(encoded, "MAX_BYTES", 10)
    with pytest.raises(DataError, match="bytes, more than 10; shrink it"):
        place(folder, user("a"), images=["red.png"])


def test_a_file_that_has_changed_is_refused(folder: Path) -> None:
    _, [image] = place(folder, user("a"), images=["red.png"])
    assert colours([image]) == [RED]
    (folder / "red.png").write_bytes(png(BLUE))
    with pytest.raises(DataError, match="has changed since the data was tokenised"):
        decode_image(image)


def test_parquet_and_jsonl_agree(folder: Path) -> None:
    rows = [
        {"chat": user("<image>a"), "images": [{"bytes": png(RED), "path": None}]},
        {"chat": user("b"), "images": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    rows[0]["images"] = ["red.png"]
    (folder / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("a.parquet", "b.jsonl"):
        read = [
            place_images(where, where.folder, row["chat"], row, COLUMNS)
            for where, row in read_files(str(folder / name))
        ]
        assert [chat for chat, _ in read] == [user([IMAGE, A]), user("b")]
        assert [colours(images) for _, images in read] == [[RED], []]
