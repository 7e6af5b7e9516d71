r"""Answers whose equality is decided by mathematics: (response, gold answer, score)."""

Case = tuple[str, str, float]


def _boxed(gold: str, right: list[str], wrong: list[str]) -> list[Case]:
    """Responses \boxed{...} to one gold answer."""
    pairs = [(answer, 1.0) for answer in right] + [(answer, 0.0) for answer in wrong]
    return [(rf"So \boxed{{{answer}}}.", gold, score) for answer, score in pairs]


NUMBERS = [
    *_boxed("5", ["5", "5.0", "+5", "05", r"\text{5}", "5.", "{5}", r"\frac{10}{2}", r"\sqrt{25}", "2+3", "5!/4!"],
        ["-5", "6", "5.1", "55", "0.5", "5^2", r"\frac{5}{2}"]),
    *_boxed("-3", ["-3", "\u22123", r"-\frac{6}{2}", "(-3)", "-3.0", r"-\sqrt{9}"], ["3", "-(-3)", r"\sqrt{9}",
        "-3^2"]),
    *_boxed("1/3", [r"\frac13", r"\dfrac{1}{3}", r"\tfrac13", "1/3", "2/6", "0.333333", "0.3333333",
        r"0.\overline{3}", r"\frac{-1}{-3}", r"\frac{1}{\sqrt{9}}"], ["0.33", "0.3", "1/4", "3", "-1/3", "33",
        "0.333334"]),
    *_boxed(r"\frac{3}{4}", ["0.75", ".75", r"\frac{6}{8}", "75\\%", r"3/4", r"\frac{\frac{3}{2}}{2}", "\u00be"],
        ["4/3", "0.7", "0.076", "-0.75"]),
    *_boxed("3/2", [r"1\frac{1}{2}", r"1 \frac12", "1 1/2", "1.5", r"\frac{3}{2}"], [r"\frac{11}{2}", "1/2", "-1 1/2"]),
    *_boxed(r"-1\frac{1}{2}", ["-1.5", "-3/2"], ["-1/2", "1.5"]),
    *_boxed("2/3", ["0.666667", "0.6666667"], ["0.666666", "0.67", "2.3"]),
    *_boxed("1,000", ["1000", "1,000", "1{,}000", r"1\,000", "1 000", "1,000.00", r"10^3", r"1\times 10^{3}",
        "1e3", "\\$1,000"], ["1", "100", "10000", "1.000"]),
    *_boxed("1450000", ["1,450,000", r"1.45 \times 10^6", r"1.45\cdot 10^{6}", "1.45e6", "1.45E+6"], ["1.45",
        "1,450", "145,000", r"1.45 \times 10^5"]),
    *_boxed(r"6.02 \times 10^{-23}", [r"6.02\times10^{-23}", "6.02e-23", r"60.2 \times 10^{-24}"],
        [r"6.02 \times 10^{23}", "0", "6.02", r"6.03 \times 10^{-23}"]),
    *_boxed("0", ["0", "-0", "0.0", r"\frac{0}{5}", r"\sin(\pi)"], ["0.0000001", "", r"\emptyset"]),
    *_boxed("3.14", ["3.14", "3.140", "157/50"], [r"\pi", "3.1", "22/7"]),
    *_boxed("0.00012345", ["0.00012345", "1.2345e-4"], ["0.000123", "0"]),
    *_boxed("1024", ["2^{10}", "2^10", "4^5", "2**10"], ["2^9", "210"]),
]  # fmt: skip

SURDS = [
    *_boxed(r"2\sqrt{3}", [r"\sqrt{12}", r"2\sqrt3", r"\frac{6}{\sqrt{3}}", "2 \u221a3", "2*sqrt(3)", "3.464102"],
        [r"3\sqrt{2}", r"\sqrt{6}", "3.46", r"-2\sqrt{3}", r"2\sqrt{3}+10^{-15}"]),
    *_boxed(r"\frac{\sqrt{2}}{2}", [r"\frac{1}{\sqrt{2}}", r"\sqrt{\frac{1}{2}}", r"\sin(45^\circ)",
        r"\cos\frac{\pi}{4}", "0.707107"], [r"\sqrt{2}", "0.7071", r"\frac{1}{2}"]),
    *_boxed(r"\frac{1+\sqrt{5}}{2}", [r"(1+\sqrt{5})/2", r"\frac{\sqrt5+1}{2}", "1.618034"],
        [r"\frac{1-\sqrt{5}}{2}", r"1+\frac{\sqrt{5}}{2}", "1.62"]),
    *_boxed(r"2\pi", [r"\pi \cdot 2", "2\u03c0", "2pi", "6.283185"], ["6.28", r"\pi", r"\pi^2", "2"]),
    *_boxed(r"\sqrt[3]{2}", ["2^{1/3}", r"2^{\frac{1}{3}}"], [r"\sqrt{2}", "2^{3}", r"3\sqrt{2}"]),
    *_boxed(r"\ln 2", [r"\ln(2)", r"\frac{\ln 4}{2}", "0.693147"], [r"\ln 4", "0.69", r"\log_{10} 2"]),
    *_boxed(r"3+4i", ["4i+3", "3 + 4 i"], ["3-4i", "4+3i", "5", "7"]),
    *_boxed(r"e^2", ["e^{2}", r"e \cdot e"], ["2e", "7.39"]),
]  # fmt: skip

