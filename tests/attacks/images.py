"""Images: other formats under a harmless name, more pixels than memory, headers that lie."""

from __future__ import annotations

import os
import struct
import zlib
from functools import partial
from pathlib import Path

from .attack import Attack

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(touch canary) run\nshowpage\n%%EOF\n"
GIF = b"GIF89a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;"


def write(folder: Path, content: bytes, name: str = "a.png") -> None:
    (folder / name).write_bytes(content)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, depth: int = 1, extra: bytes = b"", color: int = 0, rows: int | None = None) -> bytes:
    """A PNG of zeros; `rows`: how many are there."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    channels = {0: 1, 2: 3, 6: 4}[color]
    row = bytes(1 + (width * depth * channels + 7) // 8) if width < 1 << 24 else b""
    packer = zlib.compressobj(1)
    body = b"".join(packer.compress(row) for _ in range(height if rows is None else rows)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def tiff(width: int, height: int, strip_bytes: int) -> bytes:
    tags = [(256, 4, width), (257, 4, height), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1)]
    tags += [(278, 4, height), (279, 4, strip_bytes)]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)


def bmp(width: int, height: int) -> bytes:
    return b"BM" + struct.pack("<IIIIiiHHIIIIII", 54, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)


def jpeg(width: int, height: int) -> bytes:
    start = b"\xff\xd8\xff\xc2" + struct.pack(">HBHHB", 17, 8, height, width, 3) + b"\1\x11\0\2\x11\0\3\x11\0"
    return start + b"\xff\xda" + struct.pack(">HB", 12, 3) + b"\1\0\2\0\3\0\0\x3f\0" + bytes(100) + b"\xff\xd9"


def webp(width: int, height: int) -> bytes:
    size = (width - 1) | (height - 1) << 14
    body = b"WEBPVP8L" + struct.pack("<IBI", 20, 0x2F, size) + bytes(15)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def text_bomb(name: bytes) -> bytes:
    packed = zlib.compress(bytes(70 << 20), 1)
    return chunk(name, b"a\0\0" + packed)


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "a.png")


def link(folder: Path, target: str) -> None:
    (folder / "a.png").symlink_to(target)


def samples(folder: Path) -> None:
    """A small image of each format, made here."""
    from PIL import Image

    image = Image.radial_gradient("L").resize((40, 30))
    for name in ("a.png", "b.jpg", "c.bmp", "d.tif", "e.webp", "f.ppm"):
        image.convert("RGB").save(folder / name)
    image.save(folder / "g.tif", compression="tiff_lzw")
    image.convert("P").save(folder / "h.png")
    image.save(folder / "i.jpg", progressive=True)


OTHER = {
    "EPS": EPS,
    "EPS in a DOS frame": b"\xc5\xd0\xd3\xc6" + struct.pack("<IIIIII", 30, len(EPS), 0, 0, 0, 0) + b"\xff\xff" + EPS,
    "GIF": GIF,
    "WMF": b"\xd7\xcd\xc6\x9a\0\0" + bytes(34),
    "PDF": b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\nendobj\n",
    "FITS": b"SIMPLE  =                    T".ljust(2880),
    "XPM": b'/* XPM */\nstatic char *a[] = {\n"1 1 1 1",\n"a c #000000",\n"a"\n};\n',
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'><script>1</script></svg>",
    "pickle": b"cos\nsystem\n(S'touch canary'\ntR.",
    "nothing": b"",
}
TOO_LARGE = r"StageError: .*a\.png has .*more (pixels )?than max_pixels: 50000000; remove it"
UNREADABLE = r"StageError: .*a\.png can't be read as an image: ."
ATTACKS = [
    *(
        Attack(f"{name} called a.png", partial(write, content=content), "image", f"{UNREADABLE}.*none of BMP, JPEG")
        for name, content in OTHER.items()
    ),
    Attack("PNG of 169 million pixels", lambda folder: write(folder, png(13000, 13000)), "image", TOO_LARGE),
    Attack("PNG of 49 million pixels", lambda folder: write(folder, png(7000, 7000)), "image", None, peak_mb=450),
    Attack("PNG of 2^62 pixels", lambda folder: write(folder, png(2**31 - 1, 2**31 - 1, rows=1)), "image", TOO_LARGE),
    Attack(
        "PNG of 16 bits, cut short",
        lambda folder: write(folder, png(7000, 7000, 16, rows=9)),
        "image",
        None,
        peak_mb=450,
        is_thorough=True,
    ),
    Attack("PNG, a strip", lambda folder: write(folder, png(1, 65000)), "image", r"StageError: .*after resizing"),
    Attack("PNG, a flat strip", lambda folder: write(folder, png(65000, 1)), "image", r"StageError: .*after resizing"),
    Attack("PNG without pixels", lambda folder: write(folder, png(0, 0)), "image", UNREADABLE),
    *(
        Attack(
            f"PNG, {name} of 70 MiB",
            lambda folder, name=name: write(folder, png(9, 9, extra=text_bomb(name.encode()))),
            "image",
            UNREADABLE,
        )
        for name in ("zTXt", "iCCP")
    ),
    Attack("BMP of 2^62 pixels", lambda folder: write(folder, bmp(2**31 - 1, 2**31 - 1)), "image", TOO_LARGE),
    Attack("BMP, negative", lambda folder: write(folder, bmp(-9, -(2**31))), "image", TOO_LARGE),
    Attack("PPM of 10^18 pixels", lambda folder: write(folder, b"P6 1000000000 1000000000 255\n"), "image", TOO_LARGE),
    Attack(
        "PPM, long number", lambda folder: write(folder, b"P3 " + b"9" * 100_000 + b" 1 255\n1"), "image", UNREADABLE
    ),
    Attack("TIFF of 10^18 pixels", lambda folder: write(folder, tiff(10**9, 10**9, 9)), "image", TOO_LARGE),
    Attack("TIFF, long strip", lambda folder: write(folder, tiff(9, 9, 2**32 - 1)), "image", None),
    Attack("JPEG of 4 10^9 pixels", lambda folder: write(folder, jpeg(65500, 65500)), "image", TOO_LARGE),
    Attack(
        "WebP of 268 million pixels", lambda folder: write(folder, webp(16383, 16383)), "image", "StageError: .*a.png"
    ),
    Attack("a pipe called a.png", pipe, "image", "StageError: .*a.png can't be read as an image: .*not a regular file"),
    *(
        Attack(f"a link to {target} called a.png", partial(link, target=target), "image", UNREADABLE)
        for target in ("/dev/zero", "/dev/tty", "/etc/passwd", "/", "a.png")
    ),
]
