"""What becomes of the answers of the assistant in given texts: they train, or do not for one of some causes."""

from collections.abc import Sequence

from rft.data.encode.parts import Messages, asked

# Keys of a message of the assistant that say how much it trains: of OpenAI, of verl, and of axolotl and others.
MARKS = ("weight", "loss_mask", "train", "loss", "trainable")
# What becomes of an answer of the assistant; why it does not train.
TRAINED, EARLIER, REWRITES, MARKED = "trained", "earlier", "rewritten", "marked"
CAUSES = {
    EARLIER: "stand before the answer of their row (data.train_on=assistant trains them, too)",
    REWRITES: "are rewritten by the chat template where messages follow them, such as without a thought, so the model "
    "never writes them as they stand (add rows that end with them)",
    MARKED: f"are marked ({', '.join(MARKS)})",
}
FATES = (TRAINED, *CAUSES)


def text_fates(prompt: str | Messages) -> list[str]:
    """What becomes of an answer that is a text, and of the turns in its prompt; see `FATES`."""
    return [TRAINED, *(EARLIER for _ in (() if isinstance(prompt, str) else asked(prompt[:-1])))]


def explain(counts: Sequence[int]) -> str | None:
    """A message about answers that do not train; None where all do.

    Args:
        counts: answers of the assistant by what becomes of them, in the order of `FATES`.
    """
    trained, *others = counts
    causes = [f"{count:,} {cause}" for count, cause in zip(others, CAUSES.values(), strict=True) if count]
    if not causes:
        return None
    return "; ".join([f"{trained:,} of {sum(counts):,} answers of the assistant are in the loss", *causes])
