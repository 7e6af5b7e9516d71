"""Rewards that are functions of one response and its row. Importing this package registers them."""

from rft.imports import import_all

import_all(__name__)
