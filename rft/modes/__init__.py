"""A model that only answers: mode=evaluate, generate, chat."""

from rft.modes.chat import chat
from rft.modes.evaluate import evaluate
from rft.modes.generate import generate

MODES = {"evaluate": evaluate, "generate": generate, "chat": chat}
