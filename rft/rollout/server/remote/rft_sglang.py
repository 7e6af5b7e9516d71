"""Starts SGLang's server with the key in an environment variable: `python -m rft_sglang`, with the flags of
`sglang.launch_server`.

SGLang takes its key as a flag (`--api-key`), which every user of the machine could read in the command line, and logs
all its flags. It needs the standard library and sglang alone; see `rft_receiver`.
"""

import logging
import os
import runpy
import sys
from typing import Any

from rft_server_key import KEY_VARIABLE  # type: ignore[import-not-found]  # in the same folder

HIDDEN = "***"


def hide(key: str) -> None:
    """Replaces the key in all log records of this process."""
    make = logging.getLogRecordFactory()

    def without_key(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = make(*arguments, **options)
        if key in (message := record.getMessage()):
            record.msg, record.args = message.replace(key, HIDDEN), ()
        return record

    logging.setLogRecordFactory(without_key)


if __name__ == "__main__":
    if key := os.environ.get(KEY_VARIABLE):
        hide(key)
        # The operating system shows the command line with which the process started. A key may begin with a dash.
        sys.argv.append(f"--api-key={key}")
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
