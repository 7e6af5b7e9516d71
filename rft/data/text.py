"""The text of a file of the user's, in UTF-8."""

from pathlib import Path

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def check_file(path: str, key: str) -> Path:
    """The file of that path.

    Raises:
        ValueError: it does not exist or is a folder; names `key`.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        found = "it is a folder" if file.is_dir() else "there is no such file"
        raise ValueError(f"{key}={path}: {found}; give the path of a file")
    return file


def read_text(path: str, key: str) -> str:
    """The text of a file.

    Raises:
        ValueError: there is no such file, or it is not in UTF-8; names `key`.
    """
    return decoded(check_file(path, key).read_bytes(), f"{key}={path}")


def decoded(data: bytes, where: str) -> str:
    """The text of bytes in UTF-8, without a byte order mark.

    Raises:
        ValueError: they are not UTF-8; names the place.
    """
    try:
        return data.removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        at = f" in line {line}" if line > 1 else ""
        byte = error.object[error.start]
        raise ValueError(f"{where}: not UTF-8 (byte {byte:#04x}{at}); save the file in UTF-8") from None
