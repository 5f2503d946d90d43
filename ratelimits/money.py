"""Calculate with exact amounts of money. Only `rounded` rounds an amount."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import (
    ROUND_HALF_EVEN,
    Context,
    Decimal,
    DivisionByZero,
    Inexact,
    InvalidOperation,
    Overflow,
)
from functools import reduce

from ratelimits.algorithms import typed_numbers

ZERO = Decimal(0)
#: Maximum number of digits of a price before and after the decimal point. A price is stored as text, because a database
#: can turn a decimal of this length into a float.
WHOLE_DIGITS, PLACES = 12, 12
#: This context has more digits than any product of a quantity and a price. A calculation that would round raises
#: Inexact.
_EXACT = Context(prec=100, traps=[Inexact, InvalidOperation, Overflow, DivisionByZero])
_ROUNDING = Context(prec=100, rounding=ROUND_HALF_EVEN, traps=[InvalidOperation, Overflow, DivisionByZero])

#: The currencies of ISO 4217 by the number of decimals of their minor unit.
_CURRENCIES = {
    0: "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF",
    2: (
        "AED AFN ALL AMD ANG AOA ARS AUD AWG AZN BAM BBD BDT BGN BMD BND BOB BOV BRL BSD BTN BWP BYN BZD CAD CDF CHE"
        " CHF CHW CNY COP COU CRC CUP CVE CZK DKK DOP DZD EGP ERN ETB EUR FJD FKP GBP GEL GHS GIP GMD GTQ GYD HKD HNL"
        " HTG HUF IDR ILS INR IRR JMD KES KGS KHR KPW KYD KZT LAK LBP LKR LRD LSL MAD MDL MGA MKD MMK MNT MOP MRU MUR"
        " MVR MWK MXN MXV MYR MZN NAD NGN NIO NOK NPR NZD PAB PEN PGK PHP PKR PLN QAR RON RSD RUB SAR SBD SCR SDG SEK"
        " SGD SHP SLE SOS SRD SSP STN SVC SYP SZL THB TJS TMT TOP TRY TTD TWD TZS UAH USD USN UYU UZS VED VES WST XCD"
        " XCG YER ZAR ZMW ZWG"
    ),
    3: "BHD IQD JOD KWD LYD OMR TND",
    4: "CLF UYW",
}
_DIGITS = {code: digits for digits, codes in _CURRENCIES.items() for code in codes.split()}


def minor_digits(currency: str) -> int:
    """Return the number of decimals of a currency's minor unit, such as 2 for EUR.

    Raise ValueError for an unknown currency.
    """
    try:
        return _DIGITS[currency]
    except KeyError:
        raise ValueError(f"{currency!r} is not a currency of ISO 4217: write its three letters, such as EUR") from None


def price(value: Decimal) -> Decimal:
    """Return a price. Raise ValueError with what is wrong if it is below 0 or has too many digits."""
    if not value.is_finite():
        raise ValueError(f"{value} is not a price")
    text = written(value)
    whole, _point, places = text.removeprefix("-").partition(".")
    if text.startswith("-"):
        raise ValueError("a price cannot be below 0: to give units back, use an adjustment")
    if len(places) > PLACES or len(whole.lstrip("0")) > WHOLE_DIGITS:
        raise ValueError(
            f"“{text}” has too many digits: at most {WHOLE_DIGITS} before and {PLACES} after the decimal point"
        )
    return Decimal(text)


def read(text: str) -> Decimal:
    """Return the price that a text contains. Raise ValueError with a sentence that says what is wrong."""
    try:
        return price(typed_numbers.decimal(text))
    except typed_numbers.Mistyped as error:
        if error.is_ambiguous:
            raise
        raise ValueError(
            f"“{text.strip()}” is not a price: write a decimal such as 0.10, without currency and thousands separators"
        ) from error


def times(quantity: int, price: Decimal) -> Decimal:
    """Return the price of a quantity; `price` is the price of one unit."""
    return _EXACT.multiply(Decimal(quantity), price)


def plus(*amounts: Decimal) -> Decimal:
    """Return the sum of the arguments."""
    return added(amounts)


def minus(amount: Decimal, other: Decimal) -> Decimal:
    """Return `amount` minus `other`."""
    return _EXACT.subtract(amount, other)


def added(amounts: Iterable[Decimal]) -> Decimal:
    """Return the sum of an iterable of amounts."""
    return reduce(_EXACT.add, amounts, ZERO)


def rounded(amount: Decimal, digits: int) -> Decimal:
    """Return the amount, rounded half to even to this number of decimals. For example, 0.125 becomes 0.12."""
    return amount.quantize(Decimal(1).scaleb(-digits), context=_ROUNDING)


def written(amount: Decimal) -> str:
    """Return an amount as text without trailing zeros: "0.1", "1200", "-3.5"."""
    return f"{_EXACT.normalize(amount):f}" if amount else "0"
