"""Connections and sessions of users, of each kind, with the same verbs."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from urllib.parse import urlsplit

import asyncpg
import psycopg
import psycopg2.extras
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker


def sqlalchemy_url(url, driver):
    return url.replace("postgresql://", f"postgresql+{driver}://")


class Psycopg:
    """``connect`` lends one; ``block`` is the user's own transaction; ``run`` executes a statement in it."""

    @staticmethod
    def connect(url):
        return _entered(psycopg.AsyncConnection.connect(url))

    @staticmethod
    def block(given):
        return given.transaction()

    @staticmethod
    def savepoint(given):
        return given.transaction()

    @staticmethod
    async def run(given, statement):
        await given.execute(statement)

    @staticmethod
    async def close(given):
        await given.close()


class Asyncpg(Psycopg):
    @staticmethod
    @asynccontextmanager
    async def connect(url):
        connection = await asyncpg.connect(url)
        try:
            yield connection
        finally:
            await connection.close()


class AsyncpgPool(Asyncpg):
    @staticmethod
    @asynccontextmanager
    async def connect(url):
        async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool, pool.acquire() as connection:
            yield connection


class _Sqlalchemy(Psycopg):
    @staticmethod
    def block(given):
        return given.begin()

    @staticmethod
    def savepoint(given):
        return given.begin_nested()

    @staticmethod
    async def run(given, statement):
        await given.execute(text(statement))


def connection_of(driver):
    class Made(_Sqlalchemy):
        @staticmethod
        @asynccontextmanager
        async def connect(url, **options):
            engine = create_async_engine(sqlalchemy_url(url, driver), **options)
            try:
                async with engine.connect() as connection:
                    yield connection
            finally:
                await engine.dispose()

    return Made


def session_of(driver):
    class Made(_Sqlalchemy):
        @staticmethod
        @asynccontextmanager
        async def connect(url, **options):
            engine = create_async_engine(sqlalchemy_url(url, driver), **options)
            try:
                async with AsyncSession(engine) as session:
                    yield session
            finally:
                await engine.dispose()

    return Made


class ScopedSession(_Sqlalchemy):
    @staticmethod
    @asynccontextmanager
    async def connect(url):
        engine = create_async_engine(sqlalchemy_url(url, "asyncpg"))
        sessions = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: None)
        yield sessions
        await sessions.remove()
        await engine.dispose()


@asynccontextmanager
async def _entered(coming):
    async with await coming as connection:
        yield connection


DRIVERS = {"psycopg": Psycopg, "asyncpg": Asyncpg, "asyncpg pool": AsyncpgPool}
SQLALCHEMY = {
    "connection on psycopg": connection_of("psycopg"),
    "connection on asyncpg": connection_of("asyncpg"),
    "session on psycopg": session_of("psycopg"),
    "session on asyncpg": session_of("asyncpg"),
    "scoped session": ScopedSession,
}
KINDS = DRIVERS | SQLALCHEMY
SOME_KINDS = ["psycopg", "asyncpg pool", "connection on asyncpg", "session on psycopg"]
"""Kinds in which the code differs."""


# ---------------------------------------------------------------------------------------------- of plain threads


class PlainPsycopg:
    @staticmethod
    @contextmanager
    def connect(url):
        with psycopg.connect(url) as connection:
            yield connection

    @staticmethod
    @contextmanager
    def block(given):
        try:
            yield
        except BaseException:
            given.rollback()
            raise
        given.commit()

    @classmethod
    @contextmanager
    def savepoint(cls, given):
        cls.run(given, "SAVEPOINT a")
        try:
            yield
        except BaseException:
            cls.run(given, "ROLLBACK TO SAVEPOINT a")
            raise

    @staticmethod
    def run(given, statement):
        given.cursor().execute(statement)


class Psycopg2(PlainPsycopg):
    @staticmethod
    @contextmanager
    def connect(url):
        connection = psycopg2.connect(url, cursor_factory=psycopg2.extras.RealDictCursor)
        try:
            yield connection
        finally:
            connection.close()


def plain_connection_of(driver):
    class Made(PlainPsycopg):
        @staticmethod
        @contextmanager
        def connect(url):
            engine = create_engine(sqlalchemy_url(url, driver))
            try:
                with engine.connect() as connection:
                    yield connection
            finally:
                engine.dispose()

        @staticmethod
        def run(given, statement):
            given.execute(text(statement))

    return Made


def plain_session_of(driver):
    class Made(plain_connection_of(driver)):
        @staticmethod
        @contextmanager
        def connect(url):
            engine = create_engine(sqlalchemy_url(url, driver))
            try:
                with Session(engine) as session:
                    yield session
            finally:
                engine.dispose()

    return Made


class PlainScopedSession(plain_connection_of("psycopg2")):
    @staticmethod
    @contextmanager
    def connect(url):
        engine = create_engine(sqlalchemy_url(url, "psycopg2"))
        sessions = scoped_session(sessionmaker(engine))
        yield sessions
        sessions.remove()
        engine.dispose()


class Django(PlainPsycopg):
    @staticmethod
    @contextmanager
    def connect(url):
        connection = django_connection(url)
        try:
            yield connection
        finally:
            connection.close()

    @staticmethod
    def block(given):
        from django.db import transaction

        return transaction.atomic()

    @staticmethod
    def savepoint(given):
        from django.db import transaction

        return transaction.atomic()

    @staticmethod
    def run(given, statement):
        with given.cursor() as cursor:
            cursor.execute(statement)


def django_connection(url):
    """Django's connection to the database of the tests, which all tests of a process share."""
    import django
    from django.conf import settings
    from django.db import connection

    if not settings.configured:
        at = urlsplit(url)
        place = {"NAME": at.path.lstrip("/"), "USER": at.username, "HOST": at.hostname, "PORT": at.port or 5432}
        settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **place}})
        django.setup()
    return connection


PLAIN_KINDS = {
    "psycopg": PlainPsycopg,
    "psycopg2": Psycopg2,
    "connection on psycopg": plain_connection_of("psycopg"),
    "connection on psycopg2": plain_connection_of("psycopg2"),
    "session on psycopg": plain_session_of("psycopg"),
    "session on psycopg2": plain_session_of("psycopg2"),
    "scoped session": PlainScopedSession,
    "django": Django,
}
