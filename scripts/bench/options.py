"""Checks of the options that sections share."""

import argparse


def check_positive(arguments: argparse.Namespace, *names: str) -> None:
    """Checks that options are at least 1. Raises a ValueError that names the one that is not."""
    for name in names:
        if vars(arguments)[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} {vars(arguments)[name]}: give at least 1")
