"""Validate what browsers send."""

from decimal import Decimal, InvalidOperation

from flask import abort, request

#: the length of the columns
LONGEST = 255
GREATEST = 2**31 - 1


def text(name: str) -> str:
    """Return a text field; control characters are refused."""
    value = request.form.get(name, "").strip()
    if not value or len(value) > LONGEST:
        abort(400, f"{name}: 1 to {LONGEST} characters, please.")
    if not value.isprintable():
        abort(400, f"{name}: in one line, please.")
    return value


def number(name: str) -> int:
    """Return the number of a row."""
    value = text(name)
    if not value.isdecimal() or len(value) > 10 or int(value) > GREATEST:
        abort(400, f"{name}: a number, please.")
    return int(value)


def money(name: str) -> Decimal:
    """Return an amount."""
    try:
        value = Decimal(request.form.get(name, ""))
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite() or not 0 < value < 10**6 or value != round(value, 2):
        abort(400, f"{name}: an amount such as 19.90, please.")
    return value
