"""Rules about instructions that a program can verify. Importing this package registers them."""

from rft.reward.rules.instructions import ifeval, language

__all__ = ["ifeval", "language"]
