"""How good a response was. Importing this package registers every rule in it."""

from rft.reward import choice, gsm8k, text
from rft.reward.registry import REWARDS

__all__ = ["REWARDS", "choice", "gsm8k", "text"]
