"""Answers to every instruction of IFEval: texts by hand for its edges, and texts of pieces drawn with a seed."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from rft.reward.rules.instructions.ifeval import compares

SEED, DRAWN = 0, 40  # texts that are drawn for an instruction
LONGEST = 6  # pieces
RELATIONS = ("at least", "less than")
Texts = dict[str, int | None]  # texts with the number that the instruction counts in each, where a table says it


class Kind(NamedTuple):
    """How answers to an instruction are made.

    Attributes:
        arguments: each is combined with all texts. None is 0 and a letter is one of a to z, since lm_eval draws another
            at random.
        pieces: of the drawn texts.
        joints: what stands between pieces.
        texts: by hand.
    """

    arguments: list[dict[str, Any]]
    pieces: Texts
    joints: list[str]
    texts: Texts


class Case(NamedTuple):
    """An answer to an instruction.

    Attributes:
        follows: whether the text follows it, where a table says it.
    """

    name: str
    arguments: dict[str, Any]
    text: str
    follows: bool | None


def _related(name: str, relation: str, *numbers: int, **more: Any) -> list[dict[str, Any]]:
    return [{**more, name: number, relation: sign} for number in numbers for sign in RELATIONS]


def _each(name: str, *values: Any, **more: Any) -> list[dict[str, Any]]:
    return [{name: value, **more} for value in values]


def _texts(*texts: str) -> Texts:
    return dict.fromkeys(texts)


WORDS = _texts(
    "river", "Rivers", "LAND", "landed", "concatenated", "Cat", "cat.", "it's", "a+b", "aab", "end,", "Oh!",
    "straße", "STRASSE", "U.S.", "UxSx", "c++", "_cat_", "cat's", "catcat",
)  # fmt: skip
SENTENCES: Texts = {
    "We went home.": 1, "Is it late?": 1, "Stop that now!": 1, "It costs 3.5 dollars.": 1, "Dr. Smith came in.": 1,
    "We met A. B. Smith.": 1, "Use tools, e.g. a hammer.": 1, 'He said "Go now." She went.': 2, "So what?! Nothing.": 2,
    "Wait... It was late.": 2, "(It was late.) We slept.": 2, "1. Take the eggs.": 1, "* Wash the cup.": 1,
    "The U.S. army came.": 1, "It was 5 p.m. when we left.": 1, "a small start.": 1, "See www.rft.org for more.": 1,
    "\u3053\u308c\u306f\u672c\u3067\u3059\u3002": 1, "Mr. and Mrs. Lee sat.": 1, "Wow!!!": 1, "...": 0, "***": 0,
    "We left at 5 p.m. It was late.": 2, "we slept. was it late? it was.": 3, "He ate nuts, etc. The rest stayed.": 2,
}  # fmt: skip
MORE_SENTENCES: Texts = {
    "": 0, "No end here": 1, "He asked, \u201cWhy?\u201d": 1, 'He asked "why?" and left.': 1,
    "See Fig. 3 and Vol. 2.": 1,
    "It is No. 5.": 1, "The answer is no. We left.": 2, "On Jan. 5 we met.": 1, "Smith et al. wrote it.": 1,
    "He waited... and left.": 1, "Take approx. ten eggs.": 1, "He lives in the U.S. We met.": 2, "A. One\nB. Two": 1,
    "Take plan B. It works.": 2, "**One is bold.** two is not.": 2, "Made by Acme Inc.\n\nOthers sell it.": 2,
    "It was late (at 5 p.m.) then.": 1, "He went home.She stayed.": 1,
}  # fmt: skip
CAPITALS: Texts = {
    "NATO": 1, "I": 1, "Nato": 0, "TOP-10": 1, "U.S.A.": 1, "AT&T": 1, "I'M": 1, "CAN'T": 1, "BBC/CNN": 2, "3D": 1,
    "42": 0, "WORLD!": 1, '"QUOTED"': 1, "(YES)": 1, "x": 0, "A": 1, "*BOLD*": 1, "EU\u2013UK": 2, "#TAG": 1, "A_B": 1,
    "iPHONE": 0, "OK.": 1, "DON\u2019T": 1, "\u00c9T\u00c9": 1, "R2D2": 1, "C++": 1, "<<TITLE>>": 1, "II.": 1,
    "WELL...": 1, "YES--NO": 2, "it": 0, "was": 0, "a": 0, "good": 0, "day": 0,
}  # fmt: skip
LANGUAGES = {
    "en": "The weather is nice today, and we are going into the garden with our friends.",
    "de": "Das Wetter ist heute schön, und wir gehen mit unseren Freunden in den Garten.",
    "fr": "Il fait beau aujourd'hui et nous allons dans le jardin avec nos amis.",
    "es": "Hoy hace buen tiempo y vamos a salir al jardín con nuestros amigos.",
    "it": "Oggi il tempo è bello e andiamo in giardino con i nostri amici.",
    "pt": "Hoje o tempo está bom e nós vamos ao jardim com os nossos amigos.",
    "ru": "Сегодня хорошая погода, и мы идём в сад с друзьями.",  # noqa: RUF001
    "uk": "Сьогодні гарна погода, і ми йдемо в сад з друзями.",  # noqa: RUF001
    "bg": "Днес времето е хубаво и отиваме в градината с нашите приятели.",  # noqa: RUF001
    "pl": "Dziś jest ładna pogoda i idziemy do ogrodu z przyjaciółmi.",
    "fi": "Tänään on kaunis sää, ja menemme puutarhaan ystäviemme kanssa.",
    "sw": "Leo hali ya hewa ni nzuri na sisi tunaenda bustanini pamoja na marafiki zetu.",
    "vi": "Hôm nay thời tiết đẹp và chúng tôi đi ra vườn với bạn bè.",
    "ar": "الطقس جميل اليوم ونحن ذاهبون إلى الحديقة مع أصدقائنا.",
    "fa": "امروز هوا خوب است و ما با دوستانمان به باغ می‌رویم.",
    "ur": "آج موسم اچھا ہے اور ہم اپنے دوستوں کے ساتھ باغ میں جا رہے ہیں۔",  # noqa: RUF001
    "he": "היום מזג האוויר יפה ואנחנו הולכים לגינה עם החברים שלנו.",
    "hi": "आज मौसम अच्छा है और हम दोस्तों के साथ बगीचे में जा रहे हैं।",
    "mr": "आज हवामान चांगले आहे आणि आम्ही मित्रांसोबत बागेत जात आहोत.",
    "ne": "आज मौसम राम्रो छ र हामी साथीहरूसँग बगैंचामा जाँदैछौं।",
    "bn": "আজ আবহাওয়া ভালো এবং আমরা বন্ধুদের সাথে বাগানে যাচ্ছি।",
    "gu": "આજે હવામાન સારું છે અને અમે મિત્રો સાથે બગીચામાં જઈ રહ્યા છીએ.",
    "pa": "ਅੱਜ ਮੌਸਮ ਚੰਗਾ ਹੈ ਅਤੇ ਅਸੀਂ ਦੋਸਤਾਂ ਨਾਲ ਬਾਗ ਵਿੱਚ ਜਾ ਰਹੇ ਹਾਂ।",
    "ta": "இன்று வானிலை நன்றாக உள்ளது, நாங்கள் நண்பர்களுடன் தோட்டத்திற்குச் செல்கிறோம்.",
    "te": "ఈరోజు వాతావరణం బాగుంది, మేము స్నేహితులతో తోటకు వెళ్తున్నాము.",
    "kn": "ಇಂದು ಹವಾಮಾನ ಚೆನ್ನಾಗಿದೆ, ನಾವು ಸ್ನೇಹಿತರೊಂದಿಗೆ ತೋಟಕ್ಕೆ ಹೋಗುತ್ತಿದ್ದೇವೆ.",
    "ml": "ഇന്ന് കാലാവസ്ഥ നല്ലതാണ്, ഞങ്ങൾ സുഹൃത്തുക്കളോടൊപ്പം തോട്ടത്തിലേക്ക് പോകുന്നു.",
    "ko": "오늘은 날씨가 좋아서 우리는 친구들과 정원에 갑니다.",
    "ja": "今日は天気がいいので、友達と庭に行きます。",
    "th": "วันนี้อากาศดีและเราไปที่สวนกับเพื่อน",
}
CASED = {code: LANGUAGES[code] for code in ("en", "de", "fr", "es", "it", "pt", "pl", "fi")}
NO_LETTERS = ("1234", "$ % &", "123 456!", "!!!")
BLANK = ("", " ", "\n", "\t\n")
KINDS = {
    "keywords:existence": Kind(
        _each("keywords", ["river", "land"], ["cat"], ["a+b"], ["end."], ["straße"], ["U.S."]),
        WORDS, [" ", "\n", "-"], _texts("RIVERLAND", "end.", "endx")),
    "keywords:frequency": Kind(
        [*_related("frequency", "relation", 1, 2, keyword="cat "),
         *_related("frequency", "relation", 2, keyword="U.S.")],
        WORDS, [" ", "", "\n"], _texts("cat\ncat", "CATcat", "U.S. and UxSx", "u.s.u.s.")),
    "keywords:forbidden_words": Kind(
        _each("forbidden_words", ["cat", "river"], ["a+b"], ["it's"], ["c++"], ["U.S."]),
        WORDS, [" ", "-", "\n"], _texts("cats", "scat", "CAT", "in the U.S. and", "a c++ b", "c++11", "cat\u0301")),
    "keywords:letter_frequency": Kind(
        [*_related("let_frequency", "let_relation", 1, 3, letter="L"),
         *_related("let_frequency", "let_relation", 2, letter="i")],
        _texts("Lull", "lily", "I", "\u0130", "none", "\u0131", "LaLaLa", "42", "!"), [" ", "\n"], _texts("I i")),
    "length_constraints:number_sentences": Kind(
        _related("num_sentences", "relation", 2, 3, 5), SENTENCES, [" ", "\n", "\n\n"], SENTENCES | MORE_SENTENCES),
    "length_constraints:number_paragraphs": Kind(
        _each("num_paragraphs", 1, 2, 3), _texts("one", "two lines\nhere", "", "*", " ", "# three"),
        ["***", "\n***\n", "\n\n***\n\n", " *** "],
        _texts("***", "****", "*****", "******", "one\n\ntwo", "one\n* * *\ntwo", "one\n---\ntwo", "one***", "***one",
               "one\u00a0***\u00a0two", *BLANK)),
    "length_constraints:number_words": Kind(
        _related("num_words", "relation", 3, 6),
        _texts("one", "two-three", "don't", "4.5", "a_b", "\u00e9t\u00e9", "e\u0301te\u0301", "\u65e5\u672c\u8a9e",
               "...", "U.S.", "https://a.b/c?d=1", "\u0928\u092e\u0938\u094d\u0924\u0947"),
        [" ", "\n", ", "], _texts(*BLANK, "- - -", *LANGUAGES.values())),
    "length_constraints:nth_paragraph_first_word": Kind(
        [{"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "week"},
         {"num_paragraphs": 3, "nth_paragraph": 1, "first_word": "Week"},
         {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "don't"}],
        _texts("week one", "Week, two", "'week'", '"Week" three', "weekly", "a week", "", " ", "week's end", "* week",
               "**week**", "week\nnot", "don't stop", "\u201cweek\u201d"),
        ["\n\n", "\n\n\n", "\n\n\n\n", "\n \n"],
        _texts("week", "\n\nweek", "'\"week", "\"'week", "\n\n\n\nweek\n\nx", "a\n\nweek", "a\n\n\n\nweek")),
    "detectable_content:number_placeholders": Kind(
        _each("num_placeholders", 1, 2, 3), _texts("[name]", "[]", "[a", "b]", "[[x]]", "(y)", "[two words]", "]["),
        [" ", "", "\n"], _texts("[a\nb]", "[a][b][c]", "[a] [b")),
    "detectable_content:postscript": Kind(
        _each("postscript_marker", "P.S.", "P.P.S", "N.B.", "PS:"),
        _texts("Bye.", "P.S. more", "p. s. x", "P.P.S more", "P. P. S", "PS: x", "N.B. this", "nxbx", "p.s", "P.P.S."),
        ["\n", " "], _texts("p.\ns. x", "P.\u00a0S. x", "**P.S.** x")),
    "detectable_format:number_bullet_lists": Kind(
        _each("num_bullets", 1, 2, 3),
        _texts("* a", "- b", "*", "-", "** c **", "  * d", "\t- e", "*f", "text", "", "\u2022 g", "1. h", "---", "***",
               "\u00a0* i", "*  ", "+ j"),
        ["\n", "\n\n"],
        _texts("* a\r\n* b", "*\n* a", "*\n\n* a", "*\ntext", "a * b", "*\n", "* \n", "*\n- b")),
    "detectable_format:constrained_response": Kind(
        [{}],
        _texts("My answer is yes.", "My answer is no.", "my answer is no.", "My answer is maybe", "I think:", "**"),
        [" ", "\n", ""], _texts("My answer\nis yes.", "My answer is yes, no.")),
    "detectable_format:number_highlighted_sections": Kind(
        _each("num_highlights", 1, 2, 3),
        _texts("*a*", "**b**", "*c d*", "* *", "**", "* e", "***f***", "**  **", "_g_", "*h"), [" ", "\n", ""],
        _texts("*a\nb*", "****", "*****", "*a**b*", "**a*b**", "* a\n* b", "***a b***")),
    "detectable_format:multiple_sections": Kind(
        [{"section_spliter": name, "num_sections": n} for name in ("SECTION", "Section ", "Day", "Q.") for n in (1, 2)],
        _texts("SECTION 1", "Section 2", "SECTION3", "SECTION A", "Day 1", "day 2", "Monday 3", "text", "SECTION",
               "Section  4", "Q. 1", "Qx2"),
        ["\n", " ", "\n\n"], _texts("SECTION\n1\nSECTION\n2", "SECTION 1, SECTION 2")),
    "detectable_format:json_format": Kind(
        [{}], _texts('{"a": 1}', "[1, 2]", "```json", "```", "```Json", "1", '"x"', "Here:", "null", "{'a': 1}"),
        ["\n", "", " "],
        _texts('```json\n{"a": 1}\n```', '```json {"a": 1}```', '{"a": 1}\n```', "NaN", "[1,]", "```jsoN\n1\n```",
               "```JSON\n1\n```", "```python\n1\n```", "````\n1\n````", "```json\n1", "``` \n1\n ``` ",
               '{"a": 1} {"b": 2}', "```\n```json\n1\n```", "[" * 9000 + "]" * 9000)),
    "detectable_format:title": Kind(
        [{}], _texts("<<Title>>", "<<", ">>", "<a>", "<< >>", "<<<b>>>", "text", "<<c", "d>>", "<", ">"),
        [" ", "", "\n"],
        _texts("<<\u00a0>>", "<< < >>", "<<a\nb>>", "<<>>", "<<<>>>", "<<a>> and <<b>>", "<< > >>")),
    "combination:two_responses": Kind(
        [{}], _texts("yes", "no", "", " ", "yes ", "yes\nmore", "*"), ["******", "\n******\n", "\n***\n"],
        _texts("yes\n****** \nno", "yes*****no", "yes*******no", "yes\n* * * * * *\nno")),
    "combination:repeat_prompt": Kind(
        _each("prompt_to_repeat", "Who are you? ", "Write two lines.\nMake them rhyme."),
        _texts("Who are you?", "who are you", "I am.", "Write two lines.", "Make them rhyme.", "**"), [" ", "\n"],
        _texts("Who are you?I am.", '"Who are you?" I am.', "Who  are you?")),
    "startend:end_checker": Kind(
        _each("end_phrase", "Any questions?", "The end. "),
        _texts("So.", "Any questions?", "any QUESTIONS?", "The end.", '"', "**", "The end", "\u201d",
               "Any\nquestions?"),
        [" ", "", "\n"], _texts("'The end.'", 'The end.""', "The end.'")),
    "startend:quotation": Kind(
        [{}], _texts('"', '"a"', "a", '"b', 'c"', "\u201c", "\u201d", "'"), [" ", "", "\n"],
        _texts('""', '"', '" "', "\u00aba\u00bb", '\nSure:\n"a"')),
    "change_case:capital_word_frequency": Kind(
        _related("capital_frequency", "capital_relation", 1, 2, 4), CAPITALS, [" ", "\n", ", "], CAPITALS),
    "punctuation:no_comma": Kind(
        [{}], _texts("one", "two,", "\uff0c", "\u3001", "\u060c", ";", "3,5", "\u201a"), [" ", "\n"],
        _texts(*BLANK, ",", "\ufe50")),
}  # fmt: skip


def cases() -> list[Case]:
    """All answers, with all arguments of their instructions."""
    return [*_of_pieces(), *_in_languages()]


def _of_pieces() -> Iterator[Case]:
    draw = random.Random(SEED)
    for name, kind in KINDS.items():
        texts = kind.texts | dict(_drawn(kind, draw) for _ in range(DRAWN))
        for arguments in kind.arguments:
            for text, number in texts.items():
                follows = None
                if number is not None:
                    bound, relation = arguments.values()
                    follows = bool(text.strip()) and compares(number, relation, bound)
                yield Case(name, arguments, text, follows)


def _drawn(kind: Kind, draw: random.Random) -> tuple[str, int | None]:
    pieces = draw.choices([*kind.pieces], k=draw.randint(1, LONGEST))
    text = pieces[0] + "".join(draw.choice(kind.joints) + piece for piece in pieces[1:])
    numbers = [kind.pieces[piece] for piece in pieces]
    return text, None if None in numbers else sum(number or 0 for number in numbers)


def _in_languages() -> Iterator[Case]:
    """Texts in the languages of the published rows, each asked for, and instead of the one before."""
    codes = [*LANGUAGES]
    for before, code in zip([codes[-1], *codes[:-1]], codes, strict=True):
        for asked in (before, code):
            yield Case("language:response_language", {"language": asked}, LANGUAGES[code], asked == code)
    for text in (*NO_LETTERS, *BLANK):
        yield Case("language:response_language", {"language": "en"}, text, False)
    for name, change in (("capital", str.upper), ("lowercase", str.lower)):
        for code, text in CASED.items():
            for written in (text, text.upper(), text.lower()):
                yield Case(f"change_case:english_{name}", {}, written, code == "en" and written == change(written))
        for text in (*NO_LETTERS, *BLANK):
            yield Case(f"change_case:english_{name}", {}, text, False)
