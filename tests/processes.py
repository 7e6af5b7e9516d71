"""What tests ask about processes."""

from pathlib import Path


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended exists until its parent has read its status, and does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # of a process that ends, the file can be opened and not be read
        return False
