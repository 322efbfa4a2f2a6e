"""Write the photographs and textures of the training clips to one file. They come from the package scikit-image.

python examples/tiny_video_dit/photographs.py --output photographs.npz
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image
from pipeline import SLOTS, TEXTURE_PHOTOGRAPHS

SIZE = 768
"""Width and height in pixels. Most of the originals are smaller."""

SOURCES = {
    "astronaut": ("astronaut.png", (0, 0, 512, 512)),
    "cat": ("chelsea.png", (75, 0, 375, 300)),
    "coffee": ("coffee.png", (100, 0, 500, 400)),
    "rocket": ("rocket.jpg", (107, 0, 534, 427)),
    "galaxies": ("hubble_deep_field.jpg", (64, 0, 936, 872)),
    "tissue": ("ihc.png", (0, 0, 512, 512)),
    "retina": ("retina.jpg", (0, 0, 1411, 1411)),
}
"""File and crop box (left, upper, right, lower) of each photograph."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("photographs.npz"), help="default: %(default)s")
    args = parser.parse_args()
    package = find_spec("skimage")
    if package is None or package.origin is None:
        parser.error("expected the package scikit-image, got none: pip install scikit-image")
    folder = Path(package.origin).parent / "data"
    photographs = [
        read_image(folder / name, "RGB", box) for name, box in (SOURCES[word] for word in SLOTS["photograph"])
    ]
    textures = [read_image(folder / f"{word}.png", "L", None) for word in TEXTURE_PHOTOGRAPHS]
    np.savez_compressed(args.output, photographs=np.stack(photographs), textures=np.stack(textures))
    print(f"{args.output}: {len(photographs)} photographs, {len(textures)} textures")


def read_image(path: Path, mode: str, box: tuple[int, int, int, int] | None) -> np.ndarray:
    """Return an image as uint8; with a box, crop it and scale the crop to SIZE."""
    image = Image.open(path).convert(mode)
    if box is not None:
        image = image.crop(box).resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    return np.asarray(image)


if __name__ == "__main__":
    main()
