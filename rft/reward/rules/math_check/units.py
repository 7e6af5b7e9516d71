"""Units behind a number: which of them measure the same, and how they convert."""

import re
from dataclasses import dataclass
from fractions import Fraction

# dimension: {how the unit is written: its size}
SIZES: dict[str, dict[str, str]] = {
    "length": {
        "mm millimeter": "1/1000",
        "cm centimeter": "1/100",
        "m meter": "1",
        "km kilometer": "1000",
        "in inch": "127/5000",
        "ft feet foot": "381/1250",
        "yd yard": "1143/1250",
        "mi mile": "201168/125",
    },
    "mass": {"mg milligram": "1/1000", "g gram": "1", "kg kilogram": "1000"},
    "time": {
        "s sec second": "1",
        "min minute": "60",
        "h hr hour": "3600",
        "day": "86400",
        "week": "604800",
    },
    "volume": {"ml milliliter": "1/1000", "l liter": "1"},
    "angle": {"° deg degree": "1"},
    "dollars": {"¢ cent": "1/100", "$ dollar usd buck": "1"},
    "euros": {"€ euro eur": "1"},
    "pounds": {"£ gbp": "1"},
}
UNITS = {
    name: (dimension, Fraction(size))
    for dimension, sizes in SIZES.items()
    for names, size in sizes.items()
    for name in names.split()
}
CURRENCY = "$€£"
MONEY = {"dollars", "euros", "pounds"}


@dataclass(frozen=True)
class Unit:
    """A known unit: its dimension, such as "length^2" or "length/time", and its size."""

    dimension: str
    size: Fraction


def unit(text: str) -> Unit | None:
    """The unit that a text names: "cm", "square meters", "km/h", "cm^2", "dollars per day"; None for any other."""
    parts = re.split(r"\s*/\s*|\s+per\s+", text.strip().strip("."))
    found = [_power(part) for part in parts]
    known = [part for part in found if part is not None]
    if len(known) < len(found):
        return None
    if known[0].dimension in MONEY:
        return known[0]  # "18 dollars per day" answers how many dollars
    size = known[0].size
    for part in known[1:]:
        size /= part.size
    return Unit("/".join(part.dimension for part in known), size)


def _power(text: str) -> Unit | None:
    found = re.fullmatch(r"(?:(square|sq\.?|cubic|cu\.?)\s+)?([^\W\d]+|[$€£°¢])(?:\s*\^?\{?([23²³])\}?)?", text.strip())
    if found is None:
        return None
    word, name, digit = found.groups()
    power = {"2": 2, "²": 2, "3": 3, "³": 3}.get(digit or "", {"s": 2, "c": 3}.get((word or " ")[0], 1))
    name = name.lower().replace("metre", "meter").replace("litre", "liter")
    entry = UNITS.get(name) or UNITS.get(name.removesuffix("es")) or UNITS.get(name.removesuffix("s"))
    if entry is None:
        return None
    dimension, size = entry
    return Unit(dimension if power == 1 else f"{dimension}^{power}", size**power)
