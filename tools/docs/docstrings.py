"""Prepare docstrings for the reference: Sphinx roles become code, and parameters that share a text get it each."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|attr|exc|mod|data):`~?\.?([^`]+)`")
_GROUP = re.compile(r"(:param \w+:)[ \t]+(?=:param )")
_PARAMETER = re.compile(r"^(\s*):param (\w+):[ \t]*(.*)$")


class PlainDocstrings(griffe.Extension):
    """Applied to every object that has a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = shared(_ROLE.sub(r"``\1``", obj.docstring.value))


def shared(docstring: str) -> str:
    """Give each parameter of a group, ``:param a: :param b: text``, the text of the last one."""
    lines = _GROUP.sub(r"\1\n", docstring).splitlines()
    text = ""
    for i in range(len(lines) - 1, -1, -1):
        if found := _PARAMETER.match(lines[i]):
            text = found[3] or text
            lines[i] = f"{found[1]}:param {found[2]}: {text}"
    return "\n".join(lines)
