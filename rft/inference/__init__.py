"""A model that only answers: mode=evaluate, generate, chat."""

from rft.inference.chat import chat
from rft.inference.evaluate import evaluate
from rft.inference.generate import generate

MODES = {"evaluate": evaluate, "generate": generate, "chat": chat}
