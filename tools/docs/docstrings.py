"""Prepare docstrings for the reference, whose parser expects Markdown, and a field to be the end of a docstring."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|attr|exc|mod|data):`~?\.?([^`]+)`")
_GROUP = re.compile(r"(:param \w+:)[ \t]+(?=:param )")
_PARAMETER = re.compile(r"^:param (\w+):[ \t]*(.*)$")
_FIELD = re.compile(r"^:(param|return|raises)\b")


class PlainDocstrings(griffe.Extension):
    """Applied to every object that has a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = prepared(obj.docstring.value)


def prepared(docstring: str) -> str:
    """Return Sphinx roles as code, examples in fences, and the fields after everything else."""
    docstring = _GROUP.sub(r"\1\n", inspect.cleandoc(_ROLE.sub(r"``\1``", docstring)))
    prose, fields = list[str](), list[str]()
    for paragraph in re.split(r"\n{2,}", docstring):
        if _FIELD.match(paragraph):
            fields += shared(paragraph.splitlines())
        elif paragraph.startswith(">>>"):
            prose.append(f"```pycon\n{paragraph}\n```")
        else:
            prose.append(paragraph)
    return "\n\n".join([*prose, "\n".join(fields)]).strip()


def shared(fields: list[str]) -> list[str]:
    """Give each parameter of a group, ``:param a: :param b: text``, the text of the last one."""
    text = ""
    for i in range(len(fields) - 1, -1, -1):
        if found := _PARAMETER.match(fields[i]):
            text = found[2] or text
            fields[i] = f":param {found[1]}: {text}"
    return fields
