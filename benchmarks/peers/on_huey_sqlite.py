"""huey on a SQLite file: its consumer of threads, as its command runs one."""

from __future__ import annotations

from harness import main
from huey import SqliteHuey
from on_huey import Huey


class HueySqlite(Huey):
    packages = ("huey",)
    note = "threads, no results kept, its own default synchronous"

    def make(self):
        return SqliteHuey("bench", filename=self.url, results=False)


if __name__ == "__main__":
    main(HueySqlite)