PERCENT_AND_UNITS = [
    *_boxed("50\\%", ["50%", "50\\%", "0.5", r"\frac{1}{2}", "50 percent", "50", r"50\text{ percent}"], ["5%",
        "0.05", "500"]),
    *_boxed("50", ["50%", "50\\%"], ["0.5", "500%", "5%"]),
    *_boxed("0.25", ["25\\%", "1/4"], ["25", "2.5\\%"]),
    *_boxed("12", [r"12\text{ cm}", r"12 \text{ cm}^2", r"12\mathrm{~cm}", "12 apples", "12 red apples",
        r"12\text{ square units}", "12 km/h", "12 dollars", r"12 \text{ miles per hour}", "12cm"], ["2 cm", "12x",
        "12 \\pi"]),
    *_boxed(r"5\text{ cm}", ["5", "5 cm", r"5\,\mathrm{cm}", r"0.05\text{ m}", r"50\text{ mm}", "5 centimeters"],
        ["5 m", r"5\text{ cm}^2", "5 kg", "6 cm"]),
    *_boxed("2 hours", ["2", "2 hours", "120 minutes", r"2\text{ h}"], ["2 minutes", "120 seconds", "120"]),
    *_boxed("\\$18", ["18", "$18", "\\$18.00", "18 dollars", "1800 cents", "18 USD", r"18\text{ dollars per day}"],
        ["$1.8", "18 cents", "\u20ac18"]),
    *_boxed(r"90^\circ", ["90", r"90^{\circ}", "90\u00b0", "90 degrees", r"90\text{ degrees}"], ["9", "180^\\circ"]),
    *_boxed(r"10\text{ m/s}", ["10", "10 m/s", r"10\text{ m/s}", "36 km/h", "10 meters per second"], ["10 km/h",
        "10 m"]),
]  # fmt: skip

SEVERAL = [
    *_boxed("1, 2", ["1,2", "2, 1", r"1\text{ and }2", "2 and 1", r"\{1,2\}", "x=1, x=2",
        r"x = 2 \text{ or } x = 1", "(1,2)"], ["1", "1,2,3", "1, 3", "1,1", "(2,1)", "12", "1.2"]),
    *_boxed(r"\{1, 2, 3\}", [r"\{3,1,2\}", r"\left\{1,2,3\right\}", "1,2,3", r"\{1,2,3,3\}",
        r"\lbrace 1,2,3\rbrace"], [r"\{1,2\}", r"\{1,2,4\}", "(1,2,3)", r"\{\}", r"\emptyset"]),
    *_boxed(r"\emptyset", [r"\varnothing", r"\{\}", r"\{ \}"], ["0", r"\{0\}"]),
    *_boxed(r"\pm 2", ["2, -2", r"\pm 2", "-2, 2", r"\{-2, 2\}", r"x = \pm 2", r"\pm\sqrt{4}", "\u00b12"], ["2",
        "-2", "2, 2", r"\pm 3"]),
    *_boxed(r"1 \pm \sqrt{3}", [r"1+\sqrt{3}, 1-\sqrt{3}", r"\frac{2 \pm \sqrt{12}}{2}"], [r"1+\sqrt{3}",
        r"-1 \pm \sqrt{3}"]),
    *_boxed("(3, -1)", ["(3,-1)", r"\left(3, -1\right)", "(3.0, -1)", r"(\frac{6}{2},-1)", "3, -1", "x=3, y=-1"],
        ["(-1, 3)", "(3,1)", r"\{3,-1\}", "[3,-1]", "3"]),
    *_boxed("(1, 2, 3)", ["(1,2,3)", r"\langle 1, 2, 3\rangle"], ["(1,3,2)", "(1,2)", "6"]),
    *_boxed(r"(0, \frac{1}{2}), (1, 1)", [r"(1,1), (0,0.5)", r"\{(0,1/2),(1,1)\}"], [r"(0, \frac{1}{2})",
        r"(\frac{1}{2}, 0), (1,1)"]),
    *_boxed("(1,234)", ["(1, 234)"], ["1234", "(1,2,3,4)"]),
]  # fmt: skip

