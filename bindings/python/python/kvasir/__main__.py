"""`python -m kvasir ...` is the command `kvasir ...` of this installation."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path


def command() -> Path:
    """Where the command of this installation is."""
    schemes = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))]
    places = [Path(folder) / "kvasir" for folder in schemes if folder]
    # Where `pip install --target` puts it.
    places.append(Path(__file__).resolve().parents[1] / "bin" / "kvasir")
    for place in places:
        if place.is_file():
            return place
    raise SystemExit(f"kvasir: no command in {places[0].parent}: this wheel was built without it (wheel.py puts it in)")


def main() -> None:
    """Becomes the command."""
    place = command()
    os.execv(place, [str(place), *sys.argv[1:]])


if __name__ == "__main__":
    main()
