"""Mailboxes: the port (:mod:`base`), what passes through it (:mod:`message`), and one file a backend."""
