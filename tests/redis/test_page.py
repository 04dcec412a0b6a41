"""docs/redis.md: its snippets run, and its commands return what is shown."""

from __future__ import annotations

import pytest
import redis

from tests import servers as real
from tests.docs.pages import ROOT, Block, blocks, run

PAGE = ROOT / "docs" / "redis.md"
BLOCKS = blocks(PAGE)


def of(language: str) -> list[object]:
    return [pytest.param(block, id=f"line {block.line}") for block in BLOCKS if block.language == language]


def test_snippets_run(server: real.Redis, plain: redis.Redis) -> None:
    plain.flushall()
    with run(PAGE, {"redis://localhost:6379/0": server.url("redis")}) as module:
        module.client.close()
    assert set(plain.keys("*:mutex")) == {b"{sqlalchemy_locks:default}:mutex", b"{sqlalchemy_locks:mail}:mutex"}


@pytest.mark.parametrize("block", of("redis"))
def test_commands_answer_as_shown(block: Block, plain: redis.Redis) -> None:
    plain.delete("{sqlalchemy_locks:shown}:mutex", "{sqlalchemy_locks:shown}:timeout")
    lines = block.text.splitlines()
    for command, answer in zip(lines[::2], lines[1::2], strict=True):
        assert plain.execute_command(*command.removeprefix("> ").split()) == int(answer)


def test_page_has_commands() -> None:
    assert len(of("redis")) == 2
