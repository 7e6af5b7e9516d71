"""Solutions of GSM8K in steps that are known to be right or wrong, by the calculator annotations in them."""

import random
import re

from rft.data.rows.schemas import SCHEMAS

RESULT = re.compile(r"=([\d.,]*\d)>>\1(?![.,]?\d)")  # of "48/2 = <<48/2=24>>24"


@SCHEMAS.register("wrong_steps")
def wrong_steps(row: dict, *, wrong: float) -> dict:
    """The lines of a solution as steps with `labels`; in a share `wrong` of the solutions a calculation goes wrong.

    There a digit of the result of one line is another one, and the solution ends with that line. Which solutions, lines
    and digits these are depends on the question alone.
    """
    steps, dice = row["answer"].split("\n"), random.Random(row["question"])
    labels = [True] * len(steps)
    calculated = [number for number, step in enumerate(steps) if RESULT.search(step)]
    if calculated and dice.random() < wrong:
        last = dice.choice(calculated)
        *_, found = RESULT.finditer(steps[last])
        result = _another(found[1], dice)
        step = f"{steps[last][: found.start()]}={result}>>{result}{steps[last][found.end() :]}"
        steps, labels = [*steps[:last], step], [*labels[:last], False]
    return {"prompt": row["question"], "completions": steps, "labels": labels}


def _another(number: str, dice: random.Random) -> str:
    """The number with another digit in one place."""
    place = dice.choice([place for place, character in enumerate(number) if character.isdigit()])
    digit = dice.choice([digit for digit in "123456789" if digit != number[place]])
    return f"{number[:place]}{digit}{number[place + 1 :]}"
