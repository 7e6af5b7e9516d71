"""Every instruction of IFEval on texts that follow it, and on texts that do not."""

import time

import pytest

from rft.reward.rules.instructions.ifeval import INSTRUCTIONS, sentences

AT_LEAST, LESS = "at least", "less than"
BULLETS = "Two:\n* one\n  - two\n** three **\n*"
GERMAN = "Das Wetter ist heute schön, und wir gehen in den Garten."
ENGLISH = "The weather is nice today, and we are going into the garden."

# instruction, its arguments, texts that follow it, texts that do not
CASES = [
    ("keywords:existence", {"keywords": ["land", "River"]},
     ["The LAND by the rivers"], ["The land", "", "r i v e r land"]),
    ("keywords:existence", {"keywords": ["a+b"]}, ["it is a+b"], ["it is aab"]),
    ("keywords:frequency", {"keyword": "cat ", "frequency": 2, "relation": AT_LEAST}, ["Cat cat", "catcat"], ["cat"]),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": LESS}, ["cat", ""], ["Cat concatenated"]),
    ("keywords:forbidden_words", {"forbidden_words": ["can", "ride"]}, ["A canal, riders"], ["You CAN.", "to ride"]),
    ("keywords:forbidden_words", {"forbidden_words": ["U.S.", "c++"]}, ["UxSx", "c"], ["in the U.S. and", "a c++ b"]),
    ("keywords:letter_frequency", {"letter": "L", "let_frequency": 3, "let_relation": AT_LEAST}, ["Lull"], ["Lua l"]),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 1, "let_relation": LESS}, ["none"], ["# one"]),
    ("language:response_language", {"language": "de"}, [GERMAN, GERMAN.upper()], [ENGLISH, "1234", ""]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": AT_LEAST},
     ["One. Two."], ["One, two.", ""]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": LESS}, ["Dr. A. Smith"], ["Is it? Yes"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2},
     ["a\n***\nb", "***\na\n\nc\n***\nb\n***", "a *** b"],
     ["a\n\nb", "a\n***\n***\nb", "a***b***c", ""]),
    ("length_constraints:number_words", {"num_words": 3, "relation": AT_LEAST}, ["one two-three", "a b c"], ["a, b."]),
    ("length_constraints:number_words", {"num_words": 3, "relation": LESS}, ["one two", "नमस्ते दुनिया"], ["don't go"]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Week"},
     ["a b\n\nweek, two", "a\n\n'WEEK' c", "a\n\n\n\nweek's"],
     ["week\n\na", "a\n\nb\n\nweek", "a\nweek", "a\n\nweekend"]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 1, "nth_paragraph": 2, "first_word": "a"},
     [], ["a"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2},
     ["[name] in [city]", "[[a] []"],
     ["[name], (city)", "[a\nb] [c]", "]a[ [b]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Bye.\nP.S. more", "p. s. x"], ["PS: more", ""]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S more", "p. p.s"], ["P.S. more"]),
    ("detectable_content:postscript", {"postscript_marker": "N.B."}, ["n.b. this"], ["nxbx this"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2},
     [BULLETS, "- a\n\n- b", "*\n\u00a0* a"], ["- a", "- a\n- b\n* c"]),
    ("detectable_format:constrained_response", {},
     ["My answer is no.", "So: My answer is maybe."], ["my answer is no.", "No"]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* and *b c*", "**a** *b*"],
     ["*a*", "**a**", "* *\n**  **", "*a\nb* *c*"]),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2},
     ["SECTION 1\na\nSECTION 2\nb", "SECTION1 SECTION2 SECTION3"],
     ["SECTION 1", "Section 1 Section 2", "SECTION A SECTION B"]),
    ("detectable_format:json_format", {}, ['{"a": 1}', ' ```json\n{"a": [1]}\n```\n', "```\n1\n```"],
     ["{'a': 1}", 'Here: {"a": 1}', "", "[" * 100_000]),
    ("detectable_format:title", {}, ["<<A poem>>\nmore", "see <<<x>>>"],
     ["<A poem>", "<< >>", "<<\u00a0>>", "<<a\nb>>", ">>a<<"]),
    ("combination:two_responses", {}, ["yes\n******\nno", "******yes******no******"],
     ["yes******yes", "yes", "a******b******c", "a************b"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Who are you? "},
     [" who are you?\nA program."], ["A program. Who are you?"]),
    ("startend:end_checker", {"end_phrase": "Any questions?"},
     ['"So. any QUESTIONS?" '], ["Any questions? No.", "Any questions"]),
    ("startend:quotation", {}, ['"All of it."', ' "" '], ['"All" of it', '"', "“All”", ""]),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": AT_LEAST},
     ["I am OK.", "U.S.A and TOP-10"], ["One NATO", "A-B"]),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": LESS},
     ["NATO", "MAX_VALUE", ""], ["NATO, NASA"]),
    ("change_case:english_capital", {}, [ENGLISH.upper()], [ENGLISH, GERMAN.upper(), "1234", ""]),
    ("change_case:english_lowercase", {}, [ENGLISH.lower()], [ENGLISH, GERMAN.lower(), "1234", ""]),
    ("punctuation:no_comma", {}, ["One; two.", "二、三"], ["One, two", ","]),
]  # fmt: skip