INTERVALS = [
    *_boxed("[1, 3)", ["[1,3)", r"\left[1, 3\right)", r"1 \le x < 3", r"x \in [1,3)", r"3 > x \geq 1"], ["(1,3)",
        "[1,3]", "(1,3]", "[1,4)", "1,3", r"1 < x < 3"]),
    *_boxed(r"(-\infty, 2]", [r"(-\infty,2]", r"x \leq 2", "x <= 2", "2 \\geq x", r"(-infinity, 2]",
        "(-\u221e,2]"], [r"(-\infty, 2)", "x<2", r"x \ge 2", r"[2,\infty)"]),
    *_boxed("x > 3", ["x>3", "3 < x", r"(3, \infty)", r"x \in (3,\infty)"], [r"x \ge 3", "x < 3", "3",
        r"[3,\infty)", "x=3"]),
    *_boxed(r"(-\infty, 0) \cup (1, \infty)", [r"(1,\infty) \cup (-\infty,0)", r"(-\infty,0)\cup(1,+\infty)",
        r"(-\infty,0) U (1,\infty)"], [r"(-\infty,0] \cup [1,\infty)", r"(-\infty, 0)", "(0,1)"]),
    *_boxed(r"\mathbb{R} \setminus \{1\}", [r"(-\infty,1)\cup(1,\infty)", r"\mathbb{R}\setminus\{1\}"],
        [r"\mathbb{R}", r"\mathbb{R}\setminus\{2\}", r"\{1\}"]),
    *_boxed(r"\mathbb{R}", [r"(-\infty, \infty)"], [r"[0,\infty)", r"\mathbb{Z}"]),
    *_boxed(r"\infty", [r"\infty", "infinity", "+\\infty"], [r"-\infty", "0", "1000000"]),
]  # fmt: skip

EQUATIONS = [
    *_boxed("5", ["x=5", "x = 5", r"f(2)=5", r"x = 2+3 = 5", "5 = x", r"\theta = 5"], ["x=6", "x>5", r"x \neq 5"]),
    *_boxed("x = 5", ["5", "x=5", "x = 10/2"], ["y=5", "x=-5", "x"]),
    *_boxed("y = 2x + 3", ["y=2x+3", "2x - y + 3 = 0", "y = 3 + 2x", r"y-3=2x", "2y = 4x+6"], ["y=2x-3",
        "y = 3x+2", "y<2x+3"]),
    *_boxed("x^2 + y^2 = 25", [r"y^2+x^2=25", r"x^2+y^2-25=0"], ["x^2-y^2=25", "x^2+y^2=5"]),
    *_boxed("x^2+2x+1", ["(x+1)^2", "1 + 2x + x^2", "x(x+2)+1"], ["x^2+2x", "x^2+2x-1", "(x-1)^2", "y^2+2y+1"]),
    *_boxed(r"\frac{x}{x+1}", [r"1-\frac{1}{x+1}", "x/(x+1)"], [r"\frac{x+1}{x}", r"\frac{x}{x}+1"]),
    *_boxed(r"\frac{1}{2}x", ["x/2", "1/2x", "0.5x", r"\frac{x}{2}"], [r"\frac{1}{2x}", "2x"]),
    *_boxed(r"\sin^2 x", [r"1-\cos^2 x", r"(\sin x)^2"], [r"\sin x", r"\cos^2 x", r"\sin x^2"]),
    *_boxed(r"n!", ["n!"], ["n", "(n+1)!"]),
]  # fmt: skip

