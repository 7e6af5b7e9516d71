"""How good a response was. Importing this package registers every rule in it."""

from rft.reward import gsm8k, text
from rft.reward.registry import REWARDS

__all__ = ["REWARDS", "gsm8k", "text"]
