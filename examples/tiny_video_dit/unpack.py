"""Write the packed weights as a folder that diffusers loads.

python examples/tiny_video_dit/unpack.py --output tiny-video-dit
"""

from __future__ import annotations

import argparse
from pathlib import Path

from packing import load_packed

WEIGHTS = Path(__file__).parent / "weights"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="folder of packed weights")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    try:
        pipe = load_packed(args.weights)
    except FileNotFoundError as error:
        parser.error(f"--weights: {error}")
    pipe.save_pretrained(args.output)
    print(f"{args.output}: {pipe.transformer.num_parameters() / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main()
