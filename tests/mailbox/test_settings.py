"""Options of mailboxes, from keywords and from the query of a URL: read in lax mode, and refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from mainspring import ConfigError, InMemoryMailbox, open_mailbox
from mainspring.mailbox.redis.mailbox import RedisMailbox
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox

URLS = ["sqlite:///jobs.db", "redis://ann:s3cret@db/0", "postgresql://ann:s3cret@db/app", "memory://settings"]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("value", ["many", "0", "2.5", "", 0, 1.5, True, [1]])
def test_a_capacity_that_is_none_is_refused_with_what_would_do(url: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        open_mailbox(url, capacity=value)
    bare = url.replace("ann:s3cret@", "")
    assert str(caught.value) == f"{bare!r}: capacity must be a whole number from 1, or None, not {value!r}"


@pytest.mark.parametrize("url", URLS)
def test_a_number_or_none_may_be_text(url: str) -> None:
    for value in ("none", "None", None):
        assert open_mailbox(url, capacity=value).address == open_mailbox(url).address
    assert open_mailbox(f"{url}?capacity=none").address == open_mailbox(url).address


def test_the_constructors_read_text_too() -> None:
    assert SQLiteMailbox("jobs.db", capacity="7", busy_timeout="0").name == "default"  # type: ignore[arg-type]
    assert not InMemoryMailbox(serialize="no").serializes  # type: ignore[call-overload]


@pytest.mark.parametrize("option", ["password", "sentinel_password"])
def test_a_secret_that_is_no_text_is_not_shown(option: str) -> None:
    with pytest.raises(ConfigError, match=f"^'redis://db': {option} must be text$"):
        RedisMailbox("redis://db", **{option: 5318008})


def test_a_long_value_is_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        open_mailbox("redis://db", timeout="9" * 10_000 + "x")
    assert len(str(caught.value)) < 300
