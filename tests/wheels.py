"""Wheels made on the spot, for tests that must not need an index."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import zipfile
from pathlib import Path


def make_wheel(folder: Path, name: str, *, requires: tuple[str, ...] = (), text: str = "") -> Path:
    """A wheel of one module `name`, whose source is `text`."""
    version = "1.0"
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {one}\n" for one in requires)
    tags = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {f"{name}.py": text.encode(), f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": tags.encode()}
    return _pack(folder / f"{name}-{version}-py3-none-any.whl", files, info)


def wheel_of_pip(folder: Path) -> Path:
    """The pip of this very environment, as the wheel it came from."""
    found = importlib.metadata.distribution("pip")
    names = [name for name in found.files or [] if ".." not in name.parts and name.suffix != ".pyc"]
    info = f"pip-{found.version}.dist-info"
    files = {str(name): Path(str(name.locate())).read_bytes() for name in names if name.name != "RECORD"}
    return _pack(folder / f"pip-{found.version}-py3-none-any.whl", files, info)


def _pack(path: Path, files: dict[str, bytes], info: str) -> Path:
    record = ""
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(content)}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(name, content)
    return path
