r"""Answers as people and models write them, each decided by hand: (reward, response, the row's answer, score).

`MISSED` are those that a human judges right and the reward does not read, so that it gives 0.
"""

Row = tuple[str, str, str, float]


def _said(reward: str, gold: str, right: list[str], wrong: list[str]) -> list[Row]:
    return [(reward, text, gold, score) for texts, score in ((right, 1.0), (wrong, 0.0)) for text in texts]


def _boxed(gold: str, right: list[str], wrong: list[str]) -> list[Row]:
    boxes = ([rf"So \boxed{{{text}}}." for text in texts] for texts in (right, wrong))
    return _said("math", gold, *boxes)


NUMBERS = [
    *_said("math", "15", ["$ 15 $", "#### $ 15 $", "**Answer:** $ 15 $", "Answer: $15 $"], [
        "$ 51 $", "**Answer:** $ 15.5 $", "It costs $ 15 and $ 16.", "#### $ 1 5 $"]),
    *_said("math", "3/4", [r"**Answer:** $ \frac{3}{4} $", r"So $ x = \frac34 $", r"Answer: $\frac{3}{4} $"], [
        r"**Answer:** $ \frac{4}{3} $", r"$ \frac{3}{4} $ of it, that is $ \frac{1}{2} $"]),
    *_boxed("1000", ["1'000", "1\u2019000", "1'000.0"], ["1'00", "1'0000", "1'001", "100'0"]),
    *_said("math", "1000000", ["It is 1'000'000.", "#### 1'000'000"], ["It is 1'000'001.", "#### 1'000"]),
    *_boxed("12345", [r"12,\! 345", "12{,} 345", "12 {,} 345", "12\u00a0345", "12\u202f345", r"12\,345"], [
        r"12,\! 354", "12{,} 34", "12.345", "12\u00a0344", "123{,}45", "12, 345"]),
    *_said("math", "12345", ["It is 12 345", "It is 12\u202f345."], ["It is 12 346", "It is 12 and 345"]),
    *_boxed(r"2^{\sqrt{3}}", [r"2^{\sqrt 3}", "2^{3^{1/2}}", r"4^{\frac{\sqrt3}{2}}"], [
        r"\sqrt{3}^2", r"2^{\sqrt{2}}", r"2\sqrt{3}"]),
    *_boxed(r"e^{\sqrt 5}", [r"e^{\sqrt{5}}"], ["e^5", r"\sqrt{e^5}"]),
    *_boxed("7^{1/3}", [r"\sqrt[3]{7}", r"\sqrt[3]7"], ["7/3", "7^{3}"]),
    *_boxed("20!", ["20!", "2432902008176640000"], ["19!", "20", "2432902008176640001"]),
    *_boxed("(5!)!", ["120!"], ["120"]),
    *_boxed("(3!)!", ["720", "6!"], ["6"]),
    *_boxed("42", ["\u200b42\u200b", "4\u20602", "\ufeff42"], ["\u200b24", "4\u200b"]),
    *_boxed("15", [r"15\$", "15 €"], [r"1.5\$", r"15\text{ thousand}"]),
    *_boxed(r"\$15", ["15$"], ["15€"]),
]  # fmt: skip

ARGUMENTS = [
    *_boxed(r"\frac1y", ["1/y", "y^{-1}", r"\frac{1}y"], ["y", r"\frac{1}{x}"]),
    *_boxed(r"\frac z4", ["z/4", "0.25z"], ["4/z"]),
    *_boxed(r"\frac\pi6", [r"\frac{\pi}{6}", r"\pi/6"], [r"\frac\pi3", r"6\pi", r"\frac6\pi"]),
    *_boxed(r"\sqrt[4]3", ["3^{1/4}", r"3^\frac14"], [r"4\sqrt3", r"\sqrt[3]4"]),
    *_boxed(r"\frac{\sqrt5}3", [r"\frac{\sqrt{5}}{3}", r"\frac13\sqrt5"], [r"\sqrt{\frac53}", r"\frac53"]),
    *_boxed(r"\binom52", ["10"], ["5/2", r"\binom51"]),
    *_boxed(r"x^\frac12", [r"\sqrt x", "x^{0.5}"], [r"\frac{x}{2}", "x^2"]),
]  # fmt: skip

BOXES = [
    *_said("math", r"so $\boxed{1}$ and $\boxed{-2}$.", [
        r"\boxed{1, -2}", r"\boxed{-2} and \boxed{1}", r"$x=\boxed{1}$, $x=\boxed{-2}$", r"\(\boxed{1},\boxed{-2}\)"], [
        r"\boxed{1}", r"\boxed{-2}", r"\boxed{1} and \boxed{2}", r"\boxed{1} or else \boxed{-2}"]),
    *_said("math", "2", [r"\boxed{1} is wrong, it is \boxed{2}", r"\boxed{2}, \boxed{2}"], [
        r"\boxed{1} and \boxed{2}", r"\boxed{2} or \boxed{3}", r"\boxed{2}, no: \boxed{3}", r"\boxed{2}, \boxed{3"]),
    *_said("math", "(1,2)", [r"$x=\boxed{1}$ and $y=\boxed{2}$", r"$y=\boxed{2}$, $x=\boxed{1}$"], [
        r"$x=\boxed{2}$, $y=\boxed{1}$", r"$y=\boxed{1}$ and $x=\boxed{2}$"]),
    *_boxed("(1,2),(3,4)", ["(3,4),(1,2)", "(1,2),(3,4),(1,2)"], ["(1,2),(1,2)", "(1,2),(4,3)", "(1,2)"]),
]  # fmt: skip

