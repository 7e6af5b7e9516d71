"""OpenAI's file of model solutions: a question, and for each of four models its solution and whether it is right."""

from rft.data.rows.schemas import SCHEMAS


@SCHEMAS.register("graded_solutions")
def graded_solutions(row: dict, *, models: list[str]) -> dict:
    """The solutions as a list of scored `answers`, with the last line "A: 5" as GSM8K itself writes it, "#### 5".

    A solution that was cut off has no such line and is left out: 7 of 2,640, in which digits repeat without an end.
    """
    solutions = [row[model] for model in models]
    answers = [
        {"text": solution["solution"].replace("\nA: ", "\n#### "), "score": solution["is_correct"]}
        for solution in solutions
        if "\nA: " in solution["solution"]
    ]
    return {"prompt": row["question"], "answers": answers}