MATRICES = [
    *_boxed(r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", [r"\begin{bmatrix}1&2\\3&4\end{bmatrix}",
        r"\begin{pmatrix}1 & \frac{4}{2}\\3 & 4.0\end{pmatrix}",
        r"\left[\begin{array}{cc}1&2\\3&4\end{array}\right]"], [r"\begin{pmatrix}1&3\\2&4\end{pmatrix}",
        r"\begin{pmatrix}1&2\end{pmatrix}", "1,2,3,4", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", "-2"]),
    *_boxed(r"\begin{pmatrix}1\\2\end{pmatrix}", [r"\begin{pmatrix}1\\ 2\end{pmatrix}"],
        [r"\begin{pmatrix}2\\1\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"]),
]  # fmt: skip

WORDS_FOR_NUMBERS = [
    *_boxed("1500000", ["1.5 million", r"1.5\text{ million}", r"1.5 \text{ million dollars}", "\\$1.5 million"],
        ["1.5", "1.5 billion", "15 thousand"]),
    *_boxed("1.5", ["1.5 meters"], ["1.5 million", "1.5 thousand"]),
    *_boxed("18", ["The number is 18", "exactly 18", "about 18"], ["not 18", "less than 18", "18 or more",
        "it is never 18", "at least 18"]),
    *_boxed("18", ["18 more apples", r"18\text{ more}", "18 = 18", r"3 \cdot 6 = 18"], [
        r"18\text{ or maybe 17}", "17 = 18", "18 = 17", r"18\text{ dozen}", r"18\text{ hundred}", "1 8", "10 8",
        "18/17", "18 or 17", "18!", "18k", r"18\text{ thousand}", "x_{18}", "> 18"]),
    *_boxed("A", ["A"], [r"\text{(A) and (B)}", r"\text{A or B}", "A, B", "AB"]),
    *_boxed("3:2", ["3:2", "6 : 4", "3/2"], ["2:3", "3:1", "32"]),
    *_boxed("3:30 p.m.", [r"3:30\text{ p.m.}", "3:30 P.M."], ["3:30 a.m.", "4:30 p.m.", "3"]),
    *_boxed("101_2", ["101_2", "101_{2}", "5", "12_3"], ["101_3", "101", "110_2", "102_2"]),
]  # fmt: skip

ALTERNATIVES = [
    *_boxed(r"(-\infty, 1) \cup (2, \infty)", [r"x<1 \text{ or } x>2", "x > 2 or x < 1"], [
        r"x<1 \text{ or } y>2", r"x<1 \text{ and } x>2", r"x \le 1 \text{ or } x>2", "x<1, x>2"]),
    *_boxed("5/12", [r"\frac{5}{12} \approx 0.4167", r"x = \frac{5}{12} \approx 0.42", r"\ \frac{5}{12}\ "], [
        "x \\approx 0.4167", r"\frac{1}{2} \approx \frac{5}{12}"]),
    *_boxed("(1, 2)", [r"\begin{cases}x=1\\y=2\end{cases}", r"\begin{cases}x&=1\\y&=2\end{cases}"], [
        r"\begin{cases}x=2\\y=1\end{cases}"]),
    *_boxed("A", [r"\text{(A) } 5", r"\text{A. Paris}", "(A) x+1", r"\textbf{(A)}\ 5"], [
        r"\text{(B) } 5", r"\text{B. A}", "(5) A"]),
    *_boxed(r"\textbf{(A)}\ 5", ["A", r"\text{(A)}"], ["B", "C"]),
    *_boxed(r"\pi", [r"\pi \approx 3.14"], [r"3.14 \approx \pi"]),
    *_boxed("7", [r"\#7", r"\text{Thus } x=7"], [r"\#8"]),
]  # fmt: skip

TEXT = [
    *_boxed("Sunday", ["Sunday", r"\text{Sunday}", r"\textbf{Sunday}", "sunday", r"\text{ Sunday. }"], ["Monday",
        "Sun", r"\text{not Sunday}"]),
    *_boxed(r"\text{(C)}", ["C", "(C)", r"\text{C}", r"\mathrm{C}", r"\textbf{(C)}"], ["D", "(A)", r"\text{(B)}",
        "CC"]),
    *_boxed("B", [r"\text{(B)}", "(B)", "b"], ["A", "D", "8"]),
    *_boxed(r"\text{even}", ["even"], ["odd", r"\text{not even}", "0"]),
    *_boxed("yes", [r"\text{Yes}", "Yes."], ["no", "maybe", "yesterday"]),
    *_boxed("red and blue", [r"\text{red and blue}"], ["red", "blue"]),
]  # fmt: skip

PLACES: list[Case] = [
    (r"\boxed{\text{72\text{ units}}}", "72", 1.0),
    ("The answer is 18.", "18", 1.0),
    ("The answer is $18.", "18", 1.0),
    ("The answer is **18**.", "18", 1.0),
    ("**Answer:** $\\frac{1}{2}$", "0.5", 1.0),
    ("Answer: x = 3", "3", 1.0),
    ("The answer is 3, because 2 + 1 = 3 and 4 > 3.", "3", 1.0),
    ("The answer is 4. Others may say 3", "3", 0.0),
    ("The answer is $1$ and $2$.", "1,2", 1.0),
    ("The answer is $(1, 2]$.", "(1,2]", 1.0),
    ("The answer is 18 dollars per day.", "18", 1.0),
    ("The answer is: Janet makes 18 dollars a day.", "18", 1.0),
    ("The answer is 1,234.5 meters.", "1234.5", 1.0),
    ("The answer is 3.\nThe answer is 4.", "4", 1.0),
    ("The answer is 3.\nThe answer is 4.", "3", 0.0),
    ("2 + 2 = 4\n#### 4", "4", 1.0),
    ("#### 5\nThe answer is 4", "5", 1.0),
    ("#### 5\n#### 4", "5", 0.0),
    ("#### 1,234", "1234", 1.0),
    ("####", "4", 0.0),
    ("so it is 42", "42", 1.0),
    ("so it is 42, I think", "42", 1.0),
    ("so it is 42 not 43", "42", 0.0),
    ("Thus $x = \\frac{3}{4}$.", "3/4", 1.0),
    ("Thus \\(x = 7\\) holds.", "7", 1.0),
    ("Thus \\[ x = 7 \\]", "7", 1.0),
    ("Thus $$x^2+1$$", "1+x^2", 1.0),
    ("it is 2\\sqrt{3}.", "2\\sqrt{3}", 1.0),
    ("it is 2\\sqrt{3}.", "3", 0.0),
    ("He pays $5 and then $6.", "6", 1.0),
    ("He pays $5 and then $6.", "5", 0.0),
    ("I do not know.", "5", 0.0),
    ("", "5", 0.0),
    (r"\boxed{}", "5", 0.0),
    (r"\boxed{ }. The answer is 5", "5", 0.0),
    (r"\boxed{5", "5", 0.0),
    (r"\boxed{\frac{1}{2}", "1/2", 0.0),
    (r"\boxed{\frac{1}{2}}", "1/2", 1.0),
    (r"\boxed{\frac{1}{\sqrt{2+\frac{1}{4}}}}", "2/3", 1.0),
    (r"\boxed{\boxed{5}}", "5", 1.0),
    (r"\boxed 5", "5", 1.0),
    (r"\fbox{5}", "5", 1.0),
    (r"$\boxed{5}$ or rather $\boxed{6}$", "6", 1.0),
    (r"$\boxed{5}$ or rather $\boxed{6}$", "5", 0.0),
    (r"\boxed{5}. The answer is 6.", "5", 1.0),
    (r"\boxed{5}. The answer is 6.", "6", 0.0),
    (r"\boxed{\{1,2\}}", r"\{2,1\}", 1.0),
    (r"\boxed{$5$}", "5", 1.0),
    (r"\boxed{(1,2}", "(1,2)", 0.0),
    (r"\boxed{x+}", "x", 0.0),
    (r"\boxed{1/0}", "0", 0.0),
    ("7", "so 3 + 4 = 7\n#### 7", 1.0),
    ("7", r"we get $3 + 4 = \boxed{7}$", 1.0),
    ("8", r"we get $3 + 4 = \boxed{7}$", 0.0),
]

THOUGHTS = [
    (r"<think>\boxed{4}</think> \boxed{5}", "5", 1.0),
    (r"<think>\boxed{4}</think> \boxed{5}", "4", 0.0),
    (r"<think>\boxed{5}</think> The answer is 4.", "5", 0.0),
    (r"<think>\boxed{5}</think>", "5", 0.0),
    (r"<think>It is \boxed{5}", "5", 0.0),
    (r"It is \boxed{5}</think>\boxed{6}", "6", 1.0),
    (r"<think>a</think>\boxed{4}<think>b</think>\boxed{5}", "5", 1.0),
]

CASES = [
    *NUMBERS, *SURDS, *PERCENT_AND_UNITS, *SEVERAL, *INTERVALS, *EQUATIONS, *MATRICES, *WORDS_FOR_NUMBERS,
    *ALTERNATIVES, *TEXT, *PLACES,
]  # fmt: skip

# What mathematics would judge otherwise: (response, gold answer, the score that is given, why).
DISAGREEMENTS = [
    (r"\boxed{\text{all real numbers}}", r"\mathbb{R}", 0.0, "words are not translated into sets"),
    (r"\boxed{\frac{\pi}{2}}", r"90^\circ", 0.0, "an angle without a unit is read in the unit of the gold answer"),
    (r"\boxed{(1,2)}", r"\begin{pmatrix}1\\2\end{pmatrix}", 0.0, "a point is not compared with a column vector"),
    (r"\boxed{(-1)^{2n}}", "1", 0.0, "variables are real numbers, not integers"),
    (r"\boxed{1} papers and \boxed{2} bins", "1, 2", 0.0, "with words between boxes the last counts"),
]