NAMES = [
    *_boxed("(a,b)=(1,5)", ["(1,5)", "(a, b) = (1, 5)", "a=1, b=5", "b=5, a=1", "(1.0, 5)"], [
        "(5,1)", "1", "5", "(b,a)=(1,5)", r"\{1,5\}", "a=5, b=1", "(1,5,1)"]),
    *_boxed("|CD|=4", ["4", "CD=4", "|CD| = 4"], ["|CD|=5", "AB=4", "-4"]),
    *_boxed(r"\angle A = 30^\circ", ["30", r"30^\circ", "30°", r"\angle A=30°", "∠A = 30°", r"30° = \angle A"], [
        "60", r"\angle B = 30^\circ", r"\frac{\pi}{3}"]),
    *_boxed(r"m\angle ABC = 45^\circ", ["45", r"\angle ABC = 45°"], ["54", r"\angle DEF = 45^\circ"]),
    *_boxed(r"\cos\theta=\frac35", ["3/5", r"\cos\theta = 0.6"], ["5/3", r"\sin\theta = 0.6"]),
    *_boxed("color = blue", ["blue", r"\text{blue}"], ["red"]),
    *_boxed("x:y=2:3", ["2:3", "4:6", "x:y = 2:3", r"\frac{2}{3}"], ["3:2", "2", "y:x=2:3", "2:5", "2, 3"]),
    *_boxed(r"\frac{NO}{BO}=\frac{1}{\sqrt6}", [r"\frac{\sqrt6}{6}"], [r"\sqrt6", r"\frac{BO}{NO}=\frac{1}{\sqrt6}"]),
    *_boxed(r"S_{\triangle ABC}=12", ["12"], ["21", "12:2"]),
    *_boxed("1:2:3", ["2:4:6", "1 : 2 : 3", r"\frac{1}{2}:1:\frac{3}{2}", "x:y:z=1:2:3"], [
        "3:2:1", "1:2:4", "2:4:7", "1:2", "1:2:3:4", "1/2/3", "1/6", "1,2,3", "0:0:0"]),
    *_boxed("x:y:z=1:2:3", ["1:2:3", "2:4:6", "x:y:z=3:6:9", "z:y:x=3:2:1"], [
        "3:2:1", "x:z:y=1:2:3", "x=1", "1:2", "a:b:c=1:2:3", "1:2:5"]),
    *_boxed(r"1:\sqrt{3}:2", [r"2:2\sqrt3:4", r"1:\sqrt3:2"], [r"1:2:\sqrt3", "1:3:2", r"1:\sqrt{3}"]),
    *_said("math", "1:2:3", ["The ratio is 1:2:3."], ["The ratio is 1:2:4.", "The ratio is 1:2."]),
    *_said("math", "1:2", ["The ratio is 1:2."], ["The ratio is 1:2:3."]),
    *_boxed("a,b=1,5", ["1,5", "(1,5)", "a=1, b=5", "b=5, a=1", "(a,b)=(1,5)", "b,a=5,1"], [
        "5,1", "(5,1)", "a,b=5,1", "b,a=1,5", "(b,a)=(1,5)", "1", "5", "1.5", "a=5, b=1"]),
    *_boxed("a=1, b=5", ["a,b=1,5", "(a,b)=(1,5)"], ["(b,a)=(1,5)", "a,b=5,1", "a:b=1:5"]),
    *_boxed("x=1, y=2, z=3", ["(x,y,z)=(1,2,3)"], ["x:y:z=1:2:3", "(z,y,x)=(1,2,3)"]),
    *_boxed("f'(x)", [r"f^{\prime}(x)"], ["f(x)", "f''(x)", "x"]),
    *_boxed("x", ["{x}"], ["x'", "x''"]),
    *_boxed("yes", ["Yes"], ["sey", "no"]),
    *_boxed("x + y = 5", ["x+y=5", "y=5-x"], ["5", "x=5", "x-y=5"]),
    *_boxed("|x|=4", [], ["x=4"]),
]  # fmt: skip