def built(name, arguments):
    return INSTRUCTIONS.build({"name": name, **arguments}, "kwargs")


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), CASES)
def test_texts_that_follow_an_instruction_and_texts_that_do_not(name, arguments, right, wrong):
    check = built(name, arguments)
    assert [text for text in right if not check(text)] == [] and [text for text in wrong if check(text)] == []


def test_every_instruction_has_a_case():
    assert {name for name, *_ in CASES} == set(INSTRUCTIONS.names()) and len(INSTRUCTIONS.names()) == 25


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("...", 0),
        ("No end", 1),
        ("One. Two! Three? Four", 4),
        ("One... Two", 2),
        ("It costs 3.5 dollars, e.g. at Dr. A. Smith's shop.", 1),
        ('He said "Go." She went.', 2),
        ("So... he said?! Yes.", 2),
        ("A. B. C. D. Smith came. He left.", 2),
        ("he went home. she stayed.", 2),
        ('He asked "why?" and left... or did he?', 1),
        ("We left the U.S. We drove to St. Ives on Jan. 5.", 2),
        ("List:\n1. One thing.\n2. Another thing.", 2),
        ("一。二\uff01三", 3),
        ("One.\n\nTwo.\n", 2),
    ],
)
def test_sentences(text, count):
    assert sentences(text) == count


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("keywords:exist", {}, r"no instruction is called 'keywords:exist'; did you mean keywords:existence"),
        ("punctuation:no_comma", {"n": 1}, r"kwargs\.n: instruction 'punctuation:no_comma' takes no options"),
        ("startend:end_checker", {}, r"kwargs\.end_phrase is missing"),
        ("keywords:letter_frequency", {"letter": "ab", "let_frequency": 1, "let_relation": LESS}, "one character"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "at most"}, "one of less than, at least"),
        ("detectable_format:number_bullet_lists", {"num_bullets": -1}, "it must be at least 0"),
        ("language:response_language", {"language": "German"}, r"'German' is no code of a known language; .* de,"),
    ],
)
def test_instructions_with_wrong_arguments(name, arguments, said):
    with pytest.raises(ValueError, match=said):
        built(name, arguments)


@pytest.mark.parametrize(
    "unit", ["[", "<<", ">>", "*", "* ", ".", ". ", "A. ", "\n", " ", "\n1. ", '"', "P.", "```", "{", "Section ", "a-"]
)
def test_no_text_takes_long(unit):
    text = unit * (50_000 // len(unit))
    start = time.process_time()
    for name, arguments, *_ in CASES:
        built(name, arguments)(f"x{text}")
        built(name, arguments)(f"{text}x")
    assert time.process_time() - start < 5
