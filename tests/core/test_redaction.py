"""What is shown of a URL: where it leads, and nothing that lets somebody in."""

from __future__ import annotations

import pickle
import traceback
from itertools import product

import pytest

from mainspring import ConfigError, errors, open_mailbox
from mainspring.redaction import shown, without_secrets


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("redis://user:s3cret@db:1/0?name=x", "redis://db:1/0?name=x"),
        ("'redis+sentinel://:s3cret@a:1,b:2/main/0': no", "'redis+sentinel://a:1,b:2/main/0': no"),
        ("from nats://s3cret@h to tls://me:s3cret@h, twice", "from nats://h to tls://h, twice"),
        ("redis//user:s3cret@db is none", "redis//db is none"),
        ("redis://user:s3c/re@t?s3cret@db/0", "redis://db/0"),
        ("'postgresql://u@h/d?password=s3cret&capacity=z': bad", "'postgresql://h/d?password=***&capacity=z': bad"),
        ("'redis://h/0?sentinel_password=s3cret': bad", "'redis://h/0?sentinel_password=***': bad"),
        ("host=h password='s3cret is long' dbname=d", "host=h password=*** dbname=d"),
        ("https://me:s3cret@web/@page", "https://web/@page"),
        ("redis:/:s3cret@h is none", "redis:/h is none"),
        ("nats:me:s3cret@h is none", "nats:h is none"),
        ("redis://h/0?token=s3cret&x=1", "redis://h/0?token=***&x=1"),
    ],
)
def test_a_login_and_a_password_are_hidden(text, left):
    assert without_secrets(text) == left
    assert without_secrets(left) == left


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:////srv/a@b/jobs.db?name=x",
        "memory://a@b",
        "https://web/@page",
        "ann@example.org",
        "a // b@c",
        "redis://h/0",
    ],
)
def test_what_is_no_login_is_left(text):
    assert without_secrets(text) == text


def test_white_space_in_a_password_hides_nothing_of_it_the_less():
    assert shown("redis://me:s3cret is long@db/0") == "redis://db/0"
    assert shown("sqlite:////my files/a@b.db") == "sqlite:////my files/a@b.db"


def test_a_long_text_takes_no_long_time():
    for part in ("a.", "a://", "password=", "a//"):
        without_secrets(part * 20_000)  # the tests' own limit would tell


@pytest.mark.parametrize("kind", [errors.ConfigError, errors.HandlerTimeoutError, errors.SerializationError])
def test_no_error_of_the_package_shows_a_password(kind):
    error = kind("redis://me:s3cret@db/0 is away", 5)
    assert error.args == ("redis://db/0 is away", 5)
    assert "s3cret" not in "".join([repr(error), *traceback.format_exception_only(error)])
    assert pickle.loads(pickle.dumps(error)).args == error.args


@pytest.mark.parametrize("cut", ["/", "?", "#"])
@pytest.mark.parametrize("scheme", ["redis", "postgresql", "nats"])
def test_a_password_that_is_not_escaped_is_told_and_not_shown(scheme, cut):
    with pytest.raises(ConfigError, match="must be written %2F") as caught:
        open_mailbox(f"{scheme}://me:s3c{cut}ret@db/0?name=jobs")
    assert "s3c" not in str(caught.value)
    assert "ret" not in str(caught.value)


SCHEMES = (
    "redis",
    "REDIS",
    "rediss",
    "redis+sentinel",
    "redis+cluster",
    "postgresql",
    "Postgres",
    "nats",
    "tls",
    "rdis",
)
PASSWORDS = ("S3C@RET", "S3C/RET", "S3C?RET", "S3C#RET", "S3C RET", "S3C%ZZRET", "S3C:RET", "S3C[RET", "S3C]RET", "S3C=RET",
             "S3C'RET", "S3C\nRET", "S3C\\RET", "S3C%2FRET", "S3CéRET", "S3C\u2100RET")  # fmt: skip
PLACES = ("h:1/0?name=j", "h:badport/0", "[bad", "h:99999/0", "h,h:x/0/1/2", "h/0?nope=1&nope=2", "")


@pytest.mark.parametrize(
    "scheme",
    # A rediss:// URL that is whole enough has the certificates of the system read, each time.
    [pytest.param(scheme, marks=pytest.mark.slow if scheme == "rediss" else ()) for scheme in SCHEMES],
)
@pytest.mark.parametrize("slashes", ["://", ":/", ":", ":///", " ://", "//"])
def test_no_error_about_a_malformed_url_shows_its_password(scheme, slashes):
    for login, password, place in product(("u:{}@", ":{}@", "u@x:{}@"), PASSWORDS, PLACES):
        assert_hidden(f"{scheme}{slashes}{login.format(password)}{place}")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nor_one_that_stands_where_the_host_was_forgotten_or_among_the_options(scheme):
    for password in PASSWORDS[1:]:  # with an @ the host is there
        assert_hidden(f"{scheme}://u:{password}")
        assert_hidden(f"{scheme}://u:{password}/0?name=j")
    for option in (
        "password",
        "Password",
        "pass",
        "passwd",
        "pwd",
        "token",
        "sslpassword",
        "sentinel_password",
        "secret",
    ):
        assert_hidden(f"{scheme}://h/d?{option}=S3CRET&nope=1")
        assert_hidden(f"{scheme}://h/d/d?nope=1&{option}=S3C#RET")


def assert_hidden(url):
    """Neither in the error nor in what it came from."""
    try:
        open_mailbox(url)
    except Exception as raised:
        error: BaseException | None = raised
        while error is not None:
            assert "S3C" not in repr(error), (url, error)
            assert "RET" not in repr(error), (url, error)
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@pytest.mark.parametrize("verb", [["migrate"], ["dead", "list"], ["send"]])
@pytest.mark.parametrize(
    "url",
    [
        "redis://user:s3cret@127.0.0.1:1/0?name=x",
        "redis://127.0.0.1:1/zero?password=s3cret",
        "redis//user:s3cret@h",
        "redis://user:s3cret@h/0?name=a&name=b",
        "redis://user:s3c ret@h:x/0",
        "postgresql://u@127.0.0.1:1/test?name=x&password=s3cret&capacity=z",
        "postgresql://u:s3cret@127.0.0.1:1/test?timeout=0.5",
        "nats://s3cret@127.0.0.1:1?name=x&timeout=0.05",
        "bogus://u:s3cret@h",
    ],
)
def test_no_verb_shows_a_password(verb, url, monkeypatch, tmp_path, capsys):
    from mainspring.cli.app import call

    monkeypatch.chdir(tmp_path)

    status = call([*verb, url, *(["1"] if verb == ["send"] else [])])
    assert status
    told = "".join(capsys.readouterr())
    assert told
    assert "s3c" not in told
    assert "ret@" not in told
