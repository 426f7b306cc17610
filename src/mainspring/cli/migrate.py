"""``mainspring migrate``: make or upgrade the tables of a store, apart from the programs that use it."""

from __future__ import annotations

import json

import anyio
import typer

from mainspring.cli.user_errors import UserError
from mainspring.mailbox.open import open_mailbox
from mainspring.redaction import shown


def migrate_store(url: str, *, dry_run: bool, as_json: bool) -> int:
    """Bring the store at ``url`` to this version of Mainspring, or (``dry_run``) say what that would do."""
    mailbox = open_mailbox(url)
    migrate = getattr(mailbox, "migrate_schema", None)
    if migrate is None:
        raise UserError(f"{shown(url)}: this kind of mailbox has no schema to migrate; postgresql:// has")
    backend = "asyncio" if "asyncio" in mailbox.capabilities.async_backends else "trio"
    before, after = anyio.run(migrate, dry_run, backend=backend)
    if as_json:
        typer.echo(json.dumps({"before": before, "after": after, "changed": before != after and not dry_run}))
    elif before == after:
        typer.echo(f"the schema has version {after} already; nothing was to be done")
    elif dry_run:
        typer.echo(f"the schema has version {before} and would be brought to version {after}; nothing was done")
    else:
        typer.echo(f"the schema was brought from version {before} to version {after}")
    return 0
