"""Rules about instructions that a program can verify. Importing this package registers them."""

from rft.imports import import_all

import_all(__name__)
