"""What can be said of the dashboard without a browser: it needs nothing from outside, and its policy fits it."""

from __future__ import annotations

import base64
import hashlib
import re

import httpx
import pytest

from http_fakes import FakeGroup
from mainspring.core.state_machine import GroupState, OrchestratorState
from mainspring.http.app import health_app

pytestmark = pytest.mark.anyio


async def fetch() -> httpx.Response:
    transport = httpx.ASGITransport(health_app(FakeGroup()))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return await client.get("/")


async def test_the_policy_allows_the_script_and_style_of_the_page_by_their_hashes() -> None:
    response = await fetch()
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


async def test_it_loads_nothing_from_elsewhere_and_breaks_no_rule_of_its_policy() -> None:
    html = (await fetch()).text
    links = re.findall(r"(?:src|href|action)=[\"']([^\"']*)", html)
    assert all(link.startswith(("data:image/svg+xml,", "status", "metrics", "health/")) for link in links), links
    assert not re.search(r"\son[a-z]+=|\sstyle=|innerHTML|eval\(", html)


async def test_it_knows_that_nothing_can_be_done_when_the_end_has_begun() -> None:
    html = (await fetch()).text
    (ends,) = re.findall(r"const ENDS = \[(.*)\];", html)
    assert {GroupState.STOPPED, OrchestratorState.SHUTTING_DOWN, OrchestratorState.TERMINATED} == set(
        re.findall(r'"([^"]*)"', ends)
    )


async def test_it_knows_the_phases_and_says_where_the_figures_are_without_scripts() -> None:
    html = (await fetch()).text
    for phase in list(GroupState)[3:-1]:
        assert f'"{phase}"' in html
    assert re.search(r"<noscript>.*href=\"status\".*</noscript>", html, re.DOTALL)
