"""Short writing tasks with verifiable instructions of IFEval, for reward=ifeval."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from rft.ranges import NonNegativeInt, PositiveInt, Seed

TOPICS = (
    "a walk in the rain", "bees", "a night train", "the sea in winter", "baking bread", "an old bicycle",
    "learning to swim", "a cat that sleeps", "the first day of school", "mountains", "a small library",
    "growing tomatoes", "the moon", "a long bus ride", "making tea", "a lost key", "snow in April",
    "birds at a window", "a busy market", "the smell of coffee", "painting a wall", "an empty beach",
    "a birthday cake", "a broken clock", "playing the piano", "fog", "a letter from a friend", "riding a horse",
    "the last leaf of a tree", "a football match", "a quiet lake", "a thunderstorm", "cooking rice", "a tall bridge",
    "a dog in a park", "old photographs", "a campfire", "the colour blue", "apples", "a street at night",
    "a school play", "moving to a new town", "a garden in spring", "waiting for a bus", "a sailing boat",
    "the taste of honey", "a cold morning", "two sisters", "a wooden chair", "rivers", "a spider and its web",
    "a visit to a museum", "ice cream", "an early alarm", "a kite", "the desert", "a lighthouse", "shoes",
    "a chess game", "a farm", "stars", "a crowded train", "a warm coat", "a song on the radio",
)  # fmt: skip
WORDS = (
    "window",
    "silver",
    "music",
    "yellow",
    "paper",
    "slowly",
    "river",
    "friend",
    "seven",
    "stone",
    "happy",
    "garden",
)
ENDINGS = (
    "That is all.",
    "What do you think?",
    "Have a nice day.",
    "The end.",
    "And so it was.",
    "I will remember it.",
)


def quotation(rng: random.Random) -> tuple[str, dict[str, Any]]:
    return "Put your whole answer between double quotation marks.", {}


def end_checker(rng: random.Random) -> tuple[str, dict[str, Any]]:
    phrase = rng.choice(ENDINGS)
    return f"End your answer with exactly this sentence: {phrase}", {"end_phrase": phrase}


def title(rng: random.Random) -> tuple[str, dict[str, Any]]:
    return "Give it a title in double angular brackets, such as <<a good day>>.", {}


def highlights(rng: random.Random) -> tuple[str, dict[str, Any]]:
    count = rng.randint(1, 2)
    return f"Highlight at least {count} words with asterisks, like *this*.", {"num_highlights": count}


def bullets(rng: random.Random) -> tuple[str, dict[str, Any]]:
    count = rng.randint(2, 3)
    return f"Write exactly {count} bullet points, each on a line that begins with an asterisk.", {"num_bullets": count}


def postscript(rng: random.Random) -> tuple[str, dict[str, Any]]:
    return "Add a postscript at the end that begins with P.S.", {"postscript_marker": "P.S."}


def placeholders(rng: random.Random) -> tuple[str, dict[str, Any]]:
    return "Use at least 1 placeholder in square brackets, such as [name].", {"num_placeholders": 1}


def short(rng: random.Random) -> tuple[str, dict[str, Any]]:
    count = rng.randint(10, 14)
    return f"Use less than {count} words.", {"num_words": count, "relation": "less than"}


def no_comma(rng: random.Random) -> tuple[str, dict[str, Any]]:
    return "Do not use any comma.", {}


def keywords(rng: random.Random) -> tuple[str, dict[str, Any]]:
    words = sorted(rng.sample(WORDS, 2))
    return f"Use the words {words[0]} and {words[1]}.", {"keywords": words}


def capitals(rng: random.Random) -> tuple[str, dict[str, Any]]:
    count = rng.randint(2, 4)
    text = f"Write at least {count} words in capital letters, like THIS."
    return text, {"capital_frequency": count, "capital_relation": "at least"}


FEWEST = 6  # words of an answer
KINDS: dict[str, Callable[[random.Random], tuple[str, dict[str, Any]]]] = {
    "startend:quotation": quotation,
    "startend:end_checker": end_checker,
    "detectable_format:title": title,
    "detectable_format:number_highlighted_sections": highlights,
    "detectable_format:number_bullet_lists": bullets,
    "detectable_content:postscript": postscript,
    "detectable_content:number_placeholders": placeholders,
    "length_constraints:number_words": short,
    "punctuation:no_comma": no_comma,
    "keywords:existence": keywords,
    "change_case:capital_word_frequency": capitals,
}


class Instructions:
    """Rows `{prompt, instruction_id_list, kwargs, data_source}`, one for each topic and kind of instruction.

    Each asks for a word of the topic and for `FEWEST` words, too. Else the phrase that an answer is to end with would
    be an answer.

    Args:
        key: supplied by the run: the yaml key.
        kinds: names of IFEval, keys of `KINDS`.
        first, topics: the number of the first topic, and how many follow; other topics make other rows.
        seed: of the arguments of the instructions.

    Raises:
        ValueError: there is no such kind, or there are not so many topics.
    """

    def __init__(self, key: str, kinds: list[str], first: NonNegativeInt, topics: PositiveInt, seed: Seed) -> None:
        if unknown := sorted({*kinds} - KINDS.keys()):
            raise ValueError(f"{key}.kinds: no such kind {unknown[0]}; choose from {', '.join(KINDS)}")
        if first + topics > len(TOPICS):
            raise ValueError(f"{key}: first={first} and topics={topics}, but there are {len(TOPICS)} topics; lower one")
        self._kinds = kinds
        self._topics = TOPICS[first : first + topics]
        self._seed = seed

    def load(self, required: Sequence[str]) -> list[dict[str, Any]]:
        """Makes the rows."""
        rng = random.Random(self._seed)
        return [self._row(topic, kind, rng) for topic in self._topics for kind in self._kinds]

    def _row(self, topic: str, kind: str, rng: random.Random) -> dict[str, Any]:
        instruction, arguments = KINDS[kind](rng)
        word = topic.split()[-1]
        return {
            "prompt": f"Write a sentence of at least {FEWEST} words about {topic}, with the word {word}. {instruction}",
            "instruction_id_list": ["length_constraints:number_words", "keywords:existence", kind],
            "kwargs": [{"num_words": FEWEST, "relation": "at least"}, {"keywords": [word]}, arguments],
            "data_source": kind.split(":")[1],
        }