UNITS = [
    *_boxed("1:30:00", ["1:30:00"], ["2:60:00", "1:3:0", "1:30"]),
    *_boxed("8:05", ["8:05", "08:05", r"8:05\text{ a.m.}", "8:05 PM"], ["8:50", "5:08", "8:5", "805", "8/5", "1.6"]),
    *_said("math", "8:05", ["They arrive at 8:05.", "The answer is 8:05 a.m."], ["They arrive at 9:05.", "#### 5"]),
    *_boxed("8:05 p.m.", ["8:05 PM", r"8:05\text{ p.m.}", "8:05 pm", "20:05"], ["8:05 a.m.", "8:05", "8:06 p.m."]),
    *_boxed("12:00", ["12:00"], ["1:00", "12"]),
    *_boxed("12 cm²", ["12", "12 cm^2", r"12\text{ cm}^2", r"12\text{ cm²}"], ["12 cm³", "12 cm", "12 m²", "21 cm²"]),
    *_boxed("12", ["12 m³", r"12\text{ m³}", "12 km²"], ["12^3", "1.2 m³", "12x³"]),
    *_boxed("3 m³", ["3", r"3\text{ m}^3", "3m³", "V=3m³"], ["3 m²", "3 cm³", "3m²", "3x³"]),
    *_boxed("5", ["5m³", "5m²", "5m^3"], ["15m³", "5x³", "5m^2 + 1", "m³"]),
    *_boxed(r"5\text{ m}", ["5 m", "x = 5 m", "5"], ["5 s", "5 m + 1", "5x", "6 m", "a + 5 m"]),
    *_boxed("5m", ["5 m"], ["5", "5 s"]),
    *_boxed("5m³", ["5m³"], ["5", "5m²"]),
    *_boxed("x+5", ["5+x"], ["x+5m²", "5m²"]),
]  # fmt: skip

SEVERAL = [
    *_boxed(r"\begin{pmatrix}1&2\\3&4\\\end{pmatrix}", [r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"], [
        r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\\0&0\end{pmatrix}"]),
    *_boxed("(11,7)or(7,11)", ["(7,11),(11,7)"], ["(7,11)", "(11,7),(11,7)"]),
    *_boxed("x=1orx=2", ["1, 2", r"x=2\text{ or }x=1"], ["1", "12", "x=1orx=3"]),
    *_boxed("x=3, y=-1", ["3, -1", "y=-1, x=3", "(3,-1)"], ["-1, 3", "(-1,3)", "x=-1, y=3"]),
    *_boxed("x_1=3, x_2=-1", ["3, -1", "-1, 3"], ["3, 1", "3"]),
    *_said("math", "AB=2,CD=3", [r"$AB=\boxed{2}$ and $CD=\boxed{3}$"], [r"$AB=\boxed{3}$ and $CD=\boxed{2}$"]),
    *_boxed("3and4", ["4, 3"], ["34", "3"]),
    *_boxed("p=5,q=2;p=7,q=2", ["(5,2),(7,2)", "(7,2);(5,2)"], ["(2,5),(2,7)", "(5,2)", "5,2,7,2"]),
    *_said("math", "7", ["Some say the answer is 8. The answer is 7."], ['The answer is 8, and "7" was a joke']),
]  # fmt: skip

LETTERS = [
    *_said("choice", "C", [
        r"\(C\)", "the best answer is option C", "Answer: c", "<answer>C</answer>", "(C).", "The answer is (c) Paris",
        r"$\boxed{\textbf{(C)}}$", r"\[\boxed{C}\]", "Answer: C. A train leaves", "<answer> c </answer>",
        "Some say the answer is B. The answer is **C**."], [
        r"\(D\)", "the best answer is option D", "Answer: d", "<answer>B</answer>", "(A).", "A train leaves at C",
        "I think C", "C is not the answer. The answer is D.", "Answer: ABC", "The answer is carbon", "c",
        'The answer is "C" in the key, but the answer is B', r"\boxed{B}, not C"]),
    *_said("choice", "A", ["The answer is A because 1 < 2", "Answer: A", "A."], [
        "A train leaves", "The answer is a train", "The answer is A train"]),
    *_said("choice", "I", ["Answer: I"], ["I think so", "The answer is I think H"]),
]  # fmt: skip

GSM8K = [
    *_said("gsm8k", "#### 1234", [
        "#### 1,234", "#### 1'234", "#### 1{,}234", r"#### 1\,234", "#### $ 1,234", r"#### \$1,234",
        "#### 1\u202f234"], [
        "#### 1,235", "#### \u22121234", "#### 1{,}23", "#### 12,34", "#### 123", "1234", "#### 1'235"]),
    *_said("gsm8k", "1", ["#### 1"], ["#### 1'000", "#### 1'0"]),
    *_said("gsm8k", "72", ["#### 72 clips"], ["#### 72{,}5"]),
    *_said("gsm8k", "\u22125", ["#### \u22125", "#### -5", "#### \u2212$5"], ["#### 5", "#### \u221250"]),
    *_said("gsm8k", "50%", ["#### 50%", r"#### 50\%", "#### 50"], ["#### 0.5", "#### 5%"]),
]  # fmt: skip

MISSED: list[Row] = [
    ("math", r"So \boxed{z:y:x=3:2:1}.", "x:y:z=1:2:3", 1.0),  # names in another order
    ("math", r"So \boxed{5m^3}.", "5", 1.0),  # m is a variable
]
ROWS = [*NUMBERS, *ARGUMENTS, *BOXES, *NAMES, *UNITS, *SEVERAL, *LETTERS, *GSM8K]
