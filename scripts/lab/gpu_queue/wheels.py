"""Wheels of installed packages, made again without a network."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from email import message_from_string
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from decode.errors import UserError

# Files that an installer writes
INSTALLED = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")


def wheel_of(name: str, folder: Path) -> Path:
    """Write the wheel of an installed package of Python code into a folder.

    Raises:
        UserError: it is not installed, has compiled code, or is installed from a folder.
    """
    try:
        found = distribution(name)
    except PackageNotFoundError:
        raise UserError(
            f"{name}: is not installed, so its wheel cannot be made; pip install {name}"
        ) from None
    facts = message_from_string(found.read_text("WHEEL") or "")
    tags = facts.get_all("Tag") or []
    if facts.get("Root-Is-Purelib") != "true" or not all(tag.endswith("-none-any") for tag in tags):
        raise UserError(
            f"{name}: has compiled code; download its wheel for that machine, and give it as --wheel"
        )
    if not (files := _files(found)):
        raise UserError(f"{name}: is not installed from a wheel; pip install it")
    information = next(path for path in files if path.endswith(".dist-info/METADATA")).split("/")[0]
    tag = next((tag for tag in tags if tag.startswith("py3")), tags[0])
    path = folder / f"{re.sub(r'[-_.]+', '_', name).lower()}-{found.version}-{tag}.whl"
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for place, file in sorted(files.items()):
            content = file.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{place},sha256={digest},{len(content)}\n")
            wheel.writestr(place, content)
        wheel.writestr(f"{information}/RECORD", "".join([*record, f"{information}/RECORD,,\n"]))
    return path


def _files(found: Distribution) -> dict[str, Path]:
    """Files of a wheel by their places in it; commands, which an installer makes, and bytecode are none."""
    places = [
        place for place in found.files or () if ".." not in place.parts and "__pycache__" not in place.parts
    ]
    kept = [
        place for place in places if not (place.parts[0].endswith(".dist-info") and place.name in INSTALLED)
    ]
    return {place.as_posix(): Path(str(place.locate())) for place in kept}
