"""Builds the wheel: the package, its module in Rust, and the command `kvasir` beside it.

    python bindings/python/wheel.py [--release | --built] [--out DIR]

Needs Rust and Python 3.11 or later, and nothing else. A debug build uses what cargo has built for the tests; `--built` builds nothing; `--release` is what is given
to others.
Prints the path of the wheel. (`pip install bindings/python` builds the package alone, with maturin.)
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The oldest Python whose stable ABI the module is built against; as in Cargo.toml.
ABI = "cp311-abi3"


def cargo(*words: str) -> str:
    """Runs cargo in this repository."""
    done = subprocess.run(["cargo", *words], cwd=HERE, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def built(release: bool, is_built: bool) -> tuple[Path, Path, str]:
    """The command, the module, and the version. Both are built at once: alone each would have its libraries built again."""
    if not is_built:
        cargo("build", "--quiet", "--package", "kvasir-cli", "--package", "kvasir-python", *(["--profile", "dist"] if release else []))
    metadata = json.loads(cargo("metadata", "--format-version", "1", "--no-deps"))
    folder = Path(metadata["target_directory"]) / ("dist" if release else "debug")
    version = next(package["version"] for package in metadata["packages"] if package["name"] == "kvasir-python")
    return folder / "kvasir", folder / "lib_native.so", version


def platform_tag() -> str:
    """Machines with this processor and a C library of this age or newer."""
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    if name != "glibc":
        return f"linux_{platform.machine()}"
    major, minor = version.split(".")[:2]
    return f"manylinux_{major}_{minor}_{platform.machine()}"


def stripped(path: Path, folder: Path) -> Path:
    """The file without what only a debugger reads."""
    copy = folder / path.name
    strip = shutil.which("strip")
    if strip is None:
        shutil.copyfile(path, copy)
    else:
        subprocess.run([strip, "-o", str(copy), str(path)], check=True)
    return copy


def metadata(version: str) -> str:
    """What pip reads, from pyproject.toml."""
    project = (HERE / "pyproject.toml").read_text()
    field = lambda name: re.search(rf'^{name} = "(.*)"$', project, re.MULTILINE).group(1)  # type: ignore[union-attr]  # noqa: E731
    lines = [
        "Metadata-Version: 2.4",
        "Name: kvasir",
        f"Version: {version}",
        f"Summary: {field('description')}",
        f"License-Expression: {field('license')}",
        f"Requires-Python: {field('requires-python')}",
        "Description-Content-Type: text/markdown",
    ]
    return "\n".join(lines) + "\n\n" + (HERE / "README.md").read_text()


class Archive:
    """A wheel as it is written: a zip with a list of what is in it."""

    def __init__(self, path: Path, record: str) -> None:
        # Quick to make; what is stripped hardly shrinks further.
        self.zip = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        self.record, self.lines = record, [f"{record},,"]

    def put(self, name: str, data: bytes, mode: int = 0o644) -> None:
        entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
        entry.external_attr = (0o100000 | mode) << 16
        self.zip.writestr(entry, data, zipfile.ZIP_DEFLATED, 1)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        self.lines.append(f"{name},sha256={digest},{len(data)}")

    def close(self) -> None:
        self.zip.writestr(self.record, "\n".join(self.lines) + "\n")
        self.zip.close()


def build(release: bool, is_built: bool, out: Path) -> Path:
    """The wheel."""
    command, module, version = built(release, is_built)
    tag = f"{ABI}-{platform_tag()}"
    out.mkdir(parents=True, exist_ok=True)
    wheel, info = out / f"kvasir-{version}-{tag}.whl", f"kvasir-{version}.dist-info"
    with tempfile.TemporaryDirectory(dir=out) as folder:
        archive = Archive(Path(folder) / "wheel", f"{info}/RECORD")
        package = HERE / "python"
        for path in sorted((package / "kvasir").rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.put(str(path.relative_to(package)), path.read_bytes())
        archive.put("kvasir/_native.abi3.so", stripped(module, Path(folder)).read_bytes(), 0o755)
        archive.put(f"kvasir-{version}.data/scripts/kvasir", stripped(command, Path(folder)).read_bytes(), 0o755)
        archive.put(f"{info}/METADATA", metadata(version).encode())
        archive.put(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: wheel.py\nRoot-Is-Purelib: false\nTag: {tag}\n".encode())
        archive.close()
        os.replace(Path(folder) / "wheel", wheel)
    return wheel


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--release", action="store_true", help="optimised, for others")
    options.add_argument("--built", action="store_true", help="of what cargo has built without it being optimised; builds nothing")
    options.add_argument("--out", type=Path, default=Path("dist"), help="folder for the wheel (dist)")
    given = options.parse_args()
    print(build(given.release, given.built, given.out))
