"""Solutions of GSM8K as dialogues with an interpreter, by the calculator annotations in them."""

import re

from rft.data.rows.schemas import SCHEMAS

CALCULATION = re.compile(r"<<([^<>=]+)=([^<>]+)>>")  # of "48/2 = <<48/2=24>>24"


@SCHEMAS.register("tool_solutions")
def tool_solutions(row: dict) -> dict:
    """A row with a `demonstration`: a program that prints the value of each calculation, its output, and the answer.

    The program stands behind the mark `?`. Its output has the numbers of the solution: 24, where Python prints 24.0. A
    solution without a calculation is demonstrated as it is.
    """
    found = CALCULATION.findall(row["answer"])
    program = "\n".join(f"print({calculation.strip()})" for calculation, _ in found)
    output = "\n".join(result for _, result in found)
    called = [("assistant", f"?{program}"), ("tool", output), ("assistant", row["answer"].split("\n")[-1])]
    shown = called if found else [("assistant", row["answer"])]
    messages = [{"role": role, "content": content} for role, content in shown]
    return {"prompt": row["question"], "answer": row["answer"], "demonstration": messages}
